package main

import (
	"context"
	"errors"
	"io"
	"os"
	"sync"
	"time"

	"github.com/rclone/rclone/fs"
	"github.com/rclone/rclone/vfs"
)

// retryTakeUp is how often a file is tried again that could not be opened: its directory is listed for that.
const retryTakeUp = time.Second

// takeUp opens each file once that an earlier process left unsent. What it cannot open it goes on trying until the function
// is called that it returns.
//
// rclone takes such files up by itself, but behind the back of its file system, which is never told of the object in S3:
// as soon as it is stored, the file would be taken for one that was removed in S3, and who opens it would find it empty.
// A file that the file system has closed is told.
func (c *cache) takeUp(ctx context.Context, files *vfs.VFS) (stop func()) {
	left, err := c.unsent()
	if err != nil {
		fs.Errorf(nil, "looking for unsent data in the cache: %v", err)
	}
	for name := range left {
		if touch(files, name) == nil {
			delete(left, name)
		}
	}
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() {
		for len(left) > 0 {
			select {
			case <-ctx.Done():
				return
			case <-time.After(retryTakeUp):
			}
			c.takeUpLate(files, left)
		}
	})
	return func() { cancel(); wg.Wait() }
}

// takeUpLate tries once more, and takes out of left what needs no further try.
func (c *cache) takeUpLate(files *vfs.VFS, left map[string]bool) {
	unsent, err := c.unsent()
	if err != nil {
		return // it is tried again
	}
	for name := range left {
		if _, still := unsent[name]; !still {
			files.FlushDirCache() // the next look at the directory finds the object
		} else if touch(files, name) != nil {
			continue
		}
		delete(left, name)
	}
}

// touch opens and closes a file. It is opened in earnest only when it is read.
func touch(files *vfs.VFS, name string) error {
	fh, err := files.OpenFile(name, os.O_RDWR, 0)
	if err != nil {
		fs.Errorf(name, "was written earlier and cannot be opened yet: %v", err)
		return err
	}
	_, err = fh.ReadAt(make([]byte, 1), 0)
	if errors.Is(err, io.EOF) {
		err = nil
	}
	if err = errors.Join(err, fh.Close()); err != nil {
		fs.Errorf(name, "was written earlier and cannot be opened yet: %v", err)
	}
	return err
}
