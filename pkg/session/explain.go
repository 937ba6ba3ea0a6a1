package session

import (
	"context"
	"errors"
	"fmt"
	"html"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	awshttp "github.com/aws/aws-sdk-go-v2/aws/transport/http"
	"github.com/aws/smithy-go"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// subject begins all messages about an order.
func subject(o credentials.Order) string {
	s := "making a session"
	if o.RoleARN != "" {
		s += " of role " + o.RoleARN
	}
	if o.Backend != "" {
		s += " for " + o.Backend
	}
	return s + " (" + string(o.Kind) + ")"
}

func unusable(o credentials.Order, why string) error {
	return fault.Errorf(fault.Unavailable, "%s: %s: check that sts.endpoint of the backend is a token service", subject(o), why)
}

// explain says what the end of an order's request means. The error stands for itself: nothing of the SDK's, which may hold what
// the service echoed, stays in its chain.
func (a *asking) explain(ctx context.Context, o credentials.Order, err error) error {
	if f := (*fault.Error)(nil); errors.As(err, &f) {
		return err
	}
	// When the time runs out between two attempts, the service's last word says more than that.
	if ctx.Err() != nil && backend.ErrorCode(err) == "" && a.last != nil {
		err = a.last
	}
	said, ok := answered(err)
	if !ok {
		kind := fault.KindOf(backend.Classify(err, ""))
		if kind == fault.Unknown || ctx.Err() != nil && kind == fault.Timeout {
			kind = fault.Unavailable
		}
		return fault.Errorf(kind, "%s", scrub(o, backend.Classify(err, subject(o)).Error()))
	}
	kind, advice := said.meaning(o)
	return fault.Errorf(kind, "%s: %s: %s", subject(o), said.text(o), advice)
}

// answer is a token service's refusal.
type answer struct {
	code, message string
	status        int
	request       string
	err           error
}

func answered(err error) (answer, bool) {
	a := answer{err: err}
	if api, ok := errors.AsType[smithy.APIError](err); ok {
		a.code, a.message = api.ErrorCode(), api.ErrorMessage()
	}
	if r, ok := errors.AsType[*awshttp.ResponseError](err); ok {
		a.status, a.request = r.HTTPStatusCode(), r.ServiceRequestID()
	}
	return a, a.code != "" || a.status >= 300
}

// text shows the answer without what it may echo.
func (a answer) text(o credentials.Order) string {
	s := "the token service answered"
	if a.status != 0 {
		s += fmt.Sprintf(" %d", a.status)
	}
	if a.code != "" {
		s += " " + backend.Clip(scrub(o, a.code), 80)
	}
	if a.message != "" && a.message != a.code {
		s += fmt.Sprintf(" %q", backend.Clip(scrub(o, a.message), 400))
	}
	if a.request != "" {
		s += " (request " + backend.Clip(a.request, 80) + ")"
	}
	return s
}

// meaning is the kind of a refusal and what to do about it. The codes are those of the STS API Reference ("Common Errors" and the
// errors of each action), and of MinIO.
func (a answer) meaning(o credentials.Order) (fault.Kind, string) {
	switch a.code {
	case "AccessDenied", "AccessDeniedException":
		return fault.Denied, denied(o)
	case "IDPRejectedClaim":
		return fault.Denied, "the identity provider rejects the token's claims"
	case "InvalidIdentityToken", "InvalidIdentityTokenException", "InvalidClientGrantsToken":
		return fault.Unauthenticated, "the service does not take the token: check that it knows the cluster's issuer as an identity provider, and that the provider and the role take the token's audience and service account"
	case "ExpiredToken", "ExpiredTokenException", "ExpiredTradeInTokenException":
		return fault.Unauthenticated, "what the session is made with has expired: kubelet brings a new token with each republish (requiresRepublish: true in the CSIDriver object); session keys in a secret have to be replaced there"
	case "InvalidClientTokenId", "UnrecognizedClientException", "InvalidAccessKeyId", "MissingAuthenticationToken":
		return fault.Unauthenticated, "the access key " + o.Keys.AccessKeyID + " is unknown to the service, disabled or deleted, or belongs to another service"
	case "SignatureDoesNotMatch", "IncompleteSignature", "InvalidSignatureException", "AuthFailure":
		return fault.Unauthenticated, "the secret access key is not the one of access key " + o.Keys.AccessKeyID + ", or the region of the backend's sts is wrong, or this host's clock is"
	case "RequestExpired", "RequestTimeTooSkewed":
		return fault.Precondition, "the clocks of this host and of the service differ by more than the service allows: check time synchronisation on both"
	case "Throttling", "ThrottlingException", "ThrottledException", "RequestLimitExceeded", "TooManyRequests", "TooManyRequestsException", "RequestThrottled", "RequestThrottledException", "SlowDown":
		return fault.Busy, "it asks to slow down; it is tried again"
	case "MalformedPolicyDocument", "MalformedPolicyDocumentException":
		return fault.Precondition, "it does not take the session policy: it may not know an action or a condition in it; report this, and say scope: off on the volume meanwhile, if it may be less safe"
	case "PackedPolicyTooLarge", "PackedPolicyTooLargeException":
		return fault.Precondition, "the session policy is too large for the service: give the volume a shorter prefix, or the role fewer session tags"
	case "RegionDisabledException":
		return fault.Precondition, "STS is not active in this region for the account: activate it in the account's settings, or set sts.region of the backend"
	case "ValidationError", "ValidationException", "InvalidParameterValue", "InvalidParameterCombination", "MissingParameter":
		if o.Kind == credentials.WebIdentity && a.code == "InvalidParameterValue" { // MinIO says no more of a token that it does not take
			return fault.Unauthenticated, "check that the service knows the token's issuer and audience, that the role exists, and that sessionDuration of the volume" + duration(o) + " is one that it allows"
		}
		return fault.Precondition, "check sessionDuration of the volume" + duration(o) + " against what the service and the role allow (AWS: at least 15m, at most the role's maximum, 1h for a session made with another one's keys), the role's name, and that the service makes sessions of this kind (sts.kinds of the backend)"
	case "InvalidAction", "NotImplemented", "MethodNotAllowed":
		return fault.Precondition, "nothing at this endpoint makes such sessions: correct sts.endpoint and sts.kinds of the backend, or take sts out where the service has none"
	case "IDPCommunicationError", "STSNotInitialized":
		return fault.Unavailable, "it cannot do that right now; it is tried again"
	}
	switch kind := fault.KindOf(backend.Classify(a.err, "")); {
	case a.status == http.StatusTooManyRequests:
		return fault.Busy, "it asks to slow down; it is tried again"
	case kind == fault.Denied, kind == fault.Unauthenticated, kind == fault.Busy:
		return kind, denied(o)
	case kind == fault.Unavailable && a.status != http.StatusNotFound, kind == fault.Timeout, kind == fault.Unknown:
		return fault.Unavailable, "it is tried again"
	}
	return fault.Precondition, "check sts.endpoint of the backend, and that the service has a token service there"
}

func duration(o credentials.Order) string {
	if o.Duration == 0 {
		return ""
	}
	return fmt.Sprintf(" (%s)", o.Duration)
}

// denied says what a refusal may be about.
func denied(o credentials.Order) string {
	switch o.Kind {
	case credentials.WebIdentity:
		return "check that the role exists and that its trust policy lets this issuer's tokens with their audience and service account take it on (sts:AssumeRoleWithWebIdentity)"
	case credentials.FederationToken:
		return "the user of access key " + o.Keys.AccessKeyID + " needs the permission sts:GetFederationToken; or name a role with roleARN, or take federationToken out of the backend's sts.kinds, or say scope: off"
	case credentials.PodIdentity:
		return "check the pod identity association of the pod's service account"
	case credentials.AssumeRole:
		if o.RoleARN == "" {
			return "check that the secret access key of " + o.Keys.AccessKeyID + " is right, and that they are a user's: service accounts and sessions often cannot make sessions"
		}
		return "check that the role exists, that its trust policy trusts the owner of access key " + o.Keys.AccessKeyID + ", and that this owner may take it on (sts:AssumeRole)"
	}
	return "check the permissions"
}

// agentSilent is for an agent that does not answer.
func agentSilent(ctx context.Context, o credentials.Order, err error) error {
	if ctx.Err() != nil {
		return fault.Errorf(fault.Unavailable, "%s: EKS Pod Identity's agent at %s did not answer in time: check that its pod runs on this node", subject(o), o.AgentURI)
	}
	return fault.Errorf(fault.Unavailable, "%s: EKS Pod Identity's agent at %s does not answer: check that its pod runs on this node: %s", subject(o), o.AgentURI, backend.Clip(scrub(o, err.Error()), 300))
}

// agentRefused is for an agent that answers, but not with a session.
func agentRefused(o credentials.Order, status int, body []byte) error {
	kind, advice := fault.Precondition, "check podIdentityAgent of the backend"
	switch {
	case status == http.StatusTooManyRequests:
		kind, advice = fault.Busy, "it asks to slow down; it is tried again"
	case status >= 500:
		kind, advice = fault.Unavailable, "it is tried again"
	case status == http.StatusUnauthorized:
		kind, advice = fault.Unauthenticated, "it does not take the token"
	case status == http.StatusForbidden, status == http.StatusBadRequest, status == http.StatusNotFound:
		kind, advice = fault.Denied, denied(o)
	}
	return fault.Errorf(kind, "%s: EKS Pod Identity's agent at %s answered %d %q: %s", subject(o), o.AgentURI, status, backend.Clip(scrub(o, string(body)), 300), advice)
}

// scrub takes the order's secrets out of a text, also where only their beginning was kept or where they were quoted or escaped.
func scrub(o credentials.Order, text string) string {
	const kept = 10 // bytes of a secret that do not occur by chance
	for _, secret := range o.Secrets() {
		quoted := strconv.Quote(secret)
		for _, form := range []string{secret, url.QueryEscape(secret), html.EscapeString(secret), quoted[1 : len(quoted)-1]} {
			text = strings.ReplaceAll(text, form, "…")
		}
		if len(secret) < 2*kept {
			continue
		}
		for begin := secret[:kept]; ; {
			at := strings.Index(text, begin)
			if at < 0 {
				break
			}
			// What follows may be more of it in another form, up to what ends a word. Keys may hold such characters themselves.
			end := at + kept
			for end < len(text) && end-at < len(secret) && text[end] == secret[end-at] {
				end++
			}
			end += strings.IndexFunc(text[end:]+" ", func(r rune) bool { return strings.ContainsRune(" \t\r\n\"'<>,;()", r) })
			text = text[:at] + "…" + text[min(end, len(text)):]
		}
	}
	return text
}
