package driver

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

func TestEveryFaultKindHasItsCode(t *testing.T) {
	want := map[fault.Kind]codes.Code{
		fault.Invalid: codes.InvalidArgument, fault.NotFound: codes.NotFound, fault.Exists: codes.AlreadyExists,
		fault.Precondition: codes.FailedPrecondition, fault.Busy: codes.Aborted, fault.Denied: codes.PermissionDenied,
		fault.Unauthenticated: codes.Unauthenticated, fault.Unavailable: codes.Unavailable, fault.Timeout: codes.DeadlineExceeded,
		fault.Exhausted: codes.ResourceExhausted, fault.OutOfRange: codes.OutOfRange, fault.Unsupported: codes.InvalidArgument,
	}
	for kind := fault.Invalid; kind <= fault.Unsupported; kind++ {
		code, ok := want[kind]
		if !ok {
			t.Errorf("add kind %d to this test", kind)
		}
		for _, method := range []string{csi.Controller_CreateVolume_FullMethodName, csi.Node_NodeGetVolumeStats_FullMethodName} {
			err := fmt.Errorf("create volume %q: %w", "a", fault.Errorf(kind, "reason %d", kind))
			got := statusOf(t.Context(), method, err)
			if status.Code(got) != code || status.Convert(got).Message() != fmt.Sprintf(`create volume "a": reason %d`, kind) {
				t.Errorf("%s, kind %d: %v, want %v", method, kind, got, code)
			}
		}
	}
}

// A final code for an outcome that nobody knows makes COs leak volumes and mounts.
func TestUnknownOutcomesAreNeverFinalWhereSomethingMayHaveHappened(t *testing.T) {
	retried := map[codes.Code]bool{codes.Canceled: true, codes.DeadlineExceeded: true, codes.Unavailable: true, codes.Aborted: true}
	for _, method := range []string{
		csi.Controller_CreateVolume_FullMethodName, csi.Controller_DeleteVolume_FullMethodName, csi.Controller_ControllerExpandVolume_FullMethodName,
		csi.Controller_ControllerModifyVolume_FullMethodName,
		csi.Node_NodePublishVolume_FullMethodName, csi.Node_NodeUnpublishVolume_FullMethodName,
	} {
		for _, err := range []error{errors.New("who knows"), context.DeadlineExceeded, context.Canceled, fault.Errorf(fault.Unknown, "who knows")} {
			if code := status.Code(statusOf(t.Context(), method, err)); !retried[code] {
				t.Errorf("%s, %v: %v is final", method, err, code)
			}
		}
	}
	if code := status.Code(statusOf(t.Context(), csi.Node_NodeGetVolumeStats_FullMethodName, errors.New("who knows"))); code != codes.Internal {
		t.Errorf("stats: %v", code)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if code := status.Code(statusOf(ended, csi.Node_NodeGetVolumeStats_FullMethodName, errors.New("who knows"))); code != codes.DeadlineExceeded {
		t.Errorf("after the request's end: %v", code)
	}
}

func TestLongMessagesKeepBothEnds(t *testing.T) {
	err := fault.Errorf(fault.Busy, "start%send\xff", strings.Repeat("é", maxMessage))
	text := status.Convert(statusOf(t.Context(), "", err)).Message()
	if !strings.HasPrefix(text, "start") || !strings.HasSuffix(text, "end?") || len(text) > maxMessage+2 || !utf8.ValidString(text) {
		t.Errorf("%d bytes: %.20q … %q", len(text), text, text[len(text)-20:])
	}
}

func TestGeneratedUnimplementedStaysAsItIs(t *testing.T) {
	_, err := csi.UnimplementedNodeServer{}.NodeStageVolume(t.Context(), nil)
	if code := status.Code(statusOf(t.Context(), csi.Node_NodeStageVolume_FullMethodName, err)); code != codes.Unimplemented {
		t.Errorf("got %v", code)
	}
}
