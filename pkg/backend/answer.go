package backend

import (
	"errors"
	"fmt"
	"net/http"
	"strings"

	awshttp "github.com/aws/aws-sdk-go-v2/aws/transport/http"
	"github.com/aws/smithy-go"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// answer is what a service said when it refused a request.
type answer struct {
	code    string // "AccessDenied"; for an answer without a body the SDK makes one of the status
	message string
	status  int    // HTTP status; 0: not known
	head    bool   // of a HEAD request, whose answer has no body
	request string // the service's id of the request
	header  http.Header
}

// answered finds a service's answer in err's chain.
func answered(err error) (answer, bool) {
	var a answer
	if api, ok := errors.AsType[smithy.APIError](err); ok {
		a.code, a.message = api.ErrorCode(), api.ErrorMessage()
	}
	var response *awshttp.ResponseError
	if errors.As(err, &response) && response.Response != nil && response.Response.Response != nil {
		r := response.Response.Response
		a.status, a.request, a.header = r.StatusCode, response.ServiceRequestID(), r.Header
		a.head = r.Request != nil && r.Request.Method == http.MethodHead
	}
	if a.head {
		// MinIO's way to give a reason without a body.
		if code := a.header.Get("X-Minio-Error-Code"); code != "" {
			a.code, a.message = code, a.header.Get("X-Minio-Error-Desc")
		}
	}
	if a.status < 300 {
		if a.code == "" { // a 2xx whose body could not be read is no answer
			return a, false
		}
		a.status = 0 // an error in the body of a 200: S3 does that where it had to answer before it knew
	}
	return a, a.code != "" || a.status != 0
}

// region is where the service says the bucket is, or "". It goes into a host name, so that it is checked.
func (a answer) region() string {
	if r := a.header.Get(regionHeader); regionName.MatchString(r) {
		return r
	}
	return ""
}

func (a answer) String() string {
	var s strings.Builder
	fmt.Fprintf(&s, "the service answered")
	if a.status != 0 {
		fmt.Fprintf(&s, " %d", a.status)
	}
	fmt.Fprintf(&s, " %s", Clip(a.code, 80))
	if a.message != "" && a.message != a.code && a.message != http.StatusText(a.status) {
		fmt.Fprintf(&s, " %q", Clip(a.message, 300))
	}
	if a.request != "" {
		fmt.Fprintf(&s, " (request %s)", Clip(a.request, 80))
	}
	return s.String()
}

// Advice that several codes share.
const (
	adviceKeys   = "check the credentials: they are unknown to this service, disabled, or mistyped"
	adviceExpiry = "the credentials have expired and were not renewed"
	adviceClock  = "the clock of this host and the service's differ by more than the service allows: check time synchronisation on both"
	adviceRegion = "the request was made for another region than the bucket's: set region on the backend"
	adviceSlow   = "the service asks to slow down or is overloaded; it is tried again"
)

// meaning is what a code says beyond its status.
type meaning struct {
	kind   fault.Kind
	advice string
}

// meaningOf holds the codes whose status alone would mislead or says too little. S3's are listed in its API reference under
// "Error responses"; the others are STS's and MinIO's.
func meaningOf(code string) (meaning, bool) {
	switch code {
	case "NoSuchBucket", "NoSuchKey", "NoSuchUpload", "NoSuchVersion":
		return meaning{fault.NotFound, ""}, true
	case "InvalidAccessKeyId", "InvalidClientTokenId", "UnrecognizedClientException", "MissingAuthenticationToken", "MissingSecurityHeader", "NotSignedUp":
		return meaning{fault.Unauthenticated, adviceKeys}, true
	case "SignatureDoesNotMatch":
		return meaning{fault.Unauthenticated, "the secret access key is not the one that belongs to the access key id, or a proxy changed the request"}, true
	case "ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired":
		return meaning{fault.Unauthenticated, adviceExpiry}, true
	case "InvalidToken", "InvalidIdentityToken", "XMinioInvalidToken":
		return meaning{fault.Unauthenticated, "the session token is not valid here: check that keys and token belong together and to this service"}, true
	case "RequestTimeTooSkewed", "RequestExpired":
		return meaning{fault.Precondition, adviceClock}, true
	case "SlowDown", "SlowDownRead", "SlowDownWrite", "ServiceUnavailable", "RequestLimitExceeded", "Throttling", "ThrottlingException", "ThrottledException",
		"TooManyRequests", "TooManyRequestsException", "RequestThrottled", "RequestThrottledException", "BandwidthLimitExceeded":
		return meaning{fault.Unavailable, adviceSlow}, true
	case "RequestTimeout", "RequestTimeoutException", "IncompleteBody", "BadDigest", "XMinioServerNotInitialized":
		return meaning{fault.Unavailable, ""}, true
	case "BucketAlreadyExists":
		return meaning{fault.Exists, "a bucket of that name belongs to somebody else"}, true
	case "BucketAlreadyOwnedByYou":
		return meaning{fault.Exists, ""}, true
	case "BucketNotEmpty":
		return meaning{fault.Precondition, "objects, versions or unfinished uploads are left in the bucket"}, true
	case "TooManyBuckets", "QuotaExceeded", "XMinioAdminBucketQuotaExceeded", "XMinioStorageFull", "ServiceQuotaExceededException":
		return meaning{fault.Exhausted, ""}, true
	case "PermanentRedirect", "TemporaryRedirect", "Redirect", "AuthorizationHeaderMalformed", "InvalidRegion", "IllegalLocationConstraintException":
		return meaning{fault.Precondition, adviceRegion}, true
	case "InvalidBucketName", "KeyTooLongError":
		return meaning{fault.Invalid, ""}, true
	case "NotImplemented":
		return meaning{fault.Unsupported, "the service does not have this operation"}, true
	}
	return meaning{}, false
}

func (a answer) verdict() (fault.Kind, string) {
	m, ok := meaningOf(a.code)
	if !ok {
		m = a.byStatus()
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

// byStatus is for codes that are not known and answers that have none.
func (a answer) byStatus() meaning {
	switch {
	case a.status == http.StatusNotFound && !a.absent():
		return meaning{fault.Unavailable, "this 404 is not S3's: is the endpoint an S3 service?"}
	case a.absent():
		return meaning{fault.NotFound, ""}
	case a.status == http.StatusUnauthorized:
		return meaning{fault.Unauthenticated, adviceKeys}
	case a.status == http.StatusForbidden && a.head:
		return meaning{fault.Denied, "the credentials are not valid here or lack a permission; an answer to HEAD does not say which"}
	case a.status == http.StatusForbidden, a.status == 0 && (a.code == "AccessDenied" || a.code == "Forbidden"):
		return meaning{fault.Denied, "the credentials lack a permission, or a policy forbids it"}
	case a.status == http.StatusBadRequest && a.head:
		return meaning{fault.Precondition, "an answer to HEAD has no reason: expired credentials, a wrong region and a wrong clock look like this"}
	case a.status == http.StatusMovedPermanently, a.status == http.StatusPermanentRedirect:
		return meaning{fault.Precondition, adviceRegion}
	case a.status == http.StatusTemporaryRedirect, a.status == http.StatusRequestTimeout:
		return meaning{fault.Unavailable, ""}
	case a.status == http.StatusTooManyRequests, a.status == http.StatusServiceUnavailable:
		return meaning{fault.Unavailable, adviceSlow}
	case a.status == http.StatusMethodNotAllowed, a.status == http.StatusNotImplemented:
		return meaning{fault.Unsupported, "the service does not have this operation"}
	case a.status == http.StatusConflict, a.status == 0 && a.code == "OperationAborted":
		return meaning{fault.Busy, "another request on the same thing is under way"}
	case a.status == http.StatusPreconditionFailed, a.status == 0 && a.code == "PreconditionFailed":
		return meaning{fault.Busy, "somebody else changed it first"}
	case a.status == http.StatusInsufficientStorage:
		return meaning{fault.Exhausted, "the service has no space left"}
	case a.status >= 500, a.status == 0 && a.code == "InternalError":
		return meaning{fault.Unavailable, ""}
	case a.status >= 300 && a.status < 500:
		return meaning{fault.Precondition, ""}
	}
	return meaning{fault.Unknown, ""}
}

// absent tells whether the service says that something is not there. A HEAD's 404 has nothing but its status. Elsewhere S3
// names what is missing, and a web server or a proxy in its place does not.
func (a answer) absent() bool {
	// Some services refuse an unknown key with 404, for example.
	if m, ok := meaningOf(a.code); ok {
		return m.kind == fault.NotFound
	}
	switch a.code {
	case "NotFound", "UnknownError", "":
		return a.code == "NotFound" && (a.head || a.status == 0)
	}
	return a.status == http.StatusNotFound
}

// IsNotFound tells whether S3 said that a bucket, key, upload or configuration is not there. A 403 never is.
func IsNotFound(err error) bool {
	a, ok := answered(err)
	return ok && a.absent()
}

// IsNoSuchBucket tells whether S3 named the bucket itself as missing. A HEAD's 404 cannot.
func IsNoSuchBucket(err error) bool { return ErrorCode(err) == "NoSuchBucket" }

// IsPreconditionFailed tells whether a conditional request's condition did not hold (412). After a retry inside the SDK it
// may have been this request's own first attempt that changed the thing.
func IsPreconditionFailed(err error) bool {
	a, ok := answered(err)
	return ok && (a.code == "PreconditionFailed" || a.status == http.StatusPreconditionFailed)
}

// IsConflict tells whether another request on the same thing was under way, so that trying again may help (409).
func IsConflict(err error) bool {
	a, ok := answered(err)
	return ok && (a.code == "ConditionalRequestConflict" || a.code == "OperationAborted")
}

// IsNotImplemented tells whether the service does not have the operation, or a header of it (501, 405).
func IsNotImplemented(err error) bool {
	a, ok := answered(err)
	return ok && (a.code == "NotImplemented" || a.code == "MethodNotAllowed" || a.status == http.StatusNotImplemented || a.status == http.StatusMethodNotAllowed)
}

// ErrorCode is the service's code in err's chain ("AccessDenied"), or "" where no service answered. For an answer without a
// body it is made of the status ("NotFound").
func ErrorCode(err error) string {
	a, ok := answered(err)
	if !ok {
		return ""
	}
	return a.code
}
