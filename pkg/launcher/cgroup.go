package launcher

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/proc"
)

// cgroupName is the cgroup of helpers at the root of a unified hierarchy. In hierarchies of version 1 helpers go to the root itself,
// because a new directory there can need preparation (cpuset).
const cgroupName = "s3-csi-helpers"

// probeTimeout bounds the check of the cgroup file systems, which waits only for the kernel.
const probeTimeout = 5 * time.Second

// SurvivesDriver reports whether helpers can survive a restart of the driver, and if not, why. When a container, a systemd unit or a task
// of another orchestrator ends, every process in its cgroup is killed, so the driver moves helpers out of its own. The network of a pod
// ends with the pod, too.
func (p *Process) SurvivesDriver() (bool, string) {
	if err := p.sameNetwork(); err != nil {
		return false, err.Error()
	}
	ctx, cancel := context.WithTimeout(context.Background(), probeTimeout)
	defer cancel()
	if err := p.ns.Do(ctx, "checking the host's cgroups", p.probeCgroups); err != nil {
		return false, "helpers stay in the driver's cgroup and are killed when the driver's container, unit or task ends: " + err.Error()
	}
	return true, ""
}

// sameNetwork refuses a driver in a container with its own network, because its helpers share that, and it ends with the container's
// pod.
func (p *Process) sameNetwork() error {
	if !p.ns.Foreign() {
		return nil
	}
	own, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		return fmt.Errorf("finding the driver's network namespace: %w", err)
	}
	hosts, err := os.Readlink("/proc/1/ns/net")
	if err != nil {
		return fmt.Errorf("finding the host's network namespace: %w", err)
	}
	if own != hosts {
		return errors.New("helpers use the network namespace of the driver's container and lose it when that ends: run the driver in the host's " +
			"(Kubernetes: hostNetwork: true on the node's pod; docker: --network=host; Nomad: network_mode = \"host\")")
	}
	return nil
}

// confined reports whether the driver's cgroup may be killed as a whole: it is in a container, or, in any hierarchy, in another cgroup
// than PID 1. systemd kills the cgroups of units and sessions, and other orchestrators, such as Nomad, those of their tasks.
func (p *Process) confined() (bool, error) {
	if p.ns.Foreign() {
		return true, nil
	}
	own, init, err := ownCgroups()
	if err != nil {
		return false, err
	}
	return apart(own, init), nil
}

// ownCgroups returns the cgroups of the driver and those of PID 1.
func ownCgroups() (own, init map[string]string, err error) {
	if own, err = cgroupsOf(os.Getpid()); err == nil {
		init, err = cgroupsOf(1)
	}
	return own, init, err
}

func cgroupsOf(pid int) (map[string]string, error) {
	file, err := os.ReadFile(proc.Path(pid, "cgroup"))
	if err != nil {
		return nil, fmt.Errorf("read the cgroups of process %d: %w", pid, err)
	}
	return parseCgroups(file), nil
}

// apart reports whether a process is in another cgroup than PID 1 in any hierarchy, the root excepted.
func apart(own, init map[string]string) bool {
	for hierarchy, path := range own {
		if path != "/" && path != init[hierarchy] {
			return true
		}
	}
	return false
}

// probeCgroups tries everything that leaving a cgroup needs, without leaving it.
func (p *Process) probeCgroups() error {
	confined, err := p.confined()
	if err != nil || !confined {
		return err
	}
	files, err := cgroupFiles()
	if err != nil {
		return err
	}
	var errs []error
	for _, file := range files {
		f, err := os.OpenFile(file, os.O_WRONLY, 0)
		if err == nil {
			err = f.Close()
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// leaveCgroup moves a helper out of the driver's cgroup if that is killed with the driver. It runs in the host's mount namespace, on a
// thread that ends afterwards if that is not the driver's.
func (p *Process) leaveCgroup(pid int) error {
	confined, err := p.confined()
	if err != nil || !confined {
		return err
	}
	hostView := !p.ns.Foreign() || enterHostCgroups()
	files, err := cgroupFiles()
	if err != nil {
		return err
	}
	var moveErrs []error
	for _, file := range files {
		moveErrs = append(moveErrs, os.WriteFile(file, strconv.AppendInt(nil, int64(pid), 10), 0))
	}
	return hasLeft(pid, hostView, errors.Join(moveErrs...))
}

// hasLeft returns an error if a helper is in any cgroup of the driver; moveErr is the likely cause.
func hasLeft(pid int, hostView bool, moveErr error) error {
	own, init, err := ownCgroups()
	if err != nil {
		return err
	}
	its, err := cgroupsOf(pid)
	if proc.Gone(err) {
		return nil // it has exited
	}
	if err != nil {
		return err
	}
	if shared := sharedCgroups(own, its, init, hostView); len(shared) > 0 {
		return errors.Join(fmt.Errorf("still shared: %s", strings.Join(shared, ", ")), moveErr)
	}
	return nil
}

// sharedCgroups returns the hierarchies in which two processes are in the same cgroup. That of PID 1 and the root do not count, unless
// "/" is only the root of a container's cgroup namespace.
func sharedCgroups(a, b, init map[string]string, hostView bool) []string {
	var shared []string
	for hierarchy, path := range a {
		if b[hierarchy] != path || (path == "/" || path == init[hierarchy]) && hostView {
			continue
		}
		if hierarchy == "" {
			hierarchy = "the unified hierarchy"
		}
		shared = append(shared, hierarchy+" ("+path+")")
	}
	return shared
}

// parseCgroups reads /proc/<pid>/cgroup (cgroups(7)): the paths by controllers, where "" is the unified hierarchy.
func parseCgroups(file []byte) map[string]string {
	cgroups := map[string]string{}
	for line := range strings.Lines(string(file)) {
		if parts := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3); len(parts) == 3 {
			cgroups[parts[1]] = parts[2]
		}
	}
	return cgroups
}

// cgroupFiles returns the files to which a pid is written to leave its cgroups: one for each hierarchy that this thread sees whole.
func cgroupFiles() ([]string, error) {
	mounts, err := host.ThreadMounts(func(m host.Mount) bool { return m.Root == "/" && (m.FSType == "cgroup" || m.FSType == "cgroup2") })
	if err != nil {
		return nil, fmt.Errorf("find the cgroup file systems: %w", err)
	}
	if len(mounts) == 0 {
		return nil, errors.New("no cgroup file system is mounted on the host")
	}
	var files []string
	for _, m := range mounts {
		dir := m.Mountpoint
		if m.FSType == "cgroup2" {
			dir = filepath.Join(dir, cgroupName)
			if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
				return nil, fmt.Errorf("create a cgroup for helpers: %w", err)
			}
		}
		files = append(files, filepath.Join(dir, "cgroup.procs"))
	}
	return files, nil
}

// enterHostCgroups moves this thread, which ends afterwards, into the host's cgroup namespace, and reports whether it could. On a
// unified hierarchy with delegation boundaries, only a process there may move a process out of a container's cgroup.
func enterHostCgroups() bool {
	fd, err := unix.Open("/proc/1/ns/cgroup", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return false
	}
	defer unix.Close(fd)
	return unix.Setns(fd, unix.CLONE_NEWCGROUP) == nil
}
