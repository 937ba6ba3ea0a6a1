package driver

import (
	"reflect"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

func TestControllerExpandVolume(t *testing.T) {
	c, p := newTestController(t)
	req := createRequest()
	req.CapacityRange = &csi.CapacityRange{RequiredBytes: 10}
	created, err := c.CreateVolume(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	id := created.GetVolume().GetVolumeId()
	for _, tt := range []struct{ required, limit, want int64 }{{20, 0, 20}, {20, 20, 20}, {15, 0, 20}, {0, 30, 20}} {
		resp, err := c.ControllerExpandVolume(t.Context(), &csi.ControllerExpandVolumeRequest{
			VolumeId: id, CapacityRange: &csi.CapacityRange{RequiredBytes: tt.required, LimitBytes: tt.limit},
		})
		if err != nil || resp.GetCapacityBytes() != tt.want || resp.GetNodeExpansionRequired() {
			t.Errorf("%+v: %v, %v", tt, resp, err)
		}
	}
	some := &csi.CapacityRange{RequiredBytes: 1}
	calls := p.calls
	for what, tt := range map[string]struct {
		req  *csi.ControllerExpandVolumeRequest
		code codes.Code
	}{
		"no id":          {&csi.ControllerExpandVolumeRequest{CapacityRange: some}, codes.InvalidArgument},
		"no range":       {&csi.ControllerExpandVolumeRequest{VolumeId: id}, codes.InvalidArgument},
		"an empty range": {&csi.ControllerExpandVolumeRequest{VolumeId: id, CapacityRange: &csi.CapacityRange{}}, codes.InvalidArgument},
		"negative":       {&csi.ControllerExpandVolumeRequest{VolumeId: id, CapacityRange: &csi.CapacityRange{RequiredBytes: -1}}, codes.InvalidArgument},
		"limit below": {&csi.ControllerExpandVolumeRequest{VolumeId: id, CapacityRange: &csi.CapacityRange{RequiredBytes: 2, LimitBytes: 1}},
			codes.InvalidArgument},
		"block": {&csi.ControllerExpandVolumeRequest{VolumeId: id, CapacityRange: some, VolumeCapability: &csi.VolumeCapability{
			AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}, AccessMode: createRequest().GetVolumeCapabilities()[0].GetAccessMode(),
		}}, codes.InvalidArgument},
		"no volume id of ours":   {&csi.ControllerExpandVolumeRequest{VolumeId: "fake-vol-id", CapacityRange: some}, codes.NotFound},
		"a static volume":        {&csi.ControllerExpandVolumeRequest{VolumeId: "bucket-1/data", CapacityRange: some}, codes.FailedPrecondition},
		"an unknown backend":     {&csi.ControllerExpandVolumeRequest{VolumeId: "gone:bucket-1/v/", CapacityRange: some}, codes.FailedPrecondition},
		"keys that are not used": {&csi.ControllerExpandVolumeRequest{VolumeId: id, CapacityRange: some, Secrets: tenantKeys()}, codes.InvalidArgument},
	} {
		_, err := c.ControllerExpandVolume(t.Context(), tt.req)
		refused(t, what, csi.Controller_ControllerExpandVolume_FullMethodName, err, tt.code)
	}
	if p.calls != calls {
		t.Error("refused after a side effect")
	}
	_, err = c.ControllerExpandVolume(t.Context(), &csi.ControllerExpandVolumeRequest{VolumeId: "default:bucket-1/other/", CapacityRange: some})
	refused(t, "absent", csi.Controller_ControllerExpandVolume_FullMethodName, err, codes.NotFound, "default:bucket-1/other/")
	p.err = fault.Errorf(fault.OutOfRange, "too large")
	_, err = c.ControllerExpandVolume(t.Context(), &csi.ControllerExpandVolumeRequest{VolumeId: id, CapacityRange: some})
	refused(t, "over the limit", csi.Controller_ControllerExpandVolume_FullMethodName, err, codes.OutOfRange)
}

func TestControllerModifyVolume(t *testing.T) {
	c, p := newTestController(t)
	req := createRequest()
	req.Parameters["onDelete"] = "delete"
	req.MutableParameters = map[string]string{"onDelete": "retain"}
	created, err := c.CreateVolume(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	if p.last.Parameters.OnDelete != volume.OnDeleteRetain {
		t.Errorf("mutable parameters do not take precedence: %s", p.last.Parameters.OnDelete)
	}
	if req.Parameters["onDelete"] != "delete" {
		t.Error("the request was changed")
	}
	id := created.GetVolume().GetVolumeId()
	for what, tt := range map[string]struct {
		id     string
		params map[string]string
		code   codes.Code
		says   []string
	}{
		"no id":           {"", map[string]string{"onDelete": "purge"}, codes.InvalidArgument, []string{"volume_id"}},
		"absent":          {"default:bucket-1/other/", map[string]string{"onDelete": "purge"}, codes.NotFound, nil},
		"no id of ours":   {"non-existing-volume-id", map[string]string{"onDelete": "purge"}, codes.NotFound, nil},
		"a static volume": {"bucket-1/data", map[string]string{"onDelete": "purge"}, codes.FailedPrecondition, nil},
		"unknown":         {id, map[string]string{"onDelte": "purge", "iops": "7"}, codes.InvalidArgument, []string{"unknown: iops, onDelte", "onDelete, tags"}},
		"immutable":       {id, map[string]string{"bucketName": "x", "client": "rclone"}, codes.InvalidArgument, []string{"fixed at creation: bucketName, client"}},
		"one of each": {id, map[string]string{"bucketName": "x", "iops": "7", "onDelete": "purge"}, codes.InvalidArgument,
			[]string{"unknown: iops", "fixed at creation: bucketName"}},
		"a bad value":       {id, map[string]string{"onDelete": "perhaps"}, codes.InvalidArgument, []string{"mutable_parameters.onDelete"}},
		"too many bytes":    {id, map[string]string{"onDelete": strings.Repeat("x", 4096)}, codes.InvalidArgument, []string{"mutable_parameters"}},
		"tags without keys": {id, map[string]string{"tags": "a,b"}, codes.InvalidArgument, []string{"mutable_parameters.tags"}},
	} {
		_, err := c.ControllerModifyVolume(t.Context(), &csi.ControllerModifyVolumeRequest{VolumeId: tt.id, MutableParameters: tt.params})
		refused(t, what, csi.Controller_ControllerModifyVolume_FullMethodName, err, tt.code, tt.says...)
	}
	if len(p.set) > 0 {
		t.Errorf("refused after a change: %v", p.set)
	}
	_, err = c.ControllerModifyVolume(t.Context(), &csi.ControllerModifyVolumeRequest{VolumeId: id, MutableParameters: map[string]string{
		"onDelete": "purge", "tags": "team=data, cost-centre=,a b=c=d", "csi.storage.k8s.io/pvc/name": "x",
	}})
	want := volume.Mutable{OnDelete: volume.OnDeletePurge, Tags: map[string]string{"team": "data", "cost-centre": "", "a b": "c=d"}}
	if err != nil || len(p.set) != 1 || !reflect.DeepEqual(p.set[0], want) {
		t.Errorf("%v, %v", p.set, err)
	}
}
