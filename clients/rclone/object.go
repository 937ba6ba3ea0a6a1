package main

import (
	"context"
	"io"
	"time"

	"github.com/rclone/rclone/backend/s3"
	"github.com/rclone/rclone/fs"
	"github.com/rclone/rclone/fs/hash"
)

// Update stores another content.
func (o *object) Update(ctx context.Context, in io.Reader, src fs.ObjectInfo, options ...fs.OpenOption) error {
	// This creates a new object of rclone's, because open files continue to read the current one.
	now, err := o.guard.upload(ctx, in, src, options)
	if err != nil {
		return err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.now = now
	return nil
}

// with calls fn with a copy of rclone's object. It writes down in the copy what an answer of the service says, without a lock, while
// others read the object. If fn succeeds, the copy replaces the object.
func with[R any](o *object, fn func(fs.Object) (R, error)) (R, error) {
	known := o.get()
	shared, ok := known.(*s3.Object)
	if !ok {
		return fn(known)
	}
	own := *shared
	result, err := fn(&own)
	if err == nil {
		o.mu.Lock()
		defer o.mu.Unlock()
		if o.now == known {
			o.now = &own
		}
	}
	return result, err
}

// Fs returns the file system.
func (o *object) Fs() fs.Info { return o.guard }

// String returns the name.
func (o *object) String() string { return o.get().String() }

// Remote returns the name.
func (o *object) Remote() string { return o.get().Remote() }

// ModTime returns the modification time.
func (o *object) ModTime(ctx context.Context) time.Time {
	modified, _ := with(o, func(now fs.Object) (time.Time, error) { return now.ModTime(ctx), nil })
	return modified
}

// Size returns the size.
func (o *object) Size() int64 { return o.get().Size() }

// Hash returns the MD5, or "".
func (o *object) Hash(ctx context.Context, t hash.Type) (string, error) {
	return with(o, func(now fs.Object) (string, error) { return now.Hash(ctx, t) })
}

// Storable reports that it can be stored.
func (o *object) Storable() bool { return o.get().Storable() }

// SetModTime changes the modification time.
func (o *object) SetModTime(ctx context.Context, t time.Time) error {
	return o.get().SetModTime(ctx, t)
}

// Open reads the object.
func (o *object) Open(ctx context.Context, options ...fs.OpenOption) (io.ReadCloser, error) {
	return with(o, func(now fs.Object) (io.ReadCloser, error) { return now.Open(ctx, options...) })
}

// Remove removes the object.
func (o *object) Remove(ctx context.Context) error { return o.get().Remove(ctx) }

// absent is a placeholder for the object after a conflict, until it is looked up again. Its fingerprint matches no object, so
// rclone does not take the file in the cache for the content of the current object.
type absent struct {
	guard *guard
	name  string
	size  int64
	time  time.Time
}

func (a absent) Fs() fs.Info                                     { return a.guard }
func (a absent) String() string                                  { return a.name }
func (a absent) Remote() string                                  { return a.name }
func (a absent) ModTime(context.Context) time.Time               { return a.time }
func (a absent) Size() int64                                     { return a.size }
func (a absent) Storable() bool                                  { return true }
func (a absent) Hash(context.Context, hash.Type) (string, error) { return "conflict", nil }
func (a absent) SetModTime(context.Context, time.Time) error     { return fs.ErrorCantSetModTime }
func (a absent) Update(context.Context, io.Reader, fs.ObjectInfo, ...fs.OpenOption) error {
	return fs.ErrorObjectNotFound
}
func (a absent) Open(context.Context, ...fs.OpenOption) (io.ReadCloser, error) {
	return nil, fs.ErrorObjectNotFound
}
func (a absent) Remove(ctx context.Context) error {
	o, err := a.guard.Fs.NewObject(ctx, a.name)
	if err != nil {
		return err
	}
	return o.Remove(ctx)
}
