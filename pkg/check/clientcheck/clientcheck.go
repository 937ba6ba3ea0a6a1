// Package clientcheck takes one FUSE client through a mount of its own, and reports what works and what a declaration of the client
// should say. It knows the node, the bucket and the host only by the interfaces here.
package clientcheck

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/check"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

const (
	undoBound   = 25 * time.Second // how long a publish that failed may take to clean up, beyond the bound of a step
	removeBound = 30 * time.Second // bounds the removal of the objects, which also happens after an interrupt
	remoteBound = time.Second      // how long to wait for an object of another writer to appear in the mount
	poll        = 50 * time.Millisecond
	slowest     = 4 << 20 // the least rate at which a large file is written, read and stored, in bytes per second
	// drainSize is the size of the file that is closed right before the unmount, and offsetSize that of the one that is read at an offset.
	drainSize  = 9 << 19
	offsetSize = 3 << 20
)

// Volume is the volume of the check, at its only target.
type Volume interface {
	Publish(ctx context.Context) error
	Unpublish(ctx context.Context) error
	// Session returns the session that the client's credentials are from now.
	Session(ctx context.Context) (Session, error)
}

// Session is a session of the mount.
type Session struct {
	Expires time.Time // zero: the credentials do not expire
	Problem string    // why it could not be renewed; "": nothing is known
}

// Objects are the objects of the volume, as the service has them. Keys are relative to the volume's prefix.
type Objects interface {
	// Get returns an error with fs.ErrNotExist if there is no object.
	Get(ctx context.Context, key string) ([]byte, error)
	Size(ctx context.Context, key string) (int64, error)
	Put(ctx context.Context, key string, data []byte) error
	// Remove removes all objects, their versions, and unfinished uploads.
	Remove(ctx context.Context) error
}

// Host runs the client. Place implements it.
type Host interface {
	// Do runs fn, which may wait for the client, until ctx ends.
	Do(ctx context.Context, what string, fn func() error) error
	// Clients returns the pids of the client's processes, without the helper.
	Clients(ctx context.Context) ([]int, error)
	Kill(pid int) error
	// Left describes mounts, processes and files of the client that exist.
	Left(ctx context.Context) ([]string, error)
}

// Check checks one client.
type Check struct {
	Client     string
	Target     string // the directory where Volume is published
	Volume     Volume
	Objects    Objects
	Host       Host
	Large      int64         // the size of a file that the client uploads in parts
	ExitsEarly bool          // the client's declaration has drain: unknown, so that files may be lost at an unmount
	StaticKeys bool          // the client gets the keys of a user once, when it starts
	Renewal    time.Duration // how long the sessions of the volume last, whose renewal is awaited; 0: it is not tried
	Timeout    time.Duration // of each step, beside waiting for the end of a session
}

// step is one step with the mount.
type step struct {
	item  check.Item
	do    func(ctx context.Context) (check.Result, string, error)
	waits time.Duration // for something else than the client; added to the limit
}

// run is one run of a Check.
type run struct {
	in        Check
	rows      []check.Row
	hung      string            // the step that the client did not finish; "": none
	saw       map[string]string // what the notes are made of, by the name of the row
	notes     []string
	before    string // the content of the object offsetName, which exists before the mount, because clients remember that there was none
	beforeErr error
}

// Run checks the client. It unmounts the volume and removes its objects in any case, also after ctx has ended.
func (c Check) Run(ctx context.Context) check.Section {
	r := &run{in: c, saw: map[string]string{}}
	r.putBefore(ctx)
	mounted := r.try(ctx, step{item: check.Needed("clientMount", "mount"), do: r.mount, waits: undoBound})
	why := "the client did not mount"
	if mounted {
		why = ""
	}
	for _, s := range r.steps() {
		if why != "" {
			r.add(s.item.Row(check.Unknown, why, ""))
			continue
		}
		r.try(ctx, s)
	}
	r.unmount(ctx, mounted)
	r.nothingLeft(ctx)
	r.remove(ctx, mounted)
	if mounted {
		r.suggest()
	}
	return check.Section{Name: "client " + c.Client, Rows: r.rows, Notes: r.notes}
}

func (r *run) add(row check.Row) { r.rows = append(r.rows, row) }

// try adds the row of a step, and reports whether its result is Yes.
func (r *run) try(ctx context.Context, s step) bool {
	limit := r.in.Timeout + s.waits
	switch {
	case ctx.Err() != nil:
		r.add(s.item.Row(check.Unknown, "the check was stopped before", ""))
		return false
	case r.hung != "":
		r.add(s.item.Row(check.Unknown, "not tried, because the client did not finish: "+r.hung, ""))
		return false
	}
	sctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	result, why, err := s.do(sctx)
	switch {
	case err == nil:
		r.add(s.item.Row(result, why, ""))
		return result == check.Yes
	case ctx.Err() != nil:
		r.add(s.item.Row(check.Unknown, "the check was stopped meanwhile", ""))
	case sctx.Err() != nil:
		r.hung = s.item.What()
		row := s.item.Row(check.No, fmt.Sprintf("the client did not finish within %s: %s", limit, check.OneLine(err)), "")
		row.Needed = true // whatever the step is: a client must answer
		r.add(row)
	default:
		r.add(s.item.Row(check.No, check.OneLine(err), ""))
	}
	return false
}

// steps returns the steps with the mounted volume, in their order.
func (r *run) steps() []step {
	transfer := time.Duration(r.in.Large/slowest) * time.Second
	return []step{
		{check.Needed("clientList", "list the root"), r.list, 0},
		{check.Needed("clientWrite", "write a file"), r.write, 0},
		{check.Optional("clientStored", "a file is stored when it is closed"), r.stored, 0},
		{check.Needed("clientRead", "read it back"), r.readBack, 0},
		{check.Needed("clientOverwrite", "replace its content"), r.storing(smallName, small+small), 0},
		{check.Needed("clientEmpty", "store an empty file"), r.storing("empty", ""), 0},
		{check.Needed("clientLarge", "store and read a large file (multipart upload)"), r.large, 2 * transfer},
		{check.Needed("clientOffset", "read at an offset"), r.offset, 0},
		{check.Optional("clientRemote", "objects of other writers appear"), r.remote, 0},
		{check.Optional("clientRename", "rename a file"), r.rename, 0},
		{check.Needed("clientDelete", "delete a file"), r.deleteFile, 0},
		{check.Needed("clientHeal", "the mount works again after the client was killed"), r.heal, transfer},
		{check.NeededIf(r.in.Renewal > 0 && !r.in.StaticKeys, "clientRenewal", "files work after the first session has expired"), r.renewal, r.in.Renewal},
	}
}

func (r *run) path(name string) string { return filepath.Join(r.in.Target, name) }

func (r *run) mount(ctx context.Context) (check.Result, string, error) {
	began := time.Now()
	err := r.in.Volume.Publish(ctx)
	return check.Yes, "in " + since(began), err
}

func (r *run) list(ctx context.Context) (check.Result, string, error) {
	var names []os.DirEntry
	err := r.in.Host.Do(ctx, "list the root", func() (err error) {
		names, err = os.ReadDir(r.in.Target)
		return err
	})
	want := 1
	if r.beforeErr != nil {
		want = 0
	}
	if err == nil && len(names) != want {
		err = fmt.Errorf("a volume with %d objects has %d entries", want, len(names))
	}
	return check.Yes, "", err
}

const (
	smallName  = "small"
	largeName  = "large"
	offsetName = "offset"
)

// small is the content of the small files.
const small = "Test file of s3-csi-driver check. It can be deleted.\n"

// content returns a reader of bytes that are the same for each call.
func content(size int64) io.Reader { return io.LimitReader(rand.NewChaCha8([32]byte{}), size) }

func contentOf(size int64) string {
	data, _ := io.ReadAll(content(size)) // it has no errors
	return string(data)
}

// put writes a file and closes it, as one thread: some clients complete an upload when the process that wrote a file closes it.
func (r *run) put(ctx context.Context, name string, data io.Reader) error {
	return r.in.Host.Do(ctx, "write "+name, func() error {
		f, err := os.Create(r.path(name))
		if err != nil {
			return err
		}
		_, err = io.Copy(f, data)
		return errors.Join(err, f.Close())
	})
}

// get returns an error unless a file has the data.
func (r *run) get(ctx context.Context, name string, data io.Reader) error {
	return r.in.Host.Do(ctx, "read "+name, func() error {
		f, err := os.Open(r.path(name))
		if err != nil {
			return err
		}
		defer f.Close()
		got, want := sha256.New(), sha256.New()
		size, err := io.Copy(got, f)
		wanted, wantErr := io.Copy(want, data)
		if err != nil || wantErr != nil {
			return errors.Join(err, wantErr)
		}
		if !bytes.Equal(got.Sum(nil), want.Sum(nil)) {
			return fmt.Errorf("file %s has %d bytes that differ from the %d that were written", name, size, wanted)
		}
		return nil
	})
}

// await calls done until it returns nil, for limit or until ctx ends, and returns how long that took, or the last error.
func await(ctx context.Context, limit time.Duration, done func() error) (took time.Duration, err error) {
	for began := time.Now(); ; pause(ctx) {
		err, took = done(), time.Since(began)
		if err == nil || ctx.Err() != nil || took > limit {
			return took, err
		}
	}
}

// awaitObject returns how long it takes until the object has the data, within limit.
func (r *run) awaitObject(ctx context.Context, key, want string, limit time.Duration) (took time.Duration, err error) {
	return await(ctx, limit, func() error {
		got, err := r.in.Objects.Get(ctx, key)
		if err == nil && string(got) != want {
			err = fmt.Errorf("object %s has %d bytes that differ from the %d that were written", key, len(got), len(want))
		}
		return err
	})
}

func (r *run) write(ctx context.Context) (check.Result, string, error) {
	return check.Yes, "", r.put(ctx, smallName, strings.NewReader(small))
}

// stored checks what the service has at the moment when close has returned.
func (r *run) stored(ctx context.Context) (check.Result, string, error) {
	if !r.has("clientWrite") {
		return check.Unknown, "no file could be written", nil
	}
	if _, err := r.awaitObject(ctx, smallName, small, 0); err == nil {
		r.saw["clientStored"] = "at close"
		return check.Yes, "", nil
	}
	r.saw["clientStored"] = "late"
	took, err := r.awaitObject(ctx, smallName, small, r.in.Timeout/2)
	if err != nil {
		return check.No, fmt.Sprintf("not within %s: %s", r.in.Timeout/2, check.OneLine(err)), nil
	}
	return check.No, "but " + shown(took) + " later", nil
}

func (r *run) readBack(ctx context.Context) (check.Result, string, error) {
	return check.Yes, "", r.get(ctx, smallName, strings.NewReader(small))
}

// storing returns a step that writes a file, reads it, and awaits its object.
func (r *run) storing(name, data string) func(context.Context) (check.Result, string, error) {
	return func(ctx context.Context) (check.Result, string, error) {
		err := r.put(ctx, name, strings.NewReader(data))
		if err == nil {
			err = r.get(ctx, name, strings.NewReader(data))
		}
		if err == nil {
			_, err = r.awaitObject(ctx, name, data, r.in.Timeout/2)
		}
		return check.Yes, "", err
	}
}

func (r *run) large(ctx context.Context) (check.Result, string, error) {
	began := time.Now()
	if err := r.put(ctx, largeName, content(r.in.Large)); err != nil {
		return "", "", err
	}
	limit := r.in.Timeout/2 + time.Duration(r.in.Large/slowest)*time.Second - time.Since(began)
	_, err := await(ctx, limit, func() error {
		size, err := r.in.Objects.Size(ctx, largeName)
		if err == nil && size != r.in.Large {
			err = fmt.Errorf("its object has %d bytes instead of %d", size, r.in.Large)
		}
		return err
	})
	if err != nil {
		return check.No, fmt.Sprintf("not stored within %s: %s", since(began), check.OneLine(err)), nil
	}
	return check.Yes, fmt.Sprintf("%d MiB in %s", r.in.Large>>20, since(began)), r.get(ctx, largeName, content(r.in.Large))
}

func (r *run) putBefore(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, r.in.Timeout)
	defer cancel()
	r.before = contentOf(offsetSize)
	r.beforeErr = r.in.Objects.Put(ctx, offsetName, []byte(r.before))
}

// offset reads from the middle of an object of another writer, which is in no cache.
func (r *run) offset(ctx context.Context) (check.Result, string, error) {
	if r.beforeErr != nil {
		return check.Unknown, check.OneLine(r.beforeErr), nil
	}
	return check.Yes, "", r.in.Host.Do(ctx, "read at an offset", func() error {
		f, err := os.Open(r.path(offsetName))
		if err != nil {
			return err
		}
		defer f.Close()
		for _, at := range []int{offsetSize - 12345, offsetSize/2 + 123, 0} {
			got := make([]byte, 4096)
			if _, err := f.ReadAt(got, int64(at)); err != nil {
				return fmt.Errorf("read at %d: %w", at, err)
			}
			if string(got) != r.before[at:at+len(got)] {
				return fmt.Errorf("reading at %d returns bytes from another place", at)
			}
		}
		return nil
	})
}

// remote writes an object beside the client. It is looked up after it appeared in a listing only: the client may remember that there
// was no such file.
func (r *run) remote(ctx context.Context) (check.Result, string, error) {
	if err := r.in.Objects.Put(ctx, "remote", []byte(small)); err != nil {
		return check.Unknown, check.OneLine(err), nil
	}
	took, err := await(ctx, min(remoteBound, r.in.Timeout/2), func() error {
		return r.in.Host.Do(ctx, "list the root", func() error {
			names, err := os.ReadDir(r.in.Target)
			if err == nil && !slices.ContainsFunc(names, func(e os.DirEntry) bool { return e.Name() == "remote" }) {
				err = fs.ErrNotExist
			}
			return err
		})
	})
	switch {
	case err == nil:
		r.saw["clientRemote"] = "soon"
		return check.Yes, "in " + shown(took), r.get(ctx, "remote", strings.NewReader(small))
	case !errors.Is(err, fs.ErrNotExist):
		return "", "", err
	}
	r.saw["clientRemote"] = "late"
	return check.No, "not within " + shown(took) + ": the client caches names", nil
}

func (r *run) rename(ctx context.Context) (check.Result, string, error) {
	err := r.put(ctx, "old", strings.NewReader(small))
	if err == nil {
		err = r.in.Host.Do(ctx, "rename", func() error { return os.Rename(r.path("old"), r.path("renamed")) })
	}
	if err == nil {
		err = r.get(ctx, "renamed", strings.NewReader(small))
	}
	return check.Yes, "", err
}

// missing returns nil for the error of something that does not exist.
func missing(err error, there string) error {
	switch {
	case err == nil:
		return errors.New(there)
	case errors.Is(err, fs.ErrNotExist):
		return nil
	}
	return err
}

func (r *run) deleteFile(ctx context.Context) (check.Result, string, error) {
	err := r.put(ctx, "deleted", strings.NewReader(small))
	if err == nil {
		err = r.in.Host.Do(ctx, "delete", func() error { return os.Remove(r.path("deleted")) })
	}
	if err == nil {
		err = r.in.Host.Do(ctx, "look for the deleted file", func() error {
			_, err := os.Lstat(r.path("deleted"))
			return missing(err, "the file still exists")
		})
	}
	if err == nil {
		_, err = await(ctx, r.in.Timeout/2, func() error {
			_, err := r.in.Objects.Get(ctx, "deleted")
			return missing(err, "the object of the deleted file still exists")
		})
	}
	return check.Yes, "", err
}

// heal kills the client, awaits another one, and reads through it.
func (r *run) heal(ctx context.Context) (check.Result, string, error) {
	if !r.has("clientLarge") {
		return check.Unknown, "there is no file to read", nil
	}
	before, err := r.in.Host.Clients(ctx)
	if err == nil && len(before) == 0 {
		err = errors.New("the client has no process")
	}
	if err != nil {
		return "", "", err
	}
	for _, pid := range before {
		err = errors.Join(err, r.in.Host.Kill(pid))
	}
	if err != nil {
		return "", "", err
	}
	last := errors.New("the client was not started again")
	took, err := await(ctx, math.MaxInt64, func() error { // until ctx ends
		now, err := r.in.Host.Clients(ctx)
		if err == nil && slices.ContainsFunc(now, func(pid int) bool { return !slices.Contains(before, pid) }) {
			last = r.get(ctx, largeName, content(r.in.Large))
		}
		return last
	})
	return check.Yes, "in " + shown(took), err
}

// renewal waits until the session that the client has now, or had before, has expired. It then lists, writes and reads through the client:
//
//  1. find out when the session expires
//  2. wait until then, and until there is another session
//  3. list the root, write a file, read it back, and look for its object
func (r *run) renewal(ctx context.Context) (check.Result, string, error) {
	switch {
	case r.in.StaticKeys:
		return check.Unknown, "does not apply to credentials: static: when the keys in a volume's secret change, the driver replaces the client", nil
	case r.in.Renewal == 0:
		return check.Unknown, "not tried: it takes as long as a session; set --session-duration to the shortest one of the service", nil
	}
	first, err := r.in.Volume.Session(ctx)
	switch {
	case err != nil:
		return "", "", err
	case first.Expires.IsZero():
		return check.Unknown, "the backend makes no session for this volume, so the client's keys do not expire", nil
	case time.Until(first.Expires) > r.in.Renewal+time.Second:
		return check.Unknown, fmt.Sprintf("the session lasts until %s, longer than --session-duration", first.Expires.Format(time.RFC3339)), nil
	}
	if err := r.renewed(ctx, first); err != nil {
		return "", "", err
	}
	if err := r.in.Host.Do(ctx, "list the root after the renewal", func() error { _, err := os.ReadDir(r.in.Target); return err }); err != nil {
		return "", "", err
	}
	return r.storing("renewed", small)(ctx)
}

// renewed waits until a session has expired and there is another one.
func (r *run) renewed(ctx context.Context, first Session) error {
	select {
	case <-time.After(time.Until(first.Expires)):
	case <-ctx.Done():
		return ctx.Err()
	}
	_, err := await(ctx, r.in.Timeout/2, func() error {
		now, err := r.in.Volume.Session(ctx)
		switch {
		case err != nil || now.Expires.After(first.Expires):
			return err
		case now.Problem != "":
			return fmt.Errorf("the session was not renewed: %s", now.Problem)
		}
		return errors.New("the session was not renewed")
	})
	return err
}

// has reports whether a row has the result Yes.
func (r *run) has(name string) bool {
	return slices.ContainsFunc(r.rows, func(row check.Row) bool { return row.Check == name && row.Result == check.Yes })
}

// unmount writes a file, unpublishes at once, and looks for the object.
func (r *run) unmount(ctx context.Context, mounted bool) {
	var (
		unmount = check.Needed("clientUnmount", "unmount")
		drain   = check.NeededIf(!r.in.ExitsEarly, "clientDrain", "files closed before the unmount are stored")
		data    = contentOf(drainSize)
		failed  = errors.New("no file was written")
	)
	if mounted && r.hung == "" && ctx.Err() == nil {
		wctx, cancel := context.WithTimeout(ctx, r.in.Timeout)
		if failed = r.put(wctx, "drain", strings.NewReader(data)); failed != nil {
			failed = fmt.Errorf("no file could be written: %w", failed)
		}
		cancel()
	}
	began := time.Now()
	uctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), r.in.Timeout+undoBound)
	defer cancel()
	err := r.unpublish(uctx)
	switch {
	case err != nil:
		r.add(unmount.Row(check.No, check.OneLine(err), "the check kills the client and unmounts"))
	case !mounted:
		r.add(unmount.Row(check.Unknown, "the client did not mount", ""))
	default:
		r.add(unmount.Row(check.Yes, "in "+since(began), ""))
	}
	octx, cancel := context.WithTimeout(context.WithoutCancel(ctx), r.in.Timeout)
	defer cancel()
	switch {
	case failed != nil:
		r.add(drain.Row(check.Unknown, check.OneLine(failed), ""))
	case err != nil:
		r.add(drain.Row(check.No, "the unmount failed", ""))
	default:
		if _, err := r.awaitObject(octx, "drain", data, 0); err != nil {
			r.add(drain.Row(check.No, check.OneLine(err), "declare the client with drain: unknown"))
			return
		}
		r.add(drain.Row(check.Yes, "", ""))
	}
}

// unpublish waits for a publish that is still in flight.
func (r *run) unpublish(ctx context.Context) error {
	for {
		err := r.in.Volume.Unpublish(ctx)
		if !fault.Is(err, fault.Busy) || ctx.Err() != nil {
			return err
		}
		pause(ctx)
	}
}

func (r *run) nothingLeft(ctx context.Context) {
	what := check.Needed("clientLeft", "the unmount leaves nothing")
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), r.in.Timeout)
	defer cancel()
	var left []string
	_, err := await(ctx, min(remoteBound, r.in.Timeout/2), func() (err error) {
		if left, err = r.in.Host.Left(ctx); err == nil && len(left) > 0 {
			err = errLeft
		}
		return err
	})
	switch {
	case err == nil:
		r.add(what.Row(check.Yes, "", ""))
	case errors.Is(err, errLeft):
		r.add(what.Row(check.No, "left: "+strings.Join(left, ", "), "the check removes it"))
	default:
		r.add(what.Row(check.Unknown, check.OneLine(err), ""))
	}
}

var errLeft = errors.New("something is left")

// remove removes the objects. It adds a row only if that fails.
func (r *run) remove(ctx context.Context, mounted bool) {
	stopped := mounted && (ctx.Err() != nil || r.hung != "")
	if err := check.RemoveAll(ctx, removeBound, stopped, r.in.Objects.Remove); err != nil {
		r.add(NotRemoved(err))
	}
}

// NotRemoved returns the row for what the check could not remove.
func NotRemoved(err error) check.Row {
	return check.Needed("clientRemoved", "the check deletes everything that it creates").Row(check.No, check.OneLine(err), "delete it manually")
}

// suggest makes notes of what a declaration of the client should say.
func (r *run) suggest() {
	note := func(text string) { r.notes = append(r.notes, text) }
	tried := func(name string) bool {
		return slices.ContainsFunc(r.rows, func(row check.Row) bool { return row.Check == name && row.Result != check.Unknown })
	}
	switch {
	case r.has("clientUnmount") && r.has("clientDrain"):
		note("drain: exits")
	case tried("clientDrain"):
		note("drain: unknown")
	}
	if tried("clientDelete") || tried("clientRename") {
		if r.has("clientDelete") || r.has("clientRename") {
			note("needs: [delete]")
		} else {
			note("needs: without delete, because the client does not delete objects")
		}
	}
	switch r.saw["clientStored"] {
	case "at close":
		note("cache: none or copies, because a closed file is stored")
	case "late":
		note("cache: unsent if the client keeps closed files in ${cacheDir}; otherwise they are lost if it is killed")
	}
	if tried("clientRename") && !r.has("clientRename") {
		note("rename: not supported, so programs that replace files by renaming fail")
	}
	switch r.saw["clientRemote"] {
	case "soon":
		note("options: none needed for objects of other writers, which appear at once")
	case "late":
		note("options: declare the option that limits how long the client caches names")
	}
}

func since(began time.Time) string { return shown(time.Since(began)) }

func shown(d time.Duration) string { return d.Round(10 * time.Millisecond).String() }

func pause(ctx context.Context) {
	select {
	case <-time.After(poll):
	case <-ctx.Done():
	}
}
