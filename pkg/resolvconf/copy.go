//go:build linux

// Package resolvconf lets helpers, and what they start, resolve names as the driver's container does instead of as the host
// does: the driver keeps a copy of its resolv.conf in the state directory, and a helper that is started so sees that in the
// place of the host's.
//
// The file is written in place, so that who has it mounted sees what changes. What is mounted on a file goes when somebody
// puts another file in its place on the host (rename(2) takes mounts off in all namespaces but its own), which is how most
// programs write a resolv.conf. So the driver looks at the host's, and mounts the copy again where it was taken off.
package resolvconf

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
)

const (
	copyName = "resolv.conf" // in the state directory
	// inPlace is a directory of the state directory. It is put in the place of those of the host's services that resolve names,
	// and holds the copy under the names that systemd-resolved has for its own (systemd-resolved.service(8)).
	inPlace  = "resolve"
	resolved = "/run/systemd/resolve"

	every = time.Minute
	bound = 20 * time.Second
	tick  = 20 * time.Millisecond // a file's time is as exact as the kernel's clock tick, which is shorter
)

// services are the directories with the sockets of services that answer in the place of a name server, and do so as the host
// does: where /etc/nsswitch.conf says "resolve", and where nscd runs.
func services() []string { return []string{resolved, "/var/run/nscd"} }

// Bind is a file or directory of the host that a helper sees at another place, too. Both paths are free of symbolic links.
type Bind struct{ Source, Target string }

// Copy is the driver's resolv.conf on the host.
type Copy struct {
	ns       *host.Namespace
	dir      string
	own      string        // what is copied
	hosts    string        // what it takes the place of
	services []string      // and of these
	turn     chan struct{} // who writes
}

// New finds the driver's resolv.conf, of which it makes no copy yet. stateDir is the driver's, on the host.
func New(ns *host.Namespace, stateDir string) (*Copy, error) {
	c := &Copy{ns: ns, dir: stateDir, own: File, hosts: File, services: services(), turn: make(chan struct{}, 1)}
	if _, err := c.read(); err != nil {
		return nil, fault.Errorf(fault.Precondition, "%w; in Kubernetes it comes from the pod's dnsPolicy", err)
	}
	return c, nil
}

// read reads the driver's own file.
func (c *Copy) read() ([]byte, error) {
	content, err := read(c.own)
	if err != nil {
		return nil, fmt.Errorf("the driver's own %w", err)
	}
	return content, nil
}

// Binds brings the copy up to date and gives what a helper has to see where. The copy on itself is among it: by that a mount
// namespace is known as one that has the copy.
func (c *Copy) Binds(ctx context.Context) ([]Bind, error) {
	v, err := c.refresh(ctx)
	return v.binds, err
}

// view is the copy as it is on the host.
type view struct {
	binds  []Bind
	copied string // its path
	file   fileID
	// state changes with every file that something is to be mounted on.
	state string
}

// fileID is a file for as long as it exists.
type fileID struct {
	dev uint64
	ino uint64
}

func (c *Copy) refresh(ctx context.Context) (view, error) {
	select {
	case c.turn <- struct{}{}:
		defer func() { <-c.turn }()
	case <-ctx.Done():
		return view{}, fmt.Errorf("the driver's resolv.conf for helpers: %w", context.Cause(ctx))
	}
	content, unread := c.read()
	result := make(chan view, 1)
	err := c.ns.Do(ctx, "copying the driver's resolv.conf to "+c.dir, func() error {
		if unread == nil {
			if err := c.write(content); err != nil {
				return err
			}
		}
		v, err := c.look()
		if err == nil {
			result <- v
		}
		return err
	})
	if err != nil {
		return view{}, errors.Join(fmt.Errorf("the driver's resolv.conf for helpers: %w", err), unread)
	}
	if unread != nil { // what was copied before is better than nothing
		klog.FromContext(ctx).Error(unread, "Helpers go on with an older copy")
	}
	return <-result, nil
}

// write makes the copy, or changes the one that is there. Call it inside Do.
func (c *Copy) write(content []byte) error {
	dir := filepath.Join(c.dir, inPlace)
	if err := os.MkdirAll(c.dir, 0o711); err != nil {
		return err
	}
	if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	if err := os.Chmod(dir, 0o755); err != nil { // whatever the umask
		return err
	}
	path := filepath.Join(c.dir, copyName)
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o644)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := overwrite(f, content); err != nil {
		return err
	}
	for _, name := range []string{copyName, "stub-" + copyName} {
		if err := link(f, path, filepath.Join(dir, name)); err != nil {
			return err
		}
	}
	return nil
}

// overwrite changes a file that others read meanwhile. Nobody sees a file without a server, which would send them to one on
// this host: at any moment either the old content is whole in it, or the new one is, behind what is being overwritten. Who
// reads in between can see parts of both; the file's time is changed once more after that, so that they read it again.
func overwrite(f *os.File, content []byte) error {
	if err := f.Chmod(0o644); err != nil {
		return err
	}
	old, err := io.ReadAll(f)
	if err != nil || bytes.Equal(old, content) {
		return err
	}
	end := max(len(old), len(content)) + 1
	pad := func(n int) []byte { return bytes.Repeat([]byte("\n"), n) }
	if len(old) > 0 {
		if _, err := f.WriteAt(slices.Concat(pad(end-len(old)), content), int64(len(old))); err != nil {
			return err
		}
		time.Sleep(tick) // a reader may have taken the file's former size, and read no further
	}
	if _, err := f.WriteAt(slices.Concat(content, pad(end-len(content))), 0); err != nil {
		return err
	}
	if err := f.Truncate(int64(len(content))); err != nil {
		return err
	}
	time.Sleep(tick)
	return os.Chtimes(f.Name(), time.Time{}, time.Now())
}

// link makes a second name for a file, unless it is one already.
func link(f *os.File, path, name string) error {
	fi, err := f.Stat()
	if err != nil {
		return err
	}
	if have, err := os.Lstat(name); err == nil && os.SameFile(fi, have) {
		return nil
	}
	if err := os.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return os.Link(path, name)
}

// look finds the copy and what it has to be mounted on. Call it inside Do.
func (c *Copy) look() (v view, err error) {
	dir, err := filepath.EvalSymlinks(c.dir)
	if err != nil {
		return v, err
	}
	v.copied = filepath.Join(dir, copyName)
	fi, err := os.Lstat(v.copied)
	if err != nil {
		return v, err
	}
	if !fi.Mode().IsRegular() {
		return v, fmt.Errorf("%s is no regular file", v.copied)
	}
	v.file = idOf(fi)
	v.binds = []Bind{{v.copied, v.copied}}
	for _, s := range c.services {
		at, err := filepath.EvalSymlinks(s)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return v, err
		}
		if fi, err := os.Lstat(at); err == nil && fi.IsDir() {
			v.binds = append(v.binds, Bind{filepath.Join(dir, inPlace), at})
		}
	}
	target, err := c.target()
	if err != nil {
		return v, err
	}
	covered := slices.ContainsFunc(v.binds[1:], func(b Bind) bool { return isIn(filepath.Join(dir, inPlace), b.Target, target) })
	if !covered {
		if fi, err := os.Lstat(target); err == nil && !fi.Mode().IsRegular() {
			return v, fault.Errorf(fault.Precondition, "the host's %s is no regular file", target)
		}
		v.binds = append(v.binds, Bind{v.copied, target})
	}
	v.state, err = stateOf(v.binds)
	return v, err
}

// target is the file that the host's resolv.conf is in the end. It need not be there, for a moment, where a link leads to it.
func (c *Copy) target() (string, error) {
	target, err := filepath.EvalSymlinks(c.hosts)
	if err == nil {
		return target, nil
	}
	link, lerr := os.Readlink(c.hosts)
	if lerr == nil {
		if !filepath.IsAbs(link) {
			link = filepath.Join(filepath.Dir(c.hosts), link)
		}
		if dir, derr := filepath.EvalSymlinks(filepath.Dir(link)); derr == nil {
			return filepath.Join(dir, filepath.Base(link)), nil
		}
	}
	return "", fault.Errorf(fault.Precondition, "the host has no %s that the driver's could take the place of: %w", c.hosts, err)
}

// isIn tells whether what a directory holds is what target will be, once the directory is in the place of another.
func isIn(dir, other, target string) bool {
	if filepath.Dir(target) != other {
		return false
	}
	_, err := os.Lstat(filepath.Join(dir, filepath.Base(target)))
	return err == nil
}

// stateOf tells files that are mounted on from those that took their places.
func stateOf(binds []Bind) (string, error) {
	var state strings.Builder
	for _, b := range binds[1:] {
		fi, err := os.Lstat(b.Target)
		if err != nil {
			return "", fault.Errorf(fault.Precondition, "the host has no %s that the driver's resolv.conf could take the place of: %w", b.Target, err)
		}
		st, ok := fi.Sys().(*syscall.Stat_t)
		if !ok {
			return "", fmt.Errorf("%s: nothing is known of it", b.Target)
		}
		// The number of a file that is gone is given out again, but not at the same time.
		fmt.Fprintf(&state, "%s %d %d %d.%09d\n", b.Target, st.Dev, st.Ino, st.Ctim.Sec, st.Ctim.Nsec)
	}
	return state.String(), nil
}

func idOf(fi fs.FileInfo) fileID {
	st, ok := fi.Sys().(*syscall.Stat_t)
	if !ok {
		return fileID{}
	}
	return fileID{st.Dev, st.Ino}
}

// Run keeps the copy current, and where helpers have to see it, until ctx ends: at once and each minute.
func (c *Copy) Run(ctx context.Context) error {
	ticker := time.NewTicker(every)
	defer ticker.Stop()
	var k keeper
	for {
		if err := k.keep(ctx, c); err != nil && ctx.Err() == nil {
			klog.FromContext(ctx).Error(err, "What helpers resolve names with is not as it should be; it is tried again", "in", every)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

// keeper remembers what the host looked like when all helpers were known to have the copy in its place.
type keeper struct{ state string }

func (k *keeper) keep(ctx context.Context, c *Copy) error {
	ctx, cancel := context.WithTimeout(ctx, bound)
	defer cancel()
	v, err := c.refresh(ctx)
	if err != nil || v.state == k.state {
		return err
	}
	if err := c.mend(ctx, v); err != nil {
		return err
	}
	k.state = v.state
	return nil
}

// mend mounts the copy again in the namespaces that had it where it is not seen any more.
func (c *Copy) mend(ctx context.Context, v view) error {
	all, err := c.ns.Mounts(ctx)
	if err != nil {
		return err
	}
	of, ok := mountOf(all, v.copied)
	if !ok {
		return fmt.Errorf("%s is on none of the host's mounts", v.copied)
	}
	has := func(mounts []host.Mount) bool {
		return slices.ContainsFunc(mounts, func(m host.Mount) bool {
			return m.Mountpoint == v.copied && m.Major == of.Major && m.Minor == of.Minor && filepath.Base(m.Root) == copyName
		})
	}
	return c.ns.DoElsewhere(ctx, "giving helpers the driver's resolv.conf", has, func(who string) error {
		fi, err := os.Lstat(v.copied)
		if err != nil {
			return err
		}
		if idOf(fi) != v.file {
			return nil // an earlier one, or nobody's that has to do with this driver
		}
		places, err := again(v.binds)
		if places > 0 {
			klog.FromContext(ctx).Info("The host has a new resolv.conf; a helper that had lost the driver's has it again", "process", who, "places", places)
		}
		return err
	})
}

// mountOf is the mount that a path without symbolic links is on.
func mountOf(all []host.Mount, path string) (found host.Mount, ok bool) {
	for _, m := range all { // later entries lie on top
		at := strings.TrimSuffix(m.Mountpoint, "/")
		if (path == at || strings.HasPrefix(path, at+"/")) && len(m.Mountpoint) >= len(found.Mountpoint) {
			found, ok = m, true
		}
	}
	return found, ok
}

// Apply mounts in the mount namespace of the calling thread, which must be nobody else's.
func Apply(binds []Bind) error {
	for _, b := range binds {
		if err := b.mount(); err != nil {
			return err
		}
	}
	return nil
}

// again mounts what is not seen at its place any more, and says how much that was.
func again(binds []Bind) (done int, err error) {
	for _, b := range binds {
		from, err := os.Stat(b.Source)
		if err != nil {
			return done, err
		}
		to, err := os.Stat(b.Target)
		if from.IsDir() && errors.Is(err, fs.ErrNotExist) {
			continue // a service that has come since then, where the helper does not see it
		}
		if err != nil {
			return done, err
		}
		if os.SameFile(from, to) {
			continue
		}
		if err := b.mount(); err != nil {
			return done, err
		}
		done++
	}
	return done, nil
}

func (b Bind) mount() error {
	if err := unix.Mount(b.Source, b.Target, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("mounting %s on %s: %w", b.Source, b.Target, err)
	}
	return nil
}
