package agent

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"syscall"

	"golang.org/x/sys/unix"
)

// change does what changes the agent itself.
func (a *agent) change(req Request) error {
	switch req.Op {
	case OpNest:
		return a.nest()
	case OpFuse:
		return a.mountFuse(req.Path, req.Content)
	}
	var errs []error
	for _, fd := range a.fuse {
		errs = append(errs, unix.Close(fd))
	}
	a.fuse = nil
	return errors.Join(errs...)
}

// nest starts the nested agent, whose answers become this one's. It needs no capability beyond a container's default ones, and
// ends with its input.
func (a *agent) nest() error {
	own := []syscall.SysProcIDMap{{Size: 1}}
	cmd := exec.Command("/proc/self/exe") //nolint:noctx // it ends with its input
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWUSER | unix.CLONE_NEWNS, UidMappings: own, GidMappings: own}
	in, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("starting a process in a user namespace: %w", err)
	}
	a.inner = json.NewEncoder(in)
	go func() {
		decoder := json.NewDecoder(out)
		for {
			var answer Answer
			if err := decoder.Decode(&answer); err != nil {
				break
			}
			a.say(answer)
		}
		_, _ = io.Copy(io.Discard, out)
		_ = cmd.Wait()
	}()
	return nil
}

// mountFuse mounts a file system of the agent's own.
func (a *agent) mountFuse(path, source string) error {
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("opening /dev/fuse: %w", err)
	}
	a.fuse = append(a.fuse, fd)
	return unix.Mount(source, path, "fuse", 0, fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", fd))
}

// bind binds a directory or file to another one, which is made.
func bind(source, target string) error {
	if err := os.MkdirAll(target, 0o755); err != nil {
		return err
	}
	return unix.Mount(source, target, "", unix.MS_BIND, "")
}
