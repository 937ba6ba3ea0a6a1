package systemd

import (
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

const cgroupRoot = "/sys/fs/cgroup"

// hierarchy is one of the machine's cgroup file systems, and where in it this process is.
type hierarchy struct {
	name       string // "memory", "cpu,cpuacct", "name=systemd"; "" is the unified one
	mountpoint string
	own        string
}

// unified reports whether the machine has nothing but the unified hierarchy.
func unified() bool {
	var st unix.Statfs_t
	return unix.Statfs(cgroupRoot, &st) == nil && st.Type == unix.CGROUP2_SUPER_MAGIC
}

// layout is the host's.
func layout() string {
	if l := os.Getenv(EnvLayout); l != "" {
		return l
	}
	if unified() {
		return "unified"
	}
	return "hybrid"
}

// cpuset is the hierarchy of version 1 in which a cgroup has to be prepared before a process can be in it.
const cpuset = "cpuset"

// hierarchies are those in which the host gets a cgroup: all that are mounted, cpuset of version 1 only where it is wanted.
func hierarchies(withCPUSet bool) ([]hierarchy, error) {
	body, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return nil, err
	}
	var all []hierarchy
	for line := range strings.Lines(string(body)) {
		parts := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(parts) != 3 || parts[1] == cpuset && !withCPUSet {
			continue
		}
		h := hierarchy{name: parts[1], own: parts[2]}
		switch {
		case h.name == "" && unified():
			// Below the root: a cgroup with processes cannot pass controllers on.
			h.mountpoint, h.own = cgroupRoot, "/"
		case h.name == "":
			h.mountpoint = filepath.Join(cgroupRoot, "unified")
		default:
			h.mountpoint = filepath.Join(cgroupRoot, strings.TrimPrefix(h.name, "name="))
		}
		if _, err := os.Stat(filepath.Join(h.mountpoint, "cgroup.procs")); err == nil {
			all = append(all, h)
		}
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("no cgroup file system is mounted below %s", cgroupRoot)
	}
	return all, nil
}

// joinCgroups makes a cgroup of that name everywhere and moves this process there.
func joinCgroups(name string, withCPUSet bool) error {
	all, err := hierarchies(withCPUSet)
	if err != nil {
		return err
	}
	for _, h := range all {
		dir := filepath.Join(h.mountpoint, h.own, name)
		if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
		if h.name == cpuset {
			if err := inheritCPUs(dir); err != nil {
				return err
			}
		}
		if err := inheritNice(dir); err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte("0"), 0); err != nil {
			return err
		}
	}
	return nil
}

// inheritNice gives a cgroup as little of the processors as this process has: beside a cgroup, how nice a process in another one is
// makes no difference.
func inheritNice(dir string) error {
	raw, err := unix.Getpriority(unix.PRIO_PROCESS, 0)
	if err != nil {
		return err
	}
	nice := 20 - raw // see getpriority(2)
	// Those of version 2 and of version 1, for which a process of nice 0 has 1024, and a fifth less for each step of nice.
	for name, value := range map[string]int{"cpu.weight.nice": nice, "cpu.shares": int(1024 * math.Pow(0.8, float64(nice)))} {
		f, err := os.OpenFile(filepath.Join(dir, name), os.O_WRONLY, 0)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err == nil {
			_, err = f.WriteString(strconv.Itoa(value))
			err = errors.Join(err, f.Close())
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// inheritCPUs lets a cgroup use what the one around it may use.
func inheritCPUs(dir string) error {
	for _, name := range []string{"cpuset.cpus", "cpuset.mems"} {
		all, err := os.ReadFile(filepath.Join(filepath.Dir(dir), name))
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, name), all, 0); err != nil {
			return err
		}
	}
	return nil
}

// removeCgroups removes the cgroups of that name. Their processes have ended, but the kernel may take a moment.
func removeCgroups(name string, withCPUSet bool) error {
	all, err := hierarchies(withCPUSet)
	if err != nil {
		return err
	}
	var errs []error
	for _, h := range all {
		dir := filepath.Join(h.mountpoint, h.own, name)
		for try := range 100 {
			if err = removeTree(dir); err == nil {
				break
			}
			time.Sleep(time.Duration(try) * time.Millisecond)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// removeTree removes a tree of cgroups, the innermost first. The files in it go with them.
func removeTree(dir string) error {
	var dirs []string
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			dirs = append(dirs, path)
		}
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	})
	var errs []error
	for _, d := range slices.Backward(dirs) {
		if err := os.Remove(d); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(append(errs, err)...)
}
