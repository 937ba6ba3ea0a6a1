package podclient

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/tests/internal/fuseclients"
)

// BenchmarkColdPublish measures how long a pod waits for the files of its own client: the publication, the client's start and the first
// read of a file. The bare client is the same command, started by root for a directory, with Debian's fusermount3. The client in the pod is
// started through three programs that stand for its container.
func BenchmarkColdPublish(b *testing.B) {
	for _, c := range foreignClients(b) {
		b.Run(c.Client+"/"+map[string]string{fuseclients.Starter: "starter", fuseclients.Fusermount: "fusermount"}[c.Way],
			func(b *testing.B) { measureColdPublish(b, c) })
	}
}

func measureColdPublish(b *testing.B, c foreignClient) {
	b.Helper()
	rounds := 15
	if testing.Short() {
		rounds = 2
	}
	e := start(b)
	f, p := c.of(b, e), e.pod(b, podUID)
	dir := filepath.Join(e.Dir, "bare")
	if err := os.Mkdir(dir, 0o755); err != nil {
		b.Fatal(err)
	}
	var inPod, bare []float64
	for range rounds {
		began := time.Now()
		p.publish()
		client := p.foreign(b, c.Way, f)
		inPod = append(inPod, served(b, client, p.target, began))
		p.unpublish()
		<-client.done

		began = time.Now()
		client = e.asRoot(b, f.env, f.command(dir)...)
		bare = append(bare, served(b, client, dir, began))
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			b.Fatal(err)
		}
		<-client.done
	}
	p.NothingLeft(b)
	slices.Sort(inPod)
	slices.Sort(bare)
	b.ReportMetric(0, "ns/op") // has no meaning here
	b.ReportMetric(inPod[rounds/2], "publish-ms")
	b.ReportMetric(bare[rounds/2], "bare-ms")
	b.ReportMetric(inPod[rounds/2]/bare[rounds/2], "publish/bare")
}

// served is how many milliseconds after began a client shows its file.
func served(b *testing.B, client *process, dir string, began time.Time) float64 {
	b.Helper()
	for ; time.Since(began) < eventually; time.Sleep(200 * time.Microsecond) {
		if content, err := os.ReadFile(filepath.Join(dir, "file")); err == nil && string(content) == "content" {
			return float64(time.Since(began)) / float64(time.Millisecond)
		}
		if ended(client) {
			break
		}
	}
	b.Fatalf("the client does not serve: %s", client.output.String())
	return 0
}
