package main

import (
	"context"
	"sync"
	"time"

	"github.com/rclone/rclone/fs"
)

const (
	// maxMtimes bounds the number of modification times that are remembered: about 16 MiB.
	maxMtimes = 1 << 17
	// settled is the minimum age of an object whose modification time is remembered. Listings show the time of an upload in
	// seconds, so a second upload within one could not be told from the first.
	settled = 2 * time.Second
	// maxMtimeAge is how long a modification time is remembered. On AWS the time of the upload changes with the metadata, but some
	// services keep it, and another writer may have set the modification time.
	maxMtimeAge = 10 * time.Minute
)

// mtimes remembers the modification times of objects, which rclone stores in their metadata. A listing does not have them, so
// each costs a HEAD request. rclone forgets them whenever it lists a directory again; mtimes keeps them until an object changes.
type mtimes struct {
	mu     sync.Mutex
	byName map[string]mtime
}

// mtime is the modification time of a version of an object, which is recognised by the time of its upload and its size.
type mtime struct {
	uploaded, modified time.Time
	size               int64
	read               time.Time // when it was read
}

// get returns the modification time of an object that was listed.
func (m *mtimes) get(name string, uploaded time.Time, size int64) (time.Time, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	v, ok := m.byName[name]
	if !ok || v.size != size || !v.uploaded.Equal(uploaded) || time.Since(v.read) > maxMtimeAge {
		return time.Time{}, false
	}
	return v.modified, true
}

// add remembers a modification time. If there are too many, it drops arbitrary ones.
func (m *mtimes) add(name string, v mtime) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.byName == nil {
		m.byName = map[string]mtime{}
	}
	for other := range m.byName {
		if len(m.byName) < maxMtimes {
			break
		}
		delete(m.byName, other)
	}
	m.byName[name] = v
}

func (m *mtimes) forget(name string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.byName, name)
}

// ModTime returns the modification time: that of the upload with --server-mtime, otherwise that of the file, from the object's
// metadata. If the metadata cannot be read, it is the current time, as in rclone.
func (o *object) ModTime(ctx context.Context) time.Time {
	known := o.get()
	uploaded := known.ModTime(ctx) // newRemote sets UseServerModTime
	if o.guard.serverMtime {
		return uploaded
	}
	listed := o.listed.Load()
	if listed {
		if modified, ok := o.guard.mtimes.get(known.Remote(), uploaded, known.Size()); ok {
			return modified
		}
	}
	asked := time.Now()
	v, err := with(o, func(now fs.Object) (mtime, error) { return readMtime(ctx, now) })
	if err != nil {
		fs.Logf(o, "Failed to read metadata: %v", err)
		return time.Now()
	}
	same := v.size == known.Size() && v.uploaded.Truncate(time.Second).Equal(uploaded.Truncate(time.Second))
	if listed && same && time.Since(uploaded) > settled {
		v.uploaded, v.read = uploaded, asked // a listing can be more exact than HEAD
		o.guard.mtimes.add(known.Remote(), v)
	}
	return v.modified
}

// readMtime reads an object's modification time from its metadata: a HEAD request, unless rclone has the metadata.
func readMtime(ctx context.Context, now fs.Object) (mtime, error) {
	metadata, err := fs.GetMetadata(ctx, now)
	if err != nil {
		return mtime{}, err
	}
	v := mtime{uploaded: now.ModTime(ctx), size: now.Size()}
	v.modified = v.uploaded
	if text, ok := metadata["mtime"]; ok {
		if v.modified, err = time.Parse(time.RFC3339Nano, text); err != nil {
			return mtime{}, err
		}
	}
	return v, nil
}
