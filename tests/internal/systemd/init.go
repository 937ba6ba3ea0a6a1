package systemd

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

// masked are units that would change the machine, or that tests have no use for.
func masked() []string {
	return []string{
		"systemd-sysctl.service", "systemd-binfmt.service", "systemd-modules-load.service", "systemd-random-seed.service", "systemd-udevd.service",
		"systemd-udevd-control.socket", "systemd-udevd-kernel.socket", "systemd-udev-trigger.service", "systemd-remount-fs.service",
		"systemd-update-utmp.service", "systemd-sysusers.service", "systemd-logind.service", "systemd-timesyncd.service", "systemd-networkd.service",
		"systemd-resolved.service", "systemd-journal-flush.service", "systemd-journald-audit.socket", "systemd-tmpfiles-setup.service",
		"systemd-tmpfiles-setup-dev.service", "systemd-tmpfiles-setup-dev-early.service", "systemd-tmpfiles-clean.timer", "systemd-ask-password-console.path",
		"systemd-ask-password-wall.path", "systemd-pcrphase.service", "systemd-pcrphase-sysinit.service", "sys-kernel-debug.mount",
		"sys-kernel-tracing.mount", "sys-kernel-config.mount", "sys-fs-fuse-connections.mount", "dev-hugepages.mount", "dev-mqueue.mount",
		"proc-sys-fs-binfmt_misc.automount", "proc-sys-fs-binfmt_misc.mount", "kmod-static-nodes.service", "apparmor.service",
	}
}

const targetUnit = `[Unit]
Description=A host for tests
Requires=basic.target dbus.socket systemd-journald.socket
After=basic.target dbus.socket
AllowIsolate=yes
`

const journalConfig = `[Journal]
Storage=volatile
ReadKMsg=no
Audit=no
RateLimitBurst=0
`

// becomeInit makes the host's file systems around this process, PID 1 of its namespace, and becomes systemd.
func becomeInit() error {
	runtime.LockOSThread() // namespaces are the thread's, and exec takes those of this one
	var o Options
	if err := json.Unmarshal([]byte(os.Getenv(envOptions)), &o); err != nil {
		return err
	}
	if err := joinCgroups(os.Getenv(envCgroup), o.Kubelet); err != nil {
		return fmt.Errorf("cgroups: %w", err)
	}
	if err := unix.Unshare(unix.CLONE_NEWCGROUP); err != nil {
		return fmt.Errorf("a cgroup namespace: %w", err)
	}
	// Everything below is in this mount namespace and goes with it.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	dir := os.Getenv(envDir)
	root, err := makeRoot(dir, o.Disk)
	if err != nil {
		return err
	}
	for _, step := range []func(root string, o Options) error{mountProc, mountDev, mountRest, mountCgroups, mountOptions, configure} {
		if err := step(root, o); err != nil {
			return err
		}
	}
	if err := unix.Sethostname([]byte("s3csi-test")); err != nil {
		return err
	}
	if err := errors.Join(unix.Chdir(root), unix.PivotRoot(".", "."), unix.Unmount(".", unix.MNT_DETACH), unix.Chdir("/")); err != nil {
		return fmt.Errorf("changing the root: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SHARED, ""); err != nil { // as systemd does on a real host
		return err
	}
	argv := []string{manager, "--system", "--unit=" + target, "--log-target=journal", "--show-status=false"}
	return unix.Exec(manager, argv, []string{"container=s3csi-test", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8"})
}

// The directories of a host's files: hostDir holds all of them, upperDir in it what differs from the machine's root.
const (
	hostDir  = "host"
	upperDir = "upper"
)

// mountDisk mounts what a host's files are on, which is empty.
func mountDisk(dir string) error {
	host := filepath.Join(dir, hostDir)
	if err := unix.Mount("tmpfs", host, "tmpfs", 0, "mode=755"); err != nil {
		return err
	}
	var errs []error
	for _, name := range []string{upperDir, "work", "root"} {
		errs = append(errs, os.Mkdir(filepath.Join(host, name), 0o755))
	}
	return errors.Join(errs...)
}

// makeRoot mounts an overlay of the machine's root and copies the listed files into it.
func makeRoot(dir string, kept bool) (string, error) {
	host := filepath.Join(dir, hostDir)
	upper, work, root := filepath.Join(host, upperDir), filepath.Join(host, "work"), filepath.Join(host, "root")
	list, err := os.ReadFile(filepath.Join(dir, "files"))
	if err != nil {
		return "", err
	}
	if !kept {
		if err := mountDisk(dir); err != nil {
			return "", err
		}
	}
	for line := range strings.Lines(string(list)) {
		to, from, _ := strings.Cut(strings.TrimSuffix(line, "\n"), "\t")
		if err := copyProgram(from, filepath.Join(upper, to)); err != nil {
			return "", err
		}
	}
	if err := unix.Mount("overlay", root, "overlay", 0, "lowerdir=/,upperdir="+upper+",workdir="+work); err != nil {
		return "", fmt.Errorf("an overlay of the root: %w", err)
	}
	return root, nil
}

func copyProgram(from, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	out, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o755)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Close())
}

// mountProc mounts a /proc in which what belongs to the whole machine cannot be changed.
func mountProc(root string, o Options) error {
	proc := filepath.Join(root, "proc")
	if err := unix.Mount("proc", proc, "proc", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, ""); err != nil {
		return err
	}
	for _, name := range []string{"sys", "sysrq-trigger", "irq", "bus"} {
		path := filepath.Join(proc, name)
		if _, err := os.Lstat(path); err != nil {
			continue
		}
		if err := unix.Mount(path, path, "", unix.MS_BIND, ""); err != nil {
			return err
		}
		if err := unix.Mount("", path, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
			return err
		}
	}
	if o.Kubelet {
		if err := satisfyKubelet(root); err != nil {
			return err
		}
	}
	return unix.Mount("sysfs", filepath.Join(root, "sys"), "sysfs", unix.MS_RDONLY|unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "")
}

func mountDev(root string, o Options) error {
	dev := filepath.Join(root, "dev")
	if err := unix.Mount("tmpfs", dev, "tmpfs", unix.MS_NOSUID, "mode=755"); err != nil {
		return err
	}
	devices := []string{"null", "zero", "full", "random", "urandom", "tty", "fuse"}
	if o.Kubelet {
		devices = append(devices, "kmsg")
	}
	for _, name := range devices {
		from, to := filepath.Join("/dev", name), filepath.Join(dev, name)
		if _, err := os.Lstat(from); err != nil {
			continue
		}
		if err := errors.Join(os.WriteFile(to, nil, 0o600), unix.Mount(from, to, "", unix.MS_BIND, "")); err != nil {
			return err
		}
	}
	for _, name := range []string{"pts", "shm", "mqueue"} {
		if err := os.Mkdir(filepath.Join(dev, name), 0o755); err != nil {
			return err
		}
	}
	for name, to := range map[string]string{"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2",
		"ptmx": "pts/ptmx"} {
		if err := os.Symlink(to, filepath.Join(dev, name)); err != nil {
			return err
		}
	}
	return errors.Join(
		unix.Mount("devpts", filepath.Join(dev, "pts"), "devpts", unix.MS_NOSUID|unix.MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620"),
		unix.Mount("tmpfs", filepath.Join(dev, "shm"), "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=1777"))
}

func mountRest(root string, _ Options) error {
	return errors.Join(
		unix.Mount("tmpfs", filepath.Join(root, "run"), "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=755"),
		os.Mkdir(filepath.Join(root, "run/lock"), 0o755),
		unix.Mount("tmpfs", filepath.Join(root, "tmp"), "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=1777"))
}

// mountCgroups mounts the hierarchies. In this cgroup namespace their roots are the host's own cgroups.
func mountCgroups(root string, o Options) error {
	const flags = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	base := filepath.Join(root, cgroupRoot)
	if layout() == "unified" {
		return unix.Mount("cgroup2", base, "cgroup2", flags, "")
	}
	if err := unix.Mount("tmpfs", base, "tmpfs", flags, "mode=755"); err != nil {
		return err
	}
	all, err := hierarchies(o.Kubelet)
	if err != nil {
		return err
	}
	for _, h := range all {
		dir, fstype, options := filepath.Join(base, filepath.Base(h.mountpoint)), "cgroup", h.name
		switch {
		case h.name == "":
			fstype = "cgroup2"
		case strings.HasPrefix(h.name, "name="):
			options = "none," + h.name
		}
		if err := errors.Join(os.Mkdir(dir, 0o755), unix.Mount("cgroup", dir, fstype, flags, options)); err != nil {
			return fmt.Errorf("mounting cgroups %q: %w", h.name, err)
		}
	}
	return nil
}

func configure(root string, _ Options) error {
	units := filepath.Join(root, "etc/systemd/system")
	journald := filepath.Join(root, "etc/systemd/journald.conf.d")
	for _, d := range []string{units, journald} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return err
		}
	}
	for _, name := range masked() {
		if err := errors.Join(os.RemoveAll(filepath.Join(units, name)), os.Symlink(os.DevNull, filepath.Join(units, name))); err != nil {
			return err
		}
	}
	for path, content := range map[string]string{
		filepath.Join(units, target):         targetUnit,
		filepath.Join(journald, "test.conf"): journalConfig,
		filepath.Join(root, "etc/hostname"):  "s3csi-test\n",
		filepath.Join(root, "etc/fstab"):     "",
	} {
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			return err
		}
	}
	return nil
}
