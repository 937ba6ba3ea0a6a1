package launcher

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	sd "github.com/coreos/go-systemd/v22/dbus"
	"github.com/godbus/dbus/v5"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/conc"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/sandbox"
)

// errNoLandlock means that a unit's process cannot use Landlock, for example because systemd's filter of system calls does not know it.
var errNoLandlock = errors.New("the helper cannot use Landlock")

const (
	// maxConnections bounds the concurrent calls. Each takes two connections, and a bus usually allows a user 256 of them.
	maxConnections = 24
	// dialTimeout bounds the handshake with one socket, so that the next is tried if a bus is unresponsive.
	dialTimeout = 5 * time.Second
	// patience bounds the retries after a lost connection. A bus restarts in less.
	patience = 15 * time.Second
	// callTimeout bounds a call whose ctx has no deadline.
	callTimeout = 2 * time.Minute
	redialPause = 50 * time.Millisecond
	// idleConnection is how long a connection is kept for the next call. Mounts tend to start and end together, and each needs
	// several calls.
	idleConnection = time.Second
)

// Names of D-Bus errors: those of the specification, and systemd's (its bus-common-errors.h).
const (
	errReadOnly       = "org.freedesktop.DBus.Error.PropertyReadOnly" // also for an unknown property
	errUnitExists     = "org.freedesktop.systemd1.UnitExists"
	errNoSuchUnit     = "org.freedesktop.systemd1.NoSuchUnit"
	errNoSuchProcess  = "org.freedesktop.systemd1.NoSuchProcess"
	errUnknownProcess = "org.freedesktop.DBus.Error.UnixProcessIdUnknown"
	errShuttingDown   = "org.freedesktop.systemd1.ShuttingDown"
	errDestructive    = "org.freedesktop.systemd1.TransactionIsDestructive"
	errAccessDenied   = "org.freedesktop.DBus.Error.AccessDenied"
)

// dialer connects to systemd for a call, or uses the connection of a former one, which it keeps for a moment.
type dialer struct {
	ns      Doer
	sockets []string      // on the host; the first that answers is used
	slots   chan struct{} // bounds the connections

	mu     sync.Mutex
	idle   []*bus
	closer *time.Timer // closes them
}

// bus is a connection. It is used by one call at a time.
type bus struct {
	conn   *sd.Conn
	cancel context.CancelFunc
}

func (b *bus) close() {
	b.conn.Close()
	b.cancel()
}

// call connects and calls fn. It retries while systemd or the bus restarts. Errors begin with what.
func (d *dialer) call(ctx context.Context, what string, fn func(context.Context, *bus) error) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	select {
	case d.slots <- struct{}{}:
		defer func() { <-d.slots }()
	case <-ctx.Done():
		return fmt.Errorf("%s: %d other calls to systemd are in flight: %w", what, maxConnections, context.Cause(ctx))
	}
	for end := time.Now().Add(patience); ; {
		err := d.callOnce(ctx, fn)
		switch {
		case err == nil:
			return nil
		case ctx.Err() != nil:
			if !errors.Is(err, ctx.Err()) {
				err = fmt.Errorf("%w (%w)", err, context.Cause(ctx))
			}
			return fault.Errorf(fault.Timeout, "%s: %w", what, err)
		case !lost(err):
			return fmt.Errorf("%s: %w", what, classify(err))
		case time.Now().After(end):
			return fault.Errorf(fault.Unavailable, "%s: systemd did not answer for %s: %w", what, patience, err)
		}
		conc.Sleep(ctx, redialPause)
	}
}

// callOnce calls fn with a connection, which ends with ctx.
func (d *dialer) callOnce(ctx context.Context, fn func(context.Context, *bus) error) error {
	b := d.takeIdle()
	if b == nil {
		var err error
		if b, err = d.connect(ctx); err != nil {
			return err
		}
	}
	unbind := context.AfterFunc(ctx, b.cancel)
	err := fn(ctx, b)
	if unbind() && (err == nil || !lost(err)) {
		d.keepIdle(b)
		return err
	}
	b.close()
	return err
}

// takeIdle returns a connection of a former call, nil if there is none.
func (d *dialer) takeIdle() *bus {
	d.mu.Lock()
	defer d.mu.Unlock()
	for len(d.idle) > 0 {
		last := len(d.idle) - 1
		b := d.idle[last]
		d.idle = d.idle[:last]
		if b.conn.Connected() {
			return b
		}
		b.close()
	}
	return nil
}

// keepIdle keeps a connection for the next call.
func (d *dialer) keepIdle(b *bus) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.idle = append(d.idle, b)
	if d.closer == nil {
		d.closer = time.AfterFunc(idleConnection, d.closeIdle)
		return
	}
	d.closer.Reset(idleConnection)
}

// closeIdle closes the connections that no call uses.
func (d *dialer) closeIdle() {
	d.mu.Lock()
	idle := d.idle
	d.idle = nil
	d.mu.Unlock()
	for _, b := range idle {
		b.close()
	}
}

// connect tries one socket after the other.
func (d *dialer) connect(ctx context.Context) (*bus, error) {
	var failed connectError
	for _, path := range d.sockets {
		b, err := d.dial(ctx, path)
		if err == nil {
			return b, nil
		}
		failed = append(failed, fmt.Errorf("call systemd at %s: %w", path, err))
	}
	return nil, failed
}

// connectError has the error of each socket, if none led to systemd. A bus that stops or starts can return any error.
type connectError []error

func (e connectError) Error() string {
	texts := make([]string, len(e))
	for i, err := range e {
		texts[i] = err.Error()
	}
	return strings.Join(texts, "; ")
}

func (e connectError) Unwrap() []error { return e }

// absent reports whether no process listens on any of the sockets. A busy or forbidden socket is not absent.
func (e connectError) absent() bool {
	return !slices.ContainsFunc(e, func(err error) bool {
		return !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.ECONNREFUSED)
	})
}

// dial connects to one socket. The connection ends with cancel, and may serve other calls than that of ctx.
func (d *dialer) dial(ctx context.Context, path string) (*bus, error) {
	own, cancel := context.WithCancel(context.WithoutCancel(ctx))
	unbind := context.AfterFunc(ctx, cancel)
	overdue := time.AfterFunc(dialTimeout, cancel)
	conn, err := sd.NewConnection(func() (*dbus.Conn, error) { return d.dialBus(own, path) })
	switch {
	case !unbind():
		err = context.Cause(ctx)
	case !overdue.Stop(): // the result of the handshake does not matter
		err = os.ErrDeadlineExceeded
	case err == nil:
		return &bus{conn, cancel}, nil
	}
	if conn != nil {
		conn.Close()
	}
	cancel()
	return nil, err
}

// dialBus makes one connection. The path is opened on the host, because a restart of the bus would make a container's mount of it
// stale.
func (d *dialer) dialBus(ctx context.Context, path string) (*dbus.Conn, error) {
	c, err := host.Call(ctx, d.ns, "connecting to "+path, nil, func() (*dbus.Conn, error) { // an abandoned connection ends with ctx
		return dbus.Dial("unix:path="+dbus.EscapeBusAddressValue(path), dbus.WithContext(ctx))
	})
	if err != nil {
		return nil, err
	}
	err = c.Auth([]dbus.Auth{dbus.AuthExternal(strconv.Itoa(os.Geteuid()))})
	if err == nil && filepath.Base(path) != "private" { // systemd's own socket is not a bus
		err = c.Hello()
	}
	if err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

func isDBusError(err error, names ...string) bool {
	var answer dbus.Error
	return errors.As(err, &answer) && slices.Contains(names, answer.Name)
}

// lost reports whether the connection was lost, or the bus waits for a systemd that restarts.
func lost(err error) bool {
	if c := (connectError)(nil); errors.As(err, &c) {
		return true
	}
	if answer := (dbus.Error{}); errors.As(err, &answer) {
		return isDBusError(err, "org.freedesktop.DBus.Error.NoReply", "org.freedesktop.DBus.Error.Disconnected",
			"org.freedesktop.DBus.Error.ServiceUnknown", "org.freedesktop.DBus.Error.NameHasNoOwner", "org.freedesktop.DBus.Error.Timeout",
			"org.freedesktop.DBus.Error.TimedOut", "org.freedesktop.DBus.Error.LimitsExceeded")
	}
	ended := []error{dbus.ErrClosed, io.EOF, io.ErrUnexpectedEOF, net.ErrClosed, syscall.ECONNRESET, syscall.EPIPE, syscall.ENOTCONN}
	return slices.ContainsFunc(ended, func(e error) bool { return errors.Is(err, e) })
}

func classify(err error) error {
	switch {
	case isDBusError(err, errShuttingDown, errDestructive):
		return fault.Errorf(fault.Unavailable, "the host is shutting down: %w", err)
	case isDBusError(err, errAccessDenied):
		return fault.Errorf(fault.Precondition, "the host does not let this process start units "+
			"(it must be root there, and SELinux and D-Bus policies must allow it): %w", err)
	}
	return err
}

// unknownProperty returns the name of the property in systemd's answer, which has it only in its text.
func unknownProperty(err error) (string, bool) {
	const text = `^Cannot set property ([A-Za-z0-9]+), or unknown property`
	m := regexp.MustCompile(text).FindStringSubmatch(err.Error())
	if m == nil || !isDBusError(err, errReadOnly) {
		return "", false
	}
	return m[1], true
}

// forgetUnit makes systemd remove a unit that has ended, unless it has already.
func (b *bus) forgetUnit(ctx context.Context, name string) error {
	if err := b.conn.ResetFailedUnitContext(ctx, name); err != nil && !isDBusError(err, errNoSuchUnit) {
		return fmt.Errorf("forget %s: %w", name, err)
	}
	// systemd removes it a moment later, and the name is in use until then.
	for {
		state, err := b.unit(ctx, name)
		if err != nil || !state.transient() || !state.dead() {
			return err
		}
		if !conc.Sleep(ctx, confinePause) {
			return fmt.Errorf("forget %s: %w", name, context.Cause(ctx))
		}
	}
}

// endUnits kills units: it cancels queued starts, kills the units' processes, calls kill, waits until the units have ended, and
// forgets them.
func (b *bus) endUnits(ctx context.Context, units []string, kill func() error) error {
	for _, name := range units {
		if _, err := b.conn.StopUnitContext(ctx, name, "replace", nil); err != nil && !isDBusError(err, errNoSuchUnit) {
			return fmt.Errorf("stop %s: %w", name, err)
		}
		err := b.conn.KillUnitWithTarget(ctx, name, sd.All, int32(unix.SIGKILL))
		if err != nil && !isDBusError(err, errNoSuchUnit, errNoSuchProcess, errUnknownProcess) {
			return fmt.Errorf("kill %s: %w", name, err)
		}
	}
	if err := kill(); err != nil {
		return err
	}
	for _, name := range units {
		for pause := time.Millisecond; ; pause = min(killPause, 2*pause) { // systemd is usually only a moment behind
			state, err := b.unit(ctx, name)
			if err != nil {
				return err
			}
			if state.dead() {
				break
			}
			if !conc.Sleep(ctx, pause) {
				return fmt.Errorf("unit %s is still %s: %w", name, state.active(), context.Cause(ctx))
			}
		}
		if err := b.forgetUnit(ctx, name); err != nil {
			return err
		}
	}
	return nil
}

// failureOf returns the reason why a unit did not start its program, and forgets the unit.
func (b *bus) failureOf(ctx context.Context, name, program string) error {
	state, err := b.unit(ctx, name)
	if err != nil {
		return err
	}
	how, status := state.exit()
	err = fault.Errorf(fault.Precondition, "systemd could not start %s on the host: %s; see journalctl -u %s", program, how, name)
	if status == sandbox.ExitUnsupported {
		err = fmt.Errorf("%w: %w", errNoLandlock, err)
	}
	if ferr := b.forgetUnit(ctx, name); ferr != nil {
		klog.FromContext(ctx).Error(ferr, "Cannot remove failed unit", "unit", name)
	}
	return err
}
