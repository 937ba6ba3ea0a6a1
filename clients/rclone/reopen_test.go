package main

import (
	"bytes"
	"context"
	"io"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/rclone/rclone/fs"
)

// heldUpload is a guard whose first upload waits.
type heldUpload struct {
	*guard
	once           sync.Once
	begun, release chan struct{}
}

func (h *heldUpload) Put(ctx context.Context, in io.Reader, src fs.ObjectInfo, options ...fs.OpenOption) (fs.Object, error) {
	h.once.Do(func() {
		close(h.begun)
		<-h.release
	})
	return h.guard.Put(ctx, in, src, options...)
}

// The upload of a file of a previous process begins, then the file is opened again, and then the upload is sent: rclone does not tell the
// VFS of its object.
func TestAFileWhoseUploadBeganBeforeItWasReopenedIsNotEmpty(t *testing.T) {
	s := startS3(t)
	t.Setenv("AWS_ACCESS_KEY_ID", rootKey)
	t.Setenv("AWS_SECRET_ACCESS_KEY", rootSecret)
	conf, err := parseArgs([]string{
		"--bucket=" + testBucket, "--prefix=vol/", "--endpoint=" + s.endpoint, "--region=us-east-1", "--path-style",
		"--cache-dir=" + t.TempDir(), "--fuse-fd=3", "--write-back=100ms",
	})
	check(t, err)
	check(t, configureRclone(conf))
	c := newCache(conf)
	content := []byte("of a previous process")
	for path, b := range map[string][]byte{c.data: content, c.meta: []byte(`{"Dirty":true}`)} {
		check(t, os.MkdirAll(path, 0o700))
		check(t, os.WriteFile(filepath.Join(path, "file"), b, 0o600))
	}
	plain, err := newRemote(t.Context(), conf, true)
	check(t, err)
	g, err := newGuard(t.Context(), conf, plain, c)
	check(t, err)
	queue, err := newUploads()
	check(t, err)
	check(t, recoverCache(t.Context(), c, g))
	remote := &heldUpload{guard: g, begun: make(chan struct{}), release: make(chan struct{})}
	files, err := newVFS(t.Context(), conf, remote)
	check(t, err)
	defer files.Shutdown()
	select {
	case <-remote.begun:
	case <-time.After(20 * time.Second):
		t.Fatal("no upload begins")
	}
	defer c.reopen(t.Context(), files, &g.reopening, queue)()
	close(remote.release)
	await(t, 20*time.Second, "the upload", func() bool {
		left, err := queue.items(t.Context())
		return err == nil && len(left) == 0
	})
	s.want("vol/file", content)
	if got, err := files.ReadFile("file"); err != nil || !bytes.Equal(got, content) {
		t.Errorf("the file is %q, %v", got, err)
	}
}

func TestUploadsOfAPreviousProcessWaitUntilTheirFilesAreOpen(t *testing.T) {
	var r reopening
	refused := func(want bool, names ...string) {
		t.Helper()
		for _, name := range names {
			if r.refuses(name) != want {
				t.Errorf("%s is refused: %t", name, !want)
			}
		}
	}
	refused(true, "a", "new") // it is not known yet what a previous process left
	r.begin([]string{"a", "b", "c"})
	refused(false, "new")
	refused(true, "a", "b", "c")
	r.opened("a", false)
	r.opened("b", true)
	refused(true, "b", "c") // the upload of b that began before
	refused(false, "a", "b")
	r.begin(nil) // unmounted
	refused(false, "c")
}
