// Package sanity_test runs csi-sanity against the real driver, with real mounts on a real S3 server.
package sanity_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/onsi/ginkgo/v2/types"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/tests/internal/isolate"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

func TestMain(m *testing.M) { os.Exit(isolate.Main(m.Run)) }

// prefixes and buckets are the two kinds of volumes.
func prefixes() map[string]string {
	return map[string]string{"bucketName": rigtest.Bucket, "prefix": "base/", "client": rigtest.Client}
}

func buckets() map[string]string {
	return map[string]string{"bucketNamePrefix": "sanity-", "client": rigtest.Client}
}

// snapshots are the parameters of snapshots of volumes that have their own buckets.
func snapshots() map[string]string { return map[string]string{"bucketName": rigtest.Bucket} }

func TestAllOnOneSocketWithPrefixVolumes(t *testing.T) {
	t.Parallel()
	n := rigtest.New(t)
	d := n.Drive(t, "all")
	check(t, n, d, d, suite{Address: d.Endpoint, Parameters: prefixes()})
}

func TestAllOnOneSocketWithBucketVolumes(t *testing.T) {
	t.Parallel()
	n := rigtest.New(t)
	d := n.Drive(t, "all", "--volume-health")
	check(t, n, d, d, suite{Address: d.Endpoint, Parameters: buckets(), Snapshots: snapshots()})
}

func TestControllerAndNodeApartWithBucketVolumes(t *testing.T) {
	t.Parallel()
	n := rigtest.New(t)
	controller, node := n.Drive(t, "controller"), n.Drive(t, "node")
	check(t, n, controller, node, suite{Address: node.Endpoint, ControllerAddress: controller.Endpoint, Parameters: buckets(), Snapshots: snapshots()})
}

// Neither process has credentials here: all come with the requests.
func TestControllerAndNodeApartWithPrefixVolumesAndSecrets(t *testing.T) {
	t.Parallel()
	n := rigtest.New(t)
	root := n.Process.Keys()
	n.Rig.S3.Keys = credentials.Keys{}
	config := filepath.Join(n.Dir, "config.yaml")
	writeFile(t, config, "backends: {default: {controllerCredentials: secret}}\n")
	controller, node := n.Drive(t, "controller", "--config="+config), n.Drive(t, "node", "--config="+config)
	if claims(t, controller, node)["LIST_VOLUMES"] {
		t.Error("a controller without credentials of its own claims to list volumes")
	}

	secret := map[string]string{"accessKeyID": root.AccessKeyID, "secretAccessKey": root.SecretAccessKey}
	secrets, err := json.Marshal(map[string]any{ // YAML, too
		"CreateVolumeSecret": secret, "DeleteVolumeSecret": secret, "ControllerValidateVolumeCapabilitiesSecret": secret, "NodePublishVolumeSecret": secret,
		"ControllerExpandVolumeSecret": secret, "ControllerModifyVolumeSecret": secret,
		"CreateSnapshotSecret": secret, "DeleteSnapshotSecret": secret, "ListSnapshotsSecret": secret, "GetSnapshotSecret": secret,
	})
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "secrets.yaml")
	writeFile(t, file, string(secrets))
	check(t, n, controller, node, suite{Address: node.Endpoint, ControllerAddress: controller.Endpoint, Parameters: prefixes(), SecretsFile: file})
}

// check runs the suite and judges it: every spec passed, but those that are about something that the driver does not
// claim to do; and nothing is left behind.
func check(t *testing.T, n *rigtest.Node, c csi.ControllerClient, d csi.NodeClient, s suite) {
	t.Helper()
	s.Dir = filepath.Join(n.Dir, "sanity")
	if err := os.Mkdir(s.Dir, 0o755); err != nil {
		t.Fatal(err)
	}
	claimed := claims(t, c, d)
	passed, skips := 0, map[string]bool{}
	for _, o := range s.run(t) {
		switch {
		case o.State.Is(types.SpecStatePassed):
			passed++
		case o.State.Is(types.SpecStateSkipped):
			skips[o.Message] = true
			if needs, known := skippable()[o.Message]; !known {
				t.Errorf("a spec was skipped for a reason that is not expected: %s: %s", o.Name, o.Message)
			} else if i := slices.IndexFunc(needs, func(capability string) bool { return claimed[capability] }); i >= 0 {
				t.Errorf("a spec was skipped, but the driver claims %s: %s: %s", needs[i], o.Name, o.Message)
			}
		case o.State.Is(types.SpecStatePending) && strings.HasSuffix(o.Name, pending):
		default:
			t.Errorf("%s\n%s", o, o.Message)
		}
	}
	t.Logf("%d specs passed", passed)
	want := atLeast
	if claimed["LIST_VOLUMES"] {
		want += listed
	}
	if claimed["GET_VOLUME_HEALTH"] {
		want += healthy
	}
	if passed < want {
		t.Errorf("only %d specs ran and passed, want at least %d: was the suite cut short?", passed, want)
	}
	for reason, needs := range skippable() {
		if !skips[reason] && !slices.ContainsFunc(needs, func(capability string) bool { return claimed[capability] }) {
			t.Errorf("no spec was skipped because of %q: take it off the list", reason)
		}
	}
	n.NothingLeft(t)
	onlyTombstones(t, n)
}

// onlyTombstones holds the server against what deleted volumes may leave: records that say so.
func onlyTombstones(t *testing.T, n *rigtest.Node) {
	t.Helper()
	if got := n.Buckets(t); !slices.Equal(got, []string{rigtest.Bucket}) {
		t.Errorf("buckets left: %v, want only %s", got, rigtest.Bucket)
	}
	for _, key := range n.Keys(t, rigtest.Bucket, "") {
		if dir := key[:strings.LastIndexByte(key, '/')+1]; dir != ".s3-csi/volumes/" && dir != ".s3-csi/snapshots/" {
			t.Errorf("object left: %s", key)
			continue
		}
		var record struct{ State, Name string }
		if err := json.Unmarshal([]byte(n.Object(t, rigtest.Bucket, key)), &record); err != nil {
			t.Errorf("record %s: %v", key, err)
		}
		// "base" keeps the name of a base prefix's directory from being a volume's.
		if record.State != "deleted" && record.State != "base" {
			t.Errorf("record %s of %s is %q, want a tombstone", key, record.Name, record.State)
		}
	}
}

func writeFile(t *testing.T, name, content string) {
	t.Helper()
	if err := os.WriteFile(name, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}
