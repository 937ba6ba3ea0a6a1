package sanity_test

import (
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// atLeast is how many of csi-sanity's specs are about what this driver does, listed and healthy how many more where it
// lists volumes and offers volume health.
const (
	atLeast = 66
	listed  = 3
	healthy = 5
)

// skippable are csi-sanity's reasons to skip a spec that are true of this driver, with the capabilities that would make
// each of them false. A driver of S3 volumes has no groups of snapshots, attachments or staging. It reports no capacity, because S3 has
// none to report, and lists volumes only with credentials of its own.
func skippable() map[string][]string {
	return map[string][]string{
		"GetCapacity not supported":                         {"GET_CAPACITY"},
		"ListVolumes not supported":                         {"LIST_VOLUMES"},
		"SNAPSHOT_ACCESSIBILITY_CONSTRAINTS not supported":  {"SNAPSHOT_ACCESSIBILITY_CONSTRAINTS"},
		"ControllerPublishVolume not supported":             {"PUBLISH_UNPUBLISH_VOLUME"},
		"ControllerUnpublishVolume not supported":           {"PUBLISH_UNPUBLISH_VOLUME"},
		"Controller Publish, UnpublishVolume not supported": {"PUBLISH_UNPUBLISH_VOLUME"},
		"ControllerGetVolumeHealth not supported":           {"GET_VOLUME_HEALTH"},
		"ControllerListVolumeHealth not supported":          {"LIST_VOLUME_HEALTH"},
		"GroupControllerService not supported":              {"GROUP_CONTROLLER_SERVICE"},
		"NodeStageVolume not supported":                     {"node STAGE_UNSTAGE_VOLUME"},
		"NodeUnstageVolume not supported":                   {"node STAGE_UNSTAGE_VOLUME"},
		"NodeExpandVolume not supported":                    {"node EXPAND_VOLUME"},
		"NodeGetVolumeHealth not supported":                 {"node GET_VOLUME_HEALTH"},
		"NodeGetStorageHealth not supported":                {"node GET_STORAGE_HEALTH"},
	}
}

// pending is the spec that csi-test itself has switched off ("XIt").
const pending = "ListVolumes pagination should detect volumes added between pages and accept tokens when the last volume from a page is deleted"

// claims are the capabilities that the driver's services and the plugin as a whole have, by name; a node's begin with
// "node ".
func claims(t *testing.T, c csi.ControllerClient, d csi.NodeClient) map[string]bool {
	t.Helper()
	ctx := rigtest.Context(t, 10*time.Second)
	claimed := map[string]bool{}
	controller, err := c.ControllerGetCapabilities(ctx, &csi.ControllerGetCapabilitiesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, k := range controller.GetCapabilities() {
		claimed[k.GetRpc().GetType().String()] = true
	}
	node, err := d.NodeGetCapabilities(ctx, &csi.NodeGetCapabilitiesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, k := range node.GetCapabilities() {
		claimed["node "+k.GetRpc().GetType().String()] = true
	}
	plugin, err := c.(csi.IdentityClient).GetPluginCapabilities(ctx, &csi.GetPluginCapabilitiesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, k := range plugin.GetCapabilities() {
		claimed[k.GetService().GetType().String()] = true
	}
	if !claimed["CREATE_DELETE_VOLUME"] || !claimed["node GET_VOLUME_STATS"] {
		t.Fatalf("the driver claims too little for a suite to mean anything: %v", claimed)
	}
	return claimed
}
