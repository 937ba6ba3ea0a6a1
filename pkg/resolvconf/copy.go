//go:build linux

// Package resolvconf lets helpers and their clients resolve names as the driver's container does, not as the host does. The
// driver keeps a copy of its resolv.conf in the state directory, and helpers see that copy instead of the host's file.
//
// The copy is written in place, so that a process that has it mounted sees every change. Most programs replace the host's
// resolv.conf by rename(2), which removes the mounts on it in all other mount namespaces. So the driver watches the host's file,
// and mounts the copy again where it was removed.
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
	// resolveDir is a directory in the state directory. Helpers see it instead of the directories of the host's resolving services.
	// It holds the copy under the names that systemd-resolved uses for its files (systemd-resolved.service(8)).
	resolveDir = "resolve"
	resolved   = "/run/systemd/resolve"

	refreshInterval = time.Minute
	refreshTimeout  = 20 * time.Second
	tick            = 20 * time.Millisecond // longer than the kernel's clock tick, which is the resolution of file times
)

// services are the directories of the sockets of services that resolve names as the host does: systemd-resolved, which
// /etc/nsswitch.conf calls "resolve", and nscd.
func services() []string { return []string{resolved, "/var/run/nscd"} }

// Bind is a file or directory of the host that a helper also sees at Target. Neither path has a symbolic link.
type Bind struct{ Source, Target string }

// Copy is the driver's resolv.conf on the host.
type Copy struct {
	ns       *host.Namespace
	dir      string
	own      string        // the file that is copied
	hosts    string        // the host's file, which the copy hides
	services []string      // directories of the host that resolveDir hides
	turn     chan struct{} // held while the copy is written
}

// New checks the driver's resolv.conf. It makes no copy yet. stateDir is the driver's state directory on the host.
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

// Binds updates the copy and returns what a helper must see. The first Bind mounts the copy on itself: it marks the mount
// namespaces that use the copy.
func (c *Copy) Binds(ctx context.Context) ([]Bind, error) {
	v, err := c.refresh(ctx)
	return v.binds, err
}

// view is the state of the copy on the host.
type view struct {
	binds  []Bind
	copied string      // the path of the copy
	file   fs.FileInfo // of the copy
	// state changes when a file that is mounted on is replaced.
	state string
}

// refresh updates the copy and returns its state.
func (c *Copy) refresh(ctx context.Context) (view, error) {
	select {
	case c.turn <- struct{}{}:
		defer func() { <-c.turn }()
	case <-ctx.Done():
		return view{}, fmt.Errorf("the driver's resolv.conf for helpers: %w", context.Cause(ctx))
	}
	content, unread := c.read()
	v, err := host.Call(ctx, c.ns, "copying the driver's resolv.conf to "+c.dir, nil, func() (view, error) {
		if unread == nil {
			if err := c.write(content); err != nil {
				return view{}, err
			}
		}
		return c.inspect()
	})
	if err != nil {
		return view{}, errors.Join(fmt.Errorf("the driver's resolv.conf for helpers: %w", err), unread)
	}
	if unread != nil {
		klog.FromContext(ctx).Error(unread, "Cannot read the driver's resolv.conf, keeping its copy")
	}
	return v, nil
}

// write makes or updates the copy. Call it inside Do.
func (c *Copy) write(content []byte) error {
	dir := filepath.Join(c.dir, resolveDir)
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

// overwrite replaces the content of a file that resolvers read at the same time. A file without a server would send them to
// localhost, so the file holds the whole old or the whole new content at any moment. A reader can see parts of both; the file's
// time changes again afterwards, so that this reader reads the file again. The steps are:
//  1. append the new content behind both the old content and the space that the new content needs,
//  2. write the new content to the beginning,
//  3. cut off the rest, and change the time.
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
		time.Sleep(tick) // a reader may have read the former size, and read no further
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

// link makes name a hard link to the file at path, unless it is one already.
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

// inspect finds the copy and the files that it must be mounted on. Call it inside Do.
func (c *Copy) inspect() (v view, err error) {
	dir, err := filepath.EvalSymlinks(c.dir)
	if err != nil {
		return v, err
	}
	v.copied = filepath.Join(dir, copyName)
	if v.file, err = os.Lstat(v.copied); err != nil {
		return v, err
	}
	if !v.file.Mode().IsRegular() {
		return v, fmt.Errorf("%s is not a regular file", v.copied)
	}
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
			v.binds = append(v.binds, Bind{filepath.Join(dir, resolveDir), at})
		}
	}
	target, err := c.target()
	if err != nil {
		return v, err
	}
	covered := slices.ContainsFunc(v.binds[1:], func(b Bind) bool { return isIn(filepath.Join(dir, resolveDir), b.Target, target) })
	if !covered {
		if fi, err := os.Lstat(target); err == nil && !fi.Mode().IsRegular() {
			return v, fault.Errorf(fault.Precondition, "the host's %s is not a regular file", target)
		}
		v.binds = append(v.binds, Bind{v.copied, target})
	}
	v.state, err = State(v.binds)
	return v, err
}

// target resolves the host's resolv.conf. If it is a symbolic link, the file that it leads to may be missing for a moment.
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
	return "", fault.Errorf(fault.Precondition, "the host has no %s to mount the driver's on: %w", c.hosts, err)
}

// isIn reports whether dir, once it is mounted on other, provides the file target.
func isIn(dir, other, target string) bool {
	if filepath.Dir(target) != other {
		return false
	}
	_, err := os.Lstat(filepath.Join(dir, filepath.Base(target)))
	return err == nil
}

// State identifies the files that are mounted on, as the calling thread sees them. It changes when one of them is replaced, which takes
// off what is mounted on it in any mount namespace.
func State(binds []Bind) (string, error) {
	var state strings.Builder
	for _, b := range binds {
		if b.Source == b.Target {
			continue // the copy
		}
		fi, err := os.Lstat(b.Target)
		if err != nil {
			return "", fault.Errorf(fault.Precondition, "the host has no %s to mount the driver's resolv.conf on: %w", b.Target, err)
		}
		st, ok := fi.Sys().(*syscall.Stat_t)
		if !ok {
			return "", fmt.Errorf("%s: its inode is unknown", b.Target)
		}
		// An inode number is used again after its file is removed, but with another change time.
		fmt.Fprintf(&state, "%s %d %d %d.%09d\n", b.Target, st.Dev, st.Ino, st.Ctim.Sec, st.Ctim.Nsec)
	}
	return state.String(), nil
}

// Run updates the copy, and mounts it again where helpers have lost it, at once and every minute until ctx ends.
func (c *Copy) Run(ctx context.Context) error {
	ticker := time.NewTicker(refreshInterval)
	defer ticker.Stop()
	state := ""
	for {
		var err error
		if state, err = c.refreshHelpers(ctx, state); err != nil && ctx.Err() == nil {
			klog.FromContext(ctx).Error(err, "Cannot refresh resolv.conf for helpers", "retryIn", refreshInterval)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
		}
	}
}

// refreshHelpers updates the copy. If the host's files have changed, it repairs the mounts of helpers, too. The state is that of the host in
// which all helpers are known to see the copy.
func (c *Copy) refreshHelpers(ctx context.Context, known string) (state string, err error) {
	ctx, cancel := context.WithTimeout(ctx, refreshTimeout)
	defer cancel()
	v, err := c.refresh(ctx)
	if err != nil || v.state == known {
		return known, err
	}
	if err := c.repair(ctx, v); err != nil {
		return known, err
	}
	return v.state, nil
}

// repair mounts the copy again in the mount namespaces that have lost it.
func (c *Copy) repair(ctx context.Context, v view) error {
	all, err := c.ns.Mounts(ctx)
	if err != nil {
		return err
	}
	of, ok := host.DirectoryIn(all, v.copied)
	if !ok {
		return fmt.Errorf("no mount of the host holds %s", v.copied)
	}
	has := func(mounts []host.Mount) bool {
		return slices.ContainsFunc(mounts, func(m host.Mount) bool {
			return m.Mountpoint == v.copied && of.Shows(m)
		})
	}
	return c.ns.DoInOtherNamespaces(ctx, "mounting the driver's resolv.conf for helpers", has, func(who string) error {
		fi, err := os.Lstat(v.copied)
		if err != nil {
			return err
		}
		if !os.SameFile(fi, v.file) {
			return nil // an earlier copy, or another driver's
		}
		remounted, err := remount(v.binds)
		if remounted > 0 {
			klog.FromContext(ctx).Info("Remounted resolv.conf for a helper", "process", who, "mounts", remounted)
		}
		return err
	})
}

// Apply mounts in the mount namespace of the calling thread, which must not be shared with other threads.
func Apply(binds []Bind) error {
	for _, b := range binds {
		if err := b.mount(); err != nil {
			return err
		}
	}
	return nil
}

// remount mounts what is not visible at its target any more, and returns how many mounts it made.
func remount(binds []Bind) (done int, err error) {
	for _, b := range binds {
		from, err := os.Stat(b.Source)
		if err != nil {
			return done, err
		}
		to, err := os.Stat(b.Target)
		if from.IsDir() && errors.Is(err, fs.ErrNotExist) {
			continue // the service appeared later, and the helper does not see it
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
