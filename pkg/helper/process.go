package helper

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/client"
)

const (
	// victimPoints is how much likelier than its helper the kernel's OOM killer takes a client (0 to 1000).
	victimPoints = 200
	// outputGrace is how long output is waited for after the client's end, if somebody else still holds the pipe.
	outputGrace = 500 * time.Millisecond
)

// run is a client process and the pipe of its output.
type run struct {
	process *os.Process
	output  *os.File
}

// startProcess starts a client: in "/", in a process group of its own, with nothing on stdin, its output in a pipe, the
// FUSE descriptor as client.FuseFD and nothing else. extra comes on top of the command's environment and wins. It
// returns when the program has been executed.
func startProcess(c client.Command, extra []string, fuse *os.File) (*run, error) {
	null, err := os.Open(os.DevNull)
	if err != nil {
		return nil, err
	}
	defer null.Close()
	r, w, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("make a pipe for its output: %w", err)
	}
	defer w.Close()
	files := make([]*os.File, client.FuseFD+1)
	files[0], files[1], files[2], files[client.FuseFD] = null, w, w, fuse
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
	preferAsVictim(p.Pid)
	return &run{process: p, output: r}, nil
}

// environment is base without the names in extra, then extra.
func environment(base, extra []string) []string {
	ours := make(map[string]bool, len(extra))
	for _, s := range extra {
		name, _, _ := strings.Cut(s, "=")
		ours[name] = true
	}
	env := make([]string, 0, len(base)+len(extra))
	for _, s := range base {
		if name, _, _ := strings.Cut(s, "="); !ours[name] {
			env = append(env, s)
		}
	}
	return append(env, extra...)
}

// wait reads the client's output until it has ended and gives its exit code, or -1 and the name of the signal that
// ended it.
func (r *run) wait(line func(raw []byte, cut bool)) (code int, signal string) {
	read := make(chan struct{})
	go func() {
		defer close(read)
		readLines(r.output, line)
	}()
	state, err := r.process.Wait()
	// Whatever the client left behind holds the FUSE connection.
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

// killGroup kills a client with what it started. Running as the mount's own uid, it can hit nobody else's process.
func killGroup(pgid int) { _ = unix.Kill(-pgid, unix.SIGKILL) }

// preferAsVictim raises the client's OOM score above ours; raising needs no privilege. Without it both are equal, which
// is worth a mount's keys but not its start.
func preferAsVictim(pid int) {
	own, err := os.ReadFile("/proc/self/oom_score_adj")
	if err != nil {
		return
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(own)))
	if err != nil {
		return
	}
	_ = os.WriteFile("/proc/"+strconv.Itoa(pid)+"/oom_score_adj", strconv.AppendInt(nil, int64(min(1000, n+victimPoints)), 10), 0)
}
