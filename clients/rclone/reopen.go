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

// reopenInterval is the interval between attempts to open a file.
const reopenInterval = time.Second

// reopen opens each file once that a previous process did not upload. It retries files that it cannot open until the returned
// function is called.
//
// rclone uploads such files by itself, but its VFS learns of the new object only if it has opened the file before. Otherwise
// the VFS takes the uploaded file for one that was removed from S3, and shows it as empty.
func (c *cache) reopen(ctx context.Context, files *vfs.VFS, dirs *directories) (stop func()) {
	left, err := c.unsent()
	if err != nil {
		fs.Errorf(nil, "Cannot read cache: %v", err)
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
			case <-time.After(reopenInterval):
			}
			c.retryReopen(files, dirs, left)
		}
	})
	return func() { cancel(); wg.Wait() }
}

// retryReopen tries again, and removes the files from left that need no further attempt.
func (c *cache) retryReopen(files *vfs.VFS, dirs *directories, left map[string]bool) {
	unsent, err := c.unsent()
	if err != nil {
		return // the next attempt reads it again
	}
	for name := range left {
		if _, still := unsent[name]; !still {
			dirs.expire() // the next listing finds the object
		} else if touch(files, name) != nil {
			continue
		}
		delete(left, name)
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
