//go:build linux

package check

import (
	"context"
	"net"
	"net/url"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/resolvconf"
)

const dnsBound = 5 * time.Second

// dns resolves the backends' host names like helpers: with the configuration of the host or of this process.
func (r *nodeRun) dns(ctx context.Context) {
	resolver, names := net.DefaultResolver, func(name string) []string { return []string{name} }
	where, advice := "as the host does", "hosts usually cannot resolve names of the cluster's services; set --node-dns=pod, or use an endpoint that the host "+
		"can resolve"
	unread := ""
	switch {
	case r.ns == nil: // the host's configuration is unknown
		where, advice = "as this process does", "use an endpoint that the host can resolve"
	case !r.ns.Foreign():
		advice = "use an endpoint that the host can resolve"
	case r.in.PodDNS && r.dnsErr == nil:
		where = "as the driver's container does"
		advice = "with hostNetwork: true the pod needs dnsPolicy: ClusterFirstWithHostNet for names of the cluster's services"
	default:
		if r.in.PodDNS {
			where += " despite --node-dns=pod: " + r.dnsErr.Error()
			advice = "make the host's / a shared mount (mount --make-rshared /), as systemd does at boot, or set --launcher=process, or use an endpoint that " +
				"the host can resolve"
		}
		config, err := host.Call(ctx, r.ns, "read the host's "+resolvconf.File, nil, func() (resolvconf.Config, error) { return resolvconf.Read(resolvconf.File) })
		if err != nil {
			unread = "the host's " + OneLine(err)
		}
		resolver, names = resolverOf(config), config.Names
	}
	for _, b := range r.in.Backends {
		r.rows.tryAll(ctx, []probe{{Needed("dns."+b.Name, "DNS of backend "+b.Name), "", []*string{&unread}, func(ctx context.Context, what Item) Row {
			name := hostName(b)
			if net.ParseIP(name) != nil {
				return what.Row(Yes, name+" is an address", "")
			}
			addresses, err := lookUp(ctx, resolver, names(name))
			if err != nil {
				return what.Row(No, OneLine(err)+", "+where, advice)
			}
			return what.Row(Yes, name+" is "+addresses[0]+", "+where, "")
		}}})
	}
}

// lookUp returns the addresses of the first name that has some.
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

// resolverOf returns a resolver with the servers of a configuration. It ignores search domains, so names must be rooted.
func resolverOf(config resolvconf.Config) *net.Resolver {
	return &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, _ string) (c net.Conn, err error) {
		for _, s := range config.Nameservers {
			if c, err = new(net.Dialer).DialContext(ctx, network, net.JoinHostPort(s, "53")); err == nil {
				return c, nil
			}
		}
		return nil, err
	}}
}

// hostName returns the host to which the backend's requests are sent; on AWS they go to names below it.
func hostName(b backend.Backend) string {
	if u, err := url.Parse(b.ProxyFor(b.Endpoint)); err == nil && u.Host != "" {
		return u.Hostname() // which resolves the names of the service
	}
	if u, err := url.Parse(b.Endpoint); err == nil && !b.AWS() {
		return u.Hostname()
	}
	name := "s3." + b.StartRegion() + ".amazonaws.com"
	if b.Partition() == "aws-cn" {
		name += ".cn"
	}
	return name
}
