package systemd

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// Kept is the directory of a Machine that is as it was when it boots again. All else begins anew.
const Kept = "/var/lib/kept"

// Machine is a host that a test switches on and off itself, from outside. The binary's TestMain begins with Init.
type Machine struct {
	t testing.TB
	h machine
}

// NewMachine makes a host with those files (as Install gives them), which is off. Nothing of it is left after the test.
func NewMachine(t testing.TB, files map[string]string) *Machine {
	t.Helper()
	if why := unusable(); why != "" {
		t.Skip(why)
	}
	dir, err := os.MkdirTemp("", "s3csi-systemd-") //nolint:usetesting // its users pass through it, which a test's own does not let them
	if err != nil {
		t.Fatal(err)
	}
	m := &Machine{t: t, h: machine{dir: dir, keep: filepath.Join(dir, "kept"), cgroup: filepath.Base(dir)}}
	t.Cleanup(func() {
		if err := errors.Join(m.h.stop(0), os.RemoveAll(dir)); err != nil {
			t.Errorf("taking the host away: %v", err)
		}
	})
	if err := errors.Join(os.Chmod(dir, 0o755), os.Mkdir(m.h.keep, 0o755), m.h.prepare(files)); err != nil {
		t.Fatal(err)
	}
	return m
}

// Boot switches the host on and returns when it is up.
func (m *Machine) Boot() {
	m.t.Helper()
	if err := m.h.boot(); err != nil {
		m.t.Fatal(err)
	}
}

// PowerOff shuts the host down, as its administrator does, and tells how long that took.
func (m *Machine) PowerOff(within time.Duration) time.Duration {
	m.t.Helper()
	began := time.Now()
	if err := m.h.stop(within); err != nil {
		m.t.Fatal(err)
	}
	return time.Since(began)
}

// Cut takes the power away.
func (m *Machine) Cut() {
	m.t.Helper()
	if err := m.h.stop(0); err != nil {
		m.t.Fatal(err)
	}
}

// Path is a path of the host's, from outside.
func (m *Machine) Path(path string) string {
	return filepath.Join(fmt.Sprintf("/proc/%d/root", m.h.init.Process.Pid), path)
}

// Run runs a command on the host and gives its output.
func (m *Machine) Run(argv ...string) string {
	m.t.Helper()
	out, err := m.h.output(argv...)
	if err != nil {
		m.t.Fatalf("%s: %v\n%s", strings.Join(argv, " "), err, out)
	}
	return string(out)
}
