package launcher

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/resolvconf"
)

// sandboxed is a property that shuts a unit in.
type sandboxed struct {
	Property
	seccomp bool // the host's systemd must be able to filter system calls
	unified bool // the host must have the unified cgroup hierarchy
	mounts  bool // it gives the unit a mount namespace; see propagates
	vital   bool // without it there is no start
}

// sandbox is what a unit may not do, beside the directories that it may write to and the addresses that it needs. Each property that hides or remounts
// something costs every start a pass over all the host's mounts, so those are not here that only forbid once more what a user
// without capabilities may not do (ProtectKernelTunables and its like: with them a start took 80 ms of CPU more on a host
// with 200 mounts).
func sandbox(writable []string, needs []netip.Addr) []sandboxed {
	const setuid, setgid, setpcap = 1 << unix.CAP_SETUID, 1 << unix.CAP_SETGID, 1 << unix.CAP_SETPCAP
	plain := func(name string, value any) sandboxed { return sandboxed{Property: Property{name, value}} }
	vital := func(name string, value any) sandboxed { return sandboxed{Property: Property{name, value}, vital: true} }
	mounts := func(name string, value any) sandboxed {
		return sandboxed{Property: Property{name, value}, mounts: true}
	}
	seccomp := func(name string, value any) sandboxed {
		return sandboxed{Property: Property{name, value}, seccomp: true}
	}
	return []sandboxed{
		vital("NoNewPrivileges", true),
		// What runas needs; it leaves nothing of them, and Start looks whether it has.
		vital("CapabilityBoundingSet", uint64(setuid|setgid|setpcap)),
		vital("AmbientCapabilities", uint64(0)),
		mounts("ProtectSystem", "strict"),
		mounts("ReadWritePaths", writable),
		mounts("ProtectHome", "yes"),
		mounts("PrivateTmp", true),
		mounts("PrivateDevices", true),                     // the FUSE descriptor comes over the socket
		mounts("InaccessiblePaths", []string{"-/dev/shm"}), // the host's own even so, and what is left there stays
		mounts("ProtectProc", "invisible"),
		plain("ProtectClock", true),
		plain("ProtectHostname", true),
		seccomp("RestrictNamespaces", uint64(0)),
		seccomp("RestrictAddressFamilies", filter{true, []string{"AF_UNIX", "AF_INET", "AF_INET6"}}),
		seccomp("RestrictSUIDSGID", true),
		seccomp("RestrictRealtime", true),
		seccomp("LockPersonality", true),
		seccomp("MemoryDenyWriteExecute", true),
		seccomp("SystemCallFilter", filter{true, []string{"@system-service"}}),
		seccomp("SystemCallErrorNumber", int32(unix.EPERM)),
		seccomp("SystemCallArchitectures", []string{"native"}),
		plain("UMask", uint32(0o077)),
		plain("LimitCORE", uint64(0)),
		{Property: Property{"IPAddressDeny", metadata(needs)}, unified: true},
	}
}

// bindProperty is the property by which units see the files of a Resolver.
const bindProperty = "BindReadOnlyPaths"

// parts are the sandbox, and what units see beside it.
func (s *Systemd) parts(writable []string, needs []netip.Addr, binds []resolvconf.Bind) []sandboxed {
	parts := sandbox(writable, needs)
	if s.resolver == nil {
		return parts
	}
	seen := make([]bindMount, 0, len(binds))
	for _, b := range binds {
		seen = append(seen, bindMount{Source: b.Source, Target: b.Target})
	}
	return append(parts, sandboxed{Property: Property{bindProperty, seen}, mounts: true})
}

// binds are what a unit that is started now sees of the Resolver.
func (s *Systemd) binds(ctx context.Context) ([]resolvconf.Bind, error) {
	s.mu.Lock()
	none := s.resolver == nil || s.unshared
	s.mu.Unlock()
	if none {
		return nil, nil
	}
	return s.resolver.Binds(ctx)
}

// ResolvesBy tells whether units resolve names by the launcher's Resolver, and why not.
func (s *Systemd) ResolvesBy() (bool, string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.resolver == nil:
		return false, "no other way is asked for"
	case s.lacking[bindProperty]:
		return false, "the host's systemd " + s.version + " does not know " + bindProperty
	case s.unshared:
		return false, "the host's / is not a shared mount, so that units get no mount namespace"
	}
	return true, ""
}

// Sandbox is what of a unit's sandbox the host's systemd puts up.
type Sandbox struct {
	Version string   // of systemd
	Present []string // properties that hold
	Missing []string // properties that do not, and why: "IPAddressDeny (the host has no unified cgroup hierarchy)"
}

// Sandbox tells what is known of it since the last Check or Start.
func (s *Systemd) Sandbox() Sandbox {
	s.mu.Lock()
	defer s.mu.Unlock()
	box := Sandbox{Version: s.version}
	for _, p := range s.parts(nil, nil, nil) {
		switch why, idle := s.unenforced[p.Name]; {
		case s.lacking[p.Name]:
			box.Missing = append(box.Missing, p.Name+" (unknown to systemd "+s.version+")")
		case idle:
			box.Missing = append(box.Missing, p.Name+" ("+why+")")
		case p.mounts && s.unshared:
			box.Missing = append(box.Missing, p.Name+" (the host's / is not a shared mount)")
		default:
			box.Present = append(box.Present, p.Name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(s.lacking)) {
		if slices.ContainsFunc(s.extra, func(p Property) bool { return p.Name == name }) {
			box.Missing = append(box.Missing, name+" (unknown to systemd "+s.version+")")
		}
	}
	return box
}

// observe notes what a process shows of its sandbox.
func (s *Systemd) observe(seccomp bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !seccomp {
		for _, p := range s.parts(nil, nil, nil) {
			if p.seccomp {
				s.unenforced[p.Name] = "the host has no seccomp filters"
			}
		}
	}
}

// confined tells whether a process has become the uid and has no privileges and no way to any, and whether it has a seccomp
// filter. An error means that it has ended.
func confined(pid int, uid uint32) (ok, seccomp bool, err error) {
	status, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/status")
	if err != nil {
		return false, false, err
	}
	if !statusIsOf(status, uid) {
		return false, false, nil
	}
	const none = "0000000000000000"
	is := map[string]string{}
	for line := range strings.Lines(string(status)) {
		key, value, _ := strings.Cut(line, ":")
		is[key] = strings.TrimSpace(value)
	}
	ok = is["NoNewPrivs"] == "1" && is["CapEff"] == none && is["CapPrm"] == none && is["CapInh"] == none && is["CapAmb"] == none && is["CapBnd"] == none
	return ok, is["Seccomp"] == "2", nil
}

// unified tells whether the host has the one hierarchy of cgroups that programs for addresses can be attached to.
func (s *Systemd) unified(ctx context.Context) (bool, error) {
	var st unix.Statfs_t
	if err := s.ns.Do(ctx, "looking at the host's cgroups", func() error { return unix.Statfs("/sys/fs/cgroup", &st) }); err != nil {
		return false, err
	}
	return st.Type == unix.CGROUP2_SUPER_MAGIC, nil
}

// propagates tells whether what is unmounted on the host is unmounted in the mount namespaces of its services too, as it is
// where systemd has booted and nobody has changed it. A namespace begins with copies of all mounts. Copies of a mount whose
// parent is private stay; those that systemd (before 254 at least) hides below the new root are even out of everybody's
// reach, and each pins its file system for as long as the service lives: the client would never end.
func (s *Systemd) propagates(ctx context.Context) (bool, error) {
	shared := make(chan bool, 1)
	err := s.ns.Do(ctx, "reading the host's mount table", func() error {
		f, err := os.Open("/proc/thread-self/mountinfo")
		if err != nil {
			return err
		}
		defer f.Close()
		root, err := mountinfo.GetMountsFromReader(f, mountinfo.SingleEntryFilter("/"))
		if err != nil {
			return fmt.Errorf("find the root: %w", err)
		}
		shared <- len(root) > 0 && strings.Contains(root[len(root)-1].Optional, "shared:")
		return nil
	})
	if err != nil {
		return false, err
	}
	return <-shared, nil
}

// lookAtMounts takes mount namespaces away from units to come where they would hold mounts, or gives them back.
func (s *Systemd) lookAtMounts(ctx context.Context) error {
	shared, err := s.propagates(ctx)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if !shared && !s.unshared {
		klog.FromContext(ctx).Info("The host's / is not a shared mount: units get no mount namespace, because it would keep unmounted volumes")
		if s.resolver != nil {
			klog.FromContext(ctx).Info("Units resolve names as the host does, because they get no mount namespace")
		}
	}
	s.unshared = !shared
	return nil
}

// booted tells whether the host was booted with systemd, by the sign that systemd itself goes by (sd_booted(3)).
func (s *Systemd) booted(ctx context.Context) (bool, error) {
	const sign = "/run/systemd/system"
	var fi fs.FileInfo
	err := s.ns.Do(ctx, "looking for systemd on the host", func() (err error) {
		fi, err = os.Lstat(sign)
		return err
	})
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("look for systemd on the host: %w", err)
	}
	return fi.IsDir(), nil
}

// ErrNoSystemd is that a host has no systemd, or too old a one.
var ErrNoSystemd = errors.New("the host has no systemd that could launch helpers")

// Check calls systemd and finds out what it can do. An error that wraps ErrNoSystemd says that the host has none, or too old
// a one; other errors are of one that is there.
func (s *Systemd) Check(ctx context.Context) (Sandbox, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	var version, features string
	var known map[string]any
	check := func(ctx context.Context, b *bus) error {
		for to, name := range map[*string]string{&version: "Version", &features: "Features"} {
			if err := b.manager(name, to); err != nil {
				return err
			}
		}
		var err error // systemd tells a service's properties whether there is one of that name or not
		known, err = b.GetUnitTypePropertiesContext(ctx, unitName("probe"), "Service")
		return err
	}
	// Where there is nothing to call, that is not waited for; a systemd that executes itself anew is gone for a moment.
	err := s.once(ctx, check)
	if none := (connectError)(nil); errors.As(err, &none) && none.absent() {
		booted, berr := s.booted(ctx)
		if berr != nil {
			return Sandbox{}, berr
		}
		if !booted {
			return Sandbox{}, fault.Errorf(fault.Precondition, "%w: %w", ErrNoSystemd, err)
		}
	}
	if err != nil {
		err = s.with(ctx, "ask systemd what it can do", check)
	}
	if err != nil {
		return Sandbox{}, err
	}
	number, err := parseVersion(version)
	if err != nil {
		return Sandbox{}, err
	}
	if number < minSystemd {
		return Sandbox{}, fault.Errorf(fault.Precondition, "%w: its systemd is version %s, and %d is needed", ErrNoSystemd, version, minSystemd)
	}
	unified, err := s.unified(ctx)
	if err != nil {
		return Sandbox{}, fmt.Errorf("look at the host's cgroups: %w", err)
	}
	if err := s.lookAtMounts(ctx); err != nil {
		return Sandbox{}, err
	}
	s.mu.Lock()
	s.version = version
	clear(s.lacking)
	clear(s.unenforced)
	for _, p := range s.parts(nil, nil, nil) {
		_, knows := known[p.Name]
		switch {
		case !knows && !p.vital:
			s.lacking[p.Name] = true
		case p.seccomp && !slices.Contains(strings.Fields(features), "+SECCOMP"):
			s.unenforced[p.Name] = "the host's systemd is built without seccomp filters"
		case p.unified && !unified:
			s.unenforced[p.Name] = "the host has no unified cgroup hierarchy"
		}
	}
	s.mu.Unlock()
	return s.Sandbox(), nil
}

// manager reads a property of systemd's manager. It is bounded by the connection's end.
func (b *bus) manager(name string, to *string) error {
	quoted, err := b.GetManagerProperty(name)
	if err != nil {
		return fmt.Errorf("ask for systemd's %s: %w", name, err)
	}
	*to, err = strconv.Unquote(quoted)
	return err
}

// learn takes a property out of all units to come that systemd does not know; false: it was none of those that can go.
func (s *Systemd) learn(ctx context.Context, err error) bool {
	name, ok := unknownProperty(err)
	if !ok {
		return false
	}
	dispensable := name == "OOMPolicy" || name == "CollectMode" ||
		slices.ContainsFunc(s.extra, func(p Property) bool { return p.Name == name }) ||
		slices.ContainsFunc(s.parts(nil, nil, nil), func(p sandboxed) bool { return p.Name == name && !p.vital })
	if !dispensable {
		return false
	}
	s.mu.Lock()
	known := s.lacking[name]
	s.lacking[name] = true
	s.mu.Unlock()
	if !known {
		klog.FromContext(ctx).Info("The host's systemd does not know a property of the sandbox: units are started without it", "property", name)
	}
	return true
}

// parseVersion reads the number that a version begins with: "252.38-1~deb12u1", "v255", "249 (249-10.el9)".
func parseVersion(version string) (int, error) {
	digits := strings.TrimPrefix(version, "v")
	if end := strings.IndexFunc(digits, func(r rune) bool { return r < '0' || r > '9' }); end >= 0 {
		digits = digits[:end]
	}
	n, err := strconv.Atoi(digits)
	if err != nil {
		return 0, fmt.Errorf("%q is not a version of systemd", version)
	}
	return n, nil
}
