package helper

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/fusermount"
)

const (
	// clientOOMPoints is added to a client's oom_score_adj (0 to 1000), so that the OOM killer prefers it to its helper.
	clientOOMPoints = 200
	// outputGrace is how long to wait for output after the exit if another process still has the pipe open.
	outputGrace = 500 * time.Millisecond
)

// run is a client process and the pipe of its output.
type run struct {
	process *os.Process
	output  *os.File
}

// startProcess starts a client in "/", in a process group of its own, with /dev/null as stdin, a pipe for its output, the FUSE descriptor
// as client.FuseFD, or fusermount.FuseFD, and no other descriptor. It returns when the program has been executed.
func startProcess(c client.Command, extra []string, fuse *os.File) (*run, error) {
	null, err := os.Open(os.DevNull)
	if err != nil {
		return nil, err
	}
	defer null.Close()
	r, w, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("create a pipe for its output: %w", err)
	}
	defer w.Close()
	fd := client.FuseFD
	if c.Fusermount != "" {
		fd = fusermount.FuseFD
	}
	files := make([]*os.File, fd+1)
	files[0], files[1], files[2], files[fd] = null, w, w, fuse
	p, err := os.StartProcess(c.Argv[0], c.Argv, &os.ProcAttr{
		Dir:   "/",
		Env:   environment(c.Env, extra),
		Files: files,
		Sys:   &syscall.SysProcAttr{Setpgid: true},
	})
	if err != nil {
		_ = r.Close()
		if path := (*os.PathError)(nil); errors.As(err, &path) {
			err = path.Err // the caller names the program
		}
		return nil, err
	}
	return &run{process: p, output: r}, nil
}

// prepareFusermount makes the mount point and the directory of programs of a client that executes fusermount3 or fusermount, and returns
// the environment in which it finds them.
func prepareFusermount(stateDir, program string) ([]string, error) {
	bin := filepath.Join(stateDir, "bin")
	if err := errors.Join(os.MkdirAll(bin, 0o700), os.MkdirAll(filepath.Join(stateDir, client.Mountpoint), 0o700)); err != nil {
		return nil, err
	}
	for _, name := range fusermount.Names() {
		link := filepath.Join(bin, name)
		if err := errors.Join(os.RemoveAll(link), os.Symlink(program, link)); err != nil {
			return nil, err
		}
	}
	return []string{"PATH=" + bin}, nil
}

// environment returns base with extra, which replaces variables of the same names.
func environment(base, extra []string) []string {
	replaced := func(variable string) bool {
		name, _, _ := strings.Cut(variable, "=")
		return slices.ContainsFunc(extra, func(e string) bool { return strings.HasPrefix(e, name+"=") })
	}
	return append(slices.DeleteFunc(slices.Clone(base), replaced), extra...)
}

// wait reads the client's output until it has exited and returns its exit code, or -1 and the name of the signal that killed
// it.
func (r *run) wait(line func(raw []byte, cut bool)) (code int, signal string) {
	read := make(chan struct{})
	go func() {
		defer close(read)
		readLines(r.output, line)
	}()
	state, err := r.process.Wait()
	// Its children may have the FUSE descriptor open.
	killGroup(r.process.Pid)
	_ = r.output.SetReadDeadline(time.Now().Add(outputGrace))
	<-read
	_ = r.output.Close()
	if err != nil {
		return -1, "unknown (" + err.Error() + ")"
	}
	if ws, ok := state.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		return -1, unix.SignalName(ws.Signal())
	}
	return state.ExitCode(), ""
}

// killGroup kills a client and its children. With the mount's own uid it cannot hit processes of other mounts.
func killGroup(pgid int) { _ = unix.Kill(-pgid, unix.SIGKILL) }

// signalFlush asks a client for a flush. One that has exited meanwhile reports none.
func signalFlush(pid int) { _ = unix.Kill(pid, client.FlushSignal) }

// raiseOOMScore raises the client's OOM score above the helper's, which needs no privilege. Errors are ignored: then both have
// the same score.
func raiseOOMScore(pid int) {
	own, err := os.ReadFile("/proc/self/oom_score_adj")
	if err != nil {
		return
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(own)))
	if err != nil {
		return
	}
	_ = os.WriteFile("/proc/"+strconv.Itoa(pid)+"/oom_score_adj", strconv.AppendInt(nil, int64(min(1000, n+clientOOMPoints)), 10), 0)
}
