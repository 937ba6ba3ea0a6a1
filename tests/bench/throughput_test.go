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

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
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
func BenchmarkThroughput(b *testing.B) { eachClient(b, measureThroughput) }

func measureThroughput(b *testing.B, client string) {
	const rounds = 5
	n, d := setup(b, client)
	published, byHand := ways(b, n, d, volume(b, n, "throughput"), n.Target("pod"))
	block := make([]byte, blockSize)
	random := rand.NewChaCha8([32]byte{})
	_, _ = random.Read(block)

	measure := func(w way) func(int) {
		note := func(what string, seconds float64) { w.note(what, fileSize/1e6/seconds) }
		return func(round int) {
			name := fmt.Sprintf("%s-%d", w.name, round)
			must(b, w.start())
			began := time.Now()
			must(b, write(filepath.Join(w.dir, name), block))
			note("write", time.Since(began).Seconds())
			stored(b, n, "throughput/"+name)
			note("store", time.Since(began).Seconds())
			must(b, w.stop())
			must(b, w.start())
			note("read", took(b, func() error { return read(filepath.Join(w.dir, name), block) })/1e3)
			must(b, os.Remove(filepath.Join(w.dir, name)))
			must(b, w.stop())
		}
	}
	inTurns(rounds, measure(published), measure(byHand))
	n.NothingLeft(b)
	for _, what := range []string{"write", "store", "read"} {
		driver, bare := published.measured[what], byHand.measured[what]
		b.Logf("%s: published %s MB/s, bare %s MB/s", what, span(driver), span(bare))
		b.ReportMetric(median(driver), what+"-MB/s")
		b.ReportMetric(median(driver)/median(bare), what+"/bare")
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
