package launcher

import (
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"
)

// instanceMetadata are the addresses where clouds serve the node's own credentials. No mount needs them.
func instanceMetadata() []netip.Addr {
	return []netip.Addr{
		netip.MustParseAddr("169.254.169.254"), // AWS, Azure, GCP and most others
		netip.MustParseAddr("fd00:ec2::254"),   // AWS, Amazon EC2 User Guide, "Access instance metadata"
	}
}

// otherMetadata are further such addresses, and those of agents that serve a container's credentials.
func otherMetadata() []netip.Addr {
	return []netip.Addr{
		netip.MustParseAddr("169.254.170.2"),   // Amazon ECS Developer Guide, "Task IAM role"
		netip.MustParseAddr("169.254.170.23"),  // Amazon EKS User Guide, "Understand how EKS Pod Identity works"
		netip.MustParseAddr("fd00:ec2::23"),    // the same
		netip.MustParseAddr("100.100.100.200"), // Alibaba Cloud ECS User Guide, "Instance metadata"
		netip.MustParseAddr("169.254.0.23"),    // Tencent Cloud CVM, metadata.tencentyun.com
		netip.MustParseAddr("fd20:ce::254"),    // Compute Engine, "View and query VM metadata", IPv6
	}
}

// metadata returns the addresses that a unit is denied, except those that it needs.
func metadata(needs []netip.Addr) []network {
	denied := instanceMetadata()
	for _, a := range otherMetadata() {
		if !slices.Contains(needs, a) {
			denied = append(denied, a)
		}
	}
	networks := make([]network, 0, len(denied))
	for _, a := range denied {
		family := int32(unix.AF_INET)
		if a.Is6() {
			family = unix.AF_INET6
		}
		networks = append(networks, network{family, a.AsSlice(), uint32(a.BitLen())})
	}
	return networks
}
