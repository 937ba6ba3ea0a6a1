package backend

import (
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

// Makes tells whether the backend's token service makes sessions of that kind, as the operator says. AWS's makes all; another
// makes what is declared, and where only sts is, those that are common: assumeRole and webIdentity.
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

// Audience is that of the service accounts' tokens that may be sent to the backend's token service; "": none may.
func (b Backend) Audience() string {
	switch {
	case b.STS != nil && b.STS.Audience != "":
		return b.STS.Audience
	case b.AWS():
		return awsAudience
	}
	return ""
}

// Audiences are those of all tokens that this backend has use for.
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

// RoleOptional tells whether the token service makes sessions without being told a role.
func (b Backend) RoleOptional() bool { return b.STS != nil && b.STS.RoleOptional }

// AgentURI is where EKS Pod Identity's agent answers.
func (b Backend) AgentURI() string {
	if b.PodIdentityAgent != "" {
		return b.PodIdentityAgent
	}
	return podIdentityAgent
}

// Addresses are those of the backend's services, as far as its configuration has them as addresses, and that of EKS Pod Identity's
// agent for mounts whose credentials can be from there: their helpers ask it for each new session.
func (b Backend) Addresses(source string) []netip.Addr {
	urls := []string{b.Endpoint}
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
			continue // the configuration was read: it is no URL with an address
		}
		if a, err := netip.ParseAddr(u.Hostname()); err == nil {
			all = append(all, a.Unmap().WithZone(""))
		}
	}
	return all
}

// Partition is the part of AWS that the backend's region is in, as ARNs name it; other services write "aws".
func (b Backend) Partition() string {
	if !b.AWS() {
		return "aws"
	}
	return partitionOf(b.StartRegion())
}

// partitionOf is the partition of AWS that a region is in.
func partitionOf(region string) string {
	// AWS General Reference, "AWS service endpoints"; the SDK knows the same by these beginnings.
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

// ScopeOf is the scope of a volume that asks for wanted ("" asks for nothing). A volume can ask for more than its backend says
// and never for less; the error is a Precondition.
func (b Backend) ScopeOf(wanted string) (string, error) {
	rank := map[string]int{volume.ScopeOff: 1, volume.ScopeAuto: 2, volume.ScopeRequired: 3}
	switch {
	case wanted == "" && b.Scope == "":
		return volume.ScopeAuto, nil
	case wanted == "":
		return b.Scope, nil
	case rank[wanted] == 0:
		return "", fault.Field("scope", "is %q, must be %s, %s or %s", Clip(wanted, 32), volume.ScopeRequired, volume.ScopeAuto, volume.ScopeOff)
	case b.Scope != "" && rank[wanted] < rank[b.Scope]:
		return "", fault.Errorf(fault.Precondition, "the volume says scope: %s, but %s demands at least scope: %s: take it out of the volume, or change scope of the backend in the driver's config file", wanted, b, b.Scope)
	}
	return wanted, nil
}

// STSService is how the backend's token service is reached, also from another process: with the CA certificates, the proxy
// that the driver's environment names, and on AWS what that says about endpoints. Errors are Precondition.
func (c *Clients) STSService(ctx context.Context, b Backend) (credentials.STSService, error) {
	ca, err := b.CA()
	if err != nil {
		return credentials.STSService{}, err
	}
	client, err := c.sts(ctx, b, credentials.Keys{})
	if err != nil {
		return credentials.STSService{}, err
	}
	o := client.Options()
	s := credentials.STSService{
		Endpoint:  aws.ToString(o.BaseEndpoint),
		Region:    o.Region,
		CA:        ca,
		FIPS:      o.EndpointOptions.UseFIPSEndpoint == aws.FIPSEndpointStateEnabled,
		DualStack: o.EndpointOptions.UseDualStackEndpoint == aws.DualStackEndpointStateEnabled,
	}
	at, err := o.EndpointResolverV2.ResolveEndpoint(ctx, sts.EndpointParameters{Region: &s.Region, Endpoint: o.BaseEndpoint, UseFIPS: &s.FIPS, UseDualStack: &s.DualStack})
	if err != nil {
		return s, fault.Errorf(fault.Precondition, "%s: there is no token service to ask in region %s: correct region or sts.region of the backend: %w", b, s.Region, err)
	}
	proxy, err := c.proxy(&http.Request{URL: &at.URI})
	if err != nil {
		return s, fault.Errorf(fault.Precondition, "the driver's environment names a proxy (HTTPS_PROXY, HTTP_PROXY) that is no URL")
	}
	if proxy != nil {
		s.Proxy = proxy.String()
	}
	return s, nil
}
