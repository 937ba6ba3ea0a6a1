package driver

import (
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
)

func healthServer(t *testing.T, on bool) (*running, *fakeProvisioner) {
	t.Helper()
	p := newFakeProvisioner()
	return start(t, func(cfg *Config, m *fakeMounter) {
		c := NewController(p, newFakeSnapshots(), fakeBackends{})
		n := NewNode(m, "s3.csi.driver", NodeOptions{NodeID: "node-1"})
		c.VolumeHealth, n.VolumeHealth = on, on
		cfg.Controller, cfg.Node = c, n
	}), p
}

func TestVolumeHealth_IsOffByDefault(t *testing.T) {
	r, _ := healthServer(t, false)
	_, err := csi.NewNodeClient(r.conn).NodeGetVolumeHealth(t.Context(), &csi.NodeGetVolumeHealthRequest{VolumeId: "v"})
	_, storageErr := csi.NewNodeClient(r.conn).NodeGetStorageHealth(t.Context(), &csi.NodeGetStorageHealthRequest{})
	_, controllerErr := csi.NewControllerClient(r.conn).ControllerGetVolumeHealth(t.Context(), &csi.ControllerGetVolumeHealthRequest{VolumeId: "v"})
	for _, err := range []error{err, storageErr, controllerErr} {
		if status.Code(err) != codes.Unimplemented {
			t.Error(err)
		}
	}
	node, err := csi.NewNodeClient(r.conn).NodeGetCapabilities(t.Context(), &csi.NodeGetCapabilitiesRequest{})
	if err != nil || len(node.GetCapabilities()) != 3 {
		t.Errorf("%v, %v", node, err)
	}
}

func TestVolumeHealth_OfNode(t *testing.T) {
	r, _ := healthServer(t, true)
	client := csi.NewNodeClient(r.conn)
	caps, err := client.NodeGetCapabilities(t.Context(), &csi.NodeGetCapabilitiesRequest{})
	if err != nil || len(caps.GetCapabilities()) != 5 {
		t.Errorf("%v, %v", caps, err)
	}
	r.mounter.published["/t"] = mount.Request{VolumeID: "v"}
	r.mounter.conditions = []mount.Condition{{Inaccessible: true, Reason: mount.ReasonStale, Message: "m"}, {Reason: mount.ReasonDraining}}
	for _, path := range []string{"", "/t", "/t/"} {
		got, err := client.NodeGetVolumeHealth(t.Context(), &csi.NodeGetVolumeHealthRequest{VolumeId: "v", VolumePublishPath: path})
		statuses := got.GetVolumeHealth().GetHealthStatuses()
		if err != nil || got.GetVolumeHealth().GetVolumeId() != "v" || len(statuses) != 2 {
			t.Fatalf("%q: %v, %v", path, got, err)
		}
		if s := statuses[0]; s.GetStatus() != csi.VolumeHealthErrorType_INACCESSIBLE || s.GetReason() != "StaleMount" || s.GetMessage() != "m" {
			t.Errorf("%v", s)
		}
		if s := statuses[1]; s.GetStatus() != csi.VolumeHealthErrorType_DEGRADED || s.GetReason() != "Draining" {
			t.Errorf("%v", s)
		}
	}
	for code, req := range map[codes.Code]*csi.NodeGetVolumeHealthRequest{
		codes.InvalidArgument: {}, codes.NotFound: {VolumeId: "w"},
	} {
		if _, err := client.NodeGetVolumeHealth(t.Context(), req); status.Code(err) != code {
			t.Errorf("%v: %v", req, err)
		}
	}
	if _, err := client.NodeGetVolumeHealth(t.Context(), &csi.NodeGetVolumeHealthRequest{VolumeId: "v",
		VolumePublishPath: "t"}); status.Code(err) != codes.InvalidArgument {
		t.Errorf("a relative path: %v", err)
	}
	storage, err := client.NodeGetStorageHealth(t.Context(), &csi.NodeGetStorageHealthRequest{})
	if err != nil || len(storage.GetBackendHealth()) != 2 || storage.GetBackendHealth()[0].GetStatus() != csi.StorageHealthErrorType_STORAGE_UNREACHABLE {
		t.Errorf("%v, %v", storage, err)
	}
}

func TestVolumeHealth_OfController(t *testing.T) {
	r, p := healthServer(t, true)
	client := csi.NewControllerClient(r.conn)
	created, err := client.CreateVolume(t.Context(), createRequest())
	if err != nil {
		t.Fatal(err)
	}
	id := created.GetVolume().GetVolumeId()
	for name, tt := range map[string]struct {
		err    error
		reason string
		code   codes.Code
	}{
		"healthy":     {nil, "", codes.OK},
		"denied":      {fault.Errorf(fault.Denied, "x"), "CredentialsRefused", codes.OK},
		"expired":     {fault.Errorf(fault.Unauthenticated, "x"), "CredentialsRefused", codes.OK},
		"unreachable": {fault.Errorf(fault.Unavailable, "x"), "BackendUnreachable", codes.OK},
		"timeout":     {fault.Errorf(fault.Timeout, "x"), "BackendUnreachable", codes.OK},
		"absent":      {fault.Errorf(fault.NotFound, "x"), "", codes.NotFound},
		"misused":     {fault.Errorf(fault.Precondition, "x"), "", codes.FailedPrecondition},
	} {
		p.mu.Lock()
		p.err = tt.err
		p.mu.Unlock()
		got, err := client.ControllerGetVolumeHealth(t.Context(), &csi.ControllerGetVolumeHealthRequest{VolumeId: id})
		if status.Code(err) != tt.code {
			t.Errorf("%s: %v", name, err)
			continue
		}
		statuses := got.GetVolumeHealth().GetHealthStatuses()
		switch {
		case tt.reason == "" && len(statuses) > 0:
			t.Errorf("%s: %v", name, statuses)
		case tt.reason != "" && (len(statuses) != 1 || statuses[0].GetReason() != tt.reason || statuses[0].GetStatus() != csi.VolumeHealthErrorType_DEGRADED):
			t.Errorf("%s: %v", name, statuses)
		}
	}
	for id, code := range map[string]codes.Code{"": codes.InvalidArgument, "fake": codes.NotFound} {
		if _, err := client.ControllerGetVolumeHealth(t.Context(), &csi.ControllerGetVolumeHealthRequest{VolumeId: id}); status.Code(err) != code {
			t.Errorf("%q: %v", id, err)
		}
	}
}
