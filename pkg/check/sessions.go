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
	stsBound    = 15 * time.Second                              // limits one request to a token service
	sessionName = "s3csi.check"                                 // the name of sessions in the service's log
	noRole      = "arn:aws:iam::000000000000:role/s3-csi-check" // a role that does not exist, for a token that is invalid
	// noToken looks like a service account's token (RFC 7519) and has no valid signature.
	noToken = "eyJhbGciOiJSUzI1NiIsInR5cCI6IkpXVCJ9." + //nolint:gosec // see above
		"eyJpc3MiOiJodHRwczovL3MzLWNzaS1jaGVjay5pbnZhbGlkIiwic3ViIjoiczMtY3NpLWNoZWNrIn0.AAAA"
)

// openSTS makes the client of the backend's token service.
func (r *run) openSTS(ctx context.Context) {
	var err error
	if r.sts, err = r.in.Clients.STS(ctx, r.be, r.keys); err != nil {
		r.noSTS = OneLine(err)
	}
}

// sessionProbes returns what the backend's token service is asked for, even if it is not declared. The last probe changes the bucket of the
// check.
func (r *run) sessionProbes() []probe {
	required := r.be.Scope == volume.ScopeRequired
	service, bucket := []*string{&r.noService, &r.noSTS}, []*string{&r.noService, &r.noSTS, &r.noBucket}
	return []probe{
		{Optional("callerIdentity", "STS GetCallerIdentity"), "", service, bounded(r.callerIdentity)},
		{Optional("assumeRole", "STS AssumeRole"), "", service, bounded(r.assumeRole)},
		{Optional("webIdentity", "STS AssumeRoleWithWebIdentity"), "", service, bounded(r.webIdentity)},
		{Optional("federationToken", "STS GetFederationToken"), "", service, bounded(r.federationToken)},
		{Optional("leastSession", "the shortest session"), "", service, r.leastSession},
		{NeededIf(required, "sessions", "volumes with the driver's credentials get sessions"), "", bucket, r.planned},
		{NeededIf(required, "sessionPolicies", "session policies are enforced"), "", bucket, r.enforced},
		{Optional("timeSnapshots", "snapshots of one time (consistency: time)"), "", []*string{&r.noService, &r.noBucket}, r.timeSnapshots},
	}
}

// bounded limits a probe of one request.
func bounded(try func(context.Context, Item) Row) func(context.Context, Item) Row {
	return func(ctx context.Context, what Item) Row {
		ctx, cancel := context.WithTimeout(ctx, stsBound)
		defer cancel()
		return try(ctx, what)
	}
}

// rowOfAnswer returns the row for a response: yes if the action worked, unknown if it exists, no otherwise.
func rowOfAnswer(what Item, err error, doing string) Row {
	if err == nil {
		return what.Row(Yes, "", "")
	}
	why := OneLine(backend.Classify(err, doing))
	switch code := backend.ErrorCode(err); {
	case code == "":
		return what.Row(Unknown, why, "")
	case isInput(code), code == "AccessDenied", code == "AccessDeniedException":
		return what.Row(Unknown, "not for these credentials: "+why, "")
	}
	return what.Row(No, why, "")
}

// isInput reports whether a code means that the service supports the action and rejects its input (STS API Reference, "Common
// Errors" and the errors of each action; MinIO's).
func isInput(code string) bool {
	switch code {
	case "ExpiredToken", "ExpiredTokenException", "ValidationError", "ValidationException", "InvalidParameterValue", "MissingParameter",
		"InvalidClientTokenId", "STSNotInitialized":
		return true
	}
	return false
}

func (r *run) callerIdentity(ctx context.Context, what Item) Row {
	out, err := r.sts.GetCallerIdentity(ctx, &sts.GetCallerIdentityInput{})
	row := rowOfAnswer(what, err, "get the caller's identity")
	if code := backend.ErrorCode(err); isInput(code) && code != "InvalidClientTokenId" && !strings.HasPrefix(code, "ExpiredToken") {
		r.odd, row.Result = code, No // it has no input to reject
		row.Why = OneLine(backend.Classify(err, "get the caller's identity"))
	}
	switch {
	case err == nil && aws.ToString(out.Account) != "":
		row.Why = "account " + aws.ToString(out.Account) + "; buckets of other accounts are refused unless a volume has expectedBucketOwner"
	case err == nil:
		row.Result, row.Why = No, "the service returns no account"
	case r.be.ExpectedBucketOwner == "":
		row.Why += "; the owner of buckets is not checked"
	}
	return row
}

func (r *run) assumeRole(ctx context.Context, what Item) Row {
	role := r.be.ControllerRoleARN
	if role == "" && r.be.AWS() {
		return what.Row(Unknown, "the backend has no controllerRoleARN", "")
	}
	_, err := r.sts.AssumeRole(ctx, &sts.AssumeRoleInput{RoleArn: &role, RoleSessionName: aws.String(sessionName)})
	row := rowOfAnswer(what, err, "assume a role")
	if err != nil {
		return row
	}
	r.noteOrder(credentials.AssumeRole, role)
	row.Why = "role " + role
	if role == "" {
		row.Why = "without a role (roleOptional)"
	}
	return r.undeclared(row, credentials.AssumeRole)
}

// noteOrder records an order that worked.
func (r *run) noteOrder(kind credentials.Kind, role string) {
	if r.order.IsZero() {
		r.order = credentials.Order{Kind: kind, Keys: r.keys, RoleARN: role, Name: sessionName, Backend: r.be.String()}
	}
}

// undeclared adds advice for a kind of sessions that is not declared.
func (r *run) undeclared(row Row, kind credentials.Kind) Row {
	switch {
	case r.be.Makes(kind) && (kind != credentials.AssumeRole || r.be.AWS() || r.be.ControllerRoleARN != "" || r.be.RoleOptional()):
	case r.be.STS == nil && kind == credentials.AssumeRole && r.be.ControllerRoleARN == "":
		row.Advice = "set sts: {roleOptional: true} for the backend in the driver's config file to have it used"
	case r.be.STS == nil:
		row.Advice = "set sts for the backend in the driver's config file to have it used"
	case r.be.Makes(kind):
		row.Advice = "set sts.roleOptional: true for the backend in the driver's config file to have it used without roles"
	default:
		row.Advice = "add " + string(kind) + " to the backend's sts.kinds in the driver's config file to have it used"
	}
	return row
}

func (r *run) webIdentity(ctx context.Context, what Item) Row {
	role := r.be.WorkloadRoleARN
	if role == "" || volume.Role(role).Templated() {
		role = noRole
	}
	_, err := r.sts.AssumeRoleWithWebIdentity(ctx, &sts.AssumeRoleWithWebIdentityInput{RoleArn: &role, RoleSessionName: aws.String(sessionName),
		WebIdentityToken: aws.String(noToken)})
	if err == nil {
		what.needed = true
		return what.Row(No, "the service accepts a token with an invalid signature", "do not use this service's STS; remove sts from the backend")
	}
	switch backend.ErrorCode(err) {
	case "InvalidIdentityToken", "InvalidIdentityTokenException", "IDPRejectedClaim", "IDPCommunicationError", "ExpiredToken", "ExpiredTokenException":
		return r.undeclared(what.Row(Yes, "it refuses a token with an invalid signature; the first volume with credentials: workload shows whether it accepts "+
			"your cluster's", ""), credentials.WebIdentity)
	case "InvalidParameterValue": // MinIO's, of a role that no identity provider is configured for, and of a token
		return what.Row(Unknown, "the service has it; the first volume with credentials: workload shows whether it accepts your cluster's tokens: "+
			OneLine(backend.Classify(err, "exchange a token with an invalid signature")), "")
	}
	return rowOfAnswer(what, err, "exchange a token with an invalid signature")
}

func (r *run) federationToken(ctx context.Context, what Item) Row {
	if r.keys.SessionToken != "" {
		return what.Row(Unknown, "requires keys of a user, but the driver has session keys", "")
	}
	_, err := r.sts.GetFederationToken(ctx, &sts.GetFederationTokenInput{Name: aws.String(sessionName),
		DurationSeconds: aws.Int32(int32(time.Hour / time.Second))})
	row := rowOfAnswer(what, err, "get a federation token")
	if err == nil {
		r.noteOrder(credentials.FederationToken, "")
		row = r.undeclared(row, credentials.FederationToken)
	} else if r.odd != "" && backend.ErrorCode(err) == r.odd {
		row.Result, row.Why = No, OneLine(backend.Classify(err, "get a federation token"))
	}
	return row
}

// leastSession finds the shortest of some durations. AWS documents it (STS API Reference, AssumeRole).
func (r *run) leastSession(ctx context.Context, what Item) Row {
	if r.be.AWS() {
		return what.Row(Yes, "15m, as AWS documents", "")
	}
	if r.order.IsZero() {
		return what.Row(Unknown, "no session could be made", "")
	}
	var last error
	for _, try := range []struct {
		d    time.Duration
		text string
	}{{time.Second, "1s"}, {10 * time.Second, "10s"}, {time.Minute, "1m"}, {5 * time.Minute, "5m"}, {15 * time.Minute, "15m"}, {time.Hour, "1h"}} {
		if last = r.makeSession(ctx, try.d); last == nil {
			return what.Row(Yes, try.text+" is possible; a volume's sessionDuration can be as short", "")
		}
		if backend.ErrorCode(last) == "" {
			break
		}
	}
	return failed(what, last, "get sessions of different durations")
}

func (r *run) makeSession(ctx context.Context, d time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, stsBound)
	defer cancel()
	seconds := aws.Int32(int32(d / time.Second))
	if r.order.Kind == credentials.FederationToken {
		_, err := r.sts.GetFederationToken(ctx, &sts.GetFederationTokenInput{Name: aws.String(sessionName), DurationSeconds: seconds})
		return err
	}
	_, err := r.sts.AssumeRole(ctx, &sts.AssumeRoleInput{RoleArn: &r.order.RoleARN, RoleSessionName: aws.String(sessionName), DurationSeconds: seconds})
	return err
}

// planned returns what volumes with credentials: driver get with the current configuration.
func (r *run) planned(ctx context.Context, what Item) Row {
	o, err := r.plan(ctx)
	switch {
	case fault.Is(err, fault.Precondition):
		return what.Row(No, OneLine(err), "")
	case err != nil:
		return what.Row(Unknown, OneLine(err), "")
	case o.Kind == credentials.AsIs && r.be.Scope == volume.ScopeOff:
		return what.Row(No, "the backend has scope: off, so every client has the driver's own keys", "")
	case o.Kind == credentials.AsIs:
		how := "declare the backend's token service with sts"
		if r.be.AWS() || r.be.STS != nil {
			how = "set roleARN in the volumes and controllerRoleARN on the backend"
		}
		return what.Row(No, "not possible with this configuration, so every client has the driver's own keys and all their permissions",
			how+", or give each volume its own secret; scope: required refuses volumes without a session")
	}
	return what.Row(Yes, "of kind "+string(o.Kind), "")
}
