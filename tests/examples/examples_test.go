// Package examples proves that the files in examples/ are what the driver takes.
package examples

import (
	"bytes"
	"maps"
	"os"
	"path/filepath"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

const dir = "../../examples"

type object struct {
	Kind        string            `json:"kind"`
	Provisioner string            `json:"provisioner"`
	Parameters  map[string]string `json:"parameters"`
	Options     []string          `json:"mountOptions"`
	Spec        struct {
		CSI *struct {
			Driver           string            `json:"driver"`
			VolumeHandle     string            `json:"volumeHandle"`
			VolumeAttributes map[string]string `json:"volumeAttributes"`
		} `json:"csi"`
	} `json:"spec"`
}

func TestEveryExampleIsAccepted(t *testing.T) {
	files, err := filepath.Glob(dir + "/*.yaml")
	if err != nil || len(files) < 6 {
		t.Fatalf("%d examples: %v", len(files), err)
	}
	var classes, volumes int
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			b, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if filepath.Base(file) == "config.yaml" {
				if _, err := backend.LoadConfig(mustAbs(t, file), "", ""); err != nil {
					t.Error(err)
				}
				return
			}
			for doc := range bytes.SplitSeq(b, []byte("\n---\n")) {
				var o object
				if err := yaml.Unmarshal(doc, &o); err != nil {
					t.Fatal(err)
				}
				switch {
				case o.Kind == "StorageClass":
					classes++
					checkClass(t, o)
				case o.Spec.CSI != nil:
					volumes++
					checkVolume(t, o)
				}
			}
		})
	}
	if classes < 4 || volumes < 1 {
		t.Errorf("%d classes and %d static volumes: the rest is not looked at", classes, volumes)
	}
}

func checkClass(t *testing.T, o object) {
	t.Helper()
	params := maps.Clone(o.Parameters)
	params["csi.storage.k8s.io/pvc/namespace"] = "default"
	params["csi.storage.k8s.io/pvc/name"] = "data"
	params["csi.storage.k8s.io/pv/name"] = "pvc-5b4a4d0e-8a55-4d0c-b6a4-cf1f6fd5e0a1"
	for key := range o.Parameters { // external-provisioner keeps its own to itself
		if bytes.HasPrefix([]byte(key), []byte("csi.storage.k8s.io/")) {
			delete(params, key)
		}
	}
	p, err := volume.ParseParameters(params, params["csi.storage.k8s.io/pv/name"])
	if err != nil {
		t.Fatal(err)
	}
	checkClient(t, p.Node, o.Options)
}

func checkVolume(t *testing.T, o object) {
	t.Helper()
	_, attributes, err := volume.ParseContext(o.Spec.CSI.VolumeHandle, o.Spec.CSI.VolumeAttributes)
	if err != nil {
		t.Fatal(err)
	}
	checkClient(t, attributes, o.Options)
}

func checkClient(t *testing.T, a volume.Attributes, flags []string) {
	t.Helper()
	c, err := client.Get(a.Client)
	if err != nil {
		t.Fatal(err)
	}
	options, err := volume.ParseMountOptions(flags, "mountOptions")
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Check(append(a.MountOptions, options...), "mountOptions"); err != nil {
		t.Error(err)
	}
}

func mustAbs(t *testing.T, file string) string {
	t.Helper()
	abs, err := filepath.Abs(file)
	if err != nil {
		t.Fatal(err)
	}
	return abs
}
