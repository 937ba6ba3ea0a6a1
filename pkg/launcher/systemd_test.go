package launcher

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/godbus/dbus/v5"
	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/launcher/runas"
	"github.com/s3-csi/s3-csi-driver/pkg/resolvconf"
)

// here is the namespace of a driver that is not in a container.
type here struct{}

func (here) Foreign() bool                                         { return false }
func (here) Do(_ context.Context, _ string, fn func() error) error { return fn() }

func TestParseVersion(t *testing.T) {
	for text, want := range map[string]int{"252.38-1~deb12u1": 252, "v255": 255, "249 (249-10.el9)": 249, "258": 258, "": -1, "devel": -1} {
		if got, err := parseVersion(text); (err != nil) != (want < 0) || err == nil && got != want {
			t.Errorf("%q: %d %v", text, got, err)
		}
	}
}

func TestUnknownPropertyIsReadFromTheRightErrorOnly(t *testing.T) {
	answer := func(name, text string) error { return dbus.Error{Name: name, Body: []any{text}} }
	for _, c := range []struct {
		err  error
		want string
	}{
		{answer(errReadOnly, "Cannot set property ProtectProc, or unknown property."), "ProtectProc"},
		{answer(errUnitExists, "Cannot set property ProtectProc, or unknown property."), ""},
		{answer(errReadOnly, "Something else"), ""},
		{errors.New("Cannot set property ProtectProc, or unknown property."), ""}, //nolint:revive // as systemd writes it
	} {
		if got, ok := unknownProperty(c.err); got != c.want || ok != (c.want != "") {
			t.Errorf("%v: %q %v", c.err, got, ok)
		}
	}
}

func TestOnlyDispensablePropertiesAreLeftOut(t *testing.T) {
	s, err := NewSystemd(here{}, "/helper", Options{Properties: []Property{{"Extra", true}}, NoLandlock: true})
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]bool{
		"ProtectProc": true, "OOMPolicy": true, "Extra": true,
		"NoNewPrivileges": false, "CapabilityBoundingSet": false, "ExecStart": false, "StandardInputFileDescriptor": false, "MemoryMax": false, "NeverHeardOf": false,
	} {
		err := dbus.Error{Name: errReadOnly, Body: []any{"Cannot set property " + name + ", or unknown property."}}
		if got := s.sandbox.recordUnsupported(t.Context(), err); got != want {
			t.Errorf("%s: %v", name, got)
		}
	}
	for _, p := range s.properties(Unit{Name: "a"}, nil, []uintptr{0}) {
		if p.Name == "ProtectProc" || p.Name == "OOMPolicy" || p.Name == "Extra" {
			t.Errorf("%s is still asked for", p.Name)
		}
	}
	missing := strings.Join(s.Sandbox().Missing, " ")
	if !strings.Contains(missing, "ProtectProc (not supported") || !strings.Contains(missing, "Extra (not supported") {
		t.Error(missing)
	}
}

func TestUnitsWithAMountNamespaceSeeTheResolversFiles(t *testing.T) {
	plain, err := NewSystemd(here{}, "/helper", Options{NoLandlock: true})
	if err != nil {
		t.Fatal(err)
	}
	s, err := NewSystemd(here{}, "/helper", Options{NoLandlock: true, Resolver: stub{{Source: "/run/s3-csi/resolv.conf", Target: "/etc/resolv.conf"}}})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		what     string
		s        *Systemd
		unshared bool
		want     string
	}{
		{"without a resolver", plain, false, ""},
		{"with one", s, false, "[{/run/s3-csi/resolv.conf /etc/resolv.conf false 0}]"},
		{"without a mount namespace", s, true, ""},
	} {
		c.s.sandbox.unshared = c.unshared
		binds, err := c.s.sandbox.binds(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		got := ""
		for _, p := range c.s.properties(Unit{Name: "a"}, binds, []uintptr{0}) {
			if p.Name == bindProperty {
				got = fmt.Sprint(p.Value.Value())
				if signature := p.Value.Signature().String(); signature != "a(ssbt)" {
					t.Errorf("%s: of the type %s", c.what, signature)
				}
			}
		}
		if got != c.want {
			t.Errorf("%s: %s, want %s", c.what, got, c.want)
		}
		if ok, why := c.s.ResolvesBy(); ok != (c.want != "") || ok != (why == "") {
			t.Errorf("%s: %v %q", c.what, ok, why)
		}
		missing := strings.Contains(strings.Join(c.s.Sandbox().Missing, " "), bindProperty+" (the host's / is not a shared mount)")
		if missing != c.unshared {
			t.Errorf("%s: missing: %v", c.what, c.s.Sandbox().Missing)
		}
	}
}

// stub is a Resolver that has nothing to do.
type stub []resolvconf.Bind

func (s stub) Binds(context.Context) ([]resolvconf.Bind, error) { return s, nil }

func TestUnitTextsAreEscaped(t *testing.T) {
	s, err := NewSystemd(here{}, "/opt/s3-csi/s3-csi-helper", Options{})
	if err != nil {
		t.Fatal(err)
	}
	s.sandbox.landlock = 7
	for _, p := range s.properties(Unit{Name: "a-1", Description: "two\nlines\x00", StateDir: "/run/$HOME", UID: 5000, GID: 6000}, nil, []uintptr{0}) {
		switch p.Name {
		case "Description":
			if got := p.Value.Value(); got != "two lines " {
				t.Errorf("%q", got)
			}
		case "ExecStart":
			got := fmt.Sprint(p.Value.Value())
			if got != "[{/opt/s3-csi/s3-csi-helper [s3-csi-helper run-as 5000 6000 helper --name a-1 --state-dir /run/$$HOME --landlock] false}]" {
				t.Error(got)
			}
		}
	}
}

func TestUIDOfAUnit(t *testing.T) {
	line := func(argv ...string) any { return [][]any{{"/helper", argv, false}} }
	for _, c := range []struct {
		value any
		uid   uint32
		ok    bool
	}{
		{line(runas.Identity{UID: 5000, GID: 6000}.Argv("helper", "helper")...), 5000, true},
		{line("helper", "run-as", "5", "6000"), 0, false},
		{line("sleep", "1000"), 0, false},
		{line(), 0, false}, {nil, 0, false}, {[][]any{}, 0, false}, {"text", 0, false},
	} {
		if uid, ok := uidOf(c.value); ok != c.ok || ok && uid != c.uid {
			t.Errorf("%v: %d %v", c.value, uid, ok)
		}
	}
}

func TestValidUnitNames(t *testing.T) {
	for name, want := range map[string]bool{
		"zm2ncgjtzq7yf3wnb72dclmm-1": true, "A_b.c": true, "": false, "a/b": false, "a@b": false, `a\x2d`: false,
		"a b": false, "é": false, strings.Repeat("a", 201): false,
	} {
		if got := validUnitName(name); got != want {
			t.Errorf("%q: %v", name, got)
		}
	}
}

func TestLimitsAreCheckedAndDefaulted(t *testing.T) {
	for _, l := range []Limits{{MemoryMax: 1}, {MemoryHigh: 1}, {CPUWeight: 10001}, {TasksMax: 1}} {
		if err := l.check(); !fault.Is(err, fault.Invalid) {
			t.Errorf("%+v: %v", l, err)
		}
	}
	if err := (Limits{}).check(); err != nil {
		t.Error(err)
	}
	if got, want := (Limits{MemoryMax: 1, TasksMax: 2}).or(Limits{MemoryMax: 3, CPUWeight: 4}), (Limits{MemoryMax: 1, CPUWeight: 4, TasksMax: 2}); got != want {
		t.Errorf("%+v", got)
	}
}

func TestOOMKillsOfBothCgroupVersions(t *testing.T) {
	for body, want := range map[string]uint64{
		"low 0\nhigh 12\nmax 3\noom 2\noom_kill 1\noom_group_kill 0\n": 1,
		"oom_kill_disable 0\nunder_oom 0\noom_kill 7\n":                7,
		"oom_kill many\n": 0, "": 0,
	} {
		if got := parseOOMKills([]byte(body)); got != want {
			t.Errorf("%q: %d", body, got)
		}
	}
}

func TestUnitState_ExitIsDescribed(t *testing.T) {
	const exited, killed, dumped = int32(1), int32(2), int32(3)
	for want, u := range map[string]unitState{
		"OOM-killed":                   {"ActiveState": "failed", "Result": "oom-kill", "ExecMainCode": killed, "ExecMainStatus": int32(9)},
		"killed by SIGSEGV":            {"ActiveState": "failed", "Result": "core-dump", "ExecMainCode": dumped, "ExecMainStatus": int32(11)},
		"exit status 1":                {"ActiveState": "failed", "Result": "exit-code", "ExecMainCode": exited, "ExecMainStatus": int32(1)},
		"exit status 217 (USER)":       {"ActiveState": "failed", "Result": "exit-code", "ExecMainCode": exited, "ExecMainStatus": int32(217)},
		"it is active":                 {"ActiveState": "active", "Result": "success"},
		"it is failed, result timeout": {"ActiveState": "failed", "Result": "timeout", "ExecMainCode": exited, "ExecMainStatus": int32(0)},
	} {
		if got, _ := u.exit(); got != want {
			t.Errorf("%+v: %q, want %q", u, got, want)
		}
	}
}

func TestLostConnectionsAreRetried(t *testing.T) {
	for _, err := range []error{
		dbus.ErrClosed, fmt.Errorf("x: %w", io.EOF), syscall.ECONNRESET, connectError{errors.New("dbus: authentication failed")},
		dbus.Error{Name: "org.freedesktop.DBus.Error.NoReply"}, dbus.Error{Name: "org.freedesktop.DBus.Error.NameHasNoOwner"},
	} {
		if !lost(err) {
			t.Errorf("%v is final", err)
		}
	}
	for _, err := range []error{errors.New("x"), dbus.Error{Name: errUnitExists}, dbus.Error{Name: errAccessDenied}, context.Canceled} {
		if lost(err) {
			t.Errorf("%v is tried again", err)
		}
	}
}

func TestDBusErrorsHaveKinds(t *testing.T) {
	for name, want := range map[string]fault.Kind{
		errShuttingDown: fault.Unavailable, errDestructive: fault.Unavailable, errAccessDenied: fault.Precondition, "x": fault.Unknown,
	} {
		if got := fault.KindOf(classify(dbus.Error{Name: name})); got != want {
			t.Errorf("%s: %d", name, got)
		}
	}
}

func TestInvalidOptionsAreRefused(t *testing.T) {
	for what, create := range map[string]func() (*Systemd, error){
		"relative program": func() (*Systemd, error) { return NewSystemd(here{}, "helper", Options{}) },
		"tiny limit": func() (*Systemd, error) {
			return NewSystemd(here{}, "/helper", Options{DefaultLimits: Limits{MemoryMax: 1}})
		},
		"tiny slice": func() (*Systemd, error) {
			return NewSystemd(here{}, "/helper", Options{SliceLimits: Limits{MemoryMax: 1}})
		},
	} {
		if _, err := create(); err == nil {
			t.Errorf("%s is accepted", what)
		}
	}
}

func TestCallsToAnUnresponsiveSystemdEndWithTheContext(t *testing.T) {
	dir := t.TempDir()
	// A socket that accepts and says nothing.
	l := listen(t, dir+"/private")
	defer l.Close()
	s, err := NewSystemd(here{}, "/helper", Options{Sockets: []string{dir + "/private"}})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	began := time.Now()
	for what, call := range map[string]func() error{
		"check": func() error { _, err := s.Check(ctx); return err },
		"list":  func() error { _, err := s.List(ctx); return err },
		"kill":  func() error { return s.Kill(ctx, 5000) },
	} {
		if err := call(); !errors.Is(err, context.DeadlineExceeded) || !fault.Is(err, fault.Timeout) {
			t.Errorf("%s: %v (kind %d)", what, err, fault.KindOf(err))
		}
	}
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("it took %s", took)
	}
}

func listen(t *testing.T, path string) net.Listener {
	t.Helper()
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func TestAbsentSystemd(t *testing.T) {
	gone, refused, hung := fmt.Errorf("x: %w", syscall.ENOENT), fmt.Errorf("x: %w", syscall.ECONNREFUSED), fmt.Errorf("x: %w", os.ErrDeadlineExceeded)
	for _, c := range []struct {
		err    connectError
		absent bool
	}{
		{connectError{gone}, true}, {connectError{gone, refused}, true}, {connectError{gone, hung}, false}, {connectError{hung}, false},
		{connectError{syscall.EACCES, gone}, false},
	} {
		if c.err.absent() != c.absent {
			t.Errorf("%v: %v", c.err, !c.absent)
		}
	}
}

// With Landlock, no property gives a unit a mount namespace, unless the Resolver's files need one.
func TestUnitsHaveMountNamespacesOnlyWithoutLandlock(t *testing.T) {
	resolver := stub{{Source: "/run/s3-csi/resolv.conf", Target: "/etc/resolv.conf"}}
	const joined = "StandardOutputFileDescriptor"
	hiding := []string{"ProtectSystem", "ReadWritePaths", "ProtectHome", "PrivateTmp", "PrivateDevices", "InaccessiblePaths", "ProtectProc"}
	for _, c := range []struct {
		what     string
		landlock int
		resolver Resolver
		want     []string
		isolates bool
		kind     string
	}{
		{"Landlock", 2, nil, nil, false, "landlock"},
		{"Landlock and a resolver", 7, resolver, []string{joined}, false, "landlock"},
		{"no Landlock", 0, nil, hiding, true, "unit"},
		{"no Landlock and a resolver", 0, resolver, append(slices.Clone(hiding), bindProperty), true, "unit"},
	} {
		t.Run(c.what, func(t *testing.T) {
			s, err := NewSystemd(here{}, "/helper", Options{Resolver: c.resolver})
			if err != nil {
				t.Fatal(err)
			}
			s.sandbox.version, s.sandbox.landlock = "252", c.landlock
			s.sandbox.noLandlock = map[bool]string{true: "tested"}[c.landlock == 0]
			var got []string
			binds, err := s.sandbox.binds(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			fds := []uintptr{0}
			if s.view != nil {
				fds = append(fds, 1)
			}
			for _, p := range s.properties(Unit{Name: "a"}, binds, fds) {
				if p.Name == bindProperty || p.Name == joined || slices.Contains(hiding, p.Name) {
					got = append(got, p.Name)
				}
				join := slices.Contains(c.want, joined)
				if argv := fmt.Sprint(p.Value); p.Name == "ExecStart" && strings.Contains(argv, "--join") != join {
					t.Error(argv)
				}
				const fewest = 1<<unix.CAP_SETUID | 1<<unix.CAP_SETGID | 1<<unix.CAP_SETPCAP
				if can := fmt.Sprint(p.Value.Value()); p.Name == "CapabilityBoundingSet" && (can != fmt.Sprint(fewest)) != join {
					t.Errorf("it has the capabilities %s", can)
				}
				if argv := fmt.Sprint(p.Value); p.Name == "ExecStart" && strings.Contains(argv, "--landlock") != (c.landlock > 0) {
					t.Error(argv)
				}
			}
			if !slices.Equal(got, c.want) {
				t.Errorf("%v, want %v", got, c.want)
			}
			box := s.Sandbox()
			if box.Isolates != c.isolates || box.Kind() != c.kind || (box.NoLandlock == "") != (c.landlock > 0) || len(box.Missing) > 0 {
				t.Errorf("%+v", box)
			}
			s.sandbox.dropLandlock(t.Context(), "why")
			if box := s.Sandbox(); box.Kind() != "unit" || !slices.Contains(box.Present, "ProtectSystem") {
				t.Errorf("afterwards: %+v", box)
			}
		})
	}
}
