package credentials

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"slices"
	"strings"
	"time"
)

// Kind is how a session is made.
type Kind string

// The kinds. All but AsIs ask a security token service (STS API Reference, "Actions").
const (
	AsIs            Kind = "asIs"            // the keys of the order themselves: no session is made
	AssumeRole      Kind = "assumeRole"      // signed with the order's keys
	WebIdentity     Kind = "webIdentity"     // AssumeRoleWithWebIdentity with the order's token, which needs no keys
	FederationToken Kind = "federationToken" // GetFederationToken, for the keys of an IAM user
	PodIdentity     Kind = "podIdentity"     // EKS Pod Identity's agent for the order's token, then AssumeRole where RoleARN is given
)

// Order is all that a mount's sessions are made from, again and again: it can be given to another process. It is secret as a
// whole, and formats as its kind and role.
type Order struct {
	Kind  Kind   `json:"kind"`
	Keys  Keys   `json:"keys,omitzero"`
	Token string `json:"token,omitempty"` // a service account's, of WebIdentity and PodIdentity
	// RoleARN is the role to take on; "" where the kind needs none.
	RoleARN string `json:"roleARN,omitempty"`
	// Name is the role session's name, which the cloud's audit log shows.
	Name string `json:"name,omitempty"`
	// Policy is the session policy, as JSON; "": the session may do all that the role may.
	Policy   string        `json:"policy,omitempty"`
	Duration time.Duration `json:"duration,omitempty"` // 0: the service's default
	STS      STSService    `json:"sts,omitzero"`
	// AgentURI is where EKS Pod Identity's agent answers.
	AgentURI string `json:"agentURI,omitempty"`
	// Backend names the S3 service in messages.
	Backend string `json:"backend,omitempty"`
}

// Class names whose sessions the order makes, and how, without their policy: orders of one class can do the same before it.
// Nothing secret is in it.
func (o Order) Class() string {
	class := string(o.Kind) + " " + o.RoleARN
	if o.Keys.SessionToken == "" { // else the id is new with each session
		class += " " + o.Keys.AccessKeyID
	}
	return class
}

// STSService is how a security token service is reached.
type STSService struct {
	Endpoint string `json:"endpoint,omitempty"` // URL; "" is AWS's of Region
	Region   string `json:"region,omitempty"`
	CA       string `json:"ca,omitempty"` // PEM certificates to trust beside the system's
	// FIPS and DualStack choose among AWS's own endpoints.
	FIPS      bool `json:"fips,omitempty"`
	DualStack bool `json:"dualStack,omitempty"`
	// Proxy is the URL of an HTTP proxy on the way there, perhaps with a password; "" is none.
	Proxy string `json:"proxy,omitempty"`
}

// String shows nothing secret.
func (o Order) String() string { return "Order(" + string(o.Kind) + " " + o.RoleARN + ")" }

// GoString keeps %#v from printing secrets.
func (o Order) GoString() string { return o.String() }

// password is what stands with the user in the proxy's URL, if anything does.
func (s STSService) password() string {
	_, rest, _ := strings.Cut(s.Proxy, "://")
	user, _, found := strings.Cut(rest, "@")
	if !found {
		return ""
	}
	_, password, _ := strings.Cut(user, ":")
	return password
}

// IsZero tells whether there is no order.
func (o Order) IsZero() bool { return o.Kind == "" }

// Secrets are the values that must not be shown anywhere.
func (o Order) Secrets() []string {
	return slices.DeleteFunc([]string{o.Keys.SecretAccessKey, o.Keys.SessionToken, o.Token, o.STS.password()}, func(s string) bool { return s == "" })
}

// Digest is an opaque name of the order under somebody's random salt: equal orders have equal digests, and nothing can be
// learnt from it without the salt, nor, as long as the order's secrets cannot be guessed, with it. No order has none: "".
func (o Order) Digest(salt []byte) string {
	if o.IsZero() {
		return ""
	}
	o.Keys.Expires = o.Keys.Expires.UTC() // the same moment in another zone is the same
	body, err := json.Marshal(o)
	if err != nil {
		return "" // a year beyond 9999: no digest is one's own, so nobody takes it for known
	}
	mac := hmac.New(sha256.New, salt)
	mac.Write(body)
	return hex.EncodeToString(mac.Sum(nil)[:16])
}
