package mount

import "github.com/s3-csi/s3-csi-driver/pkg/fault"

// WithCleanupError joins an error with that of the clean-up after it; nil: there was none. If the clean-up failed the error is not
// final (fault.Unavailable), so that the caller retries, which cleans up.
func WithCleanupError(err, cleanup error) error {
	if cleanup == nil {
		return err
	}
	return fault.Errorf(fault.Unavailable, "%w; the clean-up failed, too, and is done by a retry: %w", err, cleanup)
}
