package driver

import (
	"context"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// This file alone knows what an error means to a CO.
//
// external-provisioner and kubelet take Canceled, DeadlineExceeded, Unavailable and Aborted as "it may have happened, ask
// again" and everything else as "it did not happen". A wrong final code from CreateVolume or NodePublishVolume leaves a
// volume or a mount that nobody will ever remove, so an error that nobody classified is never final there.

// maxMessage bounds an error's text, in bytes: gRPC carries it in a header.
const maxMessage = 4096

// mutates tells whether a method may have changed something when it fails.
func mutates(method string) bool {
	switch method {
	case csi.Controller_CreateVolume_FullMethodName, csi.Controller_DeleteVolume_FullMethodName,
		csi.Node_NodePublishVolume_FullMethodName, csi.Node_NodeUnpublishVolume_FullMethodName:
		return true
	}
	return false
}

// codeOf is the gRPC code of an error that a method returns.
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
		// CSI keeps Unimplemented for whole RPCs; an argument that cannot be served is invalid.
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

// statusOf turns a method's error into the one that the CO gets. The text is the error's own, with its whole cause. An
// error that is a gRPC status already is the generated code's "unimplemented"; one that only wraps a status is not, so
// this is no errors.As.
func statusOf(ctx context.Context, method string, err error) error {
	if err == nil {
		return nil
	}
	if _, ok := err.(interface{ GRPCStatus() *status.Status }); ok {
		return err
	}
	return status.Error(codeOf(ctx, method, err), bounded(err.Error()))
}

// bounded keeps both ends of an over-long text: what failed is at its start and why at its end.
func bounded(text string) string {
	const gap = " … "
	if len(text) > maxMessage {
		half := (maxMessage - len(gap)) / 2
		text = text[:half] + gap + text[len(text)-half:]
	}
	return strings.ToValidUTF8(text, "?")
}

// unexpected tells the codes that mean a fault of the driver or of what it stands on from those that every CO meets.
func unexpected(code codes.Code) bool {
	return code == codes.Internal || code == codes.Unknown || code == codes.DataLoss
}
