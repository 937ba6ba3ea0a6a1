package launcher

import (
	"net/netip"
	"slices"
	"testing"
)

// denied are the networks that a unit of s may not reach.
func denied(t *testing.T, s *Systemd, u Unit) (all []netip.Prefix) {
	t.Helper()
	for _, p := range s.properties(u, nil, []uintptr{0}) {
		if p.Name != "IPAddressDeny" {
			continue
		}
		if signature := p.Value.Signature().String(); signature != "a(iayu)" {
			t.Errorf("of the type %s", signature)
		}
		for _, n := range p.Value.Value().([]network) {
			a, ok := netip.AddrFromSlice(n.Addr)
			p := netip.PrefixFrom(a, int(n.Prefix))
			if !ok || p != p.Masked() || (n.Family == 2) != a.Is4() {
				t.Errorf("%+v is no network", n)
			}
			all = append(all, p)
		}
	}
	return all
}

func TestUnits_MetadataOfEveryCloudIsDenied(t *testing.T) {
	instance := []string{"169.254.169.254", "fd00:ec2::254", "fe80::a9fe:a9fe"}
	others := []string{
		"169.254.170.2", "169.254.170.23", "fd00:ec2::23", "100.100.100.200", "100.96.0.96", "168.63.129.16", "169.254.0.23", "169.254.42.42", "169.254.169.250",
		"192.0.0.192", "fd00:c1::a9fe:a9fe", "fd00:42::42", "fd00:a9fe:a9fe::1", "fd20:ce::254", "169.254.255.255", "fe80::1", "febf::1",
	}
	free := []string{"169.254.20.10", "169.254.25.10", "169.254.169.253", "fd00:ec2::253", "10.0.0.1", "169.253.255.255", "169.255.0.0", "fec0::1",
		"100.100.2.136", "::1", "127.0.0.1"}
	for _, needs := range [][]string{nil, {"169.254.170.23"}, {"fd00:ec2::23", "fe80::1"}, {"100.100.100.200", "10.0.0.1"}, instance, {"168.63.129.16"}} {
		u := Unit{Name: "a"}
		for _, a := range needs {
			u.Needs = append(u.Needs, netip.MustParseAddr(a))
		}
		for _, configured := range []bool{false, true} { // as name servers
			s, err := NewSystemd(here{}, "/helper", Options{})
			if configured {
				s, err = NewSystemd(here{}, "/helper", Options{Nameservers: u.Needs})
			}
			if err != nil {
				t.Fatal(err)
			}
			plain := !slices.ContainsFunc(needs, func(a string) bool { return slices.Contains(others, a) })
			if got := s.Prepares(u.Needs); got != (plain || configured) {
				t.Errorf("needs %q, configured %t: a spare can be used: %t", needs, configured, got)
			}
			networks := denied(t, s, Unit{Name: "a", Needs: u.Needs})
			if configured {
				networks = denied(t, s, Unit{Name: "a"})
			}
			for _, a := range slices.Concat(instance, others, free) {
				got := slices.ContainsFunc(networks, func(p netip.Prefix) bool { return p.Contains(netip.MustParseAddr(a)) })
				want := slices.Contains(instance, a) || slices.Contains(others, a) && !slices.Contains(needs, a)
				if got != want {
					t.Errorf("needs %q: %s is denied: %t", needs, a, got)
				}
			}
		}
	}
}
