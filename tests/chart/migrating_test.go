package chart

import (
	"bytes"
	"encoding/json"
	"maps"
	"os/exec"
	"slices"
	"testing"

	"sigs.k8s.io/yaml"
)

// volumeOrClaim is what a PersistentVolume and a claim have.
type volumeOrClaim struct {
	Metadata reference
	Spec     struct {
		ClaimRef                      reference
		StorageClassName              *string
		VolumeName                    string
		PersistentVolumeReclaimPolicy string
		MountOptions                  []string
		CSI                           struct {
			Driver, VolumeHandle string
			VolumeAttributes     map[string]string
		}
	}
}

type reference struct{ Namespace, Name string }

// The script of docs/how-to/migrating-aws.md makes a volume and a claim for the same data.
func TestVolumesSideBySide(t *testing.T) {
	if _, err := exec.LookPath("jq"); err != nil {
		t.Skip(err)
	}
	documents := bytes.Split([]byte(readDocument(t, root+"/examples/migrating/aws-mountpoint.yaml")), []byte("\n---\n"))
	old, err := yaml.YAMLToJSON(documents[0])
	if err != nil {
		t.Fatal(err)
	}
	const other = `{"metadata": {"name": "other"}, "spec": {"csi": {"driver": "ebs.csi.aws.com"}, "claimRef": {"name": "c"}}}`
	cmd := exec.CommandContext(t.Context(), "jq", "-f", root+"/deploy/migrating/side-by-side.jq")
	cmd.Stdin = bytes.NewReader(slices.Concat([]byte(`{"items": [`+other+","), old, []byte("]}")))
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	var list struct{ Items []json.RawMessage }
	if err := json.Unmarshal(out, &list); err != nil || len(list.Items) != 2 {
		t.Fatalf("%v: %s", err, out)
	}
	var before, pv, pvc volumeOrClaim
	for text, into := range map[string]*volumeOrClaim{string(old): &before, string(list.Items[0]): &pv, string(list.Items[1]): &pvc} {
		if err := json.Unmarshal([]byte(text), into); err != nil {
			t.Fatal(err)
		}
	}
	spec, csi := pv.Spec, pv.Spec.CSI
	if pv.Metadata.Name == before.Metadata.Name || csi.VolumeHandle == before.Spec.CSI.VolumeHandle || csi.Driver != "s3.csi.driver" ||
		spec.PersistentVolumeReclaimPolicy != "Retain" {
		t.Errorf("the volume: %s", list.Items[0])
	}
	if pvc.Spec.VolumeName != pv.Metadata.Name || spec.ClaimRef.Name != pvc.Metadata.Name || spec.ClaimRef.Namespace != pvc.Metadata.Namespace ||
		pvc.Spec.StorageClassName == nil || *pvc.Spec.StorageClassName != "" {
		t.Errorf("volume and claim are not bound to each other: %s", out)
	}
	if !maps.Equal(csi.VolumeAttributes, before.Spec.CSI.VolumeAttributes) {
		t.Errorf("attributes %v", csi.VolumeAttributes)
	}
	// The example allows deleting, and does not allow overwriting: so it stays.
	want := append(slices.Clone(before.Spec.MountOptions), "allow-overwrite=false")
	if !slices.Equal(spec.MountOptions, want) {
		t.Errorf("mount options %q, want %q", spec.MountOptions, want)
	}
}
