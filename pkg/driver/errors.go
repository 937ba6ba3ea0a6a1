package driver

import (
	"context"
	"errors"
	"math"
	"path/filepath"
	"regexp"
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

// maxMessage is the maximum length of an error text with its page, in bytes. COs show the text in an event, which Kubernetes cuts at 1,024
// bytes, after words of their own such as the volume's name. The log has the full text.
const maxMessage = 850

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

// statusOf converts a method's error to a gRPC status with the same text and the page that explains it. target is the path of the request, or "".
// An error that is itself a status is returned unchanged: it is the generated code's "unimplemented". errors.As would also match errors that wrap
// a status.
func statusOf(ctx context.Context, method, target string, err error) error {
	if err == nil {
		return nil
	}
	if _, ok := err.(interface{ GRPCStatus() *status.Status }); ok {
		return err
	}
	return &rpcError{err, status.New(codeOf(ctx, method, err), messageOf(method, target, err, maxMessage)), messageOf(method, target, err, math.MaxInt)}
}

// rpcError is an error as an RPC returns it.
type rpcError struct {
	err    error
	status *status.Status
	full   string // the status's text, not shortened
}

// Error implements error.
func (e *rpcError) Error() string { return e.status.Err().Error() }

// Unwrap returns the method's error.
func (e *rpcError) Unwrap() error { return e.err }

// GRPCStatus returns the status that gRPC sends.
func (e *rpcError) GRPCStatus() *status.Status { return e.status }

// fullText returns the text of an RPC's error for the log.
func fullText(err error) string {
	if e := (*rpcError)(nil); errors.As(err, &e) {
		return e.full
	}
	return status.Convert(err).Message()
}

// messageOf returns the text of a method's error, with the page that explains it at the end, in at most limit bytes. A long text does not name the
// target: an event is of a pod and names the volume.
func messageOf(method, target string, err error, limit int) string {
	text, page := err.Error(), pageOf(method, err)
	if named := pageInText.FindString(text); named != "" && !strings.Contains(truncate(text, limit), named) {
		page = "; " + named
	}
	if limit -= len(page); len(text) > limit && target != "" {
		for _, word := range []string{" at ", " from "} {
			text = strings.Replace(text, word+target+":", ":", 1)
		}
	}
	return truncate(text, limit) + page
}

// targetOf returns the path of the request's target, or "".
func targetOf(req any) string {
	path := ""
	switch r := req.(type) {
	case interface{ GetTargetPath() string }:
		path = r.GetTargetPath()
	case interface{ GetVolumePath() string }:
		path = r.GetVolumePath()
	}
	if path == "" {
		return ""
	}
	return filepath.Clean(path)
}

// pageInText matches a page that a text names.
var pageInText = regexp.MustCompile(`see docs/[a-z0-9/-]+\.md(#[a-z0-9-]+)?`)

// truncate shortens a text to limit bytes. It keeps twice as much of the start as of the end: what failed and the cause are at the start,
// advice at the end, or the last lines of a client's output.
func truncate(text string, limit int) string {
	const gap = " … "
	text = strings.ToValidUTF8(text, "?")
	if len(text) <= limit {
		return text
	}
	end := (limit - len(gap)) / 3
	// What is left of characters that were cut is removed.
	return strings.ToValidUTF8(text[:limit-len(gap)-end], "") + gap + strings.ToValidUTF8(text[len(text)-end:], "")
}

// unexpected reports whether a code indicates a bug or a broken environment, which is logged as an error.
func unexpected(code codes.Code) bool {
	return code == codes.Internal || code == codes.Unknown || code == codes.DataLoss
}
