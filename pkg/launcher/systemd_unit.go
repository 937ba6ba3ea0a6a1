package launcher

import (
	"path/filepath"
	"slices"
	"strings"

	sd "github.com/coreos/go-systemd/v22/dbus"
	"github.com/godbus/dbus/v5"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/launcher/runas"
	"github.com/s3-csi/s3-csi-driver/pkg/resolvconf"
)

// Limits are what one helper and its client, or all of them, may use (systemd.resource-control(5)). Zero is no limit.
type Limits struct {
	MemoryMax  uint64 // bytes; beyond, the kernel kills the client
	MemoryHigh uint64 // bytes; beyond, the kernel slows the client down; needs the unified hierarchy
	CPUWeight  uint64 // 1 to 10000, 100 is everybody's
	TasksMax   uint64 // processes and threads
}

// minMemory is what a helper and the smallest client need to come to life.
const minMemory = 16 << 20

func (l Limits) check() error {
	switch {
	case l.MemoryMax != 0 && l.MemoryMax < minMemory:
		return fault.Errorf(fault.Invalid, "a memory limit of %d bytes is too small for a client to start: at least %d", l.MemoryMax, minMemory)
	case l.MemoryHigh != 0 && l.MemoryHigh < minMemory:
		return fault.Errorf(fault.Invalid, "a memory threshold of %d bytes is too small for a client to start: at least %d", l.MemoryHigh, minMemory)
	case l.CPUWeight > 10000:
		return fault.Errorf(fault.Invalid, "CPU weight %d: the largest is 10000", l.CPUWeight)
	case l.TasksMax != 0 && l.TasksMax < 32:
		return fault.Errorf(fault.Invalid, "a limit of %d tasks is too small for a client to start: at least 32", l.TasksMax)
	}
	return nil
}

// or fills in what is not set.
func (l Limits) or(d Limits) Limits {
	for _, f := range []struct{ to, from *uint64 }{
		{&l.MemoryMax, &d.MemoryMax}, {&l.MemoryHigh, &d.MemoryHigh}, {&l.CPUWeight, &d.CPUWeight}, {&l.TasksMax, &d.TasksMax},
	} {
		if *f.to == 0 {
			*f.to = *f.from
		}
	}
	return l
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
	filter struct {
		Allow bool
		Names []string
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

// containersEnd are the units after whose end the last container is gone, so that helpers are stopped later. Containers are
// scopes below kubepods.slice, and a slice ends after what is in it.
func containersEnd() []string {
	return []string{"containerd.service", "crio.service", "docker.service", "kubelet.service", "kubepods.slice"}
}

// properties are those of a unit, less what the host's systemd lacks. Whoever may ask systemd can read them: nothing in
// them is secret.
func (s *Systemd) properties(u Unit, binds []resolvconf.Bind, socket dbus.UnixFD) []sd.Property {
	argv := runas.Argv(s.program, u.UID, u.GID, "helper", "--name", u.Name, "--state-dir", u.StateDir)
	for i := range argv[1:] {
		argv[i+1] = strings.ReplaceAll(argv[i+1], "$", "$$") // systemd would put a variable there
	}
	argv[0] = filepath.Base(s.program)
	props := []Property{
		{"Description", oneLine(u.Description)},
		{"Slice", Slice},
		{"Type", "exec"},
		{"ExecStart", []command{{s.program, argv, false}}},
		{"StandardInputFileDescriptor", socket},
		{"StandardOutput", "journal"},
		{"StandardError", "journal"},
		{"SyslogIdentifier", unitPrefix + u.Name},
		// A clean end vanishes; a failure stays to be read, until Remove, Kill or the next Start.
		{"CollectMode", "inactive"},
		// The helper alone is asked, and it ends when its client has; what is left then, or is late, is killed.
		{"KillMode", "mixed"},
		{"SendSIGKILL", true},
		{"TimeoutStopUSec", uint64(s.stopTimeout.Microseconds())},
		// An OOM kill takes the client; the helper lives to tell, and has the keys.
		{"OOMPolicy", "continue"},
		{"MemoryAccounting", true},
		{"Before", containersEnd()},
	}
	props = append(props, u.Limits.or(s.defaults).properties()...)
	writable := []string{u.StateDir}
	if u.CacheDir != "" {
		writable = append(writable, u.CacheDir)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.parts(writable, u.Needs, binds) {
		if u.Callers && p.Name == "ProtectProc" {
			continue // it would hide other users' processes; what they keep from others is kept anyway
		}
		if !p.mounts || !s.unshared {
			props = append(props, p.Property)
		}
	}
	props = append(props, s.extra...)
	return wire(slices.DeleteFunc(props, func(p Property) bool { return s.lacking[p.Name] }))
}

func wire(props []Property) []sd.Property {
	list := make([]sd.Property, 0, len(props))
	for _, p := range props {
		list = append(list, sd.Property{Name: p.Name, Value: dbus.MakeVariant(p.Value)})
	}
	return list
}

// oneLine makes a text fit for a unit's description.
func oneLine(text string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return ' '
		}
		return r
	}, text)
}
