//go:build linux

package check

import (
	"context"
	"errors"
	"net"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
)

const (
	dnsBound = 5 * time.Second
	// maxResolvConf bounds the host's file, in bytes.
	maxResolvConf = 64 << 10
)

// dns looks the backends' host names up, as helpers do: units of systemd with the host's configuration, plain processes with that
// of this process.
func (t *nodeTrial) dns(ctx context.Context) {
	resolver, where := net.DefaultResolver, "as this process does"
	advice := "plain processes resolve names as the driver's pod does: with hostNetwork: true it needs dnsPolicy: ClusterFirstWithHostNet for names of the cluster"
	if t.systemd && t.ns.Foreign() {
		where, advice = "as the host does", "units of systemd resolve names as the host does, which does not know names of the cluster's services: give the backend an endpoint that the host knows, or its cluster IP"
		servers, err := t.nameservers(ctx)
		if err != nil {
			for _, b := range t.Backends {
				t.add(dnsThing(b).row(Unknown, one(err), ""))
			}
			return
		}
		resolver = &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, _ string) (c net.Conn, err error) {
			for _, s := range servers {
				if c, err = new(net.Dialer).DialContext(ctx, network, net.JoinHostPort(s, "53")); err == nil {
					return c, nil
				}
			}
			return nil, err
		}}
	}
	for _, b := range t.Backends {
		what, name := dnsThing(b), hostName(b)
		if net.ParseIP(name) != nil {
			t.add(what.row(Yes, name+" is an address", ""))
			continue
		}
		asking, cancel := context.WithTimeout(ctx, dnsBound)
		addresses, err := resolver.LookupHost(asking, name)
		cancel()
		if err != nil {
			t.add(what.row(No, one(err), advice))
			continue
		}
		t.add(what.row(Yes, name+" is "+addresses[0]+", "+where, ""))
	}
}

func dnsThing(b backend.Backend) thing {
	return thing{"dns." + b.Name, "DNS of backend " + b.Name, true}
}

// hostName is where the backend's requests go; on AWS to names below this one.
func hostName(b backend.Backend) string {
	if u, err := url.Parse(b.Endpoint); err == nil && !b.AWS() {
		return u.Hostname()
	}
	name := "s3." + b.StartRegion() + ".amazonaws.com"
	if b.Partition() == "aws-cn" {
		name += ".cn"
	}
	return name
}

// nameservers are those of the host (resolv.conf(5)).
func (t *nodeTrial) nameservers(ctx context.Context) ([]string, error) {
	found := make(chan []byte, 1)
	err := t.ns.Do(ctx, "reading the host's /etc/resolv.conf", func() error {
		data, err := os.ReadFile("/etc/resolv.conf")
		found <- data[:min(len(data), maxResolvConf)]
		return err
	})
	if err != nil {
		return nil, err
	}
	var servers []string
	for line := range strings.Lines(string(<-found)) {
		if f := strings.Fields(line); len(f) > 1 && f[0] == "nameserver" {
			servers = append(servers, f[1])
		}
	}
	if len(servers) == 0 {
		return nil, errors.New("the host's /etc/resolv.conf names no server")
	}
	return servers, nil
}
