package containers

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

const cgroupRoot = "/sys/fs/cgroup"

// removeCgroup removes what the runtime leaves of a container: the directories above its cgroup, in every hierarchy.
func removeCgroup(path string) error {
	var hierarchies []string
	if _, err := os.Lstat(cgroupRoot + "/cgroup.procs"); err == nil {
		hierarchies = append(hierarchies, cgroupRoot)
	}
	if all, err := filepath.Glob(cgroupRoot + "/*/cgroup.procs"); err == nil {
		for _, file := range all {
			hierarchies = append(hierarchies, filepath.Dir(file))
		}
	}
	var errs []error
	for _, h := range hierarchies {
		for dir := path; dir != "/"; dir = filepath.Dir(dir) {
			err := os.Remove(filepath.Join(h, dir))
			if errors.Is(err, unix.EBUSY) || errors.Is(err, unix.ENOTEMPTY) {
				errs = append(errs, fmt.Errorf("the cgroup %s is still in use: %w", filepath.Join(h, dir), err))
				break
			}
			if err != nil && !errors.Is(err, fs.ErrNotExist) {
				errs = append(errs, err)
			}
		}
	}
	return errors.Join(errs...)
}
