package systemd

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// Options say what a host has beyond the least.
type Options struct {
	// Network gives the host a network of its own, in which there is only a loopback interface that is down. Without it the
	// host has the machine's.
	Network bool
	// Disk keeps the host's files over its boots, but for /run, /tmp and /dev. Without it, they are empty after each boot.
	Disk bool
	// Kubelet makes what kubelet and kube-proxy demand of a host: the cpuset cgroups, /dev/kmsg, network settings that can be
	// changed, which only a host with Network has for itself, and kernel settings that look as kubelet would set them, so that
	// none of the machine's is changed.
	Kubelet bool
	// Binds are paths of the machine that the host sees, by its own path.
	Binds map[string]string
	// Plain are directories that cannot be on an overlay, as those of container images. Only with Disk.
	Plain []string
}

// Instance is a host that is switched on and off from outside. The process that has one begins with Init; the host does not
// outlive it.
type Instance struct{ h machine }

// NewInstance makes a host, which is off. Close takes it away.
func NewInstance(o Options) (*Instance, error) {
	if why := unusable(); why != "" {
		return nil, errors.New(why)
	}
	dir, err := os.MkdirTemp("", "s3csi-systemd-")
	if err != nil {
		return nil, err
	}
	i := &Instance{h: machine{dir: dir, cgroup: filepath.Base(dir), opts: o}}
	if err := errors.Join(os.Chmod(dir, 0o755), i.h.prepare(nil)); err != nil {
		return nil, errors.Join(err, i.Close())
	}
	if o.Disk {
		if err := mountDisk(dir); err != nil {
			return nil, errors.Join(err, i.Close())
		}
	}
	return i, nil
}

// File is where a file of the host's disk is while the host is off, for putting it there. Only with Options.Disk.
func (i *Instance) File(path string) string {
	return filepath.Join(i.h.dir, hostDir, upperDir, path)
}

// Boot switches the host on and returns when it is up.
func (i *Instance) Boot() error { return i.h.boot() }

// PowerOff shuts the host down in order.
func (i *Instance) PowerOff(within time.Duration) error { return i.h.stop(within) }

// Cut takes the power away.
func (i *Instance) Cut() error { return i.h.stop(0) }

// Close takes the host and its disk away.
func (i *Instance) Close() error {
	err := i.h.stop(0)
	if i.h.opts.Disk {
		if e := unix.Unmount(filepath.Join(i.h.dir, hostDir), unix.MNT_DETACH); e != nil && !errors.Is(e, unix.EINVAL) {
			return errors.Join(err, e) // never delete through a mount
		}
	}
	return errors.Join(err, os.RemoveAll(i.h.dir))
}

// PID is the process id of the host's init, on this machine.
func (i *Instance) PID() int { return i.h.init.Process.Pid }

// Path is a path of the running host's, from outside.
func (i *Instance) Path(path string) string {
	return filepath.Join(fmt.Sprintf("/proc/%d/root", i.PID()), path)
}

// Run runs a command on the host. Its program and directory are paths of the host's.
func (i *Instance) Run(cmd *exec.Cmd) error { return i.h.enter(cmd) }

// Output runs a command on the host and gives what it says.
func (i *Instance) Output(argv ...string) (string, error) {
	out, err := i.h.output(argv...)
	return string(out), err
}
