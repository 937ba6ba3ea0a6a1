package programs

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/osfile"
	"github.com/s3-csi/s3-csi-driver/pkg/proc"
)

// Clean removes the other versions of this driver's programs, unless inUse reports true for the version's directory, a process
// runs one of its programs, or a running driver holds it. It removes only what Install made.
func (i Installed) Clean(ctx context.Context, ns host.Doer, inUse func(dir string) bool) error {
	base := filepath.Dir(i.Dir)
	return ns.Do(ctx, "removing unused programs from "+base, func() error {
		removed, err := i.clean(ctx, base, inUse)
		if len(removed) > 0 {
			klog.FromContext(ctx).Info("Removed unused programs of other versions", "directories", removed)
		}
		if err != nil {
			return fmt.Errorf("remove unused programs from %s: %w", base, err)
		}
		return nil
	})
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
		return nil, err // the usual case
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

// running returns the directories below base from which processes run programs. If the link to a process's program cannot be read, the process
// has more privileges than this one, or hangs with a file system of other software, and was not started from base.
func running(ctx context.Context, base string) (map[string]bool, error) {
	pids, err := proc.PIDs()
	if err != nil {
		return nil, err
	}
	dirs := map[string]bool{}
	var looks host.Looks
	for _, pid := range pids {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		program, err := looks.Program(ctx, pid)
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

// remove removes a version that no driver holds and that contains only programs.
func remove(dir string) (gone bool, err error) {
	f, err := openDir(dir)
	if err != nil {
		return false, err
	}
	defer f.Close()
	if ok, err := osfile.TryLock(f); err != nil || !ok {
		return false, err // locked by a driver that runs
	}
	entries, err := f.ReadDir(-1)
	if err != nil {
		return false, err
	}
	for _, e := range entries {
		if !e.Type().IsRegular() {
			return false, fmt.Errorf("%s was not removed: it contains %s, which is not a program", dir, e.Name())
		}
	}
	for _, e := range entries {
		if err := os.Remove(filepath.Join(dir, e.Name())); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return false, err
		}
	}
	return true, os.Remove(dir)
}
