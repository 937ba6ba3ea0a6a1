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

func (b Backend) checkPodIdentityAgent(place string) error {
	if b.PodIdentityAgent == "" {
		return nil
	}
	if !b.AWS() {
		return fault.Field(place, "is only for AWS, because other services do not accept credentials of EKS Pod Identity")
	}
	if err := CheckAgent(b.PodIdentityAgent); err != nil {
		return fault.Field(place, "%w", err)
	}
	return nil
}

// checkSTS checks the token service, and sorts its kinds for Revision.
func (b Backend) checkSTS(place func(key string) string) (err error) {
	s := b.STS
	if s == nil {
		return nil
	}
	if s.Endpoint, err = checkEndpoint(place("sts.endpoint"), s.Endpoint); err != nil {
		return err
	}
	if err := checkRegion(place("sts.region"), s.Region); err != nil {
		return err
	}
	for i, kind := range s.Kinds {
		if err := oneOf(place("sts.kinds"), kind, credentials.AssumeRole, credentials.WebIdentity, credentials.FederationToken); err != nil {
			return err
		}
		if slices.Contains(s.Kinds[:i], kind) {
			return fault.Field(place("sts.kinds"), "has %s twice", kind)
		}
	}
	slices.Sort(s.Kinds)
	for _, c := range s.Audience {
		if c <= ' ' || c > '~' || len(s.Audience) > maxAudience {
			return fault.Field(place("sts.audience"), "is not an audience: at most %d printable characters without spaces", maxAudience)
		}
	}
	switch {
	case s.Audience == credentials.PodIdentityAudience:
		return fault.Field(place("sts.audience"), "is the audience of EKS Pod Identity, whose tokens are for its agent, not for STS")
	case s.RoleOptional && b.AWS():
		return fault.Field(place("sts.roleOptional"), "is for services where AssumeRole needs no role, such as MinIO; AWS needs one")
	}
	return nil
}

// roleForm is whether a role of the config may have templates.
type roleForm bool

const (
	templates   roleForm = true
	noTemplates roleForm = false
)

// checkRole checks a role of the config; "" is none.
func (b Backend) checkRole(place, arn string, form roleForm) error {
	if arn == "" {
		return nil
	}
	role := volume.Role(arn)
	err := role.Check()
	if err == nil && role.Templated() && form == noTemplates {
		err = errors.New("must not contain templates, because there is no pod")
	}
	if err == nil {
		err = CheckTemplates(arn)
	}
	if err == nil {
		var expanded string
		if expanded, err = role.Expand("x", "x"); err == nil {
			err = b.CheckRole(expanded)
		}
	}
	if err != nil {
		return fault.Field(place, "%w", err)
	}
	return nil
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
			return errors.New("could be the same role for two pods; put a . after ${pod.namespace}, or a / or _ between the templates, so that namespace a-b with " +
				"service account c differs from namespace a with b-c")
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
