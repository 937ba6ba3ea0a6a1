package backend

import (
	"cmp"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	awshttp "github.com/aws/aws-sdk-go-v2/aws/transport/http"
	"github.com/aws/smithy-go"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// Answer is a service's error response.
type Answer struct {
	Code    string // "AccessDenied"; without a body the SDK derives it from the status
	Message string
	Status  int    // HTTP status; 0: unknown
	Request string // the service's id of the request

	head   bool // of a HEAD request, whose response has no body
	plain  bool // of a request without TLS
	header http.Header
}

// ThrottledCode is the code of all answers with status 429.
const ThrottledCode = "TooManyRequests"

// Answered returns the service's error response in err's chain.
func Answered(err error) (Answer, bool) {
	var a Answer
	if api, ok := errors.AsType[smithy.APIError](err); ok {
		a.Code, a.Message = api.ErrorCode(), api.ErrorMessage()
	}
	if s := (interface{ HTTPStatusCode() int })(nil); errors.As(err, &s) {
		a.Status = s.HTTPStatusCode()
	}
	var response *awshttp.ResponseError
	if errors.As(err, &response) && response.Response != nil && response.Response.Response != nil {
		r := response.Response.Response
		a.Request, a.header = response.ServiceRequestID(), r.Header
		if r.Request != nil {
			a.head, a.plain = r.Request.Method == http.MethodHead, r.Request.URL != nil && r.Request.URL.Scheme == "http"
		}
	}
	if a.head {
		// MinIO's header for the reason without a body.
		if code := a.header.Get("X-Minio-Error-Code"); code != "" {
			a.Code, a.Message = code, a.header.Get("X-Minio-Error-Desc")
		}
	}
	if a.Status == http.StatusTooManyRequests && a.Code != ThrottledCode {
		// Services differ in the code, and some have none or one of another meaning.
		a.Message = strings.TrimSpace(a.Code + " " + a.Message)
		a.Code = ThrottledCode
	}
	if a.Status < 300 {
		if a.Code == "" { // a 2xx with an unreadable body is not an error response
			return a, false
		}
		a.Status = 0 // an error in the body of a 200, which S3 uses for long operations
	}
	return a, a.Code != "" || a.Status != 0
}

// region returns the bucket's region as named by the service, or "". It becomes part of a host name, so it is validated.
func (a Answer) region() string {
	if r := a.header.Get(regionHeader); regionName.MatchString(r) {
		return r
	}
	return ""
}

func (a Answer) String() string {
	var s strings.Builder
	fmt.Fprintf(&s, "the service returned")
	if a.Status != 0 {
		fmt.Fprintf(&s, " %d", a.Status)
	}
	if code := cmp.Or(a.Code, http.StatusText(a.Status)); code != "" {
		fmt.Fprintf(&s, " %s", Clip(code, 80))
	}
	if a.Message != "" && a.Message != a.Code && a.Message != http.StatusText(a.Status) {
		fmt.Fprintf(&s, " %q", Clip(a.Message, 300))
	}
	if a.Request != "" {
		fmt.Fprintf(&s, " (request %s)", Clip(a.Request, 80))
	}
	return s.String()
}

// Advice for several codes.
const (
	adviceKeys   = "check the credentials; they are unknown to this service, disabled or mistyped"
	adviceExpiry = "the credentials have expired and were not renewed"
	adviceClock  = "the clocks of this host and of the service differ too much; check time synchronisation on both"
	adviceRegion = "the bucket is in another region; set region on the backend"
	adviceTLS    = "if the endpoint uses TLS, it must begin with https://"
	adviceSlow   = "the service is overloaded or throttles requests; the driver retries"
)

// meaning is the kind of an error response and what to do about it.
type meaning struct {
	kind   fault.Kind
	advice string
}

// meaningOf returns the meaning of codes for which the status is misleading or too vague. S3's are listed in its API reference
// under "Error responses"; the others are STS's and MinIO's.
func meaningOf(code string) (meaning, bool) {
	switch code {
	case "NoSuchBucket", "NoSuchKey", "NoSuchUpload", "NoSuchVersion":
		return meaning{fault.NotFound, ""}, true
	case "InvalidAccessKeyId", "InvalidClientTokenId", "UnrecognizedClientException", "MissingAuthenticationToken", "MissingSecurityHeader", "NotSignedUp":
		return meaning{fault.Unauthenticated, adviceKeys}, true
	case "SignatureDoesNotMatch":
		return meaning{fault.Unauthenticated, "the secret access key does not match the access key id, or a proxy changed the request"}, true
	case "ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired":
		return meaning{fault.Unauthenticated, adviceExpiry}, true
	case "InvalidToken", "InvalidIdentityToken", "XMinioInvalidToken":
		return meaning{fault.Unauthenticated, "the session token is not valid; check that keys and token belong together and to this service"}, true
	case "RequestTimeTooSkewed", "RequestExpired":
		return meaning{fault.Precondition, adviceClock}, true
	case "SlowDown", "SlowDownRead", "SlowDownWrite", "ServiceUnavailable", "RequestLimitExceeded", "Throttling", "ThrottlingException", "ThrottledException",
		ThrottledCode, "TooManyRequestsException", "RequestThrottled", "RequestThrottledException", "BandwidthLimitExceeded":
		return meaning{fault.Unavailable, adviceSlow}, true
	case "RequestTimeout", "RequestTimeoutException", "IncompleteBody", "BadDigest", "XMinioServerNotInitialized":
		return meaning{fault.Unavailable, ""}, true
	case "BucketAlreadyExists":
		return meaning{fault.Exists, "a bucket of that name belongs to another account"}, true
	case "BucketAlreadyOwnedByYou":
		return meaning{fault.Exists, ""}, true
	case "BucketNotEmpty":
		return meaning{fault.Precondition, "the bucket still has objects, versions or unfinished uploads"}, true
	case "TooManyBuckets", "QuotaExceeded", "XMinioAdminBucketQuotaExceeded", "XMinioStorageFull", "ServiceQuotaExceededException":
		return meaning{fault.Exhausted, ""}, true
	case "PermanentRedirect", "TemporaryRedirect", "Redirect", "AuthorizationHeaderMalformed", "InvalidRegion", "IllegalLocationConstraintException",
		"InvalidLocationConstraint":
		return meaning{fault.Precondition, adviceRegion}, true
	case "SecondLevelDomainForbidden", "PathStyleDomainForbidden", "InvalidPathAccess", "VirtualHostDomainRequired": // OSS, COS, TOS, OBS
		return meaning{fault.Precondition, "the service wants the bucket in the host name; set addressing: virtual on the backend"}, true
	case "InvalidBucketName", "KeyTooLongError":
		return meaning{fault.Invalid, ""}, true
	case "NotImplemented":
		return meaning{fault.Unsupported, "the service does not support this operation"}, true
	}
	return meaning{}, false
}

func (a Answer) verdict() (fault.Kind, string) {
	m, ok := meaningOf(a.Code)
	if !ok {
		m = a.byStatus()
	}
	if skew := a.skew(); skew != "" && (a.head && m.kind == fault.Denied || a.Code == "SignatureDoesNotMatch" || m.advice == adviceClock) {
		m = meaning{fault.Precondition, fmt.Sprintf("%s (this host is %s)", adviceClock, skew)}
	}
	text := a.String()
	if m.advice != "" {
		text += ": " + m.advice
	}
	if r := a.region(); r != "" && m.advice == adviceRegion {
		text += " (the bucket is in " + r + ")"
	}
	return m.kind, text
}

// maxSkew is a difference of clocks that is no delay of the network. Services allow about 15 minutes.
const maxSkew = 5 * time.Minute

// skew describes the difference of the clocks ("17m0s ahead"), or returns "" if it is small or unknown.
func (a Answer) skew() string {
	date, err := http.ParseTime(a.header.Get("Date"))
	switch ahead := time.Since(date).Round(time.Minute); {
	case err != nil:
	case ahead > maxSkew:
		return ahead.String() + " ahead"
	case ahead < -maxSkew:
		return (-ahead).String() + " behind"
	}
	return ""
}

// byStatus returns the meaning of unknown codes and of responses without one.
func (a Answer) byStatus() meaning {
	switch {
	case a.Status == http.StatusNotFound && !a.absent():
		return meaning{fault.Unavailable, "this 404 is not from S3; check that the endpoint is an S3 service"}
	case a.absent():
		return meaning{fault.NotFound, ""}
	case a.Status == http.StatusUnauthorized:
		return meaning{fault.Unauthenticated, adviceKeys}
	case a.Status == http.StatusForbidden && a.head:
		return meaning{fault.Denied, "the credentials are invalid or lack a permission; a response to HEAD does not say which"}
	case a.Status == http.StatusForbidden, a.Status == 0 && (a.Code == "AccessDenied" || a.Code == "Forbidden"):
		return meaning{fault.Denied, "the credentials lack a permission, or a policy forbids it"}
	case a.Status == http.StatusBadRequest && a.plain && (a.head || a.Code == "" || a.Code == "UnknownError" || a.Code == "BadRequest"):
		return meaning{fault.Precondition, "the answer has no reason; possible are expired credentials, a wrong region or a wrong clock, and " + adviceTLS}
	case a.Status == http.StatusBadRequest && a.head:
		return meaning{fault.Precondition, "a response to HEAD has no reason; possible are expired credentials, a wrong region or a wrong clock"}
	case a.Status == http.StatusMovedPermanently, a.Status == http.StatusPermanentRedirect:
		return meaning{fault.Precondition, adviceRegion}
	case a.Status == http.StatusTemporaryRedirect, a.Status == http.StatusRequestTimeout:
		return meaning{fault.Unavailable, ""}
	case a.Status == http.StatusServiceUnavailable:
		return meaning{fault.Unavailable, adviceSlow}
	case a.Status == http.StatusMethodNotAllowed, a.Status == http.StatusNotImplemented:
		return meaning{fault.Unsupported, "the service does not support this operation"}
	case a.Status == http.StatusConflict, a.Status == 0 && a.Code == "OperationAborted":
		return meaning{fault.Busy, "another request for the same object is in progress"}
	case a.Status == http.StatusPreconditionFailed, a.Status == 0 && a.Code == "PreconditionFailed":
		return meaning{fault.Busy, "another writer changed it first"}
	case a.Status == http.StatusInsufficientStorage:
		return meaning{fault.Exhausted, "the service has no space left"}
	case a.Status >= 500, a.Status == 0 && a.Code == "InternalError":
		return meaning{fault.Unavailable, ""}
	case a.Status >= 300 && a.Status < 500:
		return meaning{fault.Precondition, ""}
	}
	return meaning{fault.Unknown, ""}
}

// absent reports whether the response means that an object does not exist. The 404 of a HEAD has only its status. Otherwise S3
// names what is missing, unlike other web servers and proxies.
func (a Answer) absent() bool {
	// Some services return 404 for an unknown access key, for example.
	if m, ok := meaningOf(a.Code); ok {
		return m.kind == fault.NotFound
	}
	switch a.Code {
	case "NotFound", "UnknownError", "":
		return a.Code == "NotFound" && (a.head || a.Status == 0)
	}
	return a.Status == http.StatusNotFound
}

// IsNotFound reports whether S3 returned that a bucket, key, upload or configuration does not exist. A 403 never means that.
func IsNotFound(err error) bool {
	a, ok := Answered(err)
	return ok && a.absent()
}

// IsNoSuchBucket reports whether S3 returned that the bucket itself does not exist, which the 404 of a HEAD cannot show.
func IsNoSuchBucket(err error) bool { return ErrorCode(err) == "NoSuchBucket" }

// IsPreconditionFailed reports whether the condition of a request did not hold (412). After a retry inside the SDK the first
// attempt of the same request may have made the change.
func IsPreconditionFailed(err error) bool {
	a, ok := Answered(err)
	return ok && (a.Code == "PreconditionFailed" || a.Status == http.StatusPreconditionFailed)
}

// IsConflict reports whether another request for the same object was in progress (409), so that a retry may succeed.
func IsConflict(err error) bool {
	a, ok := Answered(err)
	return ok && (a.Code == "ConditionalRequestConflict" || a.Code == "OperationAborted")
}

// IsNotImplemented reports whether the service does not support the operation or one of its headers (501, 405).
func IsNotImplemented(err error) bool {
	a, ok := Answered(err)
	return ok && (a.Code == "NotImplemented" || a.Code == "MethodNotAllowed" || a.Status == http.StatusNotImplemented || a.Status == http.StatusMethodNotAllowed)
}

// IsUnsupported reports whether the service does not support a request that is right for S3: a condition (If-Match, If-None-Match), or an
// operation that has a substitute, such as DeleteObjects. Services answer with 501, 405, or one of many codes of 400.
func IsUnsupported(err error) bool {
	a, ok := Answered(err)
	if !ok || a.Status != http.StatusBadRequest || a.head || strings.HasPrefix(a.Code, "KMS.") {
		return IsNotImplemented(err)
	}
	switch a.Code { // reasons that are not about the condition or the operation
	case "InvalidDigest", "XAmzContentSHA256Mismatch", "InvalidEncryptionAlgorithmError", "InvalidStorageClass", "InvalidTag", "MetadataTooLarge",
		"EntityTooLarge", "EntityTooSmall", "InvalidPart", "InvalidPartOrder", "UserKeyMustBeSpecified":
		return false
	}
	_, known := meaningOf(a.Code)
	return !known || a.Code == "NotImplemented"
}

// ErrorCode returns the service's code in err's chain ("AccessDenied"), or "" without a response. Without a body it is
// derived from the status ("NotFound").
func ErrorCode(err error) string {
	a, ok := Answered(err)
	if !ok {
		return ""
	}
	return a.Code
}
