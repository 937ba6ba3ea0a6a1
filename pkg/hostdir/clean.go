package hostdir

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
)

// Clean removes the other versions of this driver's programs, except those for which inUse is true, those that a process
// runs, and those of a driver that runs. It removes nothing that Install did not make. inUse is called with the version's
// directory.
func (i Installed) Clean(ctx context.Context, ns Doer, inUse func(dir string) bool) error {
	base := filepath.Dir(i.Dir)
	removed := make(chan []string, 1)
	err := ns.Do(ctx, "removing programs that nobody runs from "+base, func() error {
		dirs, err := i.clean(ctx, base, inUse)
		removed <- dirs
		return err
	})
	select {
	case dirs := <-removed:
		if len(dirs) > 0 {
			klog.FromContext(ctx).Info("Removed programs of other versions, which nothing runs any more", "directories", dirs)
		}
	default: // it goes on without us
	}
	if err != nil {
		return fmt.Errorf("remove programs that nobody runs from %s: %w", base, err)
	}
	return nil
}

// clean runs on the host.
func (i Installed) clean(ctx context.Context, base string, inUse func(dir string) bool) (removed []string, err error) {
	unused := func() (dirs []string, err error) {
		entries, err := os.ReadDir(base)
		for _, e := range entries {
			dir := filepath.Join(base, e.Name())
			if dir != i.Dir && e.IsDir() && versionName.MatchString(e.Name()) && !inUse(dir) {
				dirs = append(dirs, dir)
			}
		}
		return dirs, err
	}
	if dirs, err := unused(); err != nil || len(dirs) == 0 {
		return nil, err // as nearly always
	}
	lock, err := lockDir(ctx, base)
	if err != nil {
		return nil, err
	}
	defer lock.Close()
	dirs, err := unused()
	if err != nil {
		return nil, err
	}
	running, err := running(ctx, base)
	if err != nil {
		return nil, err
	}
	var errs []error
	for _, dir := range dirs {
		if running[dir] {
			continue
		}
		gone, err := remove(dir)
		if gone {
			removed = append(removed, dir)
		}
		errs = append(errs, err)
	}
	return removed, errors.Join(errs...)
}

// running are the directories below base that processes run programs of. It reads nothing of a process but the link to its
// program, which never blocks. A link that cannot be read is of a process with more privileges than this one has, and so of
// none that was started from here.
func running(ctx context.Context, base string) (map[string]bool, error) {
	proc, err := os.Open("/proc")
	if err != nil {
		return nil, err
	}
	defer proc.Close()
	names, err := proc.Readdirnames(-1)
	if err != nil {
		return nil, err
	}
	dirs := map[string]bool{}
	for _, name := range names {
		if _, err := strconv.Atoi(name); err != nil {
			continue
		}
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		program, err := os.Readlink("/proc/" + name + "/exe")
		if err != nil {
			continue
		}
		if rest, ok := strings.CutPrefix(program, base+"/"); ok {
			version, _, _ := strings.Cut(rest, "/")
			dirs[filepath.Join(base, version)] = true
		}
	}
	return dirs, nil
}

// remove removes a version that no driver holds and that has nothing in it but programs.
func remove(dir string) (gone bool, err error) {
	f, err := openDir(dir)
	if err != nil {
		return false, err
	}
	defer f.Close()
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		if errors.Is(err, unix.EWOULDBLOCK) {
			return false, nil // a driver's that runs
		}
		return false, err
	}
	entries, err := f.ReadDir(-1)
	if err != nil {
		return false, err
	}
	for _, e := range entries {
		if !e.Type().IsRegular() {
			return false, fmt.Errorf("%s is left alone: %s in it is no program", dir, e.Name())
		}
	}
	for _, e := range entries {
		if err := os.Remove(filepath.Join(dir, e.Name())); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return false, err
		}
	}
	return true, os.Remove(dir)
}
