package check

import (
	"context"
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
	// stsBound limits one request to a token service.
	stsBound = 15 * time.Second
	// sessionName is the name of sessions in the service's log.
	sessionName = "s3csi.check"
	// noRole is a role that does not exist, for a token that is invalid.
	noRole = "arn:aws:iam::000000000000:role/s3-csi-check"
	// noToken looks like a service account's token (RFC 7519) and has no valid signature.
	noToken = "eyJhbGciOiJSUzI1NiIsInR5cCI6IkpXVCJ9.eyJpc3MiOiJodHRwczovL3MzLWNzaS1jaGVjay5pbnZhbGlkIiwic3ViIjoiczMtY3NpLWNoZWNrIn0.AAAA" //nolint:gosec // see above
)

// stsRun checks a token service.
type stsRun struct {
	*run
	client *sts.Client
	// order is one that worked, for a session without a policy; zero: none did.
	order credentials.Order
	// odd is the unspecific code that the service returns for an unknown action; "": unknown.
	odd string
}

// probes returns what the backend's token service is asked for, even if it is not declared.
func (s *stsRun) probes() []probe {
	required := s.be.Scope == volume.ScopeRequired
	return []probe{
		{item{"callerIdentity", "STS GetCallerIdentity", false}, "", s.callerIdentity},
		{item{"assumeRole", "STS AssumeRole", false}, "", s.assumeRole},
		{item{"webIdentity", "STS AssumeRoleWithWebIdentity", false}, "", s.webIdentity},
		{item{"federationToken", "STS GetFederationToken", false}, "", s.federationToken},
		{item{"leastSession", "the shortest session", false}, "", s.leastSession},
		{item{"sessions", "volumes with the driver's credentials get sessions", required}, "", s.planned},
		{item{"sessionPolicies", "session policies are enforced", required}, "", s.enforced},
	}
}

// asked returns the row for a response: yes if the action worked, unknown if it exists, no otherwise.
func asked(what item, err error, doing string) Row {
	if err == nil {
		return what.row(Yes, "", "")
	}
	why := one(backend.Classify(err, doing))
	switch code := backend.ErrorCode(err); {
	case code == "":
		return what.row(Unknown, why, "")
	case isInput(code), code == "AccessDenied", code == "AccessDeniedException":
		return what.row(Unknown, "not for these credentials: "+why, "")
	}
	return what.row(No, why, "")
}

// isInput reports whether a code means that the service supports the action and rejects its input (STS API Reference, "Common
// Errors" and the errors of each action; MinIO's).
func isInput(code string) bool {
	switch code {
	case "ExpiredToken", "ExpiredTokenException", "ValidationError", "ValidationException", "InvalidParameterValue", "MissingParameter", "InvalidClientTokenId", "STSNotInitialized":
		return true
	}
	return false
}

func (s *stsRun) callerIdentity(ctx context.Context, what item) Row {
	ctx, cancel := context.WithTimeout(ctx, stsBound)
	defer cancel()
	out, err := s.client.GetCallerIdentity(ctx, &sts.GetCallerIdentityInput{})
	row := asked(what, err, "get the caller's identity")
	if code := backend.ErrorCode(err); isInput(code) && code != "InvalidClientTokenId" && !strings.HasPrefix(code, "ExpiredToken") {
		s.odd, row.Result = code, No // it has no input to reject
		row.Why = one(backend.Classify(err, "get the caller's identity"))
	}
	switch {
	case err == nil && aws.ToString(out.Account) != "":
		row.Why = "account " + aws.ToString(out.Account) + "; buckets of other accounts are refused unless a volume has expectedBucketOwner"
	case err == nil:
		row.Result, row.Why = No, "the service returns no account"
	case s.be.ExpectedBucketOwner == "":
		row.Why += "; the owner of buckets is not checked"
	}
	return row
}

func (s *stsRun) assumeRole(ctx context.Context, what item) Row {
	role := s.be.ControllerRoleARN
	if role == "" && s.be.AWS() {
		return what.row(Unknown, "the backend has no controllerRoleARN", "")
	}
	ctx, cancel := context.WithTimeout(ctx, stsBound)
	defer cancel()
	_, err := s.client.AssumeRole(ctx, &sts.AssumeRoleInput{RoleArn: &role, RoleSessionName: aws.String(sessionName)})
	row := asked(what, err, "assume a role")
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

// works records an order that worked.
func (s *stsRun) works(kind credentials.Kind, role string) {
	if s.order.IsZero() {
		s.order = credentials.Order{Kind: kind, Keys: s.keys, RoleARN: role, Name: sessionName, Backend: s.be.String()}
	}
}

// undeclared adds advice for a kind of sessions that is not declared.
func (s *stsRun) undeclared(row Row, kind credentials.Kind) Row {
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

func (s *stsRun) webIdentity(ctx context.Context, what item) Row {
	role := s.be.WorkloadRoleARN
	if role == "" || volume.Role(role).Templated() {
		role = noRole
	}
	ctx, cancel := context.WithTimeout(ctx, stsBound)
	defer cancel()
	_, err := s.client.AssumeRoleWithWebIdentity(ctx, &sts.AssumeRoleWithWebIdentityInput{RoleArn: &role, RoleSessionName: aws.String(sessionName), WebIdentityToken: aws.String(noToken)})
	if err == nil {
		what.needed = true
		return what.row(No, "the service accepts a token with an invalid signature", "do not use this service's STS; remove sts from the backend")
	}
	switch backend.ErrorCode(err) {
	case "InvalidIdentityToken", "InvalidIdentityTokenException", "IDPRejectedClaim", "IDPCommunicationError", "ExpiredToken", "ExpiredTokenException":
		return s.undeclared(what.row(Yes, "it refuses a token with an invalid signature; the first volume with credentials: workload shows whether it accepts your cluster's", ""), credentials.WebIdentity)
	case "InvalidParameterValue": // MinIO's, of a role that no identity provider is configured for, and of a token
		return what.row(Unknown, "the service has it; the first volume with credentials: workload shows whether it accepts your cluster's tokens: "+one(backend.Classify(err, "exchange a token with an invalid signature")), "")
	}
	return asked(what, err, "exchange a token with an invalid signature")
}

func (s *stsRun) federationToken(ctx context.Context, what item) Row {
	if s.keys.SessionToken != "" {
		return what.row(Unknown, "requires keys of a user, but the driver has session keys", "")
	}
	ctx, cancel := context.WithTimeout(ctx, stsBound)
	defer cancel()
	_, err := s.client.GetFederationToken(ctx, &sts.GetFederationTokenInput{Name: aws.String(sessionName), DurationSeconds: aws.Int32(int32(time.Hour / time.Second))})
	row := asked(what, err, "get a federation token")
	if err == nil {
		s.works(credentials.FederationToken, "")
		row = s.undeclared(row, credentials.FederationToken)
	} else if s.odd != "" && backend.ErrorCode(err) == s.odd {
		row.Result, row.Why = No, one(backend.Classify(err, "get a federation token"))
	}
	return row
}

// leastSession finds the shortest of some durations. AWS documents it (STS API Reference, AssumeRole).
func (s *stsRun) leastSession(ctx context.Context, what item) Row {
	if s.be.AWS() {
		return what.row(Yes, "15m, as AWS documents", "")
	}
	if s.order.IsZero() {
		return what.row(Unknown, "no session could be made", "")
	}
	var last error
	for _, try := range []struct {
		d    time.Duration
		text string
	}{{time.Second, "1s"}, {10 * time.Second, "10s"}, {time.Minute, "1m"}, {5 * time.Minute, "5m"}, {15 * time.Minute, "15m"}, {time.Hour, "1h"}} {
		if last = s.lasting(ctx, try.d); last == nil {
			return what.row(Yes, try.text+" is possible; a volume's sessionDuration can be as short", "")
		}
		if backend.ErrorCode(last) == "" {
			break
		}
	}
	return failed(what, last, "get sessions of different durations")
}

func (s *stsRun) lasting(ctx context.Context, d time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, stsBound)
	defer cancel()
	seconds := aws.Int32(int32(d / time.Second))
	if s.order.Kind == credentials.FederationToken {
		_, err := s.client.GetFederationToken(ctx, &sts.GetFederationTokenInput{Name: aws.String(sessionName), DurationSeconds: seconds})
		return err
	}
	_, err := s.client.AssumeRole(ctx, &sts.AssumeRoleInput{RoleArn: &s.order.RoleARN, RoleSessionName: aws.String(sessionName), DurationSeconds: seconds})
	return err
}

// planned returns what volumes with credentials: driver get with the current configuration.
func (s *stsRun) planned(ctx context.Context, what item) Row {
	if s.info.Name == "" {
		return what.row(Unknown, noBucket, "")
	}
	o, err := s.plan(ctx)
	switch {
	case fault.Is(err, fault.Precondition):
		return what.row(No, one(err), "")
	case err != nil:
		return what.row(Unknown, one(err), "")
	case o.Kind == credentials.AsIs && s.be.Scope == volume.ScopeOff:
		return what.row(No, "the backend has scope: off, so every client has the driver's own keys", "")
	case o.Kind == credentials.AsIs:
		how := "declare the backend's token service with sts"
		if s.be.AWS() || s.be.STS != nil {
			how = "set roleARN in the volumes and controllerRoleARN on the backend"
		}
		return what.row(No, "not possible with this configuration, so every client has the driver's own keys and all their permissions",
			how+", or give each volume its own secret; scope: required refuses volumes without a session")
	}
	return what.row(Yes, "of kind "+string(o.Kind), "")
}
