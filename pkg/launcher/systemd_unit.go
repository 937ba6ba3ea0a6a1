package launcher

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"

	sd "github.com/coreos/go-systemd/v22/dbus"
	"github.com/godbus/dbus/v5"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/launcher/runas"
	"github.com/s3-csi/s3-csi-driver/pkg/resolvconf"
)

// Limits are the limits of one helper and its client, or of all of them (systemd.resource-control(5)). Zero is no limit.
type Limits struct {
	MemoryMax  uint64 // bytes; above it, the kernel kills the client
	MemoryHigh uint64 // bytes; above it, the kernel slows the client down; needs the unified hierarchy
	CPUWeight  uint64 // 1 to 10000; the default is 100
	TasksMax   uint64 // processes and threads
}

// minMemory is the minimum for a helper and the smallest client to start, in bytes.
const minMemory = 16 << 20

func (l Limits) check() error {
	switch {
	case l.MemoryMax != 0 && l.MemoryMax < minMemory:
		return fault.Errorf(fault.Invalid, "memory limit of %d bytes is too low for a client to start: use at least %d", l.MemoryMax, minMemory)
	case l.MemoryHigh != 0 && l.MemoryHigh < minMemory:
		return fault.Errorf(fault.Invalid, "memory threshold of %d bytes is too low for a client to start: use at least %d", l.MemoryHigh, minMemory)
	case l.CPUWeight > 10000:
		return fault.Errorf(fault.Invalid, "CPU weight %d is too high: use at most 10000", l.CPUWeight)
	case l.TasksMax != 0 && l.TasksMax < 32:
		return fault.Errorf(fault.Invalid, "limit of %d tasks is too low for a client to start: use at least 32", l.TasksMax)
	}
	return nil
}

func (l Limits) or(d Limits) Limits {
	return Limits{
		MemoryMax: cmp.Or(l.MemoryMax, d.MemoryMax), MemoryHigh: cmp.Or(l.MemoryHigh, d.MemoryHigh),
		CPUWeight: cmp.Or(l.CPUWeight, d.CPUWeight), TasksMax: cmp.Or(l.TasksMax, d.TasksMax),
	}
}

func (l Limits) properties() []Property {
	var props []Property
	for _, p := range []struct {
		name  string
		value uint64
	}{{"MemoryMax", l.MemoryMax}, {"MemoryHigh", l.MemoryHigh}, {"CPUWeight", l.CPUWeight}, {"TasksMax", l.TasksMax}} {
		if p.value != 0 {
			props = append(props, Property{p.name, p.value})
		}
	}
	return props
}

// The D-Bus types of systemd's properties.
type (
	command struct {
		Path  string
		Argv  []string
		Unfit bool // a failure counts as success
	}
	bindMount struct {
		Source, Target string
		IgnoreMissing  bool
		Flags          uint64 // MS_REC, or 0
	}
	network struct {
		Family int32
		Addr   []byte
		Prefix uint32
	}
)

// containersEnd are the units that end after the last container; helpers are stopped after them. Containers are scopes below
// kubepods.slice, and a slice ends after its units.
func containersEnd() []string {
	return []string{"containerd.service", "crio.service", "docker.service", "kubelet.service", "kubepods.slice"}
}

// properties returns the properties of a unit, without those that the host's systemd does not know. Every user who may call systemd
// can read them, so they contain no secret. The descriptors are those of start.
func (s *Systemd) properties(u Unit, binds []resolvconf.Bind, fds []uintptr) []sd.Property {
	confines := s.sandbox.confines()
	as, output := runas.Identity{UID: u.UID, GID: u.GID}, Property{"StandardOutput", "journal"}
	if confines && len(fds) > 1 {
		as.Join, output = true, Property{"StandardOutputFileDescriptor", dbus.UnixFD(fds[1])}
	}
	argv := as.Argv(s.program, u.arguments(confines)...)
	for i := range argv[1:] {
		argv[i+1] = strings.ReplaceAll(argv[i+1], "$", "$$") // systemd would expand it as a variable
	}
	argv[0] = filepath.Base(s.program)
	props := []Property{
		{"Description", oneLine(u.Description)},
		{"Slice", Slice},
		{"Type", "exec"},
		{"ExecStart", []command{{s.program, argv, false}}},
		{"Environment", helper.Environment()},
		{"StandardInputFileDescriptor", dbus.UnixFD(fds[0])},
		output,
		{"StandardError", "journal"},
		{"SyslogIdentifier", unitPrefix + u.Name},
		// systemd removes a unit that exits cleanly, and keeps a failed one until Remove, Kill or the next Start.
		{"CollectMode", "inactive"},
		// Only the helper gets the signal, and it exits after its client. After the timeout all processes are killed.
		{"KillMode", "mixed"},
		{"SendSIGKILL", true},
		{"TimeoutStopUSec", uint64(s.stopTimeout.Microseconds())},
		// An OOM kill hits the client. The helper must survive to report it, and has the credentials.
		{"OOMPolicy", "continue"},
		{"MemoryAccounting", true},
		{"Before", containersEnd()},
	}
	props = append(props, u.Limits.or(s.defaults).properties()...)
	return wire(s.sandbox.complete(props, u, unitParams{writable: u.directories(), needs: u.Needs, binds: binds, join: as.Join}))
}

func wire(props []Property) []sd.Property {
	list := make([]sd.Property, 0, len(props))
	for _, p := range props {
		list = append(list, sd.Property{Name: p.Name, Value: dbus.MakeVariant(p.Value)})
	}
	return list
}

// oneLine replaces control characters, which a unit's description must not have.
func oneLine(text string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return ' '
		}
		return r
	}, text)
}

// Prepares reports whether a unit can be started as a spare and later become that of a mount that needs these addresses. With Landlock,
// the directories of a spare can get other paths; a mount namespace of its own would show the former ones.
func (s *Systemd) Prepares(needs []netip.Addr) bool {
	own := s.sandbox.nameservers
	return s.sandbox.confines() && len(metadata(slices.Concat(own, needs))) == len(metadata(own)) && (s.view == nil || !s.view.alone.Load())
}

// Limit gives the unit of a spare, which has the default limits, those of its mount.
func (s *Systemd) Limit(ctx context.Context, u Unit) error {
	if err := u.Limits.check(); err != nil {
		return fmt.Errorf("limit %s: %w", unitName(u.Name), err)
	}
	limits := u.Limits.or(s.defaults)
	if limits == s.defaults {
		return nil
	}
	return s.set(ctx, "limit "+unitName(u.Name), u, limits.properties())
}

// Describe gives the unit of a spare the description of its mount.
func (s *Systemd) Describe(ctx context.Context, u Unit) error {
	return s.set(ctx, "describe "+unitName(u.Name), u, []Property{{"Description", oneLine(u.Description)}})
}

// set changes properties of a running unit until it ends. A property that the host's systemd does not know is left out, as in Start.
func (s *Systemd) set(ctx context.Context, what string, u Unit, props []Property) error {
	if !validUnitName(u.Name) {
		return fault.Errorf(fault.Invalid, "%s: invalid name %q", what, u.Name)
	}
	return s.systemd.call(ctx, what, func(ctx context.Context, b *bus) error {
		return b.conn.SetUnitPropertiesContext(ctx, unitName(u.Name), untilReboot, wire(s.sandbox.supported(props))...)
	})
}
