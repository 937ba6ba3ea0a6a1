package bench

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// BenchmarkRename renames 1,000 small files one after the other through a publication, and as many through the bare client, in two
// rounds of 500. On S3 a rename is a copy and a delete.
//
// rename-s is the time of the 1,000 renames, renames/s the rate. renames/bare is the rate divided by the bare client's: 1 is no
// difference, less is slower.
func BenchmarkRename(b *testing.B) { eachClient(b, measureRename) }

func measureRename(b *testing.B, client string) {
	const (
		files  = 500
		rounds = 2
	)
	n, d := setup(b, client)
	v, target := volume(b, n, "rename"), n.Target("pod")
	name := func(generation, file int) string { return fmt.Sprintf("%d-%d", generation, file) }
	for i := range files {
		n.Put(b, rigtest.Bucket, "rename/"+name(0, i), "content")
	}
	published, byHand := ways(b, n, d, v, target)

	generation := 0
	measure := func(w way) func(int) {
		return func(int) {
			must(b, w.start())
			w.note("s", took(b, func() error {
				for i := range files {
					if err := os.Rename(filepath.Join(w.dir, name(generation, i)), filepath.Join(w.dir, name(generation+1, i))); err != nil {
						return err
					}
				}
				return nil
			})/1000)
			must(b, w.stop())
			generation++
		}
	}
	inTurns(rounds, measure(published), measure(byHand))
	n.NothingLeft(b)
	if got := len(n.Keys(b, rigtest.Bucket, fmt.Sprintf("rename/%d-", generation))); got != files {
		b.Errorf("%d of %d objects have their last names", got, files)
	}
	driver, bare := published.measured["s"], byHand.measured["s"]
	b.Logf("%d renames: published %s s, bare %s s", files, span(driver), span(bare))
	b.ReportMetric(rounds*median(driver), "rename-s")
	b.ReportMetric(files/median(driver), "renames/s")
	b.ReportMetric(median(bare)/median(driver), "renames/bare")
}
