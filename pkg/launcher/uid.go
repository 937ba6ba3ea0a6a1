package launcher

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/conc"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/proc"
)

// UIDRange is the range of the mounts' uids, both ends included. No user of the host may have one of them, because processes are found
// and killed by uid; member.go limits that to processes of mounts.
type UIDRange struct{ First, Last uint32 }

// DefaultUIDs are all uids that a mount can have.
func DefaultUIDs() UIDRange { return UIDRange{First: minUID, Last: maxUID} }

func (r UIDRange) orDefault() UIDRange {
	if r == (UIDRange{}) {
		return DefaultUIDs()
	}
	return r
}

const (
	minUID = 1000          // smaller uids belong to root and the system's services
	nobody = 65534         // shared by processes without a uid of their own
	maxUID = 1<<32 - 1 - 2 // (uid_t)-1 means "none", -2 is "nobody" on other systems
	noUID  = 65535         // (uid_t)-1 with 16 bits
)

func (r UIDRange) check(uid uint32) error {
	if uid < max(r.First, minUID) || uid > min(r.Last, maxUID) || uid == nobody || uid == noUID {
		return fault.Errorf(fault.Invalid, "uid %d is not in the range of mounts: %d to %d", uid, max(r.First, minUID), min(r.Last, maxUID))
	}
	return nil
}

// killPause is the longest interval between two checks for remaining processes.
const killPause = 20 * time.Millisecond

// Alive reports whether any process of the mount with that uid runs; zombies do not count, nor do processes of pods, which can have any
// uid and cannot access a mount's files. The uid may be outside the launcher's range, also in Kill, because mounts outlive a change of
// the range.
func (p *Process) Alive(ctx context.Context, uid uint32) (bool, error) {
	p.reap()
	return p.scan.alive(ctx, uid)
}

// Kill kills every process of the mount with that uid. It returns when none is left or ctx ends. A process that is blocked in the
// kernel, usually by a FUSE mount, exits only when that connection is aborted.
func (p *Process) Kill(ctx context.Context, uid uint32) error {
	if err := DefaultUIDs().check(uid); err != nil {
		return fmt.Errorf("kill processes: %w", err)
	}
	return p.scan.killAll(ctx, uid, killPause, p.reap)
}

// List returns the uids of the launcher's range that have processes.
func (p *Process) List(ctx context.Context) ([]UnitInfo, error) {
	p.reap()
	alive, err := p.scan.uids(ctx)
	if err != nil {
		return nil, err
	}
	var list []UnitInfo
	for uid := range alive {
		if p.uids.check(uid) == nil {
			list = append(list, UnitInfo{UID: uid})
		}
	}
	slices.SortFunc(list, func(a, b UnitInfo) int { return cmp.Compare(a.UID, b.UID) })
	return list, nil
}

// OOMKills returns 0, because helpers of this launcher have no cgroups that count OOM kills.
func (p *Process) OOMKills(context.Context, string, uint32) (uint64, error) { return 0, nil }

// killAll kills every process of a mount's uid and returns when none is left. It looks again when those that it found have exited, at
// the latest after pause, and calls each before it looks.
func (s *processScan) killAll(ctx context.Context, uid uint32, pause time.Duration, each func()) error {
	for {
		each()
		if alive, err := s.alive(ctx, uid); err != nil || !alive {
			return err
		}
		pids, err := killOnce(ctx, s.finder(), uid)
		if err != nil || len(pids) == 0 {
			return err
		}
		wait, cancel := context.WithTimeout(ctx, pause)
		for _, pid := range pids { // only another scan proves that all have exited: one may have forked
			host.AwaitExit(wait, pid, uid)
		}
		cancel()
		if err := ctx.Err(); err != nil {
			return fmt.Errorf("kill the processes of uid %d: %v have not exited: %w", uid, pids, err)
		}
	}
}

// killOnce kills the processes that it finds and returns their pids.
func killOnce(ctx context.Context, find finder, uid uint32) ([]int, error) {
	killed := make(chan []int, 1) // buffered: after ctx ends, no caller receives it
	err := find(ctx, func(is member) error {
		var pids []int
		err := eachProcess(ctx, func(pid int, status proc.Status) {
			if runsAs(status, uid) && is(pid, uid, status) {
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

// killIfOf kills a process if it still belongs to that uid. The pid may have been reused; a pidfd cannot be.
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
	if err != nil || !runsAs(status, uid) || !is(pid, uid, status) {
		return err
	}
	if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return err
	}
	return nil
}

// eachProcess calls fn for each process. The status is valid until fn returns, and nil for a process that has exited.
func eachProcess(ctx context.Context, fn func(pid int, status proc.Status)) error {
	pids, err := proc.PIDs()
	if err != nil {
		return err
	}
	var reader proc.StatusReader
	for _, pid := range pids {
		if err := ctx.Err(); err != nil {
			return err
		}
		status, err := ifExists(pid, reader.Read)
		if err != nil {
			return err
		}
		fn(pid, status)
	}
	return nil
}

func statusOf(pid int) (proc.Status, error) { return ifExists(pid, proc.ReadStatus) }

// ifExists reads the status of a process, nil if there is no such process.
func ifExists(pid int, read func(pid int) (proc.Status, error)) (proc.Status, error) {
	status, err := read(pid)
	if proc.Gone(err) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read the status of process %d: %w", pid, err)
	}
	return status, nil
}

// runsAs reports whether a process runs as a mount's uid: its real and its effective uid are that one. A process that has
// set only one of them to it belongs to another user.
func runsAs(status proc.Status, uid uint32) bool {
	ruid, euid, ok := status.UIDs()
	return ok && ruid == uid && euid == uid && status.Running()
}

// processScan finds the uids that have running processes of mounts. A scan reads the status of every process on the host.
// Callers that arrive during a scan share the next one, so that a hundred mounts that end at once do not need a hundred scans.
type processScan struct {
	find  finder // nil: findOnHost
	looks host.Looks
	reads conc.Reader[map[uint32]bool]
}

// scanTimeout bounds a scan, which reads only /proc.
const scanTimeout = 30 * time.Second

// alive reports whether a process of a mount has a uid. Usually no process has it, and there is no scan.
func (s *processScan) alive(ctx context.Context, uid uint32) (bool, error) {
	if err := DefaultUIDs().check(uid); err != nil {
		return false, fmt.Errorf("look for processes: %w", err)
	}
	if !hasThreads(uid) {
		return false, nil
	}
	uids, err := s.uids(ctx)
	return uids[uid], err
}

// hasThreads reports whether any thread in this process's PID namespace has that real uid, those of zombies and of pods among them. The
// kernel looks at each thread, which takes much less time than a scan (getpriority(2), PRIO_USER).
func hasThreads(uid uint32) bool {
	_, err := unix.Getpriority(unix.PRIO_USER, int(uid))
	return !errors.Is(err, unix.ESRCH)
}

// uids returns the uids that have processes, from a scan that begins after the call.
func (s *processScan) uids(ctx context.Context) (map[uint32]bool, error) {
	uids, err := s.reads.Read(ctx, s.scan)
	if err != nil {
		return nil, fmt.Errorf("look for processes: %w", err)
	}
	return uids, nil
}

func (s *processScan) finder() finder {
	if s.find == nil {
		return s.findOnHost
	}
	return s.find
}

func (s *processScan) scan(ctx context.Context) (map[uint32]bool, error) {
	ctx, cancel := context.WithTimeout(ctx, scanTimeout)
	defer cancel()
	found := make(chan map[uint32]bool, 1) // buffered: after ctx ends, no caller receives it
	err := s.finder()(ctx, func(is member) error {
		uids := map[uint32]bool{}
		err := eachProcess(ctx, func(pid int, status proc.Status) {
			if uid, _, ok := status.UIDs(); ok && uid >= minUID && !uids[uid] && runsAs(status, uid) && is(pid, uid, status) {
				uids[uid] = true
			}
		})
		found <- uids
		return err
	})
	if err != nil {
		return nil, err
	}
	return <-found, nil
}
