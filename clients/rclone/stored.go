package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/rclone/rclone/fs"
	"golang.org/x/sys/unix"
)

// compareBound is the timeout for comparing all cached files with their objects, because the mount waits for it. Files that are
// not compared by then count as different.
const compareBound = 5 * time.Second

// stored returns nil if all cached data of a file is also in its object, because it was only read or is already uploaded. Otherwise
// it returns the difference, or why the comparison failed.
func stored(ctx context.Context, remote fs.Fs, name string, f *os.File, size int64) error {
	object, err := remote.NewObject(ctx, name)
	if err != nil {
		return err
	}
	if object.Size() != size {
		return fmt.Errorf("size is %d bytes, but %d in S3", size, object.Size())
	}
	sparse := !whole(f, size)
	for end := int64(0); ; {
		var start int64
		start, end, err = extent(f, end, size)
		if err != nil || start == end {
			return err
		}
		if err := same(ctx, object, f, start, end, sparse); err != nil {
			return err
		}
	}
}

// whole reports whether a file has no holes.
func whole(f *os.File, size int64) bool {
	start, end, err := extent(f, 0, size)
	return err == nil && start == 0 && end == size
}

// extent returns the next part of a file, from an offset on, that is not a hole. The part is empty if there is none.
func extent(f *os.File, from, size int64) (start, end int64, err error) {
	start, err = unix.Seek(int(f.Fd()), from, unix.SEEK_DATA)
	if errors.Is(err, unix.ENXIO) || err == nil && start >= size { // only a hole follows (lseek(2))
		return size, size, nil
	}
	if err != nil {
		return 0, 0, err
	}
	end, err = unix.Seek(int(f.Fd()), start, unix.SEEK_HOLE)
	return start, min(end, size), err
}

// same compares a part of a file with its object. In a sparse file, the last page of a part may be incomplete and end in zeros.
func same(ctx context.Context, object fs.Object, f *os.File, start, end int64, sparse bool) error {
	body, err := object.Open(ctx, &fs.RangeOption{Start: start, End: end - 1})
	if err != nil {
		return err
	}
	defer body.Close()
	ours, theirs := bufio.NewReaderSize(io.NewSectionReader(f, start, end-start), fetchSize), bufio.NewReaderSize(body, fetchSize)
	page := int64(os.Getpagesize())
	a, b := make([]byte, page), make([]byte, page)
	for at := start; at < end; at += page {
		n := min(page, end-at)
		if _, err := io.ReadFull(ours, a[:n]); err != nil {
			return err
		}
		if _, err := io.ReadFull(theirs, b[:n]); err != nil {
			return err
		}
		known := a[:n]
		if sparse {
			known = bytes.TrimRight(known, "\x00")
		}
		if !bytes.HasPrefix(b[:n], known) {
			return fmt.Errorf("content differs from the object after %d bytes", at)
		}
	}
	return nil
}
