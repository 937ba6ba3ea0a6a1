package backend

import (
	"encoding/json"
	"errors"
	"net/netip"
	"net/url"
	"slices"
	"strings"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

const (
	// awsAudience is the default audience of service accounts' tokens for AWS's STS (Amazon EKS User Guide, "IAM roles for
	// service accounts").
	awsAudience = "sts.amazonaws.com"
	// maxAudience bounds an audience in bytes, like IAM's client ids of an identity provider.
	maxAudience = 255
	// podIdentityAgent is the URL of EKS Pod Identity's agent on nodes (Amazon EKS User Guide, "Understand how EKS Pod Identity
	// works").
	podIdentityAgent = "http://169.254.170.23/v1/credentials"
	// podIdentityAgent6 is its address on nodes of IPv6 clusters. It is allowed although it is not link-local.
	podIdentityAgent6 = "fd00:ec2::23"
)

// fileScope is the key scope. YAML reads an unquoted off as false.
type fileScope string

// UnmarshalJSON implements json.Unmarshaler.
func (s *fileScope) UnmarshalJSON(raw []byte) error {
	if string(raw) == "false" {
		*s = volume.ScopeOff
		return nil
	}
	return json.Unmarshal(raw, (*string)(s))
}

// sessions reads the settings of sessions and their rules.
func (f fileBackend) sessions(b *Backend, place func(key string) string) error {
	if err := f.sts(b, place); err != nil {
		return err
	}
	switch f.Scope {
	case "", volume.ScopeOff, volume.ScopeAuto, volume.ScopeRequired:
		b.Scope = string(f.Scope)
	default:
		return fault.Field(place("scope"), "is %q, must be %s, %s or %s", Clip(string(f.Scope), 32), volume.ScopeRequired, volume.ScopeAuto, volume.ScopeOff)
	}
	for _, role := range []struct {
		key, value string
		to         *string
		templates  bool
	}{
		{"workloadRoleARN", f.WorkloadRoleARN, &b.WorkloadRoleARN, true},
		{"controllerRoleARN", f.ControllerRoleARN, &b.ControllerRoleARN, false},
	} {
		if role.value == "" {
			continue
		}
		if err := checkRole(*b, role.value, role.templates); err != nil {
			return fault.Field(place(role.key), "%w", err)
		}
		*role.to = role.value
	}
	if f.PodIdentityAgent != "" {
		if !b.AWS() {
			return fault.Field(place("podIdentityAgent"), "is only for AWS, because other services do not accept credentials of EKS Pod Identity")
		}
		if err := CheckAgent(f.PodIdentityAgent); err != nil {
			return fault.Field(place("podIdentityAgent"), "%w", err)
		}
		b.PodIdentityAgent = f.PodIdentityAgent
	}
	var err error
	b.Allow, err = newAllow(f.Allow, place("allow"))
	return err
}

func (f fileBackend) sts(b *Backend, place func(key string) string) (err error) {
	if f.STS == nil {
		return nil
	}
	b.STS = &STS{Region: f.STS.Region, Audience: f.STS.Audience, RoleOptional: f.STS.RoleOptional}
	if b.STS.Endpoint, err = checkEndpoint(place("sts.endpoint"), f.STS.Endpoint); err != nil {
		return err
	}
	if err := checkRegion(place("sts.region"), f.STS.Region); err != nil {
		return err
	}
	for _, kind := range f.STS.Kinds {
		switch k := credentials.Kind(kind); k {
		case credentials.AssumeRole, credentials.WebIdentity, credentials.FederationToken:
			if slices.Contains(b.STS.Kinds, k) {
				return fault.Field(place("sts.kinds"), "has %s twice", k)
			}
			b.STS.Kinds = append(b.STS.Kinds, k)
		default:
			return fault.Field(place("sts.kinds"), "%q must be one of %s, %s, %s", Clip(kind, 32), credentials.AssumeRole, credentials.WebIdentity, credentials.FederationToken)
		}
	}
	slices.Sort(b.STS.Kinds) // for Revision
	for _, c := range f.STS.Audience {
		if c <= ' ' || c > '~' || len(f.STS.Audience) > maxAudience {
			return fault.Field(place("sts.audience"), "is not an audience: at most %d printable characters without spaces", maxAudience)
		}
	}
	switch {
	case f.STS.Audience == credentials.PodIdentityAudience:
		return fault.Field(place("sts.audience"), "is the audience of EKS Pod Identity, whose tokens are for its agent, not for STS")
	case f.STS.RoleOptional && b.AWS():
		return fault.Field(place("sts.roleOptional"), "is for services where AssumeRole needs no role, such as MinIO; AWS needs one")
	}
	return nil
}

// checkRole checks a role of the config.
func checkRole(b Backend, arn string, templates bool) error {
	role := volume.Role(arn)
	if err := role.Check(); err != nil {
		return err
	}
	if role.Templated() && !templates {
		return errors.New("must not contain templates, because there is no pod")
	}
	if err := CheckTemplates(arn); err != nil {
		return err
	}
	expanded, err := role.Expand("x", "x")
	if err != nil {
		return err
	}
	return b.CheckRole(expanded)
}

// CheckRole refuses an ARN that is not of a role of this backend's service. The error continues a sentence about the ARN.
func (b Backend) CheckRole(arn string) error {
	role, err := credentials.ParseRole(arn)
	if err != nil {
		return err
	}
	if b.AWS() && (role.Account == "" || !strings.HasPrefix(role.Partition, "aws")) {
		return errors.New("is not a role of AWS, as arn:aws:iam::111122223333:role/name is")
	}
	return nil
}

// CheckTemplates refuses a role that could expand to the same name for two pods: ${pod.namespace} and ${pod.serviceAccountName}
// must be separated by a character that neither can contain, so that "a-b" and "c" differ from "a" and "b-c". The error
// continues a sentence about the role.
func CheckTemplates(role string) error {
	pieces := strings.Split(role, "${")
	for i := 1; i+1 < len(pieces); i++ {
		name, between, _ := strings.Cut(pieces[i], "}")
		next, _, _ := strings.Cut(pieces[i+1], "}")
		if name == next { // the same value twice
			continue
		}
		holds := "abcdefghijklmnopqrstuvwxyz0123456789-" // a namespace is a DNS label
		if !strings.HasSuffix(name, "namespace") {
			holds += "." // a service account is a DNS name
		}
		if strings.Trim(between, holds) == "" {
			return errors.New("could be the same role for two pods; put a . after ${pod.namespace}, or a / or _ between the templates, so that namespace a-b with service account c differs from namespace a with b-c")
		}
	}
	return nil
}

// CheckAgent refuses a URL of EKS Pod Identity's agent that is not on this machine, so that tokens for it stay on the node. The
// error continues a sentence about the URL.
func CheckAgent(uri string) error {
	u, err := url.Parse(uri)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.User != nil || u.RawQuery != "" || u.ForceQuery || strings.Contains(uri, "#") {
		return errors.New("must be a URL with scheme, address, port and path only")
	}
	ip, err := netip.ParseAddr(u.Hostname())
	if err != nil || ip.Zone() != "" || !ip.IsLoopback() && !ip.IsLinkLocalUnicast() && ip != netip.MustParseAddr(podIdentityAgent6) {
		return errors.New("must have a loopback or link-local address (or " + podIdentityAgent6 + "), because a token for the agent must not leave the node")
	}
	return nil
}
