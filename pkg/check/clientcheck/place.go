//go:build linux

package clientcheck

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/launcher"
	"github.com/s3-csi/s3-csi-driver/pkg/osfile"
	"github.com/s3-csi/s3-csi-driver/pkg/proc"
)

// closeBound bounds the removal of what a client left.
const closeBound = 30 * time.Second

// Launcher has the processes of the check's uids.
type Launcher interface {
	List(ctx context.Context) ([]launcher.UnitInfo, error)
	Kill(ctx context.Context, uid uint32) error
}

// Place holds the directories of a check, below those of the node service, and what runs for it.
type Place struct {
	Namespace *host.Namespace
	Launcher  Launcher // set before the volume is published
	UIDs      launcher.UIDRange
	State     string // for --state-dir
	Cache     string // for --cache-dir
	Target    string
	Helper    string // the file name of the helper's program
	looks     host.Looks
	dirs      []string
	parents   []string // that did not exist, the deepest first
}

// NewPlace makes the directories.
func NewPlace(ctx context.Context, ns *host.Namespace, stateDir, cacheDir string) (*Place, error) {
	p := &Place{Namespace: ns}
	err := ns.Do(ctx, "make the directories of the check", func() error {
		for _, parent := range []string{stateDir, cacheDir} {
			dir, err := p.makeBelow(parent)
			if err != nil {
				return err
			}
			p.dirs = append(p.dirs, dir)
		}
		p.State, p.Target, p.Cache = filepath.Join(p.dirs[0], "s"), filepath.Join(p.dirs[0], "t"), p.dirs[1]
		return nil
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("make the directories of the check: %w", err), p.Close(ctx))
	}
	return p, nil
}

// makeBelow makes a directory that the client's user can pass.
func (p *Place) makeBelow(parent string) (string, error) {
	for dir := parent; ; dir = filepath.Dir(dir) {
		if _, err := os.Lstat(dir); !errors.Is(err, os.ErrNotExist) {
			break
		}
		p.parents = append(p.parents, dir)
	}
	if err := os.MkdirAll(parent, 0o711); err != nil {
		return "", err
	}
	dir, err := os.MkdirTemp(parent, "check-")
	if err != nil {
		return "", err
	}
	return dir, os.Chmod(dir, 0o711)
}

// Do implements Host.
func (p *Place) Do(ctx context.Context, what string, fn func() error) error {
	return p.Namespace.Do(host.For(ctx, "check"), what, fn)
}

// Clients implements Host.
func (p *Place) Clients(ctx context.Context) ([]int, error) {
	all, err := proc.PIDs()
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, pid := range all {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		status, err := proc.ReadStatus(pid)
		if err != nil {
			continue
		}
		uid, _, ok := status.UIDs()
		if !ok || uid < p.UIDs.First || uid > p.UIDs.Last || !status.Running() {
			continue
		}
		// The helper and the program that renews sessions are no clients.
		exe, err := p.looks.Program(ctx, pid)
		if name := filepath.Base(exe); err == nil && name != p.Helper && name != "s3-csi-driver" {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// Kill implements Host.
func (p *Place) Kill(pid int) error {
	if err := unix.Kill(pid, unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("kill the client: %w", err)
	}
	return nil
}

// Left implements Host.
func (p *Place) Left(ctx context.Context) ([]string, error) {
	mounts, err := p.mounts(ctx)
	if err != nil {
		return nil, err
	}
	var left []string
	for _, m := range mounts {
		if isClients(m) {
			left = append(left, "mount "+m.Mountpoint)
		}
	}
	units, err := p.units(ctx)
	if err != nil {
		return nil, err
	}
	for _, u := range units {
		left = append(left, fmt.Sprintf("processes of uid %d", u.UID))
	}
	err = p.Namespace.Do(ctx, "look for files", func() error {
		names, err := filepath.Glob(filepath.Join(p.Cache, "*-*")) // of mounts, see mount.Name
		records, rerr := filepath.Glob(filepath.Join(p.State, "mounts", "*"))
		for _, name := range append(names, records...) {
			left = append(left, "directory "+name)
		}
		if slices.ContainsFunc(mounts, func(m host.Mount) bool { return m.Mountpoint == p.Target }) {
			return errors.Join(err, rerr) // it is named as a mount, and its client may never answer
		}
		if _, serr := os.Lstat(p.Target); !errors.Is(serr, os.ErrNotExist) {
			left = append(left, "target "+p.Target)
		}
		return errors.Join(err, rerr)
	})
	return left, err
}

// isClients reports whether a mount is a client's. The others are those of the node, which stay until Close.
func isClients(m host.Mount) bool {
	return strings.HasPrefix(m.FSType, "fuse") && m.FSType != "fusectl"
}

func (p *Place) units(ctx context.Context) ([]launcher.UnitInfo, error) {
	if p.Launcher == nil {
		return nil, nil
	}
	return p.Launcher.List(ctx)
}

// mounts returns the mounts below the directories, in the order of the mount table.
func (p *Place) mounts(ctx context.Context) ([]host.Mount, error) {
	all, err := p.Namespace.Mounts(ctx)
	var found []host.Mount
	for _, m := range all {
		for _, dir := range p.dirs {
			if strings.HasPrefix(m.Mountpoint, dir+"/") {
				found = append(found, m)
				break
			}
		}
	}
	return found, err
}

// Close removes everything that is left: it aborts connections, kills processes, unmounts, and removes the directories once nothing
// is mounted below them. No node service may use the place any more. It also works after ctx has ended.
func (p *Place) Close(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeBound)
	defer cancel()
	mounts, err := p.mounts(ctx)
	if err != nil {
		return err
	}
	fusectl := host.NewFusectl(p.Namespace, filepath.Join(p.State, "fusectl"))
	var errs []error
	for _, m := range mounts {
		if isClients(m) {
			errs = append(errs, fusectl.Abort(ctx, m.Minor))
		}
	}
	units, err := p.units(ctx)
	errs = append(errs, err)
	for _, u := range units {
		errs = append(errs, p.Launcher.Kill(ctx, u.UID))
	}
	if mounts, err = p.mounts(ctx); err != nil { // the control file system may have been mounted
		return errors.Join(append(errs, err)...)
	}
	errs = append(errs, p.Namespace.Do(ctx, "unmount what is left", func() error {
		var errs []error
		for _, m := range slices.Backward(mounts) {
			if err := unix.Unmount(m.Mountpoint, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil && !errors.Is(err, unix.EINVAL) {
				errs = append(errs, fmt.Errorf("unmount %s: %w", m.Mountpoint, err))
			}
		}
		return errors.Join(errs...)
	}))
	mounts, err = p.mounts(ctx)
	if err == nil && len(mounts) > 0 {
		err = fmt.Errorf("%s is still mounted; unmount it, and remove %s", mounts[0].Mountpoint, strings.Join(p.dirs, " and "))
	}
	if err != nil {
		return errors.Join(append(errs, err)...)
	}
	errs = append(errs, p.Namespace.Do(ctx, "remove the directories of the check", func() error {
		var errs []error
		for _, dir := range p.dirs {
			errs = append(errs, osfile.RemoveTree(ctx, dir))
		}
		for _, dir := range p.parents { // fails if it is not empty
			_ = os.Remove(dir)
		}
		return errors.Join(errs...)
	}))
	return errors.Join(errs...)
}
