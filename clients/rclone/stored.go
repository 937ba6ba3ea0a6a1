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

// compareBound is how long it may take to compare files of the cache with their objects: all of them, because a mount waits for
// it. What is left then counts as different.
const compareBound = 5 * time.Second

// stored is nil where all that the cache has of a file is in its object too: it was only read, or is stored already. Else it
// tells what is different, or why that is not known.
func stored(ctx context.Context, remote fs.Fs, name string, f *os.File, size int64) error {
	object, err := remote.NewObject(ctx, name)
	if err != nil {
		return err
	}
	if object.Size() != size {
		return fmt.Errorf("it has %d bytes, and %d in S3", size, object.Size())
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

// whole tells whether a file has no holes.
func whole(f *os.File, size int64) bool {
	start, end, err := extent(f, 0, size)
	return err == nil && start == 0 && end == size
}

// extent is the next part of a file, from an offset on, that is not a hole. It is empty where there is none.
func extent(f *os.File, from, size int64) (start, end int64, err error) {
	start, err = unix.Seek(int(f.Fd()), from, unix.SEEK_DATA)
	if errors.Is(err, unix.ENXIO) || err == nil && start >= size { // only a hole is left (lseek(2))
		return size, size, nil
	}
	if err != nil {
		return 0, 0, err
	}
	end, err = unix.Seek(int(f.Fd()), start, unix.SEEK_HOLE)
	return start, min(end, size), err
}

// same compares a part of a file with its object. Of a sparse file, a page may end in zeros where it was not read to its end.
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
			return fmt.Errorf("it differs from what is in S3, after %d bytes", at)
		}
	}
	return nil
}
