package launcher

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
)

// denied are the addresses that a unit of s may not reach.
func denied(t *testing.T, s *Systemd, u Unit) (all []string) {
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
			if !ok || int(n.Prefix) != a.BitLen() || (n.Family == 2) != a.Is4() {
				t.Errorf("%+v is no address", n)
			}
			all = append(all, a.String())
		}
	}
	slices.Sort(all)
	return all
}

func TestUnitsAreDeniedTheMetadataOfEveryCloud(t *testing.T) {
	s, err := NewSystemd(here{}, "/helper")
	if err != nil {
		t.Fatal(err)
	}
	all := []string{"100.100.100.200", "169.254.0.23", "169.254.169.254", "169.254.170.2", "169.254.170.23", "fd00:ec2::23", "fd00:ec2::254", "fd20:ce::254"}
	without := func(gone ...string) []string {
		return slices.DeleteFunc(slices.Clone(all), func(a string) bool { return slices.Contains(gone, a) })
	}
	for _, tc := range []struct{ needs, want []string }{
		{nil, all},
		{[]string{"169.254.170.23"}, without("169.254.170.23")},
		{[]string{"fd00:ec2::23"}, without("fd00:ec2::23")},
		{[]string{"100.100.100.200", "10.0.0.1"}, without("100.100.100.200")},
		{[]string{"169.254.169.254", "fd00:ec2::254"}, all}, // the node's own credentials are no mount's
	} {
		u := Unit{Name: "a"}
		for _, a := range tc.needs {
			u.Needs = append(u.Needs, netip.MustParseAddr(a))
		}
		if got := denied(t, s, u); !slices.Equal(got, tc.want) {
			t.Errorf("needs %s: denied %s, want %s", tc.needs, strings.Join(got, " "), strings.Join(tc.want, " "))
		}
	}
}
