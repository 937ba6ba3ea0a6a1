package main

import (
	"context"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/rclone/rclone/vfs/vfscache/writeback"
)

const (
	// renamePatience is how long a rename waits for uploads that run. Then rclone cancels them.
	renamePatience = 10 * time.Second
	// renamePause is the time between two looks at these uploads.
	renamePause = 2 * time.Millisecond
	// uploadSettles is how long after the service's response rclone may still work on an upload.
	uploadSettles = time.Minute
)

// renames keeps renames and uploads apart.
//
// rclone cancels the upload of a file that is renamed or replaced. The service may have the object by then, or get it a moment later:
// under the file's former name it would come back as a file, and under the name that another file got it would replace that file's
// newer data. If the upload ends before it can be cancelled, rclone even takes the renamed file for stored. So a rename waits for
// the uploads that run, and no upload begins meanwhile.
type renames struct {
	items func(ctx context.Context) ([]writeback.QueueInfo, error) // rclone's queue; set before begin is called

	mu      sync.Mutex
	names   map[string]int       // parts of paths that are being renamed
	uploads map[string]time.Time // when the service answered, by the file's name; zero: not yet
}

func newRenames() *renames {
	return &renames{names: map[string]int{}, uploads: map[string]time.Time{}}
}

// upload records that an upload begins, until answered is called. ok is false if it must not begin, because the file may be being
// renamed; rclone then tries again after --write-back.
func (r *renames) upload(name string) (answered func(), ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if slices.ContainsFunc(strings.Split(name, "/"), func(part string) bool { return r.names[part] > 0 }) {
		return nil, false
	}
	now := time.Now()
	maps.DeleteFunc(r.uploads, func(_ string, at time.Time) bool { return !at.IsZero() && now.Sub(at) > uploadSettles })
	r.uploads[name] = time.Time{}
	return func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.uploads[name] = time.Now()
	}, true
}

// begin waits for the uploads of files whose paths have one of these parts, and keeps others from beginning until end is called.
func (r *renames) begin(parts ...string) (end func()) {
	r.mu.Lock()
	for _, part := range parts {
		r.names[part]++
	}
	r.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), renamePatience)
	defer cancel()
	for r.running(ctx, parts) && ctx.Err() == nil {
		time.Sleep(renamePause)
	}
	return func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		for _, part := range parts {
			if r.names[part]--; r.names[part] == 0 {
				delete(r.names, part)
			}
		}
	}
}

// running reports whether rclone works on the upload of a file whose path has one of these parts.
func (r *renames) running(ctx context.Context, parts []string) bool {
	if !r.began(parts) { // as of nearly all files that are renamed
		return false
	}
	items, err := r.items(ctx)
	return err == nil && slices.ContainsFunc(items, func(item writeback.QueueInfo) bool { return item.Uploading && has(item.Name, parts) })
}

// began reports whether an upload began that rclone may still work on.
func (r *renames) began(parts []string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	for name := range r.uploads {
		if has(name, parts) {
			return true
		}
	}
	return false
}

// has reports whether a path has one of these parts.
func has(name string, parts []string) bool {
	return slices.ContainsFunc(parts, func(part string) bool {
		return strings.Contains(name, part) && slices.Contains(strings.Split(name, "/"), part) // the former rules out nearly all, fast
	})
}
