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
	"runtime"
	"runtime/debug"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/proc"
)

// Program describes the programs of a helper.
type Program struct {
	Version string
	// Exchange is the path of the program that makes sessions. If it cannot be executed, sessions are not renewed and the
	// status has the reason.
	Exchange string
}

// arguments are those of a helper.
type arguments struct {
	name, stateDir string
	cacheDir       string // "": none
	landlock       bool   // the helper and the processes that it starts are restricted with Landlock
}

func parse(args []string) (a arguments, err error) {
	flags := flag.NewFlagSet("helper", flag.ContinueOnError)
	flags.StringVar(&a.name, "name", "", "name of the mount")
	flags.StringVar(&a.stateDir, "state-dir", "", "the mount's state directory")
	flags.StringVar(&a.cacheDir, "cache-dir", "", "the mount's cache directory")
	flags.BoolVar(&a.landlock, "landlock", false, "restrict the helper and its client with Landlock")
	if err := flags.Parse(args); err != nil {
		return a, fmt.Errorf("helper: %w", err)
	}
	switch {
	case flags.NArg() > 0:
		return a, fmt.Errorf("helper: unexpected argument %q", flags.Arg(0))
	case a.name == "":
		return a, errors.New("helper: --name is missing")
	case !filepath.IsAbs(a.stateDir):
		return a, errors.New("helper: --state-dir is not an absolute path")
	case a.cacheDir != "" && !filepath.IsAbs(a.cacheDir):
		return a, errors.New("helper: --cache-dir is not an absolute path")
	}
	return a, nil
}

// writable returns the directories that belong to the mount.
func (a arguments) writable() []string {
	if a.cacheDir == "" {
		return []string{a.stateDir}
	}
	return []string{a.stateDir, a.cacheDir}
}

// Arguments returns the command line of a helper, without the program. landlock means that Restrict was, or will be, called with it.
func Arguments(name, stateDir, cacheDir string, landlock bool) []string {
	args := []string{"helper", "--name", name, "--state-dir", stateDir}
	if cacheDir != "" {
		args = append(args, "--cache-dir", cacheDir)
	}
	if landlock {
		args = append(args, "--landlock")
	}
	return args
}

// Run runs a helper with the arguments of Arguments, without the first one, and the listening socket as descriptor 0. It returns
// when the helper is done; an error means that it could not start. It changes the whole process (umask, limits,
// dumpability, garbage collection, signals), so nothing else may run there. The end of ctx is treated like SIGTERM: the
// helper continues while a client runs.
func Run(ctx context.Context, program Program, args []string) error {
	a, err := parse(args)
	if err != nil {
		return err
	}
	limitMemory()
	if err := harden(); err != nil {
		return fmt.Errorf("helper %s: %w", a.name, err)
	}
	// Notify, not Ignore: a client must not inherit ignored signals.
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGPIPE)
	defer signal.Stop(signals)

	l, uid, err := takeListener(0)
	if err != nil {
		return fmt.Errorf("helper %s: descriptor 0: %w", a.name, err)
	}
	o := options{
		name: a.name, stateDir: a.stateDir, cacheDir: a.cacheDir, landlock: a.landlock,
		version: program.Version, random: rand.Float64, stderr: os.Stderr, now: time.Now, lookup: client.Get, checkFuse: checkFuse, idleLimit: idleLimit, endGrace: endGrace, idleQueue: idleQueue, idleSilent: idleSilent, cpuTime: proc.CPUTime,
	}
	o.exchange = newExchanger(program.Exchange, o.restricted).make
	h, err := newHelper(o)
	if err != nil {
		return errors.Join(fmt.Errorf("helper %s: %w", a.name, err), l.Close())
	}
	h.log.printf("helper started: name=%s pid=%d version=%s", a.name, os.Getpid(), h.status.Version)
	h.run(ctx, l, uid, signals)
	return nil
}

// limitMemory trades CPU for memory: helpers are idle most of the time, and a node may run a hundred.
func limitMemory() {
	runtime.GOMAXPROCS(1)
	debug.SetGCPercent(25)
	debug.SetMemoryLimit(8 << 20)
	debug.FreeOSMemory()
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
