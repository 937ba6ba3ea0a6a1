package backend

// Classify puts a fault kind and a readable text on an error of an S3 or STS request. what says what was tried, on which
// bucket: "reading the volume record .s3-csi/volumes/x of bucket b". nil stays nil, the chain stays reachable.
func Classify(err error, what string) error { panic("soon") }

// IsNotFound tells whether S3 said that a bucket, key, upload or configuration is not there. A 403 never is.
func IsNotFound(err error) bool { panic("soon") }

// IsNoSuchBucket tells whether S3 said that the bucket itself is not there.
func IsNoSuchBucket(err error) bool { panic("soon") }

// IsPreconditionFailed tells whether a conditional request's condition did not hold (412): somebody was first.
func IsPreconditionFailed(err error) bool { panic("soon") }

// IsConflict tells whether another request on the same thing was under way (409 ConditionalRequestConflict,
// OperationAborted): try again.
func IsConflict(err error) bool { panic("soon") }

// IsNotImplemented tells whether the service does not have the operation or a header of it (501, 405).
func IsNotImplemented(err error) bool { panic("soon") }

// ErrorCode is the S3 error code in err's chain ("AccessDenied"), or "".
func ErrorCode(err error) string { panic("soon") }
