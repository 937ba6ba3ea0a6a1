package bench

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"

	"github.com/s3-csi/s3-csi-driver/tests/rig/rigtest"
)

const (
	fileSize  = 256 << 20
	blockSize = 1 << 20
)

// BenchmarkThroughput compares a file of 256 MiB that is written and read through a publication with one through the bare
// client. Both write and read sequentially, in blocks of 1 MiB, with the client's default settings.
//
//   - write: until the file is closed. What the client has stored by then is its own affair.
//   - store: from the first byte until the object is complete in S3, its wait before the upload included.
//   - read: on a new mount, whose client's cache is empty, so everything comes from S3.
//
// The units *-MB/s are medians of 10^6 bytes a second through the publication; */bare is that divided by the bare client's
// median: 1 is no difference, less is slower.
func BenchmarkThroughput(b *testing.B) {
	const rounds = 7
	n, d := setup(b)
	v := volume(b, n, "throughput")
	target := n.Target("pod")
	rigtest.Publish(b, d, v, target)
	byHand := newBare(b, n)
	rigtest.Unpublish(b, d, v, target)
	block := make([]byte, blockSize)
	random := rand.NewChaCha8([32]byte{})
	_, _ = random.Read(block)

	ways := []way{
		{"published", target, func() { rigtest.Publish(b, d, v, target) }, func() { rigtest.Unpublish(b, d, v, target) }},
		{"bare", byHand.dir, func() { must(b, byHand.start()) }, func() { must(b, byHand.stop()) }},
	}
	speeds := map[string][2][]float64{}
	measure := func(i, round int) {
		w := ways[i]
		name := fmt.Sprintf("%s-%d", w.name, round)
		note := func(what string, seconds float64) {
			s := speeds[what]
			s[i] = append(s[i], fileSize/1e6/seconds)
			speeds[what] = s
		}
		w.start()
		began := time.Now()
		must(b, write(filepath.Join(w.dir, name), block))
		note("write", time.Since(began).Seconds())
		stored(b, n, "throughput/"+name)
		note("store", time.Since(began).Seconds())
		w.stop()
		w.start()
		note("read", took(b, func() error { return read(filepath.Join(w.dir, name), block) })/1e3)
		must(b, os.Remove(filepath.Join(w.dir, name)))
		w.stop()
	}
	inTurns(rounds, func(r int) { measure(0, r) }, func(r int) { measure(1, r) })
	n.NothingLeft(b)
	for _, what := range []string{"write", "store", "read"} {
		s := speeds[what]
		b.Logf("%s: published %s MB/s, bare %s MB/s", what, span(s[0]), span(s[1]))
		b.ReportMetric(median(s[0]), what+"-MB/s")
		b.ReportMetric(median(s[0])/median(s[1]), what+"/bare")
	}
}

// way is one of the two ways to a mount.
type way struct {
	name, dir   string
	start, stop func()
}

func must(b *testing.B, err error) {
	b.Helper()
	if err != nil {
		b.Fatal(err)
	}
}

func write(path string, block []byte) (err error) {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	for range fileSize / blockSize {
		if _, err := f.Write(block); err != nil {
			return err
		}
	}
	return nil
}

func read(path string, block []byte) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	got := make([]byte, blockSize)
	for i := range fileSize / blockSize {
		if _, err := io.ReadFull(f, got); err != nil {
			return fmt.Errorf("block %d: %w", i, err)
		}
		if !bytes.Equal(got, block) {
			return fmt.Errorf("block %d of %s is not what was written", i, path)
		}
	}
	return nil
}

// stored waits until an object is complete.
func stored(b *testing.B, n *rigtest.Node, key string) {
	b.Helper()
	bucket := rigtest.Bucket
	ctx := rigtest.Context(b, 2*time.Minute)
	for {
		head, err := n.Server.S3.HeadObject(ctx, &s3.HeadObjectInput{Bucket: &bucket, Key: &key})
		missing := (*types.NotFound)(nil)
		if err != nil && !errors.As(err, &missing) {
			b.Fatal(err)
		}
		if err == nil && *head.ContentLength == fileSize {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
}
