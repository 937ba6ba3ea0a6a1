package main

import (
	"context"
	"errors"
	"io"
	"maps"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/rclone/rclone/fs"
	"github.com/rclone/rclone/vfs"
)

// reopenInterval is the interval between attempts to open a file.
const reopenInterval = time.Second

// reopening holds back the uploads of files of a previous process until the VFS has opened them.
//
// rclone uploads such files by itself, but its VFS learns of the new object only if it has opened the file before the upload begins.
// Otherwise the VFS takes the uploaded file for one that was removed from S3, and shows it as empty until the file system is unmounted.
type reopening struct {
	mu      sync.Mutex
	begun   bool            // waiting is known
	waiting map[string]bool // files that are not opened yet
	running map[string]bool // files with an upload that began before they were opened
}

// refuses reports whether an upload of a file must fail. rclone tries again after --write-back, which begins another upload.
func (r *reopening) refuses(name string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.begun || r.waiting[name] {
		return true
	}
	outdated := r.running[name]
	delete(r.running, name)
	return outdated
}

// begin sets which files a previous process left.
func (r *reopening) begin(left []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.begun, r.waiting, r.running = true, map[string]bool{}, map[string]bool{}
	for _, name := range left {
		r.waiting[name] = true
	}
}

// left returns the files that are not opened yet.
func (r *reopening) left() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Collect(maps.Keys(r.waiting))
}

// opened records that a file is open, and whether an upload of it runs, which may have begun before.
func (r *reopening) opened(name string, running bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.waiting, name)
	if running {
		r.running[name] = true
	}
}

// forget records that a file was removed.
func (r *reopening) forget(name string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.waiting, name)
}

// reopen opens each file once that a previous process did not upload. It retries files that it cannot open until the returned
// function is called. Then nothing uses the file system any more, and all files may be uploaded.
func (c *cache) reopen(ctx context.Context, files *vfs.VFS, r *reopening, queue *uploads) (stop func()) {
	left, err := c.unsent()
	if err != nil {
		fs.Errorf(nil, "Cannot read cache: %v", err)
	}
	r.begin(slices.Collect(maps.Keys(left)))
	r.open(ctx, files, queue)
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() {
		for len(r.left()) > 0 {
			select {
			case <-ctx.Done():
				r.begin(nil)
				return
			case <-time.After(reopenInterval):
			}
			c.forgetGone(r)
			r.open(ctx, files, queue)
		}
	})
	return func() { cancel(); wg.Wait() }
}

// open tries to open the files that are not opened yet.
func (r *reopening) open(ctx context.Context, files *vfs.VFS, queue *uploads) {
	opened := slices.DeleteFunc(r.left(), func(name string) bool { return touch(files, name) != nil })
	if len(opened) == 0 {
		return
	}
	items, err := queue.items(ctx)
	running := map[string]bool{}
	for _, item := range items {
		running[item.Name] = item.Uploading
	}
	for _, name := range opened {
		r.opened(name, err != nil || running[name])
	}
}

// forgetGone forgets files that were removed meanwhile.
func (c *cache) forgetGone(r *reopening) {
	unsent, err := c.unsent()
	if err != nil {
		return // the next attempt reads it again
	}
	for _, name := range r.left() {
		if _, still := unsent[name]; !still {
			r.forget(name)
		}
	}
}

// touch opens and closes a file. rclone opens it only when it is read.
func touch(files *vfs.VFS, name string) error {
	fh, err := files.OpenFile(name, os.O_RDWR, 0)
	if err != nil {
		fs.Errorf(name, "Cannot reopen file of previous process, retrying: %v", err)
		return err
	}
	_, err = fh.ReadAt(make([]byte, 1), 0)
	if errors.Is(err, io.EOF) {
		err = nil
	}
	if err = errors.Join(err, fh.Close()); err != nil {
		fs.Errorf(name, "Cannot reopen file of previous process, retrying: %v", err)
	}
	return err
}
