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
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
)

// Program is what a helper is made of.
type Program struct {
	Version string
	// Exchange is the path of the program that makes sessions. Where it cannot be executed, or is "", the helper makes none
	// and says so in its status (no Status.Session).
	Exchange string
}

// Run is the `helper` mode of a program: `--name <name> --state-dir <dir>`, the listening socket as descriptor 0. It
// returns when the helper has nothing left to do, and an error only if it could not begin. It changes its whole process (umask, limits,
// dumpability, garbage collection, signals), so nothing else may run in it. A ctx that ends is taken as SIGTERM: the
// helper goes on while a client runs.
func Run(ctx context.Context, program Program, args []string) error {
	flags := flag.NewFlagSet("helper", flag.ContinueOnError)
	name := flags.String("name", "", "name of the mount")
	stateDir := flags.String("state-dir", "", "the mount's state directory")
	if err := flags.Parse(args); err != nil {
		return fmt.Errorf("helper: %w", err)
	}
	switch {
	case flags.NArg() > 0:
		return fmt.Errorf("helper: unexpected argument %q", flags.Arg(0))
	case *name == "":
		return errors.New("helper: --name is missing")
	case !filepath.IsAbs(*stateDir):
		return errors.New("helper: --state-dir is not an absolute path")
	}
	beSmall()
	if err := harden(); err != nil {
		return fmt.Errorf("helper %s: %w", *name, err)
	}
	// Notify, not Ignore: a client must not inherit ignored signals.
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGPIPE)
	defer signal.Stop(signals)

	l, uid, err := takeListener(0)
	if err != nil {
		return fmt.Errorf("helper %s: descriptor 0: %w", *name, err)
	}
	exchange, exchangeErr := program.exchange()
	h, err := newHelper(options{
		name: *name, version: program.Version, exchange: exchange, random: rand.Float64, stateDir: *stateDir, stderr: os.Stderr, now: time.Now,
		lookup: client.Get, checkFuse: checkFuse, idleLimit: idleLimit, endGrace: endGrace, idleQueue: idleQueue, idleSilent: idleSilent,
	})
	if err != nil {
		return errors.Join(fmt.Errorf("helper %s: %w", *name, err), l.Close())
	}
	h.log.printf("helper %s serves (pid %d, version %s)", *name, os.Getpid(), h.status.Version)
	if exchangeErr != nil {
		h.log.printf("no sessions can be made here, only the driver can bring some: %v", exchangeErr)
	}
	h.run(ctx, l, uid, signals)
	return nil
}

// exchange is nil where nothing makes sessions.
func (p Program) exchange() (func(context.Context, credentials.Order) (credentials.Keys, error), error) {
	if p.Exchange == "" {
		return nil, errors.New("the helper was made without a program for it")
	}
	x, err := newExchanger(p.Exchange)
	if err != nil {
		return nil, err
	}
	return x.make, nil
}

// beSmall trades a little CPU for memory: a helper is idle nearly always, and there may be a hundred.
func beSmall() {
	runtime.GOMAXPROCS(1)
	debug.SetGCPercent(25)
	debug.SetMemoryLimit(8 << 20)
	debug.FreeOSMemory()
}

// harden keeps the keys in this process to itself and what it makes to its uid.
func harden() error {
	unix.Umask(0o077)
	// Executed through a descriptor, it would be called by the descriptor's number in ps. Not worth failing for.
	_ = os.WriteFile("/proc/self/comm", []byte("s3-csi-helper"), 0)
	// Not dumpable: no core, no ptrace, and /proc/<pid>/mem belongs to root, even for the client, which has our uid. An
	// exec makes the client dumpable again, so that it can open /dev/fd/N.
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return fmt.Errorf("make the process not dumpable: %w", err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{}); err != nil {
		return fmt.Errorf("forbid core dumps: %w", err)
	}
	return closeInherited()
}

// closeInherited closes what came through the exec beside the standard descriptors: something that whoever started the
// driver had left open, and that would be kept from going for as long as the mount lives. What this process opened
// itself is close-on-exec.
func closeInherited() error {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return fmt.Errorf("look for inherited descriptors: %w", err)
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

// takeListener makes a listener of descriptor fd, puts /dev/null in its place, and gives the uid that called listen:
// the driver's.
func takeListener(fd int) (*net.UnixListener, uint32, error) {
	if listening, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ACCEPTCONN); err != nil || listening != 1 {
		return nil, 0, errors.Join(errors.New("is not a listening socket; a launcher has to start this mode"), err)
	}
	// A copy, because an os.File closes its descriptor when it is collected, and this one's number stays in use.
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
		return nil, 0, errors.Join(errors.New("is not a UNIX socket"), listener.Close())
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
