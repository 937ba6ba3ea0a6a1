package driver

import (
	"context"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// Only this file maps errors to gRPC codes.
//
// external-provisioner and kubelet treat Canceled, DeadlineExceeded, Unavailable and Aborted as an unknown outcome, which they retry,
// and all other codes as final. A wrong final code from CreateVolume or NodePublishVolume orphans a volume or a mount, so errors
// without a kind are never final there.

// maxMessage is the maximum length of an error text, in bytes. gRPC sends it in a header.
const maxMessage = 4096

// mutates reports whether a method may have changed something when it fails.
func mutates(method string) bool {
	switch method {
	case csi.Controller_CreateVolume_FullMethodName, csi.Controller_DeleteVolume_FullMethodName,
		csi.Controller_ControllerExpandVolume_FullMethodName, csi.Controller_ControllerModifyVolume_FullMethodName,
		csi.Controller_CreateSnapshot_FullMethodName, csi.Controller_DeleteSnapshot_FullMethodName,
		csi.Node_NodePublishVolume_FullMethodName, csi.Node_NodeUnpublishVolume_FullMethodName:
		return true
	}
	return false
}

// codeOf returns the gRPC code of a method's error.
func codeOf(ctx context.Context, method string, err error) codes.Code {
	switch fault.KindOf(err) {
	case fault.Invalid:
		return codes.InvalidArgument
	case fault.NotFound:
		return codes.NotFound
	case fault.Exists:
		return codes.AlreadyExists
	case fault.Precondition:
		return codes.FailedPrecondition
	case fault.Busy:
		return codes.Aborted
	case fault.Denied:
		return codes.PermissionDenied
	case fault.Unauthenticated:
		return codes.Unauthenticated
	case fault.Unavailable:
		return codes.Unavailable
	case fault.Timeout:
		return codes.DeadlineExceeded
	case fault.Exhausted:
		return codes.ResourceExhausted
	case fault.OutOfRange:
		return codes.OutOfRange
	case fault.Unsupported:
		// In CSI, Unimplemented is for whole RPCs; an unsupported argument is invalid.
		return codes.InvalidArgument
	case fault.Unknown:
	}
	switch {
	case ctx.Err() != nil:
		return codes.DeadlineExceeded
	case mutates(method):
		return codes.Aborted
	}
	return codes.Internal
}

// statusOf converts a method's error to a gRPC status with the same text and the page that explains it. An error that is itself a status is returned unchanged: it is
// the generated code's "unimplemented". errors.As would also match errors that wrap a status.
func statusOf(ctx context.Context, method string, err error) error {
	if err == nil {
		return nil
	}
	if _, ok := err.(interface{ GRPCStatus() *status.Status }); ok {
		return err
	}
	page := pageOf(method, err)
	return status.Error(codeOf(ctx, method, err), truncate(err.Error(), maxMessage-len(page))+page)
}

// truncate shortens a text to limit bytes in the middle, because what failed is at the start and the cause at the end.
func truncate(text string, limit int) string {
	const gap = " … "
	if len(text) > limit {
		half := (limit - len(gap)) / 2
		text = text[:half] + gap + text[len(text)-half:]
	}
	return strings.ToValidUTF8(text, "?")
}

// unexpected reports whether a code indicates a bug or a broken environment, which is logged as an error.
func unexpected(code codes.Code) bool {
	return code == codes.Internal || code == codes.Unknown || code == codes.DataLoss
}
