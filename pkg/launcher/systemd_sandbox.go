package launcher

import (
	"context"
	"maps"
	"net/netip"
	"slices"
	"sync"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/proc"
	"github.com/s3-csi/s3-csi-driver/pkg/resolvconf"
)

type sandboxed struct {
	Property
	unified bool // the host must have the unified cgroup hierarchy
	mounts  bool // it needs a mount namespace; see sharedRoot
	hides   bool // not needed with Landlock, which restricts the same without a mount namespace
	vital   bool // a unit is not started without it
}

// unitSandbox returns the properties that restrict a unit, with the directories that it may write to and the addresses that it needs.
// Each property that hides or remounts something costs every start a pass over all the host's mounts. So properties that only deny what
// a user without capabilities cannot do anyway are not used (ProtectKernelTunables and the like took 80 ms of CPU per start on a host
// with 200 mounts), and those that hide something only where the kernel has no Landlock. None makes systemd filter system calls: it
// would assemble several filters for each unit (10 ms of CPU), and the helper has one (sandbox.RestrictCalls).
//
// join means that the unit's process enters another mount namespace before it drops its privileges.
func unitSandbox(writable []string, needs []netip.Addr, join bool) []sandboxed {
	capabilities := uint64(1<<unix.CAP_SETUID | 1<<unix.CAP_SETGID | 1<<unix.CAP_SETPCAP)
	if join {
		capabilities |= 1<<unix.CAP_SYS_ADMIN | 1<<unix.CAP_SYS_CHROOT
	}
	plain := func(name string, value any) sandboxed { return sandboxed{Property: Property{name, value}} }
	vital := func(name string, value any) sandboxed { return sandboxed{Property: Property{name, value}, vital: true} }
	hides := func(name string, value any) sandboxed {
		return sandboxed{Property: Property{name, value}, mounts: true, hides: true}
	}
	return []sandboxed{
		vital("NoNewPrivileges", true),
		// runas needs these and drops them all. Start checks that.
		vital("CapabilityBoundingSet", capabilities),
		vital("AmbientCapabilities", uint64(0)),
		hides("ProtectSystem", "strict"),
		hides("ReadWritePaths", writable),
		hides("ProtectHome", "yes"),
		hides("PrivateTmp", true),
		hides("PrivateDevices", true),                     // the helper gets the FUSE descriptor over the socket
		hides("InaccessiblePaths", []string{"-/dev/shm"}), // it would be the host's own, where files outlive the unit
		hides("ProtectProc", "invisible"),
		plain("UMask", uint32(0o077)),
		plain("LimitCORE", uint64(0)),
		{Property: Property{"IPAddressDeny", metadata(needs)}, unified: true},
	}
}

// bindProperty is the property that mounts the files of a Resolver.
const bindProperty = "BindReadOnlyPaths"

// Sandbox is what this host enforces of the sandbox of helpers.
type Sandbox struct {
	Version string // of systemd; "" with launcher process
	// Landlock is the version of Landlock that restricts helpers. If it is 0, NoLandlock has the reason, and Isolates reports
	// whether units have mount namespaces of their own instead.
	Landlock   int
	NoLandlock string
	Isolates   bool
	Present    []string // enforced properties of units
	// Missing are other properties, and "seccomp" if system calls are not filtered, each with the reason:
	// "IPAddressDeny (the host has no unified cgroup hierarchy)".
	Missing []string
}

// Kind names what keeps helpers from the host's files: "landlock", or without it "unit" (mount namespaces of units) or "none".
func (s Sandbox) Kind() string {
	switch {
	case s.Landlock > 0:
		return "landlock"
	case s.Isolates:
		return "unit"
	}
	return "none"
}

// hostSandbox records which parts of the sandbox the host's systemd enforces. It is safe for concurrent use.
type hostSandbox struct {
	extra    []Property // set on every unit
	resolver Resolver   // nil: units resolve names as the host does
	// nameservers are never denied, except addresses of instance metadata.
	nameservers []netip.Addr

	mu         sync.Mutex
	landlock   int               // version of Landlock that restricts helpers; 0: none
	noLandlock string            // why there is none
	unshared   bool              // the host's / is not a shared mount
	version    string            // of the systemd that answered last
	lacking    map[string]bool   // properties that it does not know
	unenforced map[string]string // properties that have no effect on this host, and why
}

// clone returns an independent copy.
func (h *hostSandbox) clone() *hostSandbox {
	h.mu.Lock()
	defer h.mu.Unlock()
	return &hostSandbox{
		extra: h.extra, resolver: h.resolver, nameservers: h.nameservers, landlock: h.landlock, noLandlock: h.noLandlock, unshared: h.unshared, version: h.version,
		lacking: maps.Clone(h.lacking), unenforced: maps.Clone(h.unenforced),
	}
}

// confines reports whether helpers are restricted with Landlock.
func (h *hostSandbox) confines() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.landlock > 0
}

// isolates reports whether units have mount namespaces of their own, if the host's / is shared.
func (h *hostSandbox) isolates() bool { return !h.confines() }

// dropLandlock makes further units do without Landlock.
func (h *hostSandbox) dropLandlock(ctx context.Context, why string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.landlock != 0 {
		klog.FromContext(ctx).Info("Units cannot use Landlock, using mount namespaces", "landlock", h.landlock, "reason", why)
	}
	h.landlock, h.noLandlock = 0, why
}

// parts are the properties that units have now. Call under mu.
func (h *hostSandbox) parts(writable []string, needs []netip.Addr, binds []resolvconf.Bind, join bool) []sandboxed {
	return slices.DeleteFunc(h.all(writable, needs, binds, join), func(p sandboxed) bool { return p.hides && h.landlock > 0 })
}

// all are the properties that units may have: the sandbox and the files of the Resolver.
func (h *hostSandbox) all(writable []string, needs []netip.Addr, binds []resolvconf.Bind, join bool) []sandboxed {
	parts := unitSandbox(writable, append(slices.Clone(h.nameservers), needs...), join)
	if h.resolver == nil {
		return parts
	}
	seen := make([]bindMount, 0, len(binds))
	for _, b := range binds {
		seen = append(seen, bindMount{Source: b.Source, Target: b.Target})
	}
	return append(parts, sandboxed{Property: Property{bindProperty, seen}, mounts: true, hides: true})
}

// binds returns the Resolver's files for a unit that starts now with a mount namespace of its own.
func (h *hostSandbox) binds(ctx context.Context) ([]resolvconf.Bind, error) {
	h.mu.Lock()
	none := h.resolver == nil || h.unshared || h.landlock > 0
	h.mu.Unlock()
	if none {
		return nil, nil
	}
	return h.resolver.Binds(ctx)
}

// complete adds the sandbox to the properties of a unit and removes those that the host's systemd does not know.
func (h *hostSandbox) complete(props []Property, u Unit, writable []string, binds []resolvconf.Bind, join bool) []Property {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, p := range h.parts(writable, u.Needs, binds, join) {
		if u.Callers && p.Name == "ProtectProc" {
			continue // the client must see its callers; the kernel still protects what other processes keep private
		}
		if !p.mounts || !h.unshared {
			props = append(props, p.Property)
		}
	}
	return h.without(append(props, h.extra...))
}

// supported returns the properties that the host's systemd knows.
func (h *hostSandbox) supported(props []Property) []Property {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.without(props)
}

// without removes the properties that the host's systemd does not know. Call under mu.
func (h *hostSandbox) without(props []Property) []Property {
	return slices.DeleteFunc(props, func(p Property) bool { return h.lacking[p.Name] })
}

func (h *hostSandbox) resolves() (bool, string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case h.resolver == nil:
		return false, "not requested"
	case h.landlock > 0:
		return true, ""
	case h.lacking[bindProperty]:
		return false, "the host's systemd " + h.version + " does not support " + bindProperty
	case h.unshared:
		return false, "the host's / is not a shared mount, so units get no mount namespace"
	}
	return true, ""
}

func (h *hostSandbox) report() Sandbox {
	h.mu.Lock()
	defer h.mu.Unlock()
	box := Sandbox{Version: h.version, Landlock: h.landlock}
	if h.landlock == 0 {
		box.NoLandlock, box.Isolates = h.noLandlock, !h.unshared
	}
	for _, p := range h.parts(nil, nil, nil, false) {
		switch why, idle := h.unenforced[p.Name]; {
		case h.lacking[p.Name]:
			box.Missing = append(box.Missing, p.Name+" (not supported by systemd "+h.version+")")
		case idle:
			box.Missing = append(box.Missing, p.Name+" ("+why+")")
		case p.mounts && h.unshared:
			box.Missing = append(box.Missing, p.Name+" (the host's / is not a shared mount)")
		default:
			box.Present = append(box.Present, p.Name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(h.lacking)) {
		if slices.ContainsFunc(h.extra, func(p Property) bool { return p.Name == name }) {
			box.Missing = append(box.Missing, name+" (not supported by systemd "+h.version+")")
		}
	}
	box.Missing = append(box.Missing, unfiltered()...)
	return box
}

// update records systemd's version and the properties that it supports.
// unified reports whether the host has the unified cgroup hierarchy.
func (h *hostSandbox) update(version string, known map[string]any, unified bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.version = version
	clear(h.lacking)
	clear(h.unenforced)
	for _, p := range h.all(nil, nil, nil, false) {
		_, knows := known[p.Name]
		switch {
		case !knows && !p.vital:
			h.lacking[p.Name] = true
		case p.unified && !unified:
			h.unenforced[p.Name] = "the host has no unified cgroup hierarchy"
		}
	}
}

// setShared records whether the host's / is a shared mount. If it is not, new units get no mount namespace.
func (h *hostSandbox) setShared(ctx context.Context, shared bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !shared && !h.unshared {
		klog.FromContext(ctx).Info("Host's / is not shared, disabling mount namespaces", "reason", "a unit's mount namespace would keep volumes mounted",
			"hostDNS", h.resolver != nil)
	}
	h.unshared = !shared
}

// recordUnsupported omits a property that systemd does not support from all further units. It reports false if err is not about a property
// that may be left out.
func (h *hostSandbox) recordUnsupported(ctx context.Context, err error) bool {
	name, ok := unknownProperty(err)
	if !ok {
		return false
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	dispensable := name == "OOMPolicy" || name == "CollectMode" ||
		slices.ContainsFunc(h.extra, func(p Property) bool { return p.Name == name }) ||
		slices.ContainsFunc(h.all(nil, nil, nil, false), func(p sandboxed) bool { return p.Name == name && !p.vital })
	if !dispensable {
		return false
	}
	known := h.lacking[name]
	h.lacking[name] = true
	if !known {
		klog.FromContext(ctx).Info("systemd does not support sandbox property", "property", name)
	}
	return true
}

// confined reports whether a process runs as the uid without privileges and without a way to gain any. An error means that the process
// has exited.
func confined(pid int, uid uint32) (bool, error) {
	status, err := proc.ReadStatus(pid)
	if err != nil || !runsAs(status, uid) {
		return false, err
	}
	for _, set := range []string{"CapEff", "CapPrm", "CapInh", "CapAmb", "CapBnd"} {
		if status.Field(set) != "0000000000000000" {
			return false, nil
		}
	}
	return status.Field("NoNewPrivs") == "1", nil
}

// instanceMetadata are the addresses where clouds serve the node's own credentials. No mount needs them.
func instanceMetadata() []netip.Addr {
	return []netip.Addr{
		netip.MustParseAddr("169.254.169.254"), // AWS, Azure, GCP and most others
		netip.MustParseAddr("fd00:ec2::254"),   // AWS, Amazon EC2 User Guide, "Access instance metadata"
		netip.MustParseAddr("fe80::a9fe:a9fe"), // OpenStack and others: 169.254.169.254 as a link-local address
	}
}

// otherMetadata are further such addresses, and those of agents that serve a container's credentials. Link-local ranges are whole: clouds
// use many addresses there.
func otherMetadata() []netip.Prefix {
	return []netip.Prefix{
		// Amazon ECS and EKS Pod Identity (170.2, 170.23), Tencent (0.23), Scaleway (42.42), Rancher (169.250), and others
		netip.MustParsePrefix("169.254.0.0/16"),
		netip.MustParsePrefix("fe80::/10"),
		netip.MustParsePrefix("fd00:ec2::23/128"),       // Amazon EKS User Guide, "Understand how EKS Pod Identity works"
		netip.MustParsePrefix("100.100.100.200/32"),     // Alibaba Cloud ECS User Guide, "Instance metadata"
		netip.MustParsePrefix("100.96.0.96/32"),         // Volcano Engine ECS, "Instance metadata"
		netip.MustParsePrefix("168.63.129.16/32"),       // Azure, "What is IP address 168.63.129.16?": WireServer, and a name server
		netip.MustParsePrefix("192.0.0.192/32"),         // Oracle Cloud Infrastructure Classic, "Instance metadata"
		netip.MustParsePrefix("fd00:c1::a9fe:a9fe/128"), // Oracle Cloud Infrastructure, "Instance metadata", IPv6
		netip.MustParsePrefix("fd00:42::42/128"),        // Scaleway, "Metadata API", IPv6
		netip.MustParsePrefix("fd00:a9fe:a9fe::1/128"),  // Linode, "Metadata service", IPv6
		netip.MustParsePrefix("fd20:ce::254/128"),       // Compute Engine, "View and query VM metadata", IPv6
	}
}

// localServers are name servers and other harmless services in those ranges.
func localServers() []netip.Addr {
	return []netip.Addr{
		netip.MustParseAddr("169.254.20.10"),   // Kubernetes, "Using NodeLocal DNSCache"
		netip.MustParseAddr("169.254.25.10"),   // the same, of Kubespray
		netip.MustParseAddr("169.254.169.253"), // Amazon VPC User Guide, "Amazon DNS server"
	}
}

// metadata returns the networks that a unit is denied, without the addresses that it needs.
func metadata(needs []netip.Addr) []network {
	never := instanceMetadata()
	denied := otherMetadata()
	for _, a := range append(localServers(), needs...) {
		if slices.Contains(never, a) {
			continue
		}
		var rest []netip.Prefix
		for _, p := range denied {
			rest = append(rest, without(p, a)...)
		}
		denied = rest
	}
	for _, a := range never {
		denied = append(denied, netip.PrefixFrom(a, a.BitLen()))
	}
	networks := make([]network, 0, len(denied))
	for _, p := range denied {
		family := int32(unix.AF_INET)
		if p.Addr().Is6() {
			family = unix.AF_INET6
		}
		networks = append(networks, network{family, p.Addr().AsSlice(), uint32(p.Bits())})
	}
	return networks
}

// without returns the parts of a network that do not contain an address.
func without(p netip.Prefix, a netip.Addr) []netip.Prefix {
	switch {
	case !p.Contains(a):
		return []netip.Prefix{p}
	case p.IsSingleIP():
		return nil
	}
	upper := p.Addr().AsSlice()
	upper[p.Bits()/8] |= 0x80 >> (p.Bits() % 8)
	half, _ := netip.AddrFromSlice(upper)
	return append(without(netip.PrefixFrom(p.Addr(), p.Bits()+1), a), without(netip.PrefixFrom(half, p.Bits()+1), a)...)
}
