package driver

import (
	"slices"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
)

func TestListVolumesAndGetVolume(t *testing.T) {
	c, p := newTestController(t)
	var want []string
	for _, name := range []string{"a", "b", "c"} {
		req := createRequest()
		req.Name, req.CapacityRange = name, &csi.CapacityRange{RequiredBytes: 7}
		created, err := c.CreateVolume(t.Context(), req)
		if err != nil {
			t.Fatal(err)
		}
		want = append(want, created.GetVolume().GetVolumeId())
	}
	var got []string
	token := ""
	for {
		resp, err := c.ListVolumes(t.Context(), &csi.ListVolumesRequest{MaxEntries: 2, StartingToken: token})
		if err != nil || len(resp.GetEntries()) > 2 {
			t.Fatalf("%v, %v", resp, err)
		}
		for _, e := range resp.GetEntries() {
			got = append(got, e.GetVolume().GetVolumeId())
			if e.GetVolume().GetCapacityBytes() != 7 {
				t.Errorf("capacity of %v", e)
			}
		}
		if token = resp.GetNextToken(); token == "" {
			break
		}
	}
	if !slices.Equal(got, want) {
		t.Errorf("listed %q, want %q", got, want)
	}
	const list, get = csi.Controller_ListVolumes_FullMethodName, csi.Controller_ControllerGetVolume_FullMethodName
	_, err := c.ListVolumes(t.Context(), &csi.ListVolumesRequest{MaxEntries: -1})
	refused(t, "negative", list, err, codes.InvalidArgument)
	_, err = c.ListVolumes(t.Context(), &csi.ListVolumesRequest{StartingToken: "x"})
	refused(t, "no token", list, err, codes.Aborted)
	resp, err := c.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: want[0]})
	if err != nil || resp.GetVolume().GetVolumeId() != want[0] || resp.GetVolume().GetCapacityBytes() != 7 || resp.GetStatus() == nil {
		t.Errorf("%v, %v", resp, err)
	}
	for id, code := range map[string]codes.Code{
		"": codes.InvalidArgument, "fake": codes.NotFound, "default:bucket-1/other/": codes.NotFound, "tenants:bucket-1/a/": codes.FailedPrecondition,
	} {
		_, err = c.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: id})
		refused(t, "get "+id, get, err, code)
	}
	p.secretsOnly = true
	_, err = c.ListVolumes(t.Context(), &csi.ListVolumesRequest{})
	refused(t, "only secrets", list, err, codes.FailedPrecondition)
}
