package main

import (
	"maps"
	"path"
	"slices"
	"sync"
	"time"

	"github.com/rclone/rclone/vfs/vfscache/writeback"
)

const (
	// lateAfter is the time after closing a file at which its upload is late: another writer may have stored a newer version.
	lateAfter = 10 * time.Second
	// rememberStored is how long the version of a file is kept after it has left the queue.
	rememberStored = time.Minute
	// rememberRenamed is how long the rename of a file that is still open is kept.
	rememberRenamed = time.Hour
)

// unsentFiles records when each file in the upload queue was closed, and which objects it may replace.
type unsentFiles struct {
	cache *cache
	now   func() time.Time

	// changed requests a call of observe at once.
	changed chan struct{}

	mu      sync.Mutex
	of      map[string]unsentFile // by name
	renamed map[string]time.Time  // by the last part of the new name
}

type unsentFile struct {
	id     writeback.Handle // in rclone's queue; 0 if not known yet
	queued bool             // it is in the queue
	seen   time.Time        // last time in the queue
	closed time.Time        // when it was added to the queue
	// earlier is the modification time of a file of a previous process; zero for a file of this process.
	earlier time.Time
	// known are the objects that its writers knew, or that this process sent itself. If the current object is one of these, no
	// other writer has stored a newer version.
	known []objectVersion
}

func newUnsentFiles(c *cache) *unsentFiles {
	return &unsentFiles{cache: c, now: time.Now, changed: make(chan struct{}, 1), of: map[string]unsentFile{}, renamed: map[string]time.Time{}}
}

// renaming records that a file gets a name. A new file then may replace the object of that name, because programs replace files by
// renaming. The last part of the name is enough: the object must also be older than the rename.
func (u *unsentFiles) renaming(name string) {
	u.mu.Lock()
	u.renamed[name] = u.now()
	u.mu.Unlock()
	select {
	case u.changed <- struct{}{}:
	default:
	}
}

// takeOver records the files of a previous process or VFS: their uploads are late.
func (u *unsentFiles) takeOver() error {
	left, err := u.cache.keepVersions()
	if err != nil {
		return err
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	for name, l := range left {
		known := append(u.of[name].known, l.known)
		u.of[name] = unsentFile{seen: u.now(), earlier: l.modified, known: known}
	}
	return nil
}

// observe records the queue. It must be called often, because it misses changes between two calls.
func (u *unsentFiles) observe(queue []writeback.QueueInfo) {
	u.mu.Lock()
	defer u.mu.Unlock()
	now := u.now()
	names := map[writeback.Handle]string{}
	for name, f := range u.of {
		if f.id != 0 && f.queued {
			names[f.id] = name
		}
		f.queued = false
		u.of[name] = f
	}
	for _, item := range queue {
		f := u.of[item.Name]
		was, known := names[item.ID]
		switch {
		case known && was == item.Name: // unchanged
		case f.id == 0 && !f.seen.IsZero(): // of a previous process, or sent before it was observed
		default: // closed or renamed, which counts as closed
			if at, ok := u.renamed[path.Base(item.Name)]; ok {
				u.cache.renamedOver(item.Name, at)
			}
			f.closed, f.earlier = now, time.Time{}
			f.know(u.cache.version(item.Name))
		}
		f.id, f.queued, f.seen = item.ID, true, now
		u.of[item.Name] = f
	}
	maps.DeleteFunc(u.renamed, func(_ string, at time.Time) bool { return now.Sub(at) > rememberRenamed })
	for name, f := range u.of {
		if !f.queued && f.earlier.IsZero() && now.Sub(f.seen) > rememberStored {
			delete(u.of, name)
		}
	}
}

// know adds a version.
func (f *unsentFile) know(v objectVersion) {
	if !slices.Contains(f.known, v) {
		f.known = append(slices.Clone(f.known), v)
	}
}

// late reports whether the upload of a file is late, and if so returns the known objects that it may replace. Otherwise the upload
// must begin before the deadline. modified is the file's modification time.
func (u *unsentFiles) late(name string, modified time.Time) (known []objectVersion, deadline time.Time, late bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	f, ok := u.of[name]
	now := u.now()
	switch {
	case !ok:
		f.closed = now
	case !f.earlier.IsZero() && modified.Sub(f.earlier).Abs() < time.Millisecond:
		return f.known, time.Time{}, true
	case modified.After(f.closed) && !modified.After(now): // changed and closed again since the queue was observed
		f.closed = modified
	}
	deadline = f.closed.Add(lateAfter)
	return f.known, deadline, !now.Before(deadline)
}

// sending records the version that is sent: S3 may store it although the response is lost.
func (u *unsentFiles) sending(name string, v objectVersion) {
	u.mu.Lock()
	defer u.mu.Unlock()
	f, ok := u.of[name]
	if !ok {
		f.closed = u.now()
		f.know(u.cache.version(name))
	}
	f.seen = u.now()
	f.know(v)
	u.of[name] = f
}

// stored records the version that was stored.
func (u *unsentFiles) stored(name string, v objectVersion) {
	u.mu.Lock()
	defer u.mu.Unlock()
	f := u.of[name]
	f.known, f.earlier, f.seen = []objectVersion{v}, time.Time{}, u.now()
	u.of[name] = f
}
