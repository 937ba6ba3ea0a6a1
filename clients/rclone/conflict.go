package main

import (
	"context"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"sync"

	"github.com/rclone/rclone/fs"
)

// conflictStatus is how many files a process has put aside because of a conflict.
type conflictStatus struct {
	Files int64 `json:"files"`
}

// conflictedFiles are the files that were put aside and that rclone still takes for objects. Once such an upload has left the queue, the
// directories must be read again.
type conflictedFiles struct {
	mu    sync.Mutex
	names map[string]bool
}

func (p *conflictedFiles) add(name string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.names == nil {
		p.names = map[string]bool{}
	}
	p.names[name] = true
}

// settled forgets the files that are not in the queue any more, and reports whether there were any.
func (p *conflictedFiles) settled(queued map[string]bool) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	before := len(p.names)
	maps.DeleteFunc(p.names, func(name string, _ bool) bool { return !queued[name] })
	return len(p.names) < before
}

// What a late upload may do.
const (
	mayStore = iota
	alreadyStored
	conflict
)

type decision struct {
	verdict int
	remote  remoteState
}

// condition makes the upload depend on the object that was found, or on there being none.
func (d decision) condition() fs.OpenOption {
	if !d.remote.exists {
		return &fs.HTTPOption{Key: "If-None-Match", Value: "*"}
	}
	return &fs.HTTPOption{Key: "If-Match", Value: d.remote.etag}
}

// decide compares the object that is there with the versions that are known, and then with the file itself.
func (g *guard) decide(ctx context.Context, name string, known []objectVersion, size int64, sum string) (decision, error) {
	remote, err := g.heads.state(ctx, name)
	if err != nil {
		return decision{}, fmt.Errorf("looking at the object before a late upload: %w", err)
	}
	d := decision{remote: remote}
	switch {
	case remote.exists && remote.size == size && remote.hasMD5(sum):
		d.verdict = alreadyStored
	case slices.ContainsFunc(known, remote.is):
		d.verdict = mayStore
	case remote.exists && remote.size == size && g.sameContent(ctx, name, size):
		d.verdict = alreadyStored
	default:
		d.verdict = conflict
	}
	return d, nil
}

// sameContent reads the object. Its ETag need not be an MD5.
func (g *guard) sameContent(ctx context.Context, name string, size int64) bool {
	f, err := os.Open(g.cache.dataOf(name))
	if err != nil {
		return false
	}
	defer f.Close()
	return stored(ctx, g.Fs, name, f, size) == nil
}

// putAside keeps a copy of a file that must not be stored. The file in the cache stays until it is opened the next time: it can
// be open. If the copy cannot be made, the upload fails, and is tried again.
func (g *guard) putAside(ctx context.Context, name string, src fs.ObjectInfo, d decision) (fs.Object, error) {
	aside, err := g.cache.asidePath(pathOf(name))
	if err == nil {
		err = copyFile(g.cache.dataOf(name), aside)
	}
	if err != nil {
		return nil, fmt.Errorf("conflict: the object is not the one that the file was made from, and the file cannot be put aside: %w", err)
	}
	why := "another writer stored the object"
	if !d.remote.exists {
		why = "another writer removed the object"
	}
	fs.Errorf(name, "Conflict, local copy put aside: object=%q file=%q size=%d modified=%q reason=%q", g.heads.url(name), aside, src.Size(), src.ModTime(ctx), why)
	g.conflicts.Add(1)
	g.aside.add(name)
	return absent{guard: g, name: name, size: src.Size(), time: src.ModTime(ctx)}, nil
}

// copyFile copies a file and its times, and returns when the copy is on disk.
func copyFile(from, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	fi, err := in.Stat()
	if err != nil {
		return err
	}
	out, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	if err == nil {
		err = out.Sync()
	}
	if cerr := out.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Chtimes(to, fi.ModTime(), fi.ModTime())
	}
	if err != nil {
		_ = os.Remove(to)
	}
	return err
}
