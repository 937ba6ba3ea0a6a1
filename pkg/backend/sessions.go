package backend

import (
	"cmp"
	"context"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/sts"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// Makes reports whether the backend's token service makes sessions of that kind. AWS's makes all kinds, other services those that
// are declared, by default assumeRole and webIdentity.
func (b Backend) Makes(kind credentials.Kind) bool {
	switch {
	case kind == credentials.AsIs:
		return true
	case kind == credentials.PodIdentity:
		return b.AWS()
	case b.STS != nil && len(b.STS.Kinds) > 0:
		return slices.Contains(b.STS.Kinds, kind)
	case b.AWS():
		return true
	case b.STS != nil:
		return kind == credentials.AssumeRole || kind == credentials.WebIdentity
	}
	return false
}

// Audience returns the audience of tokens that may be sent to the backend's token service; "": none may.
func (b Backend) Audience() string {
	switch {
	case b.STS != nil && b.STS.Audience != "":
		return b.STS.Audience
	case b.AWS():
		return awsAudience
	}
	return ""
}

// Audiences returns the audiences of all tokens that this backend can use.
func (b Backend) Audiences() []string {
	var all []string
	if a := b.Audience(); a != "" {
		all = append(all, a)
	}
	if b.AWS() {
		all = append(all, credentials.PodIdentityAudience)
	}
	return all
}

// RoleOptional reports whether the token service makes sessions without a role.
func (b Backend) RoleOptional() bool { return b.STS != nil && b.STS.RoleOptional }

// AgentURI returns the URL of EKS Pod Identity's agent.
func (b Backend) AgentURI() string {
	return cmp.Or(b.PodIdentityAgent, podIdentityAgent)
}

// Addresses returns the IP addresses in the backend's configuration, and that of EKS Pod Identity's agent if helpers of mounts
// with these credentials may use it.
func (b Backend) Addresses(source string) []netip.Addr {
	urls := []string{b.Endpoint, b.Proxy.URL}
	if b.STS != nil {
		urls = append(urls, b.STS.Endpoint)
	}
	if source == credentials.SourceWorkload && b.Makes(credentials.PodIdentity) {
		urls = append(urls, b.AgentURI())
	}
	var all []netip.Addr
	for _, raw := range urls {
		u, err := url.Parse(raw)
		if err != nil {
			continue // validated when the config was read
		}
		if a, err := netip.ParseAddr(u.Hostname()); err == nil {
			all = append(all, a.Unmap().WithZone(""))
		}
	}
	return all
}

// Partition returns the AWS partition of the backend's region for ARNs; "aws" for other services.
func (b Backend) Partition() string {
	if !b.AWS() {
		return "aws"
	}
	return partitionOf(b.StartRegion())
}

// partitionOf returns the AWS partition of a region.
func partitionOf(region string) string {
	// AWS General Reference, "AWS service endpoints".
	for _, p := range []struct{ start, partition string }{
		{"cn-", "aws-cn"}, {"us-gov-", "aws-us-gov"}, {"us-iso-", "aws-iso"}, {"us-isob-", "aws-iso-b"}, {"us-isof-", "aws-iso-f"},
		{"eu-isoe-", "aws-iso-e"}, {"eusc-", "aws-eusc"},
	} {
		if strings.HasPrefix(region, p.start) {
			return p.partition
		}
	}
	return "aws"
}

// ScopeOf returns the scope of a volume that asks for wanted, or "" for the default. A volume can be stricter than its backend and
// never less strict; the error is a Precondition.
func (b Backend) ScopeOf(wanted string) (string, error) {
	rank := map[string]int{volume.ScopeOff: 1, volume.ScopeAuto: 2, volume.ScopeRequired: 3}
	switch {
	case wanted == "" && b.Scope == "":
		return volume.ScopeAuto, nil
	case wanted == "":
		return b.Scope, nil
	case rank[wanted] == 0:
		return "", oneOf("scope", wanted, volume.ScopeRequired, volume.ScopeAuto, volume.ScopeOff)
	case b.Scope != "" && rank[wanted] < rank[b.Scope]:
		return "", fault.Errorf(fault.Precondition, "the volume has scope: %s, but %s requires at least scope: %s; remove it from the volume, or change "+
			"scope of the backend in the driver's config file", wanted, b, b.Scope)
	}
	return wanted, nil
}

// STSService returns how another process can reach the backend's token service: with its CA certificates and proxy and the
// endpoint settings, or else the proxy, of the driver's environment. Errors are Precondition.
func (c *Clients) STSService(ctx context.Context, b Backend) (credentials.STSService, error) {
	client, err := c.STS(ctx, b, credentials.Keys{})
	if err != nil {
		return credentials.STSService{}, err
	}
	o := client.Options()
	s := credentials.STSService{
		Endpoint:  aws.ToString(o.BaseEndpoint),
		Region:    o.Region,
		CA:        b.ca,
		FIPS:      o.EndpointOptions.UseFIPSEndpoint == aws.FIPSEndpointStateEnabled,
		DualStack: o.EndpointOptions.UseDualStackEndpoint == aws.DualStackEndpointStateEnabled,
	}
	at, err := o.EndpointResolverV2.ResolveEndpoint(ctx, sts.EndpointParameters{Region: &s.Region, Endpoint: o.BaseEndpoint, UseFIPS: &s.FIPS,
		UseDualStack: &s.DualStack})
	if err != nil {
		return s, fault.Errorf(fault.Precondition, "%s: no token service in region %s; correct region or sts.region of the backend: %w", b, s.Region, err)
	}
	proxyOf, err := b.proxyFunc(c.proxy)
	if err != nil {
		return s, err
	}
	proxy, err := proxyOf(&http.Request{URL: &at.URI})
	if err != nil {
		return s, fault.Errorf(fault.Precondition, "the proxy in the driver's environment (HTTPS_PROXY, HTTP_PROXY) is not a URL")
	}
	if proxy != nil {
		s.Proxy = proxy.String()
	}
	return s, nil
}
