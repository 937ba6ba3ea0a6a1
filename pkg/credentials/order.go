package credentials

import (
	"encoding/json"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// Kind is how a session is made.
type Kind string

// The kinds. All but AsIs ask a security token service (STS API Reference, "Actions").
const (
	AsIs            Kind = "asIs"            // the order's keys themselves, without a session
	AssumeRole      Kind = "assumeRole"      // signed with the order's keys
	WebIdentity     Kind = "webIdentity"     // AssumeRoleWithWebIdentity with the order's token, which needs no keys
	FederationToken Kind = "federationToken" // GetFederationToken, for the keys of an IAM user
	PodIdentity     Kind = "podIdentity"     // EKS Pod Identity's agent for the order's token, then AssumeRole where RoleARN is given
)

// Order is everything from which a mount's sessions are made, also by another process. It is secret as a whole and formats as
// its kind and role.
type Order struct {
	Kind  Kind   `json:"kind"`
	Keys  Keys   `json:"keys,omitzero"`
	Token string `json:"token,omitempty"` // a service account's, of WebIdentity and PodIdentity
	// RoleARN is the role to assume; "" if the kind needs none.
	RoleARN string `json:"roleARN,omitempty"`
	// Name is the role session's name, which the cloud's audit log shows.
	Name string `json:"name,omitempty"`
	// Policy is the session policy, as JSON; "": the session has all permissions of the role.
	Policy   string        `json:"policy,omitempty"`
	Duration time.Duration `json:"duration,omitempty"` // 0: the service's default
	STS      STSService    `json:"sts,omitzero"`
	// AgentURI is the URL of EKS Pod Identity's agent.
	AgentURI string `json:"agentURI,omitempty"`
	// Backend names the S3 service in messages.
	Backend string `json:"backend,omitempty"`
}

// Class names the identity and the kind of the order's sessions: without a policy, sessions of one class have the same
// permissions. It is not secret.
func (o Order) Class() string {
	class := string(o.Kind) + " " + o.RoleARN
	if o.Keys.SessionToken == "" { // else the id changes with each session
		class += " " + o.Keys.AccessKeyID
	}
	return class
}

// STSService is how to reach a security token service.
type STSService struct {
	Endpoint string `json:"endpoint,omitempty"` // URL; "" is AWS's of Region
	Region   string `json:"region,omitempty"`
	CA       string `json:"ca,omitempty"` // PEM certificates to trust in addition to the system's
	// FIPS and DualStack choose among AWS's own endpoints.
	FIPS      bool `json:"fips,omitempty"`
	DualStack bool `json:"dualStack,omitempty"`
	// Proxy is the URL of an HTTP proxy, possibly with a password; "": none.
	Proxy string `json:"proxy,omitempty"`
}

// String shows nothing secret.
func (o Order) String() string { return "Order(" + string(o.Kind) + " " + o.RoleARN + ")" }

// GoString keeps %#v from printing secrets.
func (o Order) GoString() string { return o.String() }

// passwords returns the password in the proxy's URL as it is there and, if that differs, as it is sent; without one they are "".
func (s STSService) passwords() (written, sent string) {
	_, rest, _ := strings.Cut(s.Proxy, "://")
	user, _, found := strings.Cut(rest, "@")
	if !found {
		return "", ""
	}
	_, written, _ = strings.Cut(user, ":")
	if sent, err := url.PathUnescape(written); err == nil && sent != written {
		return written, sent
	}
	return written, ""
}

// IsZero reports whether there is no order.
func (o Order) IsZero() bool { return o.Kind == "" }

// Secrets returns the values that must not be shown.
func (o Order) Secrets() []string {
	written, sent := o.STS.passwords()
	return slices.DeleteFunc([]string{o.Keys.SecretAccessKey, o.Keys.SessionToken, o.Token, written, sent}, func(s string) bool { return s == "" })
}

// Reply is the answer of a process that got an order: keys or an error.
type Reply struct {
	Keys  *Keys          `json:"keys,omitempty"`
	Error *fault.Message `json:"error,omitempty"`
}

// Digest returns an opaque name of the order: equal orders have equal digests under one salt, and a digest reveals nothing without
// the salt, nor with it as long as the secrets cannot be guessed. Without an order it is "".
func (o Order) Digest(salt []byte) string {
	if o.IsZero() {
		return ""
	}
	o.Keys.Expires = o.Keys.Expires.UTC() // equal moments must have equal digests
	body, err := json.Marshal(o)
	if err != nil {
		return "" // a year after 9999: "" equals no digest
	}
	return digest(salt, string(body))
}
