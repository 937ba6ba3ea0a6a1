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

// need is what a property of the sandbox needs to have an effect.
type need int

const (
	nothing need = iota
	// vital properties are always set: a unit is not started without them.
	vital
	// unified properties need the unified cgroup hierarchy.
	unified
	// mounts properties need a mount namespace (see sharedRoot). With Landlock they are not used, because it restricts the same without one.
	mounts
)

// sandboxed is a property of the sandbox.
type sandboxed struct {
	Property Property
	need     need
}

// unitParams are those of a unit on which its properties depend.
type unitParams struct {
	writable []string          // directories
	needs    []netip.Addr      // addresses that it must reach
	binds    []resolvconf.Bind // files of the Resolver
	join     bool              // its process enters another mount namespace before it drops its privileges
}

// properties returns the sandbox of a unit: what restricts it, and the files of the Resolver. Each property that hides or remounts
// something costs every start a pass over all the host's mounts. So properties that only deny what a user without capabilities cannot do
// anyway are not used (ProtectKernelTunables and the like took 80 ms of CPU per start on a host with 200 mounts), and those that hide
// something only where the kernel has no Landlock. None makes systemd filter system calls: it would assemble several filters for each unit
// (10 ms of CPU), and the helper has one (sandbox.RestrictCalls).
func (h *hostSandbox) properties(u unitParams) []sandboxed {
	capabilities := uint64(1<<unix.CAP_SETUID | 1<<unix.CAP_SETGID | 1<<unix.CAP_SETPCAP)
	if u.join {
		capabilities |= 1<<unix.CAP_SYS_ADMIN | 1<<unix.CAP_SYS_CHROOT
	}
	properties := []sandboxed{
		{Property{"NoNewPrivileges", true}, vital},
		// runas needs these and drops them all. Start checks that.
		{Property{"CapabilityBoundingSet", capabilities}, vital},
		{Property{"AmbientCapabilities", uint64(0)}, vital},
		{Property{"ProtectSystem", "strict"}, mounts},
		{Property{"ReadWritePaths", u.writable}, mounts},
		{Property{"ProtectHome", "yes"}, mounts},
		{Property{"PrivateTmp", true}, mounts},
		{Property{"PrivateDevices", true}, mounts},                     // the helper gets the FUSE descriptor over the socket
		{Property{"InaccessiblePaths", []string{"-/dev/shm"}}, mounts}, // it would be the host's own, where files outlive the unit
		{Property{"ProtectProc", "invisible"}, mounts},
		{Property{"UMask", uint32(0o077)}, nothing},
		{Property{"LimitCORE", uint64(0)}, nothing},
		{Property{"IPAddressDeny", metadata(slices.Concat(h.nameservers, u.needs))}, unified},
	}
	if h.resolver == nil {
		return properties
	}
	files := make([]bindMount, 0, len(u.binds))
	for _, b := range u.binds {
		files = append(files, bindMount{Source: b.Source, Target: b.Target})
	}
	return append(properties, sandboxed{Property{bindProperty, files}, mounts})
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
	landlock   int             // version of Landlock that restricts helpers; 0: none
	noLandlock string          // why there is none
	unshared   bool            // the host's / is not a shared mount
	version    string          // of the systemd that answered last
	lacking    map[string]bool // properties that it does not know
	legacy     bool            // the host has no unified cgroup hierarchy
}

// confines reports whether helpers are restricted with Landlock.
func (h *hostSandbox) confines() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.landlock > 0
}

// dropLandlock makes further units do without Landlock.
func (h *hostSandbox) dropLandlock(ctx context.Context, why string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.landlock != 0 {
		klog.FromContext(ctx).Info("Units cannot use Landlock, using mount namespaces", "landlock", h.landlock, "reason", why)
	}
	h.landlock, h.noLandlock = 0, why
}

// current returns the properties that units have now. Call under mu.
func (h *hostSandbox) current(u unitParams) []sandboxed {
	return slices.DeleteFunc(h.properties(u), func(p sandboxed) bool { return p.need == mounts && h.landlock > 0 })
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
func (h *hostSandbox) complete(props []Property, u Unit, params unitParams) []Property {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, p := range h.current(params) {
		if u.Callers && p.Property.Name == "ProtectProc" {
			continue // the client must see its callers; the kernel still protects what other processes keep private
		}
		if p.need != mounts || !h.unshared {
			props = append(props, p.Property)
		}
	}
	return h.known(append(props, h.extra...))
}

// supported returns the properties that the host's systemd knows.
func (h *hostSandbox) supported(props []Property) []Property {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.known(props)
}

// known removes the properties that the host's systemd does not know. Call under mu.
func (h *hostSandbox) known(props []Property) []Property {
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
	for _, p := range h.current(unitParams{}) {
		name := p.Property.Name
		switch {
		case h.lacking[name]:
			box.Missing = append(box.Missing, name+" (not supported by systemd "+h.version+")")
		case p.need == unified && h.legacy:
			box.Missing = append(box.Missing, name+" (the host has no unified cgroup hierarchy)")
		case p.need == mounts && h.unshared:
			box.Missing = append(box.Missing, name+" (the host's / is not a shared mount)")
		default:
			box.Present = append(box.Present, name)
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

// update records systemd's version, the properties that it knows, and whether the host has the unified cgroup hierarchy.
func (h *hostSandbox) update(version string, known map[string]any, unified bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.version, h.legacy = version, !unified
	clear(h.lacking)
	for _, p := range h.properties(unitParams{}) {
		if _, knows := known[p.Property.Name]; !knows && p.need != vital {
			h.lacking[p.Property.Name] = true
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
		slices.ContainsFunc(h.properties(unitParams{}), func(p sandboxed) bool { return p.Property.Name == name && p.need != vital })
	if !dispensable {
		return false
	}
	if !h.lacking[name] {
		klog.FromContext(ctx).Info("systemd does not support sandbox property", "property", name)
	}
	h.lacking[name] = true
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
