package systemd

import (
	"errors"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// kernelSettings are what kubelet demands of the kernel (k8s.io/component-helpers/node/util/sysctl). They belong to the whole
// machine: on a host they are files that already say what kubelet would write.
func kernelSettings() map[string]string {
	return map[string]string{
		"vm/overcommit_memory": "1", "vm/panic_on_oom": "0", "kernel/panic": "10", "kernel/panic_on_oops": "1",
		"kernel/keys/root_maxkeys": "1000000", "kernel/keys/root_maxbytes": "25000000",
	}
}

// wholeProc is a /proc of which nothing is hidden: the kernel lets a container with a user namespace mount its own only where
// there is one.
const wholeProc = "var/lib/whole-proc"

// satisfyKubelet lets network settings, which are the namespace's own, be changed, and shows kubelet the kernel's as it wants them.
func satisfyKubelet(root string) error {
	sys := filepath.Join(root, "proc/sys")
	network := filepath.Join(sys, "net")
	if err := errors.Join(unix.Mount(network, network, "", unix.MS_BIND, ""), unix.Mount("", network, "", unix.MS_BIND|unix.MS_REMOUNT, "")); err != nil {
		return err
	}
	dir := filepath.Join(root, "var/lib/kernel-settings")
	for name, value := range kernelSettings() {
		file := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(file, []byte(value+"\n"), 0o644); err != nil {
			return err
		}
		if err := unix.Mount(file, filepath.Join(sys, name), "", unix.MS_BIND, ""); err != nil {
			return err
		}
	}
	proc := filepath.Join(root, wholeProc)
	return errors.Join(os.MkdirAll(proc, 0o700), unix.Mount("proc", proc, "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""))
}

// mountOptions mounts what the options name.
func mountOptions(root string, o Options) error {
	for _, dir := range o.Plain {
		from, to := filepath.Join(filepath.Dir(root), "plain", dir), filepath.Join(root, dir)
		for _, d := range []string{from, to} {
			if err := os.MkdirAll(d, 0o755); err != nil {
				return err
			}
		}
		if err := unix.Mount(from, to, "", unix.MS_BIND, ""); err != nil {
			return err
		}
	}
	for path, from := range o.Binds {
		to := filepath.Join(root, path)
		if err := os.MkdirAll(to, 0o755); err != nil {
			return err
		}
		if err := unix.Mount(from, to, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
			return err
		}
	}
	return nil
}
