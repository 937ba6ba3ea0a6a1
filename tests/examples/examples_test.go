// Package examples tests that the driver accepts the files in examples/ and the YAML in docs/.
package examples

import (
	"bytes"
	"errors"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

const dir = "../../examples"

// config is what the driver's config files are called.
const config = "config.yaml"

type object struct {
	Kind     string `json:"kind"`
	Metadata struct {
		Name string `json:"name"`
	} `json:"metadata"`
	Parameters map[string]string `json:"parameters"`
	Options    []string          `json:"mountOptions"`
	StringData map[string]string `json:"stringData"`
	Spec       struct {
		Options    []string `json:"mountOptions"`
		VolumeName string   `json:"volumeName"`
		ClaimRef   struct {
			Name string `json:"name"`
		} `json:"claimRef"`
		Volumes []struct {
			Name  string  `json:"name"`
			CSI   *inline `json:"csi"`
			Claim struct {
				Name string `json:"claimName"`
			} `json:"persistentVolumeClaim"`
		} `json:"volumes"`
		CSI *struct {
			Driver           string            `json:"driver"`
			VolumeHandle     string            `json:"volumeHandle"`
			VolumeAttributes map[string]string `json:"volumeAttributes"`
			Secret           struct {
				Name string `json:"name"`
			} `json:"nodePublishSecretRef"`
		} `json:"csi"`
	} `json:"spec"`
}

// example is one file of examples/.
type example struct {
	t       *testing.T
	objects []object
	config  *backend.Config // of the file's directory; nil for a fragment of a page
}

func TestEveryExampleIsAccepted(t *testing.T) {
	seen := map[string]int{}
	err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(path) != ".yaml" {
			return err
		}
		name, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		t.Run(name, func(t *testing.T) {
			cfg := configBeside(t, path)
			if filepath.Base(path) == config {
				seen[config]++
				return
			}
			e := read(t, path)
			e.config = cfg
			for _, o := range e.objects {
				seen[o.Kind]++
				seen["inline volume"] += e.check(o)
			}
		})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for kind, least := range map[string]int{config: 3, "StorageClass": 5, "PersistentVolume": 4, "Secret": 5, "Pod": 5, "inline volume": 3,
		"VolumeSnapshotClass": 1} {
		if seen[kind] < least {
			t.Errorf("checked %d of %s, want at least %d", seen[kind], kind, least)
		}
	}
}

// Every block of YAML in docs/ is well-formed, and the driver accepts its config files, StorageClasses and volumes.
func TestTheExamplesOfThePagesAreAccepted(t *testing.T) {
	pages, err := filepath.Glob("../../docs/*/*.md")
	if err != nil {
		t.Fatal(err)
	}
	var configs, classes, volumes, inlines int
	block := regexp.MustCompile("(?s)```yaml\n(.*?)```")
	for _, page := range pages {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range block.FindAllSubmatch(text, -1) {
			t.Run(filepath.Base(page), func(t *testing.T) {
				if bytes.HasPrefix(m[1], []byte("backends:")) {
					configs++
					text := m[1]
					if filepath.Base(page) == "credentials-setup.md" { // values of the chart
						text = onlyBackends(t, text)
					}
					if _, err := backend.ParseConfig(text, "", ""); err != nil {
						t.Errorf("%v:\n%s", err, m[1])
					}
					return
				}
				for doc := range bytes.SplitSeq(m[1], []byte("\n---\n")) {
					var o object
					var into any = &o
					if !bytes.HasPrefix(doc, []byte("apiVersion:")) { // a fragment, perhaps of a pod
						var part any
						if err := yaml.UnmarshalStrict(doc, &part); err != nil {
							t.Errorf("%v:\n%s", err, doc)
						}
						if !bytes.HasPrefix(doc, []byte("volumes:")) {
							continue
						}
						into = &o.Spec
					}
					if err := yaml.Unmarshal(doc, into); err != nil {
						t.Fatalf("%v:\n%s", err, doc)
					}
					switch {
					case o.Kind == "StorageClass":
						classes++
						example{t: t}.checkClass(o)
					case o.Spec.CSI != nil:
						volumes++
						example{t: t}.checkVolume(o)
					}
					for _, v := range o.Spec.Volumes {
						if v.CSI != nil {
							inlines++
							example{t: t}.checkInline(v.Name, *v.CSI)
						}
					}
				}
			})
		}
	}
	if configs < 5 || classes < 1 || volumes < 1 || inlines < 2 {
		t.Errorf("checked only %d config files, %d classes, %d volumes and %d inline volumes", configs, classes, volumes, inlines)
	}
}

// onlyBackends returns the part of the chart's values that becomes the config file.
func onlyBackends(t *testing.T, values []byte) []byte {
	t.Helper()
	var v struct {
		Backends map[string]any `json:"backends"`
	}
	if err := yaml.Unmarshal(values, &v); err != nil {
		t.Fatal(err)
	}
	text, err := yaml.Marshal(map[string]any{"backends": v.Backends})
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// configBeside is the config file of the file's directory, or the driver's config without a file.
func configBeside(t *testing.T, path string) *backend.Config {
	t.Helper()
	file := mustAbs(t, filepath.Join(filepath.Dir(path), config))
	cfg, err := backend.LoadConfig(file, "", "")
	if errors.Is(err, fs.ErrNotExist) {
		cfg, err = backend.DefaultConfig("", "")
	}
	if err != nil {
		t.Fatal(err)
	}
	return cfg
}

func read(t *testing.T, path string) example {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	e := example{t: t}
	for doc := range bytes.SplitSeq(b, []byte("\n---\n")) {
		var o object
		if err := yaml.Unmarshal(doc, &o); err != nil {
			t.Fatal(err)
		}
		e.objects = append(e.objects, o)
	}
	return e
}

// check validates an object with the driver's own parsers, and its references to other objects of the file. It returns the number of
// inline volumes.
func (e example) check(o object) (inlines int) {
	e.t.Helper()
	switch {
	case o.Kind == "StorageClass":
		e.checkClass(o)
	case o.Kind == "VolumeSnapshotClass":
		if _, err := volume.ParseSnapshotParameters(o.Parameters); err != nil {
			e.t.Error(err)
		}
	case o.Spec.CSI != nil:
		e.checkVolume(o)
	case o.Kind == "Secret":
		if _, ok, err := credentials.FromSecret(o.StringData); err != nil || !ok {
			e.t.Errorf("secret %s has no keys: %v", o.Metadata.Name, err)
		}
	case o.Kind == "PersistentVolumeClaim" && o.Spec.VolumeName != "":
		if pv := e.named("PersistentVolume", o.Spec.VolumeName); pv.Spec.ClaimRef.Name != o.Metadata.Name {
			e.t.Errorf("claim %s names a volume whose claimRef is %q", o.Metadata.Name, pv.Spec.ClaimRef.Name)
		}
	}
	for _, v := range o.Spec.Volumes {
		switch {
		case v.Claim.Name != "":
			e.named("PersistentVolumeClaim", v.Claim.Name)
		case v.CSI != nil:
			inlines++
			e.checkInline(v.Name, *v.CSI)
		}
	}
	return inlines
}

// named is the object of that name in the file.
func (e example) named(kind, name string) object {
	e.t.Helper()
	i := slices.IndexFunc(e.objects, func(o object) bool { return o.Kind == kind && o.Metadata.Name == name })
	if i < 0 {
		e.t.Errorf("there is no %s %s", kind, name)
		return object{}
	}
	return e.objects[i]
}

func (e example) checkClass(o object) {
	e.t.Helper()
	params := maps.Clone(o.Parameters)
	maps.DeleteFunc(params, func(key, _ string) bool { return strings.HasPrefix(key, "csi.storage.k8s.io/") }) // external-provisioner does not pass them on
	params["csi.storage.k8s.io/pvc/namespace"] = "default"
	params["csi.storage.k8s.io/pvc/name"] = "data"
	params["csi.storage.k8s.io/pv/name"] = "pvc-5b4a4d0e-8a55-4d0c-b6a4-cf1f6fd5e0a1"
	p, err := volume.ParseParameters(params, params["csi.storage.k8s.io/pv/name"])
	if err != nil {
		e.t.Fatal(err)
	}
	e.checkClaims(p.Backend, o.Parameters["csi.storage.k8s.io/node-publish-secret-name"], p.Claims)
	options, err := volume.ParseMountOptions(o.Options, "mountOptions")
	if err != nil {
		e.t.Fatal(err)
	}
	checkClient(e.t, p.Node, append(p.Node.MountOptions, options...))
}

func (e example) checkVolume(o object) {
	e.t.Helper()
	csi := o.Spec.CSI
	r, err := volume.Read(volume.Given{
		Handle: csi.VolumeHandle, Context: csi.VolumeAttributes, Flags: o.Spec.Options, FlagsField: "mountOptions", DriverName: csi.Driver,
	})
	if err != nil {
		e.t.Fatal(err)
	}
	e.checkClaims(r.ID.Backend, csi.Secret.Name, r.Claims)
	checkClient(e.t, r.Attributes, r.Options)
}

// checkClaims compares the service that a volume and its Secret name with the config.
func (e example) checkClaims(backendName, secret string, claims []volume.Claim) {
	e.t.Helper()
	if e.config == nil {
		return
	}
	if secret != "" {
		claims = append(claims, volume.SecretClaims(e.named("Secret", secret).StringData)...)
	}
	if _, err := e.config.Backend(backendName); err != nil {
		e.t.Error(err)
	} else if err := e.config.CheckClaims(backendName, claims); err != nil {
		e.t.Error(err)
	}
}

func checkClient(t *testing.T, a volume.Attributes, options []volume.Option) {
	t.Helper()
	c, err := client.Get(a.Client)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.CheckVolume(client.Volume{Place: "volume_context", Attributes: a,
		Options: []client.Given{{Field: "mountOptions", Options: options}}}); err != nil {
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
