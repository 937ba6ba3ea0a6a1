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

// conflictStatus is the number of files that a process has quarantined because of a conflict.
type conflictStatus struct {
	Files int64 `json:"files"`
}

// conflictedFiles are the files that were quarantined, but still have an object for rclone. When such an upload has left the queue,
// the directories must be listed again.
type conflictedFiles struct {
	mu    sync.Mutex
	names map[string]int // how many times
}

func (p *conflictedFiles) add(name string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.names == nil {
		p.names = map[string]int{}
	}
	p.names[name]++
}

// settled reads the queue, removes the files that are no longer in it, and reports whether there were any. A file that is quarantined
// while the queue is read stays: the queue may have been read before its upload was in it.
func (p *conflictedFiles) settled(read func() (queued map[string]bool)) bool {
	p.mu.Lock()
	known := maps.Clone(p.names)
	p.mu.Unlock()
	queued := read()
	if queued == nil {
		return false
	}
	maps.DeleteFunc(known, func(name string, _ int) bool { return queued[name] })
	p.mu.Lock()
	defer p.mu.Unlock()
	maps.DeleteFunc(p.names, func(name string, times int) bool { return known[name] == times })
	return len(known) > 0
}

// Verdicts on a late upload.
const (
	mayStore = iota
	alreadyStored
	conflict
)

type decision struct {
	verdict int
	remote  remoteState
}

// condition makes the upload fail unless the object is still the one that was found, or still absent.
func (d decision) condition() fs.OpenOption {
	if !d.remote.exists {
		return &fs.HTTPOption{Key: "If-None-Match", Value: "*"}
	}
	return &fs.HTTPOption{Key: "If-Match", Value: d.remote.etag}
}

// decide compares the current object with the known versions, and then with the file itself.
func (g *guard) decide(ctx context.Context, name string, known []objectVersion, size int64, sum string) (decision, error) {
	remote, err := g.heads.state(ctx, name)
	if err != nil {
		return decision{}, fmt.Errorf("read the object before a late upload: %w", err)
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

// sameContent compares the object's content with the file. An ETag need not be an MD5.
func (g *guard) sameContent(ctx context.Context, name string, size int64) bool {
	f, err := os.Open(g.cache.dataOf(name))
	if err != nil {
		return false
	}
	defer f.Close()
	return stored(ctx, g.Fs, name, f, size) == nil
}

// quarantine copies a file that must not be uploaded to lost. The file stays in the cache until it is opened the next time, because
// it can be open. If the copy fails, the upload fails and is retried.
func (g *guard) quarantine(ctx context.Context, name string, src fs.ObjectInfo, d decision) (fs.Object, error) {
	aside, err := g.cache.quarantinePath(pathOf(name))
	if err == nil {
		err = copyFile(g.cache.dataOf(name), aside)
	}
	if err != nil {
		return nil, fmt.Errorf("another writer changed the object, and the local copy cannot be quarantined: %w", err)
	}
	why := "another writer stored the object"
	if !d.remote.exists {
		why = "another writer removed the object"
	}
	fs.Errorf(name, "Write conflict, local copy quarantined: object=%q file=%q size=%d modified=%q reason=%q", g.heads.url(name), aside, src.Size(), src.ModTime(ctx), why)
	g.conflicts.Add(1)
	g.quarantined.add(name)
	return absent{guard: g, name: name, size: src.Size(), time: src.ModTime(ctx)}, nil
}

// copyFile copies a file and its modification time, and syncs the copy to disk.
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
