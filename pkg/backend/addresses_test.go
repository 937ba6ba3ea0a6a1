package backend

import (
	"fmt"
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
)

func TestAddresses(t *testing.T) {
	const driver, workload = credentials.SourceDriver, credentials.SourceWorkload
	for _, tc := range []struct {
		name, source string
		b            Backend
		want         string
	}{
		{"AWS", driver, Backend{}, "[]"},
		{"AWS, keys of a secret", credentials.SourceSecret, Backend{}, "[]"},
		{"AWS, a pod's own", workload, Backend{}, "[169.254.170.23]"},
		{"AWS, a pod's own, IPv6", workload, Backend{PodIdentityAgent: "http://[fd00:ec2::23]/v1/credentials"}, "[fd00:ec2::23]"},
		{"another service, a pod's own", workload, Backend{Endpoint: "https://s3.example.com"}, "[]"},
		{"an address", driver, Backend{Endpoint: "http://100.100.100.200:9000", STS: &STS{Endpoint: "http://[fe80::1%25eth0]:9000"}}, "[100.100.100.200 fe80::1]"},
		{"a mapped address", driver, Backend{Endpoint: "http://[::ffff:169.254.170.2]:9000"}, "[169.254.170.2]"},
	} {
		if got := fmt.Sprint(tc.b.Addresses(tc.source)); got != tc.want {
			t.Errorf("%s: %s, want %s", tc.name, got, tc.want)
		}
	}
}
