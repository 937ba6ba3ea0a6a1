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

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// subject returns the beginning of all messages about an order.
func subject(o credentials.Order) string {
	s := "make a session"
	if o.RoleARN != "" {
		s += " of role " + o.RoleARN
	}
	if o.Backend != "" {
		s += " for " + o.Backend
	}
	return s + " (" + string(o.Kind) + ")"
}

func unusable(o credentials.Order, why string) error {
	return fault.Errorf(fault.Unavailable, "%s: %s; check that sts.endpoint of the backend is a token service", subject(o), why)
}

// explain classifies the error of an order's request. The SDK's error is not in the chain of the result, because it may hold
// secrets that the service echoed.
func (c *stsCall) explain(ctx context.Context, o credentials.Order, err error) error {
	if f := (*fault.Error)(nil); errors.As(err, &f) {
		return err
	}
	// If ctx ended between two attempts, the service's last response is the better reason.
	if ctx.Err() != nil && backend.ErrorCode(err) == "" && c.last != nil {
		err = c.last
	}
	a, ok := backend.Answered(err)
	if !ok {
		kind := fault.KindOf(backend.Classify(err, ""))
		if kind == fault.Unknown || ctx.Err() != nil && kind == fault.Timeout {
			kind = fault.Unavailable
		}
		return fault.See(credentials.Page, fault.Errorf(kind, "%s", scrub(o, backend.Classify(err, subject(o)).Error())))
	}
	kind, advice := meaning(o, a, err)
	return fault.See(credentials.Page, fault.Errorf(kind, "%s: %s: %s", subject(o), text(o, a), advice))
}

// text returns the response without the secrets that it may echo.
func text(o credentials.Order, a backend.Answer) string {
	s := "the token service returned"
	if a.Status != 0 {
		s += fmt.Sprintf(" %d", a.Status)
	}
	if a.Code != "" {
		s += " " + backend.Clip(scrub(o, a.Code), 80)
	}
	if a.Message != "" && a.Message != a.Code {
		s += fmt.Sprintf(" %q", backend.Clip(scrub(o, a.Message), 400))
	}
	if a.Request != "" {
		s += " (request " + backend.Clip(a.Request, 80) + ")"
	}
	return s
}

// meaning returns the kind of a response and what to do about it. The codes are those of the STS API Reference ("Common Errors"
// and the errors of each action), and of MinIO.
func meaning(o credentials.Order, a backend.Answer, err error) (fault.Kind, string) {
	switch a.Code {
	case "AccessDenied", "AccessDeniedException":
		return fault.Denied, denied(o)
	case "IDPRejectedClaim":
		return fault.Denied, "the identity provider rejects the token's claims"
	case "InvalidIdentityToken", "InvalidIdentityTokenException", "InvalidClientGrantsToken":
		return fault.Unauthenticated, "the service rejects the token; check that the cluster's issuer is an identity provider there, and that the provider and " +
			"the role accept the token's audience and service account"
	case "ExpiredToken", "ExpiredTokenException", "ExpiredTradeInTokenException":
		return fault.Unauthenticated, "the credentials for making the session have expired; kubelet supplies new tokens with each republish (requiresRepublish: " +
			"true in the CSIDriver object), session keys in a secret must be replaced there"
	case "InvalidClientTokenId", "UnrecognizedClientException", "InvalidAccessKeyId", "MissingAuthenticationToken":
		return fault.Unauthenticated, "the access key " + o.Keys.AccessKeyID + " is unknown to the service, disabled, deleted, or of another service"
	case "SignatureDoesNotMatch", "IncompleteSignature", "InvalidSignatureException", "AuthFailure":
		return fault.Unauthenticated, "the secret access key does not belong to access key " + o.Keys.AccessKeyID + ", or sts.region of the backend or this " +
			"host's clock is wrong"
	case "RequestExpired", "RequestTimeTooSkewed":
		return fault.Precondition, "the clocks of this host and of the service differ too much; check time synchronisation on both"
	case "Throttling", "ThrottlingException", "ThrottledException", "RequestLimitExceeded", backend.ThrottledCode, "TooManyRequestsException", "RequestThrottled",
		"RequestThrottledException", "SlowDown":
		return fault.Busy, "the service throttles requests; the driver retries"
	case "MalformedPolicyDocument", "MalformedPolicyDocumentException":
		return fault.Precondition, "the service rejects the session policy, possibly because of an unknown action or condition; report this, or set scope: off on " +
			"the volume, which is less safe"
	case "PackedPolicyTooLarge", "PackedPolicyTooLargeException":
		return fault.Precondition, "the session policy is too large; give the volume a shorter prefix or the role fewer session tags"
	case "RegionDisabledException":
		return fault.Precondition, "STS is not active in this region for the account; activate it in the account's settings or set sts.region of the backend"
	case "ValidationError", "ValidationException", "InvalidParameterValue", "InvalidParameterCombination", "MissingParameter":
		if o.Kind == credentials.WebIdentity && a.Code == "InvalidParameterValue" { // MinIO's response to a token that it rejects
			return fault.Unauthenticated, "check that the service accepts the token's issuer and audience, that the role exists, and that it allows sessionDuration " +
				"of the volume" + duration(o)
		}
		return fault.Precondition, "check sessionDuration of the volume" + duration(o) + " against the limits of the service and the role (AWS: at least 15m, at " +
			"most the role's maximum, 1h with role chaining), the role's name, and sts.kinds of the backend"
	case "InvalidAction", "NotImplemented", "MethodNotAllowed":
		return fault.Precondition, "this endpoint does not make such sessions; correct sts.endpoint and sts.kinds of the backend, or remove sts if the service " +
			"has none"
	case "IDPCommunicationError", "STSNotInitialized":
		return fault.Unavailable, "the service is temporarily unavailable; the driver retries"
	}
	switch kind := fault.KindOf(backend.Classify(err, "")); {
	case kind == fault.Denied, kind == fault.Unauthenticated, kind == fault.Busy:
		return kind, denied(o)
	case kind == fault.Unavailable && a.Status != http.StatusNotFound, kind == fault.Timeout, kind == fault.Unknown:
		return fault.Unavailable, "the driver retries"
	}
	return fault.Precondition, "check that there is a token service at sts.endpoint of the backend"
}

func duration(o credentials.Order) string {
	if o.Duration == 0 {
		return ""
	}
	return fmt.Sprintf(" (%s)", o.Duration)
}

// denied returns possible reasons of a refusal.
func denied(o credentials.Order) string {
	switch o.Kind {
	case credentials.WebIdentity:
		return "check that the role exists and that its trust policy allows this issuer, audience and service account (sts:AssumeRoleWithWebIdentity)"
	case credentials.FederationToken:
		return "the user of access key " + o.Keys.AccessKeyID + " needs the permission sts:GetFederationToken; or set roleARN, remove federationToken from the " +
			"backend's sts.kinds, or set scope: off"
	case credentials.PodIdentity:
		return "check the pod identity association of the pod's service account"
	case credentials.AssumeRole:
		if o.RoleARN == "" {
			return "check that the secret access key of " + o.Keys.AccessKeyID + " is right and that the keys are a user's; service accounts and sessions often " +
				"cannot make sessions"
		}
		return "check that the role exists, that its trust policy trusts the owner of access key " + o.Keys.AccessKeyID + ", and that this owner may assume it " +
			"(sts:AssumeRole)"
	}
	return "check the permissions"
}

// agentSilent returns the error for an agent that does not respond.
func agentSilent(ctx context.Context, o credentials.Order, err error) error {
	if ctx.Err() != nil {
		return fault.Errorf(fault.Unavailable, "%s: EKS Pod Identity's agent at %s did not respond in time; check that its pod runs on this node", subject(o),
			o.AgentURI)
	}
	return fault.Errorf(fault.Unavailable, "%s: EKS Pod Identity's agent at %s does not respond; check that its pod runs on this node: %s", subject(o),
		o.AgentURI, backend.Clip(scrub(o, err.Error()), 300))
}

// agentRefused returns the error for an agent that responds without a session.
func agentRefused(o credentials.Order, status int, body []byte) error {
	kind, advice := fault.Precondition, "check podIdentityAgent of the backend"
	switch {
	case status == http.StatusTooManyRequests:
		kind, advice = fault.Busy, "the service throttles requests; the driver retries"
	case status >= 500:
		kind, advice = fault.Unavailable, "the driver retries"
	case status == http.StatusUnauthorized:
		kind, advice = fault.Unauthenticated, "the agent rejects the token"
	case status == http.StatusForbidden, status == http.StatusBadRequest, status == http.StatusNotFound:
		kind, advice = fault.Denied, denied(o)
	}
	return fault.Errorf(kind, "%s: EKS Pod Identity's agent at %s returned %d %q: %s", subject(o), o.AgentURI, status, backend.Clip(scrub(o, string(body)), 300),
		advice)
}

// scrub removes the order's secrets from a text, even if they are cut off, quoted or escaped.
func scrub(o credentials.Order, text string) string {
	const kept = 10 // bytes of a secret that cannot occur by chance
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
			// The rest may follow in another form up to the end of the word. Keys may contain such delimiters themselves.
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
