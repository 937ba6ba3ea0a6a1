//go:build linux

package check

import (
	"context"
	"fmt"
	"net"
	"net/url"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/resolvconf"
)

const dnsBound = 5 * time.Second

// dns looks the backends' host names up, as helpers do: with the host's configuration, or with that of this process.
func (t *nodeTrial) dns(ctx context.Context) {
	resolver, names := net.DefaultResolver, func(name string) []string { return []string{name} }
	where, advice := "as this process does", "give the backend an endpoint that the host knows"
	switch {
	case t.ns == nil: // what the host does cannot be found out
	case !t.ns.Foreign():
		where = "as the host does"
	case t.PodDNS && t.dnsErr == nil:
		where = "as the driver's container does"
		advice = "with hostNetwork: true the pod needs dnsPolicy: ClusterFirstWithHostNet for names of the cluster's services"
	default:
		where = "as the host does"
		advice = "the host does not know names of the cluster's services as a rule: choose --node-dns=pod, or give the backend an endpoint that the host knows"
		if t.PodDNS {
			where = "as the host does, against --node-dns=pod: " + t.dnsErr.Error()
			advice = "make the host's / a shared mount (mount --make-rshared /), as systemd does at boot, or choose --launcher=process, or give the backend an endpoint that the host knows"
		}
		config, err := t.hosts(ctx)
		if err != nil {
			for _, b := range t.Backends {
				t.add(dnsThing(b).row(Unknown, one(err), ""))
			}
			return
		}
		resolver, names = asking(config), config.Names
	}
	for _, b := range t.Backends {
		what, name := dnsThing(b), hostName(b)
		if net.ParseIP(name) != nil {
			t.add(what.row(Yes, name+" is an address", ""))
			continue
		}
		addresses, err := lookUp(ctx, resolver, names(name))
		if err != nil {
			t.add(what.row(No, one(err)+", "+where, advice))
			continue
		}
		t.add(what.row(Yes, name+" is "+addresses[0]+", "+where, ""))
	}
}

// lookUp gives the addresses of the first name that has some.
func lookUp(ctx context.Context, resolver *net.Resolver, names []string) (addresses []string, err error) {
	ctx, cancel := context.WithTimeout(ctx, dnsBound)
	defer cancel()
	for _, name := range names {
		if addresses, err = resolver.LookupHost(ctx, name); err == nil {
			return addresses, nil
		}
	}
	return nil, err
}

// asking is a resolver that asks the servers of a configuration. It knows its own domains no more than others': names have to
// be rooted.
func asking(config resolvconf.Config) *net.Resolver {
	return &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, _ string) (c net.Conn, err error) {
		for _, s := range config.Nameservers {
			if c, err = new(net.Dialer).DialContext(ctx, network, net.JoinHostPort(s, "53")); err == nil {
				return c, nil
			}
		}
		return nil, err
	}}
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

// hosts is the host's configuration.
func (t *nodeTrial) hosts(ctx context.Context) (resolvconf.Config, error) {
	found := make(chan resolvconf.Config, 1)
	err := t.ns.Do(ctx, "reading the host's "+resolvconf.File, func() error {
		config, err := resolvconf.Read(resolvconf.File)
		found <- config
		return err
	})
	if err != nil {
		return resolvconf.Config{}, fmt.Errorf("the host's %w", err)
	}
	return <-found, nil
}
