package hostdir

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

const (
	tryTimeout = 20 * time.Second
	tryUID     = 65534 // nobody, unprivileged like clients
	busyPause  = 20 * time.Millisecond
)

// Try runs a program on the host as an unprivileged user, with the argument --version. If the program cannot run, the error is a
// fault.Precondition that says what to do.
func (i Installed) Try(ctx context.Context, ns Doer, name string) error {
	ctx, cancel := context.WithTimeout(ctx, tryTimeout)
	defer cancel()
	path := i.Path(name)
	err := ns.Do(ctx, "trying "+path, func() error {
		for {
			err := run(ctx, path)
			// A child that another thread forks has this process's descriptors, also one that wrote the program, until it executes.
			if !errors.Is(err, unix.ETXTBSY) {
				return explain(i.Dir, err)
			}
			select {
			case <-time.After(busyPause):
			case <-ctx.Done():
				return err
			}
		}
	})
	if err != nil {
		return fmt.Errorf("run %s on the host: %w", path, err)
	}
	return nil
}

// exitError means that the program ran and failed.
type exitError struct {
	state  string
	output []byte
}

func (e *exitError) Error() string { return fmt.Sprintf("it exited with %s: %q", e.state, e.output) }

func run(ctx context.Context, path string) error {
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	// A pipe, not buffers: goroutines would fill those on other threads, which may not be in the host's mount namespace.
	cmd := exec.CommandContext(ctx, path, "--version")
	cmd.Dir, cmd.Env, cmd.Stdout, cmd.Stderr = "/", []string{"PATH=/usr/bin:/bin"}, w, w
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Credential: &syscall.Credential{Uid: tryUID, Gid: tryUID}}
	err = errors.Join(cmd.Start(), w.Close())
	if err != nil {
		return err
	}
	err = cmd.Wait()
	output, _ := io.ReadAll(io.LimitReader(r, 1024)) // less than a pipe holds, so the program did not wait for a reader
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		return &exitError{exit.String(), bytes.TrimSpace(output)}
	}
	return err
}

// explain returns the reason why the host does not run a program, with the remedy.
func explain(dir string, err error) error {
	var (
		st   unix.Statfs_t
		exit *exitError
	)
	noexec := unix.Statfs(dir, &st) == nil && st.Flags&unix.ST_NOEXEC != 0
	enforcing, _ := os.ReadFile("/sys/fs/selinux/enforce") // missing: there is no SELinux
	permitted := !errors.Is(err, unix.EACCES) && !errors.Is(err, unix.EPERM)
	switch {
	case err == nil:
		return nil
	case noexec && !permitted:
		err = fmt.Errorf("%w: its file system is mounted noexec; choose a --host-dir elsewhere, or mount it with exec", err)
	case !permitted && bytes.HasPrefix(enforcing, []byte("1")):
		base := filepath.Dir(filepath.Dir(dir))
		err = fmt.Errorf("%w: SELinux is enforcing and may forbid it (see ausearch -m avc -ts recent); label the directory for programs "+
			"(semanage fcontext -a -t bin_t '%s(/.*)?' && restorecon -R %s), or choose another --host-dir", err, base, base)
	case !permitted:
		err = fmt.Errorf("%w: the file system, or a security module of the host (AppArmor, fapolicyd), forbids it; allow it there, or choose another --host-dir", err)
	case errors.Is(err, unix.ENOEXEC):
		err = fmt.Errorf("%w: the program is not built for this machine; the driver's image must match its architecture", err)
	case errors.As(err, &exit):
	default:
		return err
	}
	return fault.Errorf(fault.Precondition, "%w", err)
}
