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
	"syscall"
	"time"

	sd "github.com/coreos/go-systemd/v22/dbus"
	"github.com/godbus/dbus/v5"
	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

const (
	// maxConnections bounds what is asked of systemd at a time. Each call takes two connections, and a bus allows a user
	// 256 of them as a rule.
	maxConnections = 24
	// dialTimeout bounds the handshake with one socket, so that a hung bus does not keep from trying the next.
	dialTimeout = 5 * time.Second
	// patience is how long a lost connection is dialled again: a bus that restarts is back in less.
	patience = 15 * time.Second
	// callTimeout bounds a call whose ctx has no end.
	callTimeout = 2 * time.Minute
	redialPause = 50 * time.Millisecond
)

// Names of D-Bus errors: those of the specification, and systemd's (its bus-common-errors.h).
const (
	errReadOnly       = "org.freedesktop.DBus.Error.PropertyReadOnly" // also: an unknown one
	errUnitExists     = "org.freedesktop.systemd1.UnitExists"
	errNoSuchUnit     = "org.freedesktop.systemd1.NoSuchUnit"
	errNoSuchProcess  = "org.freedesktop.systemd1.NoSuchProcess"
	errUnknownProcess = "org.freedesktop.DBus.Error.UnixProcessIdUnknown"
	errShuttingDown   = "org.freedesktop.systemd1.ShuttingDown"
	errDestructive    = "org.freedesktop.systemd1.TransactionIsDestructive"
	errAccessDenied   = "org.freedesktop.DBus.Error.AccessDenied"
)

// bus is a connection to systemd for the length of one call.
type bus struct {
	*sd.Conn
	cancel context.CancelFunc
}

func (b *bus) close() {
	b.Close()
	b.cancel()
}

// with connects and calls fn, and does so again while systemd or the bus restarts. what is the whole for errors.
func (s *Systemd) with(ctx context.Context, what string, fn func(context.Context, *bus) error) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	select {
	case s.slots <- struct{}{}:
		defer func() { <-s.slots }()
	case <-ctx.Done():
		return fmt.Errorf("%s: %d other calls of systemd are under way: %w", what, maxConnections, context.Cause(ctx))
	}
	for end := time.Now().Add(patience); ; {
		err := s.once(ctx, fn)
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
			return fault.Errorf(fault.Unavailable, "%s: systemd has not answered for %s: %w", what, patience, err)
		}
		select {
		case <-time.After(redialPause):
		case <-ctx.Done():
		}
	}
}

func (s *Systemd) once(ctx context.Context, fn func(context.Context, *bus) error) error {
	b, err := s.connect(ctx)
	if err != nil {
		return err
	}
	defer b.close()
	return fn(ctx, b)
}

// connect dials the sockets one after the other. The connection ends with ctx, and with it every call that waits.
func (s *Systemd) connect(ctx context.Context) (*bus, error) {
	var failed connectError
	for _, path := range s.sockets {
		b, err := s.dial(ctx, path)
		if err == nil {
			return b, nil
		}
		failed = append(failed, fmt.Errorf("call systemd at %s: %w", path, err))
	}
	return nil, failed
}

// connectError is why none of the sockets led to systemd, one error for each. A bus that is going or coming answers all
// sorts of things.
type connectError []error

func (e connectError) Error() string {
	texts := make([]string, len(e))
	for i, err := range e {
		texts[i] = err.Error()
	}
	return strings.Join(texts, "; ")
}

func (e connectError) Unwrap() []error { return e }

// absent tells whether there was nothing behind any of the sockets: neither one that is busy, nor one that is forbidden.
func (e connectError) absent() bool {
	return !slices.ContainsFunc(e, func(err error) bool {
		return !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.ECONNREFUSED)
	})
}

func (s *Systemd) dial(ctx context.Context, path string) (*bus, error) {
	ctx, cancel := context.WithCancel(ctx)
	overdue := time.AfterFunc(dialTimeout, cancel)
	conn, err := sd.NewConnection(func() (*dbus.Conn, error) { return s.dialBus(ctx, path) })
	if !overdue.Stop() { // what it did to the handshake does not matter
		if err == nil {
			conn.Close()
		}
		err = os.ErrDeadlineExceeded
	}
	if err != nil {
		cancel()
		return nil, err
	}
	return &bus{conn, cancel}, nil
}

// dialBus makes one connection. The path is the host's: a container needs no mount of it, which a restart of the bus would
// make stale.
func (s *Systemd) dialBus(ctx context.Context, path string) (*dbus.Conn, error) {
	dialled := make(chan *dbus.Conn, 1) // one that nobody waits for any more ends with ctx
	err := s.ns.Do(ctx, "connecting to "+path, func() error {
		c, err := dbus.Dial("unix:path="+dbus.EscapeBusAddressValue(path), dbus.WithContext(ctx))
		if err == nil {
			dialled <- c
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	c := <-dialled
	err = c.Auth([]dbus.Auth{dbus.AuthExternal(strconv.Itoa(os.Geteuid()))})
	if err == nil && filepath.Base(path) != "private" { // there is no bus behind that one to be greeted
		err = c.Hello()
	}
	if err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

// isDBusError tells whether err is an answer of that name.
func isDBusError(err error, names ...string) bool {
	var answer dbus.Error
	return errors.As(err, &answer) && slices.Contains(names, answer.Name)
}

// lost tells whether an error is of the connection, or the bus's answer for a systemd that is about to be back.
func lost(err error) bool {
	if c := (connectError)(nil); errors.As(err, &c) {
		return true
	}
	if answer := (dbus.Error{}); errors.As(err, &answer) {
		return isDBusError(err, "org.freedesktop.DBus.Error.NoReply", "org.freedesktop.DBus.Error.Disconnected",
			"org.freedesktop.DBus.Error.ServiceUnknown", "org.freedesktop.DBus.Error.NameHasNoOwner", "org.freedesktop.DBus.Error.Timeout",
			"org.freedesktop.DBus.Error.TimedOut", "org.freedesktop.DBus.Error.LimitsExceeded")
	}
	for _, e := range []error{
		dbus.ErrClosed, io.EOF, io.ErrUnexpectedEOF, net.ErrClosed, syscall.ECONNRESET, syscall.EPIPE, syscall.ENOTCONN,
	} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// classify puts a kind on what systemd answered.
func classify(err error) error {
	switch {
	case isDBusError(err, errShuttingDown, errDestructive):
		return fault.Errorf(fault.Unavailable, "the host is shutting down: %w", err)
	case isDBusError(err, errAccessDenied):
		return fault.Errorf(fault.Precondition, "the host does not let this process start units (it must be root there, and no SELinux or D-Bus policy in between): %w", err)
	}
	return err
}

// unknownProperty finds the name in systemd's answer, which carries it in its text alone.
func unknownProperty(err error) (string, bool) {
	const text = `^Cannot set property ([A-Za-z0-9]+), or unknown property`
	m := regexp.MustCompile(text).FindStringSubmatch(err.Error())
	if m == nil || !isDBusError(err, errReadOnly) {
		return "", false
	}
	return m[1], true
}

// kill kills a unit's processes, if it has any.
func (b *bus) kill(ctx context.Context, name string) error {
	err := b.KillUnitWithTarget(ctx, name, sd.All, int32(unix.SIGKILL))
	if isDBusError(err, errNoSuchUnit, errNoSuchProcess, errUnknownProcess) {
		return nil
	}
	return err
}

// forget lets go of a unit that has ended, if systemd has not done that already.
func (b *bus) forget(ctx context.Context, name string) error {
	if err := b.ResetFailedUnitContext(ctx, name); err != nil && !isDBusError(err, errNoSuchUnit) {
		return fmt.Errorf("forget %s: %w", name, err)
	}
	// It goes a moment later, and until then the name is taken.
	for {
		state, err := b.unit(ctx, name)
		if err != nil || !state.transient() || !state.dead() {
			return err
		}
		select {
		case <-time.After(confinePause):
		case <-ctx.Done():
			return fmt.Errorf("forget %s: %w", name, context.Cause(ctx))
		}
	}
}
