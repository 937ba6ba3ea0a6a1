package helper

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/proc"
	"github.com/s3-csi/s3-csi-driver/pkg/sandbox"
)

// Program describes the programs of a helper.
type Program struct {
	Version string
	// Exchange is the path of the program that makes sessions. If it cannot be executed, sessions are not renewed and the
	// status has the reason.
	Exchange string
}

// Arguments are those of a helper.
type Arguments struct {
	// Name is the mount's, or a spare's own.
	Name string
	// StateDir and CacheDir belong to the mount. The latter is "" if it has none.
	StateDir, CacheDir string
	// Landlock means that the helper and the processes that it starts are restricted with Landlock: Restrict was, or will be, called.
	Landlock bool
	// Spare means that the helper gets its mount later, with Peer.Assign. The directories are then those of the mount already, under other
	// paths: Landlock restricts the helper to the directories, not to the paths.
	Spare bool
}

func parse(args []string) (a Arguments, err error) {
	flags := flag.NewFlagSet("helper", flag.ContinueOnError)
	flags.StringVar(&a.Name, "name", "", "name of the mount")
	flags.StringVar(&a.StateDir, "state-dir", "", "the mount's state directory")
	flags.StringVar(&a.CacheDir, "cache-dir", "", "the mount's cache directory")
	flags.BoolVar(&a.Landlock, "landlock", false, "restrict the helper and its client with Landlock")
	flags.BoolVar(&a.Spare, "spare", false, "the helper gets its mount later")
	if err := flags.Parse(args); err != nil {
		return a, fmt.Errorf("helper: %w", err)
	}
	switch {
	case flags.NArg() > 0:
		return a, fmt.Errorf("helper: unexpected argument %q", flags.Arg(0))
	case a.Name == "":
		return a, errors.New("helper: --name is missing")
	case !filepath.IsAbs(a.StateDir):
		return a, errors.New("helper: --state-dir is not an absolute path")
	case a.CacheDir != "" && !filepath.IsAbs(a.CacheDir):
		return a, errors.New("helper: --cache-dir is not an absolute path")
	}
	return a, nil
}

// CommandLine returns the command line of a helper, without the program.
func (a Arguments) CommandLine() []string {
	args := []string{"helper", "--name", a.Name, "--state-dir", a.StateDir}
	if a.CacheDir != "" {
		args = append(args, "--cache-dir", a.CacheDir)
	}
	if a.Landlock {
		args = append(args, "--landlock")
	}
	if a.Spare {
		args = append(args, "--spare")
	}
	return args
}

// Run runs a helper with the command line of Arguments, without its first word, and the listening socket as descriptor 0. It returns
// when the helper is done; an error means that it could not start. It changes the whole process (umask, limits,
// dumpability, signals), so nothing else may run there. The end of ctx is treated like SIGTERM: the
// helper continues while a client runs.
func Run(ctx context.Context, program Program, args []string) error {
	a, err := parse(args)
	if err != nil {
		return err
	}
	callers := newCallers()
	filterErr := sandbox.RestrictCalls()
	if filterErr != nil && !errors.Is(filterErr, sandbox.ErrNoSeccomp) {
		return fmt.Errorf("helper %s: %w", a.Name, filterErr)
	}
	if err := harden(); err != nil {
		return fmt.Errorf("helper %s: %w", a.Name, err)
	}
	// Notify, not Ignore: a client must not inherit ignored signals.
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGPIPE)
	defer signal.Stop(signals)

	l, uid, err := takeListener(0)
	if err != nil {
		return fmt.Errorf("helper %s: descriptor 0: %w", a.Name, err)
	}
	o := options{
		args: a, callers: callers, version: program.Version, stderr: os.Stderr,
		random: rand.Float64, now: time.Now, lookup: client.Get, checkFuse: checkFuse, cpuTime: proc.CPUTime,
		idleLimit: idleLimit, endGrace: endGrace, idleQueue: idleQueue, idleSilent: idleSilent,
	}
	o.exchange = newExchanger(program.Exchange, o.restricted).make
	h, err := newHelper(o)
	if err != nil {
		return errors.Join(fmt.Errorf("helper %s: %w", a.Name, err), l.Close())
	}
	if filterErr != nil {
		h.log.printf("system calls are not filtered: %v", filterErr)
	}
	h.log.printf("helper started: name=%s pid=%d version=%s", a.Name, os.Getpid(), h.status.Version)
	h.run(ctx, l, uid, signals)
	return nil
}

// Environment returns the variables that launchers start helpers with. A node may run a thousand of them, which are idle most of the time:
// on one processor, and with a small heap, Go's runtime starts fewer threads and keeps less memory.
func Environment() []string {
	return []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "GOMAXPROCS=1", "GOGC=25", "GOMEMLIMIT=8MiB"}
}

// harden protects the keys in this process's memory and limits the files it creates to its uid.
func harden() error {
	unix.Umask(0o077)
	// If it was executed through a descriptor, ps would show the descriptor's number as its name. Errors do not matter.
	_ = os.WriteFile("/proc/self/comm", []byte("s3-csi-helper"), 0)
	// Not dumpable: no core dump, no ptrace, and /proc/<pid>/mem belongs to root; the client has the same uid. An exec makes
	// the client dumpable again, so that it can open /dev/fd/N.
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return fmt.Errorf("make the process not dumpable: %w", err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{}); err != nil {
		return fmt.Errorf("disable core dumps: %w", err)
	}
	return closeInherited()
}

// closeInherited closes inherited descriptors other than the standard ones, which would otherwise stay open as long as the
// mount exists. Descriptors that this process opened itself are close-on-exec.
func closeInherited() error {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return fmt.Errorf("list inherited descriptors: %w", err)
	}
	for _, e := range entries {
		fd, err := strconv.Atoi(e.Name())
		if err != nil || fd < 3 {
			continue
		}
		if flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err == nil && flags&unix.FD_CLOEXEC == 0 {
			_ = unix.Close(fd)
		}
	}
	return nil
}

// takeListener returns a listener for descriptor fd, which it replaces with /dev/null, and the uid that called listen: the
// driver's.
func takeListener(fd int) (*net.UnixListener, uint32, error) {
	if listening, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ACCEPTCONN); err != nil || listening != 1 {
		return nil, 0, errors.Join(errors.New("not a listening socket; only a launcher may start this program"), err)
	}
	// A copy, because an os.File closes its descriptor when it is collected, and descriptor fd stays in use.
	dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return nil, 0, err
	}
	f := os.NewFile(uintptr(dup), "listener")
	listener, err := net.FileListener(f)
	_ = f.Close()
	if err != nil {
		return nil, 0, err
	}
	l, ok := listener.(*net.UnixListener)
	if !ok {
		return nil, 0, errors.Join(errors.New("not a UNIX socket"), listener.Close())
	}
	uid, err := peerUID(l)
	if err != nil {
		return nil, 0, errors.Join(err, l.Close())
	}
	null, err := unix.Open(os.DevNull, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, 0, errors.Join(err, l.Close())
	}
	if err := unix.Dup3(null, fd, 0); err != nil {
		return nil, 0, errors.Join(err, l.Close())
	}
	_ = unix.Close(null)
	return l, uid, nil
}
