package driver

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

func TestErrors_EveryKindHasACode(t *testing.T) {
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
			got := statusOf(t.Context(), method, "", err)
			text, _, _ := strings.Cut(status.Convert(got).Message(), "; see ")
			if status.Code(got) != code || text != fmt.Sprintf(`create volume "a": reason %d`, kind) {
				t.Errorf("%s, kind %d: %v, want %v", method, kind, got, code)
			}
		}
	}
}

// A final code for an unknown outcome makes COs leak volumes and mounts.
func TestErrors_UnknownOutcomesAreNotFinal(t *testing.T) {
	retried := map[codes.Code]bool{codes.Canceled: true, codes.DeadlineExceeded: true, codes.Unavailable: true, codes.Aborted: true}
	for _, method := range []string{
		csi.Controller_CreateVolume_FullMethodName, csi.Controller_DeleteVolume_FullMethodName, csi.Controller_ControllerExpandVolume_FullMethodName,
		csi.Controller_ControllerModifyVolume_FullMethodName,
		csi.Node_NodePublishVolume_FullMethodName, csi.Node_NodeUnpublishVolume_FullMethodName,
	} {
		for _, err := range []error{errors.New("who knows"), context.DeadlineExceeded, context.Canceled, fault.Errorf(fault.Unknown, "who knows")} {
			if code := status.Code(statusOf(t.Context(), method, "", err)); !retried[code] {
				t.Errorf("%s, %v: %v is final", method, err, code)
			}
		}
	}
	if code := status.Code(statusOf(t.Context(), csi.Node_NodeGetVolumeStats_FullMethodName, "", errors.New("who knows"))); code != codes.Internal {
		t.Errorf("stats: %v", code)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if code := status.Code(statusOf(ended, csi.Node_NodeGetVolumeStats_FullMethodName, "", errors.New("who knows"))); code != codes.DeadlineExceeded {
		t.Errorf("after the request's end: %v", code)
	}
}

func TestLongMessages_KeepBothEnds(t *testing.T) {
	for _, start := range []string{"start", "star"} { // a character is cut, or none
		err := fault.Errorf(fault.Busy, "%s%send\xff", start, strings.Repeat("é", maxMessage))
		text := status.Convert(statusOf(t.Context(), "", "", err)).Message()
		if !strings.HasPrefix(text, start+"é") || !strings.HasSuffix(text, "éend?") || len(text) > maxMessage || !utf8.ValidString(text) ||
			strings.Count(text, "?") != 1 {
			t.Errorf("%d bytes: %.20q … %q", len(text), text, text[len(text)-20:])
		}
	}
}

const longTarget = "/var/lib/kubelet/pods/6f4b1c9e-0d7a-4a8f-9c36-2b1de00f7a55/volumes/kubernetes.io~csi/pvc-0b9c7f1e-53a4-4f0b-8d1c-7e2a90c4d611/mount"

// The cause is shown even if much advice follows it.
func TestLongMessages_KeepTheCause(t *testing.T) {
	err := fault.Errorf(fault.Unavailable, "publish volume %q at %s: the target is left unchanged: the session of mount %s (volume %s) expired at %s and "+
		"could not be renewed since %s: make a session of role %s for backend default (https://s3.example.com) (webIdentity): the token service returned 403 "+
		"AccessDenied %q (request 3eb22aa2396a447a): %s; %s",
		"default:team-data/namespace/pvc-0b9c7f1e-53a4-4f0b-8d1c-7e2a90c4d611/",
		longTarget, "52kejb4r35ynr4qcltsn4kyr-3821454290", "default:team-data/namespace/pvc-0b9c7f1e-53a4-4f0b-8d1c-7e2a90c4d611/",
		"2026-11-25T04:37:42Z", "2026-11-25T04:37:40Z", "arn:aws:iam::000000000000:role/apps.web", "not authorized to perform sts:AssumeRoleWithWebIdentity",
		strings.Repeat("check the role; ", 10), strings.Repeat("check the service account; ", 10))
	text := status.Convert(statusOf(t.Context(), csi.Node_NodePublishVolume_FullMethodName, longTarget, err)).Message()
	if !strings.Contains(text, "403 AccessDenied") || !strings.HasPrefix(text, "publish volume ") || strings.Contains(text, "/var/lib/kubelet") ||
		len(text) > maxMessage {
		t.Errorf("%d bytes: %s", len(text), text)
	}
}

// A long text does without the request's target, but not without other paths.
func TestLongMessages_KeepOtherPaths(t *testing.T) {
	const cause = "reading the certificates at /etc/s3-csi/ca.pem: permission denied"
	advice := strings.Repeat("; check the mode", 100)
	for _, tt := range []struct {
		method, begin string
		req           any
	}{
		{csi.Controller_CreateVolume_FullMethodName, "create volume \"a\": ", &csi.CreateVolumeRequest{Name: "a"}},
		{csi.Node_NodePublishVolume_FullMethodName, "publish volume \"a\" at " + longTarget + ": ", &csi.NodePublishVolumeRequest{TargetPath: longTarget + "/"}},
		{csi.Node_NodeUnpublishVolume_FullMethodName, "unpublish volume \"a\" from " + longTarget + ": ", &csi.NodeUnpublishVolumeRequest{TargetPath: longTarget}},
		{csi.Node_NodeGetVolumeStats_FullMethodName, "statistics of volume \"a\" at " + longTarget + ": ", &csi.NodeGetVolumeStatsRequest{VolumePath: longTarget}},
	} {
		err := fault.Errorf(fault.Unavailable, "%s%s%s", tt.begin, cause, advice)
		text := status.Convert(statusOf(t.Context(), tt.method, targetOf(tt.req), err)).Message()
		if !strings.Contains(text, "\"a\": "+cause) {
			t.Errorf("%s: %s", tt.method, text)
		}
	}
}

// An event shows 1,024 bytes: what failed, the end of the client's output and the page are among them. The log has all of it.
func TestLongMessages_FitIntoEvents(t *testing.T) {
	const (
		// external-provisioner and kubelet begin like this, with names of usual lengths.
		event  = "MountVolume.SetUp failed for volume \"pvc-0b9c7f1e-53a4-4f0b-8d1c-7e2a90c4d611\" : rpc error: code = FailedPrecondition desc = "
		volume = "default:team-data/namespace/pvc-0b9c7f1e-53a4-4f0b-8d1c-7e2a90c4d611/"
		failed = "client mountpoint-s3 exited before the mount was ready: exit status 1"
		last   = "Error: 403 AccessDenied"
		page   = "docs/reference/errors.md#publishing-clients-and-the-node"
	)
	output := strings.Repeat("a line of output | ", 220) + last
	for name, err := range map[string]error{
		"page of the error": fault.See(page, fault.Errorf(fault.Unavailable, "publish volume %q at %s: %s: %s", volume, longTarget, failed, output)),
		"page in the text":  fault.Errorf(fault.Unavailable, "publish volume %q at %s: %s: %s; see %s: %s", volume, longTarget, failed, output, page, output),
	} {
		err := statusOf(t.Context(), csi.Node_NodePublishVolume_FullMethodName, longTarget, err)
		text := event + status.Convert(err).Message()
		if len(text) > 1000 || !strings.HasSuffix(text, "; see "+page) || !strings.Contains(text, failed) || !strings.Contains(text, last) ||
			strings.Count(text, page) != 1 {
			t.Errorf("%s: %d bytes: %s", name, len(text), text)
		}
		if full := fullText(err); !strings.Contains(full, output) || strings.Count(full, page) != 1 {
			t.Errorf("%s: the log has %d bytes", name, len(full))
		}
	}
}

func TestErrors_UnimplementedIsUnchanged(t *testing.T) {
	_, err := csi.UnimplementedNodeServer{}.NodeStageVolume(t.Context(), nil)
	if code := status.Code(statusOf(t.Context(), csi.Node_NodeStageVolume_FullMethodName, "", err)); code != codes.Unimplemented {
		t.Errorf("got %v", code)
	}
}

func TestErrors_NameTheirPage(t *testing.T) {
	const publish, unpublish = csi.Node_NodePublishVolume_FullMethodName, csi.Node_NodeUnpublishVolume_FullMethodName
	for _, method := range []string{
		publish, unpublish, csi.Controller_CreateVolume_FullMethodName, csi.Controller_DeleteVolume_FullMethodName,
		csi.Controller_ControllerExpandVolume_FullMethodName, csi.Controller_ControllerModifyVolume_FullMethodName,
		csi.Controller_CreateSnapshot_FullMethodName, csi.Controller_DeleteSnapshot_FullMethodName,
	} {
		for kind := fault.Unknown; kind <= fault.Unsupported; kind++ {
			err := fault.Errorf(kind, "%s", strings.Repeat("a reason ", 1000))
			text := status.Convert(statusOf(t.Context(), method, "", err)).Message()
			_, page, found := strings.Cut(text, "; see docs/")
			file, heading, _ := strings.Cut(page, "#")
			if document, err := os.ReadFile("../../docs/" + file); !found || err != nil {
				t.Errorf("%s, %v: %q: %v", method, kind, page, err)
			} else if heading != "" && !slices.Contains(headings(string(document)), heading) {
				t.Errorf("%s, %v: docs/%s has no heading #%s", method, kind, file, heading)
			}
			if len(text) > maxMessage {
				t.Errorf("%s, %v: %d bytes", method, kind, len(text))
			}
		}
	}
	own := fault.See("docs/explanation/mounts.md#memory", fault.Errorf(fault.Unavailable, "client exited"))
	for _, tt := range []struct {
		method string
		err    error
		want   string
	}{
		{publish, fault.Errorf(fault.Denied, "no"), "no; see " + credentials.Page},
		{publish, fault.Errorf(fault.Busy, "later"), "later; see " + pagePodStarts},
		{publish, fmt.Errorf("mount a: %w", own), "mount a: client exited; see docs/explanation/mounts.md#memory"},
		{publish, fault.MessageOf(own).Err(), "client exited; see docs/explanation/mounts.md#memory"}, // a helper's
		{publish, fault.Errorf(fault.Precondition, "no; see docs/how-to/operations.md"), "no; see docs/how-to/operations.md"},
		{unpublish, fault.Errorf(fault.Busy, "draining"), "draining; see " + pageUnpublish},
		{csi.Node_NodeGetVolumeStats_FullMethodName, own, "client exited"},
	} {
		if got := status.Convert(statusOf(t.Context(), tt.method, "", tt.err)).Message(); got != tt.want {
			t.Errorf("%s: %q, want %q", tt.method, got, tt.want)
		}
	}
}

// headings returns the anchors of a document's headings.
func headings(markdown string) (anchors []string) {
	for _, heading := range regexp.MustCompile(`(?m)^#+ (.*)$`).FindAllStringSubmatch(markdown, -1) {
		name := regexp.MustCompile(`[^\w -]`).ReplaceAllString(strings.ToLower(heading[1]), "")
		anchors = append(anchors, strings.ReplaceAll(name, " ", "-"))
	}
	return anchors
}

// Pages that any text of the programs names exist.
func TestDocs_PagesInTheSourceExist(t *testing.T) {
	found := 0
	for _, dir := range []string{"../../pkg", "../../cmd", "../../clients", "../../charts"} {
		err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			switch {
			case err != nil:
				return err
			case d.IsDir() && (d.Name() == "target" || d.Name() == "testdata"):
				return fs.SkipDir
			case d.IsDir() || !slices.Contains([]string{".go", ".rs", ".yaml", ".txt", ".tpl"}, filepath.Ext(path)) || strings.HasSuffix(path, "_test.go"):
				return nil
			}
			source, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			for _, page := range regexp.MustCompile(`\bdocs/([a-z-]+/[a-z0-9-]+\.md)(?:#([a-z0-9-]+))?`).FindAllSubmatch(source, -1) {
				found++
				document, err := os.ReadFile("../../docs/" + string(page[1]))
				if err != nil {
					t.Errorf("%s names %s: %v", path, page[0], err)
				} else if len(page[2]) > 0 && !slices.Contains(headings(string(document)), string(page[2])) {
					t.Errorf("%s names %s, which has no such heading", path, page[0])
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if found < 30 {
		t.Errorf("only %d pages are named", found)
	}
}
