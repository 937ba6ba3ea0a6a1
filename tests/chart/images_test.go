package chart

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
)

// pinned matches an image with a tag and a digest.
var pinned = regexp.MustCompile(`^[^@\s]+:[^@\s/]+@sha256:[0-9a-f]{64}$`)

// images returns the images of all containers, by container name.
func images(objects []object) map[string]string {
	all := map[string]string{}
	for _, o := range workloads(objects) {
		for _, c := range o.Spec.Template.Spec.Containers {
			all[c.Name] = c.Image
		}
	}
	return all
}

// By default, sidecar images are pinned by digest. The operator builds the driver's image.
func TestImagesArePinned(t *testing.T) {
	seen := 0
	for name, image := range images(template(t)) {
		if name == "s3-csi-driver" {
			continue
		}
		seen++
		if !pinned.MatchString(image) {
			t.Errorf("%s has the image %q, without a digest", name, image)
		}
	}
	if seen != 3 {
		t.Errorf("%d sidecars", seen)
	}
}

// The chart's digests apply to its own tags only.
func TestDigestsFollowTheTags(t *testing.T) {
	const digest = "sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
	const repository = "registry.k8s.io/sig-storage/csi-provisioner"
	for _, tc := range []struct{ set, want string }{
		{"sidecars.provisioner.image.tag=v6.2.0", repository + ":v6.2.0"},
		{"sidecars.provisioner.image.tag=v6.2.0@" + digest, repository + ":v6.2.0@" + digest},
		{"sidecars.provisioner.image.digest=", repository + ":v6.3.0"},
		{"sidecars.provisioner.image.digest=" + digest, repository + ":v6.3.0@" + digest},
		{"sidecars.provisioner.image.digest=v6.3.0@" + digest, repository + ":v6.3.0@" + digest},
		{"sidecars.provisioner.image.digest=v6.2.0@" + digest, repository + ":v6.3.0"},
	} {
		if got := images(template(t, "--set", tc.set))["csi-provisioner"]; got != tc.want {
			t.Errorf("%s: %q, want %q", tc.set, got, tc.want)
		}
	}
	if got := images(template(t,
		"--set", "image.repository=mirror/driver,image.tag=v1,image.digest="+digest))["s3-csi-driver"]; got != "mirror/driver:v1@"+digest {
		t.Errorf("the driver's image is %q", got)
	}
	if _, _, err := tryTemplate(t, "--set", "image.digest=sha256:short"); err == nil {
		t.Error("a digest that is none is taken")
	}
}

// The driver's image has no base image, and needs nothing from a registry to be built.
func TestTheDockerfileNamesNoImage(t *testing.T) {
	text, err := os.ReadFile(root + "/Dockerfile")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		fields := strings.Fields(line)
		if from := len(fields) > 1 && fields[0] == "FROM"; from && fields[1] != "scratch" || strings.HasPrefix(line, "# syntax=") {
			t.Errorf("the Dockerfile names an image: %s", line)
		}
	}
}

// hack/image-digests writes the digests of the registries, which a program of the test replaces.
func TestDigestsAreRenewed(t *testing.T) {
	const index = "application/vnd.oci.image.index.v1+json"
	fresh := "sha256:" + strings.Repeat("b", 64)
	values := "charts/s3-csi-driver/values.yaml"
	for _, tc := range []struct {
		name, answer string
		args         []string
		change       bool // a tag of values.yaml
		fails        bool
		writes       bool
	}{
		{"other digests", index + " " + fresh, nil, true, false, true},
		{"a look at other digests", index + " " + fresh, []string{"--check"}, false, true, false},
		{"an image of one platform", "application/vnd.oci.image.manifest.v1+json " + fresh, nil, false, true, false},
		{"a registry that does not answer", "", nil, false, true, false},
		{"what is no digest", index + " sha256:short", nil, false, true, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			dir := t.TempDir()
			before := map[string]string{}
			for _, name := range []string{values, "hack/image-digests"} {
				text, err := os.ReadFile(filepath.Join(root, name))
				if err != nil {
					t.Fatal(err)
				}
				before[name] = string(text)
				if tc.change && name == values {
					before[name] = strings.Replace(before[name], "tag: v6.3.0", "tag: v6.4.0", 1)
				}
				file := filepath.Join(dir, name)
				if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, []byte(before[name]), 0o755)); err != nil {
					t.Fatal(err)
				}
			}
			if err := rig.WriteProgram(filepath.Join(dir, "docker"), []byte("#!/bin/sh\necho '"+tc.answer+"'\n")); err != nil {
				t.Fatal(err)
			}
			cmd := exec.CommandContext(t.Context(), filepath.Join(dir, "hack/image-digests"), tc.args...)
			cmd.Env = append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"))
			if out, err := cmd.CombinedOutput(); (err != nil) != tc.fails {
				t.Errorf("%v\n%s", err, out)
			}
			text, err := os.ReadFile(filepath.Join(dir, values))
			if err != nil {
				t.Fatal(err)
			}
			if got := strings.Count(string(text), "@"+fresh); tc.writes && got != 4 {
				t.Errorf("%s has %d digests of now, want 4", values, got)
			}
			if !tc.writes && string(text) != before[values] {
				t.Errorf("%s was changed", values)
			}
			if tc.change && !strings.Contains(string(text), "digest: v6.4.0@"+fresh) {
				t.Errorf("the digest of another tag was not taken: %s", text)
			}
		})
	}
}

// global.imageRegistry replaces the registry of every image, and nothing else of it.
func TestImagesComeFromOneRegistry(t *testing.T) {
	for _, tc := range []struct{ registry, repository, want string }{
		{"", "ghcr.io/s3-csi/s3-csi-driver", "ghcr.io/s3-csi/s3-csi-driver:v1"},
		{"mirror.example.com", "ghcr.io/s3-csi/s3-csi-driver", "mirror.example.com/s3-csi/s3-csi-driver:v1"},
		{"mirror.example.com/all", "localhost:5000/driver", "mirror.example.com/all/driver:v1"},
		{"mirror.example.com:5000", "localhost/driver", "mirror.example.com:5000/driver:v1"},
		{"mirror.example.com", "team/driver", "mirror.example.com/team/driver:v1"},
		{"mirror.example.com", "driver", "mirror.example.com/driver:v1"},
	} {
		objects := template(t, "--set", "image.tag=v1,image.repository="+tc.repository+",global.imageRegistry="+tc.registry)
		if have := images(objects)["s3-csi-driver"]; have != tc.want {
			t.Errorf("%s from registry %q is %q, want %q", tc.repository, tc.registry, have, tc.want)
		}
	}
	const registry = "global.imageRegistry=mirror.example.com,sidecars.resizer.enabled=true,snapshots.enabled=true"
	own := images(template(t, "--set", "sidecars.resizer.enabled=true,snapshots.enabled=true"))
	for name, image := range images(template(t, "--set", registry)) {
		_, path, _ := strings.Cut(own[name], "/")
		if image != "mirror.example.com/"+path {
			t.Errorf("%s has the image %q, and from its own registry %q", name, image, own[name])
		}
	}
}

// A sidecar has the pull policy of the driver, or its own.
func TestPullPolicies(t *testing.T) {
	own := map[string]string{"csi-provisioner": "provisioner", "csi-resizer": "resizer", "csi-snapshotter": "snapshotter",
		"node-driver-registrar": "nodeDriverRegistrar", "liveness-probe": "livenessProbe"}
	const all = "image.pullPolicy=Always,sidecars.resizer.enabled=true,snapshots.enabled=true"
	for name, c := range containers(template(t, "--set", all)) {
		if c.Pull != "Always" {
			t.Errorf("%s has the pull policy %q", name, c.Pull)
		}
	}
	for container, sidecar := range own {
		for name, c := range containers(template(t, "--set", all+",sidecars."+sidecar+".image.pullPolicy=Never")) {
			if want := strings.HasSuffix(name, "/"+container); (c.Pull == "Never") != want {
				t.Errorf("with a policy for %s, %s has %q", container, name, c.Pull)
			}
		}
	}
}
