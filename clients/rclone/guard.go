package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	smithyhttp "github.com/aws/smithy-go/transport/http"
	"github.com/rclone/rclone/backend/s3"
	"github.com/rclone/rclone/fs"
	"github.com/rclone/rclone/fs/fserrors"
	"github.com/rclone/rclone/fs/hash"
)

// guard is the S3 file system with guarded uploads.
//
// An upload that begins soon after its file was closed replaces any object: the last writer wins. A late upload, of a file that was
// closed more than lateAfter ago or that a previous process left, replaces only an object that the file's writers knew. Any other
// object is a conflict: it stays, and the file is quarantined.
//
// A late upload reads the object's metadata first. If the service honours conditions, its PutObject, or the
// CompleteMultipartUpload of a large file, has one (If-Match, If-None-Match), so that no other writer can interfere.
type guard struct {
	fs.Fs
	features *fs.Features
	heads    *heads
	cache    *cache
	unsent   *unsentFiles
	dirs     *directories

	reopening reopening
	renames   *renames

	serverMtime bool
	mtimes      mtimes
	conditional atomic.Bool
	conflicts   atomic.Int64 // of this process
	quarantined conflictedFiles
}

func newGuard(ctx context.Context, c config, remote fs.Fs, cache *cache) (*guard, error) {
	h, err := newHeads(ctx, c)
	if err != nil {
		return nil, err
	}
	if c.endpoint != "" { // AWS encodes keys
		remote = &variants{Fs: remote, encodes: h.encodesKeys, asIs: func() (fs.Fs, error) { return newRemote(ctx, c, false) }}
	}
	g := &guard{Fs: remote, heads: h, cache: cache, unsent: newUnsentFiles(cache), dirs: newDirectories(c.dirCacheTime), renames: newRenames(), serverMtime: c.serverMtime}
	g.conditional.Store(c.conditionalWrites)
	features := *remote.Features()
	if copyObject := features.Copy; copyObject != nil {
		features.Copy = func(ctx context.Context, src fs.Object, name string) (fs.Object, error) {
			if o, ok := src.(*object); ok {
				src = o.get()
			}
			return g.wrap(copyObject(ctx, src, name))
		}
	}
	// Without these, rclone uses List and Put.
	features.ListR, features.ListP, features.OpenChunkWriter = nil, nil, nil
	g.features = &features
	return g, nil
}

func (g *guard) Features() *fs.Features { return g.features }

func (g *guard) List(ctx context.Context, dir string) (fs.DirEntries, error) {
	l := g.dirs.listing(dir)
	entries, err := g.Fs.List(ctx, dir)
	uploaded := g.dirs.listed(l)
	if err != nil {
		return entries, err
	}
	for i, e := range entries {
		o, ok := e.(fs.Object)
		if !ok {
			continue
		}
		own := g.object(o)
		own.listed.Store(true)
		if newer, ok := uploaded[o.Remote()]; ok { // the service may have answered before
			own = g.object(newer)
			delete(uploaded, o.Remote())
		}
		entries[i] = own
	}
	for _, o := range uploaded {
		entries = append(entries, g.object(o))
	}
	return entries, nil
}

func (g *guard) NewObject(ctx context.Context, name string) (fs.Object, error) {
	return g.wrap(g.Fs.NewObject(ctx, name))
}

// Put stores a file that has no object for rclone.
func (g *guard) Put(ctx context.Context, in io.Reader, src fs.ObjectInfo, options ...fs.OpenOption) (fs.Object, error) {
	return g.wrap(g.upload(ctx, in, src, options))
}

// upload stores a file, or decides that it must not, and returns the resulting object.
func (g *guard) upload(ctx context.Context, in io.Reader, src fs.ObjectInfo, options []fs.OpenOption) (fs.Object, error) {
	if !g.cache.used {
		return g.Fs.Put(ctx, in, src, options...)
	}
	name := src.Remote()
	answered, ok := g.renames.upload(name)
	if !ok {
		return nil, fmt.Errorf("upload is tried again, because the file is being renamed: %w", context.Canceled)
	}
	defer answered()
	if g.reopening.refuses(name) {
		return nil, fmt.Errorf("upload is tried again, because the file of a previous process was not open when it began: %w", context.Canceled)
	}
	sum, err := src.Hash(ctx, hash.MD5)
	if err == nil && sum == "" {
		err = errors.New("not computed by rclone")
	}
	if err != nil { // without it the upload would have no Content-MD5
		return nil, fmt.Errorf("MD5 of the cached file: %w", err)
	}
	known, deadline, late := g.unsent.late(name, src.ModTime(ctx))
	if !late {
		return g.put(ctx, in, src, options, sum, deadline)
	}
	d, err := g.decide(ctx, name, known, src.Size(), sum)
	if err != nil {
		return nil, err
	}
	switch d.verdict {
	case alreadyStored:
		fs.Logf(name, "Upload skipped, object already has this content")
		g.unsent.stored(name, contentVersion(src.Size(), sum))
		return g.Fs.NewObject(ctx, name)
	case conflict:
		return g.quarantine(ctx, name, src, d)
	}
	if !g.conditional.Load() {
		return g.put(ctx, in, src, options, sum, time.Time{})
	}
	o, err := g.put(ctx, in, src, append(slices.Clip(options), d.condition()), sum, time.Time{})
	if err != nil {
		return nil, g.refused(name, err)
	}
	return o, nil
}

// put sends a file. It fails with a retryable error if it cannot begin before the deadline, which is zero for a late upload.
func (g *guard) put(ctx context.Context, in io.Reader, src fs.ObjectInfo, options []fs.OpenOption, sum string, deadline time.Time) (fs.Object, error) {
	begun := func() {}
	var tooLate atomic.Bool
	if !deadline.IsZero() {
		var cancel context.CancelFunc
		ctx, cancel = context.WithCancel(ctx)
		defer cancel()
		// rclone delays requests after errors. The upload has begun when rclone reads the file.
		timer := time.AfterFunc(time.Until(deadline), func() { tooLate.Store(true); cancel() })
		defer timer.Stop()
		begun = func() { timer.Stop() }
	}
	name, v := src.Remote(), contentVersion(src.Size(), sum)
	g.unsent.sending(name, v)
	o, err := g.Fs.Put(ctx, &firstRead{Reader: in, begun: begun}, src, options...)
	if err != nil && tooLate.Load() {
		err = fserrors.RetryError(fmt.Errorf("upload did not start within %s: %w", lateAfter, err))
	}
	if err != nil {
		return nil, err
	}
	g.unsent.stored(name, v)
	o = g.refresh(ctx, name, o, sum)
	g.dirs.uploaded(o)
	return o, nil
}

// firstRead calls begun before the first read.
type firstRead struct {
	io.Reader
	once  sync.Once
	begun func()
}

func (r *firstRead) Read(p []byte) (int, error) {
	r.once.Do(r.begun)
	return r.Reader.Read(p)
}

// refresh returns an object with the time of its upload, if the mount shows that: the response to an upload does not have it. It
// ignores the object of another writer.
func (g *guard) refresh(ctx context.Context, name string, o fs.Object, sum string) fs.Object {
	if !g.serverMtime {
		return o
	}
	now, err := g.Fs.NewObject(ctx, name)
	if err != nil || now.Size() != o.Size() {
		return o
	}
	if found, err := now.Hash(ctx, hash.MD5); err != nil || found != sum {
		return o
	}
	return now
}

// refused classifies the error of an upload with a condition. rclone calls upload again for a retryable error.
func (g *guard) refused(name string, err error) error {
	var answer *smithyhttp.ResponseError
	if !errors.As(err, &answer) {
		return err
	}
	switch answer.HTTPStatusCode() {
	case http.StatusPreconditionFailed, http.StatusConflict, http.StatusNotFound: // another writer stored or removed the object
		return fserrors.RetryError(fmt.Errorf("the object changed during the upload: %w", err))
	case http.StatusNotImplemented:
		if g.conditional.Swap(false) {
			fs.Errorf(name, "Conditional writes not supported, continuing without: %v", err)
		}
		return fserrors.RetryError(err)
	}
	return err
}

// wrap returns the guarded object, or the error.
func (g *guard) wrap(o fs.Object, err error) (fs.Object, error) {
	if err != nil || o == nil {
		return nil, err
	}
	return g.object(o), nil
}

func (g *guard) object(o fs.Object) *object {
	if own, ok := o.(*object); ok {
		return own
	}
	return &object{guard: g, now: o}
}

// object is an object whose Update is guarded.
type object struct {
	guard *guard
	// listed: it is as a listing showed it; this process has not changed it.
	listed atomic.Bool

	mu  sync.Mutex
	now fs.Object // rclone's; Update replaces it
}

func (o *object) get() fs.Object {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.now
}

// Update stores another content.
func (o *object) Update(ctx context.Context, in io.Reader, src fs.ObjectInfo, options ...fs.OpenOption) error {
	// This creates a new object of rclone's, because open files continue to read the current one.
	now, err := o.guard.upload(ctx, in, src, options)
	if err != nil {
		return err
	}
	o.listed.Store(false)
	o.mu.Lock()
	defer o.mu.Unlock()
	o.now = now
	return nil
}

// with calls fn with a copy of rclone's object, because fn stores the service's answer in it without a lock while others read the
// object. If fn succeeds, the copy replaces the object.
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

// Hash returns the MD5, or "".
func (o *object) Hash(ctx context.Context, t hash.Type) (string, error) {
	return with(o, func(now fs.Object) (string, error) { return now.Hash(ctx, t) })
}

// Open reads the object.
func (o *object) Open(ctx context.Context, options ...fs.OpenOption) (io.ReadCloser, error) {
	return with(o, func(now fs.Object) (io.ReadCloser, error) { return now.Open(ctx, options...) })
}

func (o *object) Fs() fs.Info    { return o.guard }
func (o *object) String() string { return o.get().String() }
func (o *object) Remote() string { return o.get().Remote() }
func (o *object) Size() int64    { return o.get().Size() }
func (o *object) Storable() bool { return o.get().Storable() }
func (o *object) SetModTime(ctx context.Context, t time.Time) error {
	o.listed.Store(false)
	defer o.guard.mtimes.forget(o.Remote()) // some services keep the time of the upload when only metadata changes
	return o.get().SetModTime(ctx, t)
}
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
