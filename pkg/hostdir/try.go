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
	tryUID     = 65534 // nobody: a user without rights, as clients are
	busyPause  = 20 * time.Millisecond
)

// Try runs the program of that name on the host, as a user without rights, with the only argument --version. What keeps it
// from running is a fault.Precondition that says what to do about it.
func (i Installed) Try(ctx context.Context, ns Doer, name string) error {
	ctx, cancel := context.WithTimeout(ctx, tryTimeout)
	defer cancel()
	path := i.Path(name)
	err := ns.Do(ctx, "trying "+path, func() error {
		for {
			err := run(ctx, path)
			// While this process forks, the child has our descriptors until it executes: also one that wrote the program.
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

// exitError is a program that was executed and failed.
type exitError struct {
	state  string
	output []byte
}

func (e *exitError) Error() string { return fmt.Sprintf("it ended with %s: %q", e.state, e.output) }

func run(ctx context.Context, path string) error {
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	// Files, not buffers: those would be filled by goroutines, and this thread may be the only one on the host.
	cmd := exec.CommandContext(ctx, path, "--version")
	cmd.Dir, cmd.Env, cmd.Stdout, cmd.Stderr = "/", []string{"PATH=/usr/bin:/bin"}, w, w
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Credential: &syscall.Credential{Uid: tryUID, Gid: tryUID}}
	err = errors.Join(cmd.Start(), w.Close())
	if err != nil {
		return err
	}
	err = cmd.Wait()
	output, _ := io.ReadAll(io.LimitReader(r, 1024)) // less than a pipe holds, so it has not waited for us
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		return &exitError{exit.String(), bytes.TrimSpace(output)}
	}
	return err
}

// explain says what keeps the host from running a program, and what can be done.
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
		err = fmt.Errorf("%w: SELinux is enforcing and may forbid it (ausearch -m avc -ts recent says so); label the directory as one of programs "+
			"(semanage fcontext -a -t bin_t '%s(/.*)?' && restorecon -R %s), or choose another --host-dir", err, base, base)
	case !permitted:
		err = fmt.Errorf("%w: the file system, or a security module of the host (AppArmor, fapolicyd), forbids it; allow it there, or choose another --host-dir", err)
	case errors.Is(err, unix.ENOEXEC):
		err = fmt.Errorf("%w: it is no program for this machine; the driver's image must be of the machine's architecture", err)
	case errors.As(err, &exit):
	default:
		return err
	}
	return fault.Errorf(fault.Precondition, "%w", err)
}
