package programs

import (
	"bytes"
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/conc"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
)

const (
	tryTimeout = 20 * time.Second
	tryUID     = 65534 // nobody, unprivileged like clients
	busyPause  = 20 * time.Millisecond
)

// Try runs a program on the host as an unprivileged user, with the argument --version, and returns the first line that it writes. If the
// host cannot run it, the error is a fault.Precondition with the reason and the remedy.
func Try(ctx context.Context, ns host.Doer, path string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, tryTimeout)
	defer cancel()
	version, err := host.Call(ctx, ns, "trying "+path, nil, func() (string, error) {
		for {
			output, err := run(ctx, path)
			// A child that another thread forks has this process's descriptors, also one that wrote the program, until it executes.
			if !errors.Is(err, unix.ETXTBSY) || !conc.Sleep(ctx, busyPause) {
				version, _, _ := strings.Cut(output, "\n")
				return version, explain(path, err)
			}
		}
	})
	if err != nil {
		return "", fmt.Errorf("run %s on the host: %w", path, err)
	}
	return version, nil
}

// exitError means that the program ran and failed.
type exitError struct{ state, output string }

func (e *exitError) Error() string { return fmt.Sprintf("it exited with %s: %q", e.state, e.output) }

func run(ctx context.Context, path string) (output string, err error) {
	r, w, err := os.Pipe()
	if err != nil {
		return "", err
	}
	defer r.Close()
	// A pipe, not buffers: goroutines would fill those on other threads, which may not be in the host's mount namespace.
	cmd := exec.CommandContext(ctx, path, "--version")
	cmd.Dir, cmd.Env, cmd.Stdout, cmd.Stderr = "/", []string{"PATH=/usr/bin:/bin"}, w, w
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Credential: &syscall.Credential{Uid: tryUID, Gid: tryUID}}
	err = errors.Join(cmd.Start(), w.Close())
	if err != nil {
		return "", err
	}
	err = cmd.Wait()
	text, _ := io.ReadAll(io.LimitReader(r, 1024)) // less than a pipe holds, so the program did not wait for a reader
	output = string(bytes.TrimSpace(text))
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		err = &exitError{exit.String(), output}
	}
	return output, err
}

// The messages of glibc's dynamic loader for a missing library, and for one that is too old.
var (
	missingLibrary = regexp.MustCompile(`error while loading shared libraries: ([^:\s]+): cannot open`)
	oldLibrary     = regexp.MustCompile("version `([^']+)' not found")
)

// explain returns the reason why the host does not run a program, with the remedy.
func explain(path string, err error) error {
	var (
		st   unix.Statfs_t
		exit *exitError
		dir  = filepath.Dir(path)
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
		err = fmt.Errorf("%w: the program is built for another architecture; use the driver's image for this host's architecture", err)
	case errors.Is(err, unix.ENOENT):
		loader := interpreter(path)
		if loader == "" {
			return err
		}
		err = fmt.Errorf("%w: the host lacks %s, which the program needs; use a statically linked program, such as that of the driver's image", err, loader)
	case errors.As(err, &exit):
		if m := missingLibrary.FindStringSubmatch(exit.output); m != nil {
			err = fmt.Errorf("%w; the host lacks the library %s: install it, or use the client of the driver's image, which needs no libraries", err, m[1])
		} else if m := oldLibrary.FindStringSubmatch(exit.output); m != nil {
			err = fmt.Errorf("%w; a library of the host is older than %s: use the client of the driver's image, which needs no libraries", err, m[1])
		}
	default:
		return err
	}
	return fault.Errorf(fault.Precondition, "%w", err)
}

// interpreter returns the loader that a program names, or the interpreter of a script; "" if it names none, or does not exist.
func interpreter(path string) string {
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	if e, err := elf.NewFile(f); err == nil {
		for _, p := range e.Progs {
			if p.Type == elf.PT_INTERP {
				name, _ := io.ReadAll(io.LimitReader(p.Open(), unix.PathMax))
				return string(bytes.TrimRight(name, "\x00"))
			}
		}
		return ""
	}
	head := make([]byte, 128)
	n, _ := f.ReadAt(head, 0)
	line, _, _ := strings.Cut(string(head[:n]), "\n")
	if words := strings.Fields(strings.TrimPrefix(line, "#!")); strings.HasPrefix(line, "#!") && len(words) > 0 {
		return words[0]
	}
	return ""
}
