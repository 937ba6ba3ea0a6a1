//go:build !lane || ordinary

package node

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// The user nobody, as which containers without a user of their own often run, such as exporters that see the host's root.
const nobody = 65534

// The test tries all paths as other users of the host do: a volume with the default modes is open to every user, so only a closed
// directory on the way keeps them out. They know the names of mounts, from the mount table.
func TestVolume_IsClosedToOtherUsers(t *testing.T) {
	t.Parallel()
	e := start(t)
	var volumes []string
	targets := map[string]string{}
	for _, client := range clients {
		name := "tenant-" + client
		targets[client] = e.publish(static(name, client), client)
		write(t, filepath.Join(targets[client], "secret"), "of "+name)
		volumes = append(volumes, name)
	}
	e.closedToOthers(volumes)

	// Another program has opened the driver's directories.
	e.Kill()
	for _, dir := range []string{"", "mounts", "sources", "publications"} {
		chmod(t, filepath.Join(e.State, dir), 0o711)
	}
	chmod(t, e.Cache, 0o755)
	e.drive()
	e.closedToOthers(volumes)
	for _, client := range clients {
		if got := read(t, filepath.Join(targets[client], "secret")); got != "of tenant-"+client {
			t.Errorf("the volume reads %q", got)
		}
		e.unpublish(static("tenant-"+client, client), targets[client])
	}
	e.NothingLeft(t)
}

func chmod(t *testing.T, path string, mode os.FileMode) {
	t.Helper()
	if err := os.Chmod(path, mode); err != nil {
		t.Fatal(err)
	}
}

// closedToOthers tries everything that there is as several users.
func (e *env) closedToOthers(volumes []string) {
	e.t.Helper()
	paths := e.everything(volumes)
	for _, i := range e.intruders() {
		opened, err := i.try(paths)
		if err != nil {
			e.t.Errorf("%s: %v", i.what, err)
		}
		for _, path := range opened {
			e.t.Errorf("%s: %s", i.what, path)
		}
	}
}

// everything is what root finds below the driver's directories, with its type, and the driver's socket.
func (e *env) everything(volumes []string) map[string]fs.FileMode {
	e.t.Helper()
	paths := map[string]fs.FileMode{strings.TrimPrefix(e.Driver.Endpoint, "unix://"): fs.ModeSocket}
	for _, root := range []string{e.State, e.Cache, e.HostDir} {
		err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if errors.Is(err, fs.ErrNotExist) {
				return nil // gone meanwhile; launcher process does not use the host's directory
			}
			if err != nil {
				return err
			}
			paths[path] = d.Type()
			return nil
		})
		if err != nil {
			e.t.Fatal(err)
		}
	}
	secrets, sockets := 0, 0
	for path, kind := range paths {
		if filepath.Base(path) == "secret" && strings.HasPrefix(path, filepath.Join(e.State, "sources")) {
			secrets++
		}
		if kind == fs.ModeSocket && !strings.HasPrefix(path, filepath.Join(e.State, "spares")+"/") {
			sockets++
		}
	}
	if secrets != len(volumes) || sockets != len(volumes)+2 { // those of the helpers, of the driver and of its status
		e.t.Fatalf("%d volumes and %d sockets were found: %v", secrets, sockets, paths)
	}
	return paths
}

// intruders are the users of other mounts and the user nobody, on the host and in the namespaces of mounts' processes.
func (e *env) intruders() []intruder {
	e.t.Helper()
	var all []intruder
	for _, p := range e.Running("") {
		own := e.ownOf(p.UID)
		for _, in := range []int{0, p.PID} {
			where := "on the host"
			if in != 0 {
				where = "in the namespace of " + p.Name
			}
			all = append(all, intruder{fmt.Sprintf("%s, as the mount's user %d", where, p.UID), p.UID, in, own},
				intruder{fmt.Sprintf("%s, as nobody", where), nobody, in, nil})
			for _, other := range e.Running("") {
				if other.UID != p.UID {
					all = append(all, intruder{fmt.Sprintf("%s, as the user %d of another mount", where, other.UID), other.UID, in, e.ownOf(other.UID)})
				}
			}
		}
	}
	if len(all) == 0 {
		e.t.Fatal("no process of a mount was found")
	}
	return all
}

// ownOf are the directories of a mount's user.
func (e *env) ownOf(uid int) []string {
	e.t.Helper()
	var own []string
	for _, pattern := range []string{filepath.Join(e.State, "mounts", "*", "state"), filepath.Join(e.State, "scratch", "*"), filepath.Join(e.Cache, "*")} {
		dirs, err := filepath.Glob(pattern)
		if err != nil {
			e.t.Fatal(err)
		}
		for _, dir := range dirs {
			var st unix.Stat_t
			if err := unix.Stat(dir, &st); err == nil && int(st.Uid) == uid {
				own = append(own, dir)
				if filepath.Base(dir) == "state" { // the certificates that its client trusts
					own = append(own, filepath.Join(filepath.Dir(dir), "ca.pem"))
				}
			}
		}
	}
	if len(own) < 2 {
		e.t.Fatalf("user %d has %q", uid, own)
	}
	return own
}

// try opens everything and reports what it could open. Only programs may be opened, and they must be executable.
func (i intruder) try(paths map[string]fs.FileMode) (opened []string, err error) {
	done := make(chan struct{})
	go func() { // the thread ends with it, because it is never unlocked
		defer close(done)
		runtime.LockOSThread()
		if unix.Gettid() == os.Getpid() {
			// The first thread does not end, and the whole process would look like the intruder's: use another one.
			opened, err = i.try(paths)
			runtime.UnlockOSThread()
			return
		}
		if err = i.become(); err == nil {
			opened = i.open(paths)
		}
	}()
	<-done
	slices.Sort(opened)
	return opened, err
}

// become makes this thread that user's, without capabilities, in the mount namespace.
func (i intruder) become() error {
	if i.in != 0 {
		fd, err := unix.Open(fmt.Sprintf("/proc/%d/ns/mnt", i.in), unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		if err := errors.Join(unix.Unshare(unix.CLONE_FS), unix.Setns(fd, unix.CLONE_NEWNS)); err != nil {
			return err
		}
	}
	// Plain system calls: those of the syscall package would change the whole process.
	for _, call := range [][4]uintptr{
		{unix.SYS_SETGROUPS, 0, 0, 0},
		{unix.SYS_SETRESGID, uintptr(i.uid), uintptr(i.uid), uintptr(i.uid)},
		{unix.SYS_SETRESUID, uintptr(i.uid), uintptr(i.uid), uintptr(i.uid)},
	} {
		if _, _, errno := unix.RawSyscall(call[0], call[1], call[2], call[3]); errno != 0 {
			return errno
		}
	}
	var caps [2]unix.CapUserData
	if err := unix.Capget(&unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, &caps[0]); err != nil {
		return err
	}
	if caps[0].Effective|caps[0].Permitted|caps[1].Effective|caps[1].Permitted != 0 {
		return errors.New("it still has capabilities")
	}
	return nil
}
