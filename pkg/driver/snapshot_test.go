package driver

import (
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/s3-csi/s3-csi-driver/pkg/provision"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

func newTestSnapshots(t *testing.T) (*Controller, *fakeSnapshots) {
	t.Helper()
	s := newFakeSnapshots()
	c := NewController(newFakeProvisioner(), s, fakeBackends{})
	return c, s
}

func snapshotRequest() *csi.CreateSnapshotRequest {
	return &csi.CreateSnapshotRequest{Name: "snapshot-1", SourceVolumeId: "default:bucket-1/pvc-1/"}
}

func TestSnapshots_AreCreatedFoundAndDeleted(t *testing.T) {
	c, fake := newTestSnapshots(t)
	req := snapshotRequest()
	req.Parameters = map[string]string{"bucketName": "bucket-2", "maxObjects": "5", "maxBytes": "1Ki", "onDelete": "purge", "consistency": "object",
		snapshotNamespaceKey: "shop"}
	made, err := c.CreateSnapshot(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	want := volume.SnapshotParameters{BucketName: "bucket-2", Consistency: "object", MaxObjects: 5, MaxBytes: 1024, OnDelete: volume.OnDeletePurge}
	if fake.last.Parameters != want || fake.last.Namespace != "shop" || fake.last.Source.Prefix != "pvc-1/" {
		t.Errorf("parsed as %+v", fake.last)
	}
	s := made.GetSnapshot()
	if s.GetSnapshotId() != "default:bucket-2/snapshot-1@1" || s.GetSourceVolumeId() != req.GetSourceVolumeId() || !s.GetReadyToUse() ||
		s.GetSizeBytes() != 7 || s.GetCreationTime().GetSeconds() != 1 {
		t.Errorf("%v", s)
	}
	if got, err := c.GetSnapshot(t.Context(), &csi.GetSnapshotRequest{SnapshotId: s.GetSnapshotId()}); err != nil ||
		got.GetSnapshot().GetSnapshotId() != s.GetSnapshotId() {
		t.Errorf("%v, %v", got, err)
	}
	for what, list := range map[string]struct {
		req  *csi.ListSnapshotsRequest
		want int
	}{
		"all":            {&csi.ListSnapshotsRequest{MaxEntries: 3, StartingToken: "t", SourceVolumeId: "v"}, 1},
		"by id":          {&csi.ListSnapshotsRequest{SnapshotId: s.GetSnapshotId()}, 1},
		"by id and more": {&csi.ListSnapshotsRequest{SnapshotId: s.GetSnapshotId(), SourceVolumeId: "another"}, 0},
		"another id":     {&csi.ListSnapshotsRequest{SnapshotId: "default:bucket-2/other@1"}, 0},
		"no id at all":   {&csi.ListSnapshotsRequest{SnapshotId: "none"}, 0},
	} {
		if got, err := c.ListSnapshots(t.Context(), list.req); err != nil || len(got.GetEntries()) != list.want {
			t.Errorf("%s: %v, %v", what, got, err)
		}
	}
	if fake.query != (provision.ListSnapshotsRequest{Source: "v", Max: 3, Token: "t"}) {
		t.Errorf("listed %+v", fake.query)
	}
	for _, id := range []string{s.GetSnapshotId(), s.GetSnapshotId(), "none", "default:bucket-2/pvc-1/"} {
		if _, err := c.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: id}); err != nil {
			t.Errorf("%s: %v", id, err)
		}
	}
	if len(fake.made) != 0 {
		t.Errorf("left: %v", fake.made)
	}
}

func TestSnapshots_RefuseInvalidRequests(t *testing.T) {
	c, _ := newTestSnapshots(t)
	for what, tc := range map[string]struct {
		change func(*csi.CreateSnapshotRequest)
		code   codes.Code
		says   string
	}{
		"no name":          {func(r *csi.CreateSnapshotRequest) { r.Name = "" }, codes.InvalidArgument, "name: is missing"},
		"no source":        {func(r *csi.CreateSnapshotRequest) { r.SourceVolumeId = "" }, codes.InvalidArgument, "source_volume_id: is missing"},
		"a long source":    {func(r *csi.CreateSnapshotRequest) { r.SourceVolumeId = strings.Repeat("x", 129) }, codes.InvalidArgument, "source_volume_id"},
		"a foreign source": {func(r *csi.CreateSnapshotRequest) { r.SourceVolumeId = "vol" }, codes.NotFound, "source_volume_id"},
		"unknown parameter": {func(r *csi.CreateSnapshotRequest) { r.Parameters = map[string]string{"bucket": "x"} }, codes.InvalidArgument,
			"parameters.bucket: is not a parameter of a VolumeSnapshotClass; the nearest is bucketName"},
		"consistency": {func(r *csi.CreateSnapshotRequest) { r.Parameters = map[string]string{"consistency": "crash"} }, codes.InvalidArgument,
			"parameters.consistency"},
		"maxObjects": {func(r *csi.CreateSnapshotRequest) { r.Parameters = map[string]string{"maxObjects": "0"} }, codes.InvalidArgument,
			"parameters.maxObjects"},
		"maxBytes": {func(r *csi.CreateSnapshotRequest) { r.Parameters = map[string]string{"maxBytes": "x"} }, codes.InvalidArgument, "parameters.maxBytes"},
		"onDelete": {func(r *csi.CreateSnapshotRequest) { r.Parameters = map[string]string{"onDelete": "requireEmpty"} }, codes.InvalidArgument,
			"parameters.onDelete"},
		"a secret":   {func(r *csi.CreateSnapshotRequest) { r.Secrets = tenantKeys() }, codes.InvalidArgument, "secrets"},
		"no backend": {func(r *csi.CreateSnapshotRequest) { r.SourceVolumeId = "other:bucket-1/pvc-1/" }, codes.FailedPrecondition, "other"},
	} {
		req := snapshotRequest()
		tc.change(req)
		_, err := c.CreateSnapshot(t.Context(), req)
		refused(t, what, csi.Controller_CreateSnapshot_FullMethodName, err, tc.code, tc.says)
	}
	_, err := c.ListSnapshots(t.Context(), &csi.ListSnapshotsRequest{MaxEntries: -1})
	refused(t, "negative", csi.Controller_ListSnapshots_FullMethodName, err, codes.InvalidArgument, "max_entries")
	_, err = c.GetSnapshot(t.Context(), &csi.GetSnapshotRequest{SnapshotId: "none"})
	refused(t, "get", csi.Controller_GetSnapshot_FullMethodName, err, codes.NotFound)
	for _, id := range []string{"", strings.Repeat("x", 129)} {
		_, err = c.DeleteSnapshot(t.Context(), &csi.DeleteSnapshotRequest{SnapshotId: id})
		refused(t, "delete", csi.Controller_DeleteSnapshot_FullMethodName, err, codes.InvalidArgument, "snapshot_id")
	}
}

func snapshotSource(id string) *csi.VolumeContentSource {
	return &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: id}}}
}

func TestCreateVolume_FromSnapshot(t *testing.T) {
	c, p := newTestController(t)
	req := createRequest()
	req.VolumeContentSource = snapshotSource("default:bucket-2/s@1")
	made, err := c.CreateVolume(t.Context(), req)
	if err != nil || made.GetVolume().GetContentSource().GetSnapshot().GetSnapshotId() != "default:bucket-2/s@1" {
		t.Errorf("%v, %v", made, err)
	}
	if want := (volume.Content{Snapshot: volume.SnapshotID{Backend: "default", Bucket: "bucket-2", Segment: "s",
		Generation: 1}}); p.last.Parameters.Content != want {
		t.Errorf("%+v", p.last.Parameters.Content)
	}
	req = createRequest()
	req.Name, req.Parameters["snapshotAccess"], req.VolumeContentSource = "pvc-2", "direct", snapshotSource("default:bucket-1/s@1")
	req.VolumeCapabilities = []*csi.VolumeCapability{mountCapability(csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY)}
	made, err = c.CreateVolume(t.Context(), req)
	if err != nil || made.GetVolume().GetVolumeContext()["snapshot"] != "s@1" || made.GetVolume().GetVolumeContext()["readOnly"] != "true" {
		t.Errorf("%v, %v", made, err)
	}
}
