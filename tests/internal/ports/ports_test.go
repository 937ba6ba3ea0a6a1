package ports_test

import (
	"net"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/s3-csi/s3-csi-driver/tests/internal/ports"
)

func TestAFreePortIsNobodysAndNotOneThatTheKernelGivesOut(t *testing.T) {
	limits, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range")
	if err != nil {
		t.Skip("this system does not say which ports it gives out: ", err)
	}
	lowest, err := strconv.Atoi(strings.Fields(string(limits))[0])
	if err != nil {
		t.Fatal(err)
	}
	given := map[string]bool{}
	for range 2000 { // of 22,000: with replacement some would be given twice
		addr, err := ports.Free()
		if err != nil {
			t.Fatal(err)
		}
		if given[addr] {
			t.Errorf("%s is given twice", addr)
		}
		given[addr] = true
		if a, err := net.ResolveTCPAddr("tcp", addr); err != nil || a.Port >= lowest {
			t.Errorf("%s, %v: the kernel gives out ports from %d on", addr, err, lowest)
		}
		l, err := net.Listen("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		l.Close()
	}
}
