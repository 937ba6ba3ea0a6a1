package check

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/sts"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

const (
	// stsBound is what one question to a token service may take.
	stsBound = 15 * time.Second
	// sessionName is what the service's log shows.
	sessionName = "s3csi.check"
	// nobody is a role that there is not, for a token that is not valid.
	nobody = "arn:aws:iam::000000000000:role/s3-csi-check"
	// noToken looks like a service account's token (RFC 7519) and is signed by nobody.
	noToken = "eyJhbGciOiJSUzI1NiIsInR5cCI6IkpXVCJ9.eyJpc3MiOiJodHRwczovL3MzLWNzaS1jaGVjay5pbnZhbGlkIiwic3ViIjoiczMtY3NpLWNoZWNrIn0.AAAA" //nolint:gosec // see above
)

// stsTrial is the trial of a token service.
type stsTrial struct {
	*trial
	client *sts.Client
	// order is one that has been seen to work, for a session without a policy; zero: there is none.
	order credentials.Order
	// odd is the code with which the service answers to an action that it does not have, where another one would do; "": it is not known.
	odd string
}

func (t *trial) sessionThings() []thing {
	required := t.be.Scope == volume.ScopeRequired
	return []thing{
		{"callerIdentity", "STS GetCallerIdentity", false},
		{"assumeRole", "STS AssumeRole", false},
		{"webIdentity", "STS AssumeRoleWithWebIdentity", false},
		{"federationToken", "STS GetFederationToken", false},
		{"leastSession", "the shortest session", false},
		{"sessions", "volumes with the driver's credentials get sessions", required},
		{"sessionPolicies", "session policies are enforced", required},
	}
}

// sessions tries the backend's token service, declared or not, and what its sessions are good for.
func (t *trial) sessions(ctx context.Context) {
	things := t.sessionThings()
	client, err := t.Clients.STS(ctx, t.be, t.keys)
	if err != nil {
		t.unknown(one(err), things...)
		return
	}
	s := &stsTrial{trial: t, client: client}
	tries := map[string]func(context.Context, thing) Row{
		"callerIdentity": s.callerIdentity, "assumeRole": s.assumeRole, "webIdentity": s.webIdentity, "federationToken": s.federationToken,
		"leastSession": s.leastSession, "sessions": s.planned, "sessionPolicies": s.enforced,
	}
	for _, what := range things {
		if ctx.Err() != nil {
			t.unknown("the check was stopped before", what)
			continue
		}
		t.add(tries[what.check](ctx, what))
	}
}

// asked tells what an answer says about an action: that it is there and did what was asked, that it is there, or neither.
func asked(what thing, err error, doing string) Row {
	if err == nil {
		return what.row(Yes, "", "")
	}
	why := one(backend.Classify(err, doing))
	switch code := backend.ErrorCode(err); {
	case code == "":
		return what.row(Unknown, why, "")
	case isInput(code), code == "AccessDenied", code == "AccessDeniedException":
		return what.row(Unknown, "it is not made for these credentials: "+why, "")
	}
	return what.row(No, why, "")
}

// isInput tells the codes of a token service that knows the action and not what it was asked with (STS API Reference, "Common
// Errors" and the errors of each action; MinIO's).
func isInput(code string) bool {
	switch code {
	case "ExpiredToken", "ExpiredTokenException", "ValidationError", "ValidationException", "InvalidParameterValue", "MissingParameter", "InvalidClientTokenId", "STSNotInitialized":
		return true
	}
	return false
}

func (s *stsTrial) bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, stsBound)
}

func (s *stsTrial) callerIdentity(ctx context.Context, what thing) Row {
	ctx, cancel := s.bounded(ctx)
	defer cancel()
	out, err := s.client.GetCallerIdentity(ctx, &sts.GetCallerIdentityInput{})
	row := asked(what, err, "asking who the caller is")
	if code := backend.ErrorCode(err); isInput(code) && code != "InvalidClientTokenId" && !strings.HasPrefix(code, "ExpiredToken") {
		s.odd, row.Result = code, No // it has no input that could be wrong
		row.Why = one(backend.Classify(err, "asking who the caller is"))
	}
	switch {
	case err == nil && aws.ToString(out.Account) != "":
		row.Why = "account " + aws.ToString(out.Account) + ": buckets of other accounts are refused unless a volume names their owner"
	case err == nil:
		row.Result, row.Why = No, "the service names no account"
	case s.be.ExpectedBucketOwner == "":
		row.Why += "; buckets are used whoever owns them"
	}
	return row
}

func (s *stsTrial) assumeRole(ctx context.Context, what thing) Row {
	role := s.be.ControllerRoleARN
	if role == "" && s.be.AWS() {
		return what.row(Unknown, "the backend has no controllerRoleARN to try it with", "")
	}
	ctx, cancel := s.bounded(ctx)
	defer cancel()
	_, err := s.client.AssumeRole(ctx, &sts.AssumeRoleInput{RoleArn: &role, RoleSessionName: aws.String(sessionName)})
	row := asked(what, err, "taking on a role")
	if err != nil {
		return row
	}
	s.works(credentials.AssumeRole, role)
	row.Why = "role " + role
	if role == "" {
		row.Why = "without a role (roleOptional)"
	}
	return s.undeclared(row, credentials.AssumeRole)
}

// works notes a way to a session.
func (s *stsTrial) works(kind credentials.Kind, role string) {
	if s.order.IsZero() {
		s.order = credentials.Order{Kind: kind, Keys: s.keys, RoleARN: role, Name: sessionName, Backend: s.be.String()}
	}
}

// undeclared adds what to do about a way to sessions that the operator has not declared.
func (s *stsTrial) undeclared(row Row, kind credentials.Kind) Row {
	switch {
	case s.be.Makes(kind) && (kind != credentials.AssumeRole || s.be.AWS() || s.be.ControllerRoleARN != "" || s.be.RoleOptional()):
	case s.be.STS == nil && kind == credentials.AssumeRole && s.be.ControllerRoleARN == "":
		row.Advice = "set sts: {roleOptional: true} for the backend in the driver's config file to have it used"
	case s.be.STS == nil:
		row.Advice = "set sts for the backend in the driver's config file to have it used"
	case s.be.Makes(kind):
		row.Advice = "set sts.roleOptional: true for the backend in the driver's config file to have it used without roles"
	default:
		row.Advice = "add " + string(kind) + " to the backend's sts.kinds in the driver's config file to have it used"
	}
	return row
}

func (s *stsTrial) webIdentity(ctx context.Context, what thing) Row {
	role := s.be.WorkloadRoleARN
	if role == "" || volume.Role(role).Templated() {
		role = nobody
	}
	ctx, cancel := s.bounded(ctx)
	defer cancel()
	_, err := s.client.AssumeRoleWithWebIdentity(ctx, &sts.AssumeRoleWithWebIdentityInput{RoleArn: &role, RoleSessionName: aws.String(sessionName), WebIdentityToken: aws.String(noToken)})
	if err == nil {
		what.needed = true
		return what.row(No, "the service gives a session for a token that nobody signed", "do not use this service's STS: take sts out of the backend")
	}
	switch backend.ErrorCode(err) {
	case "InvalidIdentityToken", "InvalidIdentityTokenException", "IDPRejectedClaim", "IDPCommunicationError", "ExpiredToken", "ExpiredTokenException":
		return s.undeclared(what.row(Yes, "it refuses a token that nobody signed; whether it takes your cluster's the first volume with credentials: workload shows", ""), credentials.WebIdentity)
	case "InvalidParameterValue": // MinIO's, of a role that no identity provider is configured for, and of a token
		return what.row(Unknown, "the service has it; whether it takes your cluster's tokens the first volume with credentials: workload shows: "+one(backend.Classify(err, "exchanging a token that nobody signed")), "")
	}
	return asked(what, err, "exchanging a token that nobody signed")
}

func (s *stsTrial) federationToken(ctx context.Context, what thing) Row {
	if s.keys.SessionToken != "" {
		return what.row(Unknown, "it is for keys of a user, and the driver's own are a session's", "")
	}
	ctx, cancel := s.bounded(ctx)
	defer cancel()
	_, err := s.client.GetFederationToken(ctx, &sts.GetFederationTokenInput{Name: aws.String(sessionName), DurationSeconds: aws.Int32(int32(time.Hour / time.Second))})
	row := asked(what, err, "asking for a federation token")
	if err == nil {
		s.works(credentials.FederationToken, "")
		row = s.undeclared(row, credentials.FederationToken)
	} else if s.odd != "" && backend.ErrorCode(err) == s.odd {
		row.Result, row.Why = No, one(backend.Classify(err, "asking for a federation token"))
	}
	return row
}

// leastSession finds the shortest session of a few. On AWS it is documented (STS API Reference, AssumeRole).
func (s *stsTrial) leastSession(ctx context.Context, what thing) Row {
	if s.be.AWS() {
		return what.row(Yes, "15m, as AWS documents", "")
	}
	if s.order.IsZero() {
		return what.row(Unknown, "no session could be made", "")
	}
	var last error
	for _, d := range []time.Duration{time.Second, 10 * time.Second, time.Minute, 5 * time.Minute, 15 * time.Minute, time.Hour} {
		if last = s.lasting(ctx, d); last == nil {
			return what.row(Yes, fmt.Sprintf("%s is given; a volume's sessionDuration can be as short", short(d)), "")
		}
		if backend.ErrorCode(last) == "" {
			break
		}
	}
	return failed(what, last, "asking for sessions of different lengths")
}

func (s *stsTrial) lasting(ctx context.Context, d time.Duration) error {
	ctx, cancel := s.bounded(ctx)
	defer cancel()
	seconds := aws.Int32(int32(d / time.Second))
	if s.order.Kind == credentials.FederationToken {
		_, err := s.client.GetFederationToken(ctx, &sts.GetFederationTokenInput{Name: aws.String(sessionName), DurationSeconds: seconds})
		return err
	}
	_, err := s.client.AssumeRole(ctx, &sts.AssumeRoleInput{RoleArn: &s.order.RoleARN, RoleSessionName: aws.String(sessionName), DurationSeconds: seconds})
	return err
}

// short is a duration without the zeros at its end.
func short(d time.Duration) string {
	switch {
	case d >= time.Hour:
		return fmt.Sprintf("%dh", d/time.Hour)
	case d >= time.Minute:
		return fmt.Sprintf("%dm", d/time.Minute)
	}
	return fmt.Sprintf("%ds", d/time.Second)
}

// planned tells what a volume with credentials: driver would get as things are configured.
func (s *stsTrial) planned(ctx context.Context, what thing) Row {
	if s.info.Name == "" {
		return what.row(Unknown, "there is no bucket to try it in", "")
	}
	o, err := s.plan(ctx)
	switch {
	case fault.Is(err, fault.Precondition):
		return what.row(No, one(err), "")
	case err != nil:
		return what.row(Unknown, one(err), "")
	case o.Kind == credentials.AsIs && s.be.Scope == volume.ScopeOff:
		return what.row(No, "the backend says scope: off: every client has the driver's own keys", "")
	case o.Kind == credentials.AsIs:
		how := "declare the backend's token service with sts"
		if s.be.AWS() || s.be.STS != nil {
			how = "name a role with roleARN in the volumes and controllerRoleARN on the backend"
		}
		return what.row(No, "no way to make them is configured: every client has the driver's own keys, and can reach all that they can",
			how+", or give each volume a secret of its own; scope: required makes sure that no volume goes without")
	}
	return what.row(Yes, "of kind "+string(o.Kind), "")
}
