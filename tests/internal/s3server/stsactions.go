package s3server

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/versity/versitygw/iamapi/policy"
	"github.com/versity/versitygw/iamapi/types"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
)

// The limits of the API (STS API Reference).
const (
	maxPolicy           = 2048 // characters
	leastDuration       = time.Second
	longestRole         = 12 * time.Hour
	longestFederation   = 36 * time.Hour
	longestChained      = time.Hour
	defaultDuration     = time.Hour
	defaultFederation   = 12 * time.Hour
	longestFederateName = 32
)

var sessionName = regexp.MustCompile(`^[\w+=,.@-]{2,64}$`)

// Role is what a session can be made of.
type Role struct {
	Name string `json:"name"`
	// Policy is the IAM policy document that says what the role may; "": nothing.
	Policy string `json:"policy"`
	Trust  Trust  `json:"trust"`
	// MaxDuration bounds the role's sessions; 0: as the service's.
	MaxDuration time.Duration `json:"maxDuration,omitempty"`
}

// Trust says who may take on a role.
type Trust struct {
	Users   []string        `json:"users,omitempty"`   // IAM users, by name; "*": all
	Roles   []string        `json:"roles,omitempty"`   // sessions of these roles, by name, may chain
	Issuers []TrustedIssuer `json:"issuers,omitempty"` // tokens
}

// TrustedIssuer says which tokens of an issuer are good for a role.
type TrustedIssuer struct {
	URL       string   `json:"url"`
	Audiences []string `json:"audiences,omitempty"` // one of the token's must be here; none: all that the issuer is known for
	Subjects  []string `json:"subjects,omitempty"`  // patterns, in which * stands for any characters; none: all
}

// service is what the security token service knows and decides.
type service struct {
	store  *store
	region string
	root   credentials.Keys

	mu      sync.Mutex
	roles   map[string]Role // by ARN
	issuers issuers
}

func (s *service) setRole(ctx context.Context, role Role) (arn string, err error) {
	arn, err = s.store.setRole(ctx, role.Name, role.Policy)
	if err != nil {
		return "", err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.roles[arn] = role
	return arn, nil
}

func (s *service) role(arn string) (Role, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	role, ok := s.roles[arn]
	return role, ok
}

// answer does what a call asks for.
func (s *service) answer(ctx context.Context, c *call) (any, error) {
	if v := c.form.Get("Version"); v != "2011-06-15" {
		return nil, &stsError{http.StatusBadRequest, "InvalidAction", "Could not find operation " + c.action() + " for version " + v}
	}
	if c.action() == "AssumeRoleWithWebIdentity" {
		return s.assumeRoleWithWebIdentity(ctx, c)
	}
	who, err := s.caller(ctx, c)
	if err != nil {
		return nil, err
	}
	switch c.action() {
	case "GetCallerIdentity":
		return identityResult{who.arn, who.id, account}, nil
	case "AssumeRole":
		return s.assumeRole(ctx, c, who)
	case "GetFederationToken":
		return s.federationToken(ctx, c, who)
	default:
		return nil, &stsError{http.StatusBadRequest, "InvalidAction", "Could not find operation " + c.action() + " for version 2011-06-15"}
	}
}

func (s *service) assumeRole(ctx context.Context, c *call, who caller) (any, error) {
	arn := c.form.Get("RoleArn")
	role, known := s.role(arn)
	// A role that is not there is refused like one that does not trust the caller.
	if !known || !trusts(role, who) {
		return nil, denied("User: %s is not authorized to perform: sts:AssumeRole on resource: %s", who.arn, arn)
	}
	// A session reaches no further by another session than its own policy allows.
	if who.session != nil && who.session.Policy != "" && !allows(who.session.Policy, "sts:AssumeRole", arn) {
		return nil, denied("User: %s is not authorized to perform: sts:AssumeRole on resource: %s because no session policy allows the sts:AssumeRole action",
			who.arn, arn)
	}
	longest := c.longest(role)
	if who.session != nil && longest > longestChained {
		longest = longestChained
	}
	session, err := s.roleSession(ctx, c, arn, role, longest)
	if err != nil {
		return nil, err
	}
	return roleResult{Credentials: c.keys(session), AssumedRoleUser: assumed(session), PackedPolicySize: packed(session)}, nil
}

// trusts reports whether a role's trust names a caller. As at AWS, the root user takes on no role.
func trusts(role Role, who caller) bool {
	switch {
	case who.user != nil:
		return slices.Contains(role.Trust.Users, who.user.UserName) || slices.Contains(role.Trust.Users, "*")
	case who.session != nil:
		return slices.Contains(role.Trust.Roles, who.session.RoleName)
	default:
		return false
	}
}

// allows reports whether an IAM policy allows an action, as the gateway judges it.
func allows(document, action, resource string) bool {
	return policy.EvaluateIdentityPolicies([]types.PolicyEntry{{PolicyDocument: document}},
		policy.RequestContext{Action: action, Resource: resource}) == policy.DecisionAllow
}

func (s *service) federationToken(ctx context.Context, c *call, who caller) (any, error) {
	if who.user == nil {
		return nil, denied("Cannot call GetFederationToken with session credentials, and the tests' root user does not either")
	}
	name := c.form.Get("Name")
	if !sessionName.MatchString(name) || len(name) > longestFederateName {
		return nil, invalid("1 validation error detected: Value '%s' at 'name' failed to satisfy constraint: Member must have length between 2 and %d and satisfy "+
			"regular expression pattern: [\\w+=,.@-]*", name, longestFederateName)
	}
	document, err := c.policy()
	if err != nil {
		return nil, err
	}
	if document == "" {
		document = nothing // GetFederationToken: without a session policy the session may do nothing
	}
	lasts, err := c.duration(defaultFederation, longestFederation)
	if err != nil {
		return nil, err
	}
	session, err := s.make(ctx, c, types.Session{
		RoleArn: who.user.Arn, RoleName: federated + who.user.UserName, RoleID: who.user.UserID, RoleSessionName: name, Policy: document,
	}, lasts)
	if err != nil {
		return nil, err
	}
	return federationResult{Credentials: c.keys(session), PackedPolicySize: packed(session),
		FederatedUser: federatedUser{account + ":" + name, federatedARN(name)}}, nil
}

func federatedARN(name string) string { return "arn:aws:sts::" + account + ":federated-user/" + name }

func (s *service) assumeRoleWithWebIdentity(ctx context.Context, c *call) (any, error) {
	arn := c.form.Get("RoleArn")
	claims, err := s.issuers.verify(ctx, c.form.Get("WebIdentityToken"))
	if err != nil {
		return nil, err
	}
	role, known := s.role(arn)
	if !known || !slices.ContainsFunc(role.Trust.Issuers, claims.goodFor) {
		return nil, denied("Not authorized to perform sts:AssumeRoleWithWebIdentity")
	}
	session, err := s.roleSession(ctx, c, arn, role, c.longest(role))
	if err != nil {
		return nil, err
	}
	return roleResult{Credentials: c.keys(session), AssumedRoleUser: assumed(session), PackedPolicySize: packed(session),
		Provider: claims.Issuer, Audience: claims.known, Subject: claims.Subject}, nil
}

func (s *service) roleSession(ctx context.Context, c *call, arn string, role Role, longest time.Duration) (*types.Session, error) {
	name := c.form.Get("RoleSessionName")
	if !sessionName.MatchString(name) {
		return nil, invalid("1 validation error detected: Value '%s' at 'roleSessionName' failed to satisfy constraint: Member must satisfy regular expression "+
			"pattern: [\\w+=,.@-]*", name)
	}
	document, err := c.policy()
	if err != nil {
		return nil, err
	}
	lasts, err := c.duration(min(defaultDuration, longest), longest)
	if err != nil {
		return nil, err
	}
	stored, err := s.store.GetRole(ctx, role.Name)
	if err != nil {
		return nil, err
	}
	return s.make(ctx, c, types.Session{
		RoleArn: arn, RoleName: stored.RoleName, RoleID: stored.RoleID, RoleSessionName: name, Policy: document,
	}, lasts)
}

func (s *service) make(ctx context.Context, c *call, session types.Session, lasts time.Duration) (*types.Session, error) {
	token := make([]byte, 150)
	_, _ = rand.Read(token) // never fails, see crypto/rand
	keys := newKeys()
	session.AccessKeyId = "ASIA" + strings.TrimPrefix(keys.AccessKeyID, "AKIA")
	session.SecretAccessKey, session.SessionToken = keys.SecretAccessKey, base64.StdEncoding.EncodeToString(token)
	session.CreateDate = time.Now().UTC()
	session.Expiration = session.CreateDate.Add(lasts) // by this machine's clock, which is the gateway's
	if c.state.IgnorePolicies {
		session.Policy = ""
	}
	c.session = session.RoleSessionName
	return s.store.CreateSession(ctx, session)
}

// keys are a session's as its caller gets them, with times by the service's clock.
func (c *call) keys(s *types.Session) sessionKeys {
	return sessionKeys{s.AccessKeyId, s.SecretAccessKey, s.SessionToken, timestamp(s.Expiration.Add(c.state.ClockOffset))}
}

func assumed(s *types.Session) assumedUser {
	return assumedUser{s.RoleID + ":" + s.RoleSessionName, "arn:aws:sts::" + account + ":assumed-role/" + s.RoleName + "/" + s.RoleSessionName}
}

// packed is a percentage of the limit; AWS's own way to count is not known.
func packed(s *types.Session) int {
	if s.Policy == "" {
		return 0
	}
	return max(1, len(s.Policy)*100/maxPolicy)
}

// policy is the session policy of a call, checked.
func (c *call) policy() (string, error) {
	document := c.form.Get("Policy")
	if c.form.Has("PolicyArns.member.1.arn") {
		return "", invalid("managed policies are not known here")
	}
	if document == "" {
		return "", nil
	}
	if n := len([]rune(document)); n > maxPolicy {
		return "", invalid("1 validation error detected: Value at 'policy' failed to satisfy constraint: Member must have length less than or equal to %d, and it "+
			"has %d", maxPolicy, n)
	}
	if err := policy.Parse(document); err != nil {
		return "", malformed(err)
	}
	var doc policy.Document
	if err := json.Unmarshal([]byte(document), &doc); err != nil {
		return "", malformed(err)
	}
	if c.state.MaxPacked > 0 && len(document) > c.state.MaxPacked {
		return "", &stsError{http.StatusBadRequest, "PackedPolicyTooLarge",
			fmt.Sprintf("Packed size of session tags consumes %d%% of allotted space.", len(document)*100/c.state.MaxPacked)}
	}
	return document, nil
}

func malformed(err error) *stsError {
	return &stsError{http.StatusBadRequest, "MalformedPolicyDocument", err.Error()}
}

// longest is how long a role's sessions may last.
func (c *call) longest(role Role) time.Duration {
	longest := c.state.MaxDuration
	if longest == 0 {
		longest = longestRole
	}
	if role.MaxDuration > 0 {
		longest = min(longest, role.MaxDuration)
	}
	return longest
}

func (c *call) duration(unset, longest time.Duration) (time.Duration, error) {
	text := c.form.Get("DurationSeconds")
	if text == "" {
		return unset, nil
	}
	seconds, err := strconv.Atoi(text)
	if err != nil {
		return 0, invalid("DurationSeconds %q is no number", text)
	}
	lasts, least := time.Duration(seconds)*time.Second, c.state.MinDuration
	if least == 0 {
		least = leastDuration
	}
	if lasts < least || lasts > longest {
		return 0, invalid("1 validation error detected: Value '%d' at 'durationSeconds' failed to satisfy constraint: Member must have value between %d and %d",
			seconds, int(least.Seconds()), int(longest.Seconds()))
	}
	return lasts, nil
}
