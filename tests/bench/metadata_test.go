package bench

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"golang.org/x/sync/errgroup"

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

const (
	metadataFiles = 10000
	// statTime bounds the stats of a round: where each takes requests, they are as many as fit.
	statTime = 5 * time.Second
)

// BenchmarkMetadata lists a directory of 10,000 files on a new mount, and then reads the attributes of each file, through a
// publication and through the bare client.
//
// The units *-list-s are the medians of the listings in seconds, *-stat/s those of the stats per second; */bare is the latter divided
// by the bare client's median.
func BenchmarkMetadata(b *testing.B) {
	const rounds = 3
	n, d := setup(b, rigtest.Client)
	names := fillDirectory(b, n, "metadata/")
	for _, tt := range []struct {
		name, client string
		pairs        []string
	}{
		{"rclone", "rclone", nil},
		{"rclone-relaxed", "rclone", []string{"consistency", "relaxed"}},
		{"mountpoint", "mountpoint-s3", nil},
		{"mountpoint-relaxed", "mountpoint-s3", []string{"consistency", "relaxed"}},
	} {
		v := rigtest.Static("metadata", tt.client, tt.pairs...)
		target := n.Target("pod")
		rigtest.Publish(b, d, v, target)
		byHand := newBare(b, n)
		rigtest.Unpublish(b, d, v, target)
		n.AwaitNothingLeft(b, time.Minute)
		ways := []way{
			{name: "published", dir: target,
				start: func() error { rigtest.Publish(b, d, v, target); return nil },
				stop:  func() error { rigtest.Unpublish(b, d, v, target); return nil }},
			{name: "bare", dir: byHand.dir, start: byHand.start, stop: byHand.stop},
		}
		var lists, stats [2][]float64
		measure := func(i int) {
			w := ways[i]
			must(b, w.start())
			began := time.Now()
			entries, err := os.ReadDir(w.dir)
			must(b, err)
			lists[i] = append(lists[i], time.Since(began).Seconds())
			if len(entries) != len(names) {
				b.Fatalf("%d of %d files are listed", len(entries), len(names))
			}
			stats[i] = append(stats[i], statRate(b, w.dir, names))
			must(b, w.stop())
		}
		inTurns(rounds, func(int) { measure(0) }, func(int) { measure(1) })
		b.Logf("%s: list, published %s s, bare %s s; stat, published %s /s, bare %s /s", tt.name, span(lists[0]), span(lists[1]), span(stats[0]), span(stats[1]))
		b.ReportMetric(median(lists[0]), tt.name+"-list-s")
		b.ReportMetric(median(stats[0]), tt.name+"-stat/s")
		b.ReportMetric(median(stats[0])/median(stats[1]), tt.name+"-stat/bare")
		n.AwaitNothingLeft(b, time.Minute)
	}
}

// fillDirectory stores small objects below a prefix and returns their names.
func fillDirectory(b *testing.B, n *rigtest.Node, prefix string) []string {
	b.Helper()
	var names []string
	var puts errgroup.Group
	puts.SetLimit(16)
	for i := range metadataFiles {
		name := fmt.Sprintf("file-%05d", i)
		names = append(names, name)
		puts.Go(func() error {
			_, err := n.Server.S3.PutObject(b.Context(), &s3.PutObjectInput{Bucket: aws.String(rigtest.Bucket), Key: aws.String(prefix + name),
				Body: strings.NewReader("x")})
			return err
		})
	}
	must(b, puts.Wait())
	return names
}

// statRate returns how many files per second a process can read the attributes of, one after the other.
func statRate(b *testing.B, dir string, names []string) float64 {
	b.Helper()
	began, done := time.Now(), 0
	for _, name := range names {
		if _, err := os.Lstat(filepath.Join(dir, name)); err != nil {
			b.Fatal(err)
		}
		if done++; time.Since(began) > statTime {
			break
		}
	}
	return float64(done) / time.Since(began).Seconds()
}
