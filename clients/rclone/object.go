package main

import (
	"context"
	"io"
	"time"

	"github.com/rclone/rclone/fs"
	"github.com/rclone/rclone/fs/hash"
)

// Update stores another content.
func (o *object) Update(ctx context.Context, in io.Reader, src fs.ObjectInfo, options ...fs.OpenOption) error {
	// A new object of rclone's: who has the file open goes on reading the one that is known now, and its size.
	now, err := o.guard.upload(ctx, in, src, options)
	if err != nil {
		return err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.now = now
	return nil
}

// Fs returns the file system.
func (o *object) Fs() fs.Info { return o.guard }

// String returns the name.
func (o *object) String() string { return o.get().String() }

// Remote returns the name.
func (o *object) Remote() string { return o.get().Remote() }

// ModTime returns the modification time.
func (o *object) ModTime(ctx context.Context) time.Time { return o.get().ModTime(ctx) }

// Size returns the size.
func (o *object) Size() int64 { return o.get().Size() }

// Hash returns the MD5, or "".
func (o *object) Hash(ctx context.Context, t hash.Type) (string, error) { return o.get().Hash(ctx, t) }

// Storable reports that it can be stored.
func (o *object) Storable() bool { return o.get().Storable() }

// SetModTime changes the modification time.
func (o *object) SetModTime(ctx context.Context, t time.Time) error {
	return o.get().SetModTime(ctx, t)
}

// Open reads the object.
func (o *object) Open(ctx context.Context, options ...fs.OpenOption) (io.ReadCloser, error) {
	return o.get().Open(ctx, options...)
}

// Remove removes the object.
func (o *object) Remove(ctx context.Context) error { return o.get().Remove(ctx) }

// absent takes the place of an object that must be looked up again: after a conflict. Nothing has its fingerprint, so the file
// in the cache is not taken for the content of the object that is there.
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
