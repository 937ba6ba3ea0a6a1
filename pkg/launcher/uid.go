package launcher

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// UIDRange is the uids that mounts have, both ends included. No user of the host may have one of them: processes are found
// and killed by uid, where member.go says that they are mounts'.
type UIDRange struct{ First, Last uint32 }

// DefaultUIDs is every uid that could be a mount's.
func DefaultUIDs() UIDRange { return UIDRange{First: minUID, Last: maxUID} }

const (
	minUID = 1000          // below are root and the system's services
	nobody = 65534         // shared by whatever has no uid of its own
	maxUID = 1<<32 - 1 - 2 // (uid_t)-1 means "none", -2 is nobody's elsewhere
	noUID  = 65535         // (uid_t)-1 of 16 bits
)

func (r UIDRange) check(uid uint32) error {
	if uid < max(r.First, minUID) || uid > min(r.Last, maxUID) || uid == nobody || uid == noUID {
		return fault.Errorf(fault.Invalid, "uid %d is not a mount's: those are %d to %d", uid, max(r.First, minUID), min(r.Last, maxUID))
	}
	return nil
}

// killPause is the time between two looks at what is left.
const killPause = 20 * time.Millisecond

// Alive reports whether any process of the mount with that uid is running; processes that have ended and are not reaped do not count. The
// uid may be outside the launcher's range, as Kill's may: mounts outlive a change of it.
func (p *Process) Alive(ctx context.Context, uid uint32) (bool, error) {
	if err := DefaultUIDs().check(uid); err != nil {
		return false, fmt.Errorf("look for processes: %w", err)
	}
	p.reap()
	alive, err := p.census.take(ctx)
	return alive[uid], err
}

// Free reports whether a uid that no mount has can be given to one: no process is left of the mounts that had it before. An
// answer of a few minutes ago is as good as one of now. Mounts' processes under that uid are started by this driver alone,
// which waits for their end before it gives the uid up. Other processes can take the uid at any moment after any look: those
// of pods do not count as a mount's, and do not reach what a mount has.
func (p *Process) Free(ctx context.Context, uid uint32) (bool, error) {
	if err := DefaultUIDs().check(uid); err != nil {
		return false, fmt.Errorf("look for processes: %w", err)
	}
	p.reap()
	return p.census.free(ctx, uid)
}

// Kill kills every process of the mount with that uid and returns when none is left, or with ctx: a process that hangs in the
// kernel, on a FUSE mount as a rule, goes only when that connection is aborted.
func (p *Process) Kill(ctx context.Context, uid uint32) error {
	if err := DefaultUIDs().check(uid); err != nil {
		return fmt.Errorf("kill processes: %w", err)
	}
	return killAll(ctx, findOnHost, uid, p.reap)
}

// List lists the uids of the launcher's range that have processes. Which mounts they are is for the caller to know.
func (p *Process) List(ctx context.Context) ([]UnitInfo, error) {
	p.reap()
	alive, err := p.census.take(ctx)
	if err != nil {
		return nil, err
	}
	var list []UnitInfo
	for uid := range alive {
		if p.uids.check(uid) == nil {
			list = append(list, UnitInfo{UID: uid, Active: "active"})
		}
	}
	slices.SortFunc(list, func(a, b UnitInfo) int { return cmp.Compare(a.UID, b.UID) })
	return list, nil
}

// Remove has nothing to do: of a process that has ended nothing is left.
func (p *Process) Remove(context.Context, string) error { return nil }

// OOMKills is 0: helpers of this launcher have no cgroups that could count.
func (p *Process) OOMKills(context.Context, string, uint32) (uint64, error) { return 0, nil }

// Program is the helper program. It is a path on the host only WithHostProgram, or where the driver is on the host itself.
func (p *Process) Program() string { return p.program }

// killAll kills every process of a mount's uid and returns when none is left. each is called before each look.
func killAll(ctx context.Context, find finder, uid uint32, each func()) error {
	for {
		each()
		pids, err := killOnce(ctx, find, uid)
		if err != nil || len(pids) == 0 {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("kill the processes of uid %d: %v are still there: %w", uid, pids, ctx.Err())
		case <-time.After(killPause):
		}
	}
}

// killOnce kills the processes that it finds, and returns their pids.
func killOnce(ctx context.Context, find finder, uid uint32) ([]int, error) {
	killed := make(chan []int, 1) // buffered: after ctx ends, no caller receives it
	err := find(ctx, func(is member) error {
		var pids []int
		err := eachProcess(ctx, func(pid int, status []byte) {
			if statusIsOf(status, uid) && is(pid, uid, status) {
				pids = append(pids, pid)
			}
		})
		if err != nil {
			return fmt.Errorf("look for processes of uid %d: %w", uid, err)
		}
		for _, pid := range pids {
			if err := killIfOf(pid, uid, is); err != nil {
				return fmt.Errorf("kill process %d of uid %d: %w", pid, uid, err)
			}
		}
		killed <- pids
		return nil
	})
	if err != nil {
		return nil, err
	}
	return <-killed, nil
}

// killIfOf kills a process if it is still that uid's: the number may have gone to another meanwhile, a pidfd cannot.
func killIfOf(pid int, uid uint32, is member) error {
	fd, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	status, err := statusOf(pid)
	if err != nil || !statusIsOf(status, uid) || !is(pid, uid, status) {
		return err
	}
	if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return err
	}
	return nil
}

// eachProcess calls fn with the status of every process. It reads status files only: cmdline, environ and maps of a process
// can block on its memory.
func eachProcess(ctx context.Context, fn func(pid int, status []byte)) error {
	dir, err := os.Open("/proc")
	if err != nil {
		return fmt.Errorf("list processes: %w", err)
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	if err != nil {
		return fmt.Errorf("list processes: %w", err)
	}
	for _, name := range names {
		pid, err := strconv.Atoi(name)
		if err != nil {
			continue
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		status, err := statusOf(pid)
		if err != nil {
			return err
		}
		fn(pid, status)
	}
	return nil
}

// statusOf reads /proc/<pid>/status; nil: there is no such process.
func statusOf(pid int) ([]byte, error) {
	status, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/status")
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("look at process %d: %w", pid, err)
	}
	return status, nil
}

// statusUID is the real uid in /proc/<pid>/status.
func statusUID(status []byte) (uint32, bool) {
	_, rest, ok := bytes.Cut(status, []byte("\nUid:\t"))
	if !ok {
		return 0, false
	}
	text, _, _ := bytes.Cut(rest, []byte("\t"))
	uid, err := strconv.ParseUint(string(text), 10, 32)
	return uint32(uid), err == nil
}

// statusIsOf reads /proc/<pid>/status (proc_pid_status(5)). The real and the effective uid have to be the mount's; a
// process that has set only one of them to it is somebody else's.
func statusIsOf(status []byte, uid uint32) bool {
	var state, threads string
	owned := false
	want := strconv.FormatUint(uint64(uid), 10)
	for line := range strings.Lines(string(status)) {
		key, value, _ := strings.Cut(line, ":")
		switch key {
		case "State":
			state = strings.TrimSpace(value)
		case "Uid":
			uids := strings.Fields(value)
			if len(uids) != 4 || uids[0] != want || uids[1] != want {
				return false // so nearly every process, and a mount's start looks at all of them
			}
			owned = true
		case "Threads":
			threads = strings.TrimSpace(value)
		}
	}
	if !owned || strings.HasPrefix(state, "X") {
		return false
	}
	// A zombie with threads is one whose first thread is gone and whose others still run, or hang.
	return !strings.HasPrefix(state, "Z") || threads != "1" && threads != "0" && threads != ""
}
