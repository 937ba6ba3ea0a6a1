package chart

import (
	"bytes"
	"encoding/json"
	"errors"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

// deploy/ equals the output of hack/render.
func TestManifestsAreRendered(t *testing.T) {
	dir := t.TempDir()
	cmd := exec.CommandContext(t.Context(), root+"/hack/render", dir)
	cmd.Env = append(os.Environ(), "HELM="+helm(t))
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	rendered := 0
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		rendered++
		name := strings.TrimPrefix(path, dir+"/")
		want, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		have, err := os.ReadFile(filepath.Join(deployDir, name))
		if err != nil || !bytes.Equal(have, want) {
			t.Errorf("deploy/%s is not what the chart makes (%v): make manifests", name, err)
		}
		return nil
	})
	if err != nil || rendered < 8 {
		t.Errorf("%d files: %v", rendered, err)
	}
	base, err := os.ReadDir(deployDir + "/kubernetes/base")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range base {
		if _, err := os.Stat(filepath.Join(dir, "kubernetes/base", e.Name())); err != nil {
			t.Errorf("deploy/kubernetes/base/%s is made by nothing: make manifests", e.Name())
		}
	}
}

// An overlay and the chart with the corresponding values file produce the same objects.
func TestOverlaysAreVariants(t *testing.T) {
	variantOf := map[string]string{
		"../base":          "default",
		"aws":              "aws-irsa",
		"before-1.35":      "tokens-in-context",
		"inline-volumes":   "inline-volumes",
		"minio":            "minio",
		"node-only":        "node-only",
		"process-launcher": "process-launcher",
	}
	overlays, err := os.ReadDir(deployDir + "/kubernetes/overlays")
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range overlays {
		if variantOf[o.Name()] == "" {
			t.Errorf("overlay %s is compared with nothing", o.Name())
		}
	}
	for overlay, variant := range variantOf {
		t.Run(overlay, func(t *testing.T) {
			t.Parallel()
			sameObjects(t, kustomize(t, deployDir+"/kubernetes/overlays/"+overlay), variant)
		})
	}
}

// Components change any overlay as the corresponding values files change the values of its variant.
func TestComponentsCombine(t *testing.T) {
	variantOf := map[string]string{
		"minio": "minio", "aws": "aws-irsa",
		"before-1.35": "tokens-in-context", "inline-volumes": "inline-volumes", "node-only": "node-only", "process-launcher": "process-launcher",
	}
	entries, err := os.ReadDir(deployDir + "/kubernetes/components")
	if err != nil {
		t.Fatal(err)
	}
	used := map[string]bool{"config": true} // of the overlays minio and aws
	combinations := [][]string{{"aws", "node-only"}}
	for _, overlay := range []string{"minio", "aws"} {
		combinations = append(combinations, []string{overlay, "before-1.35", "process-launcher"}, []string{overlay, "process-launcher", "before-1.35"},
			[]string{overlay, "inline-volumes", "process-launcher", "before-1.35"}, []string{overlay, "before-1.35", "inline-volumes"})
	}
	for _, combination := range combinations {
		overlay, components := combination[0], combination[1:]
		for _, c := range components {
			used[c] = true
		}
		t.Run(strings.Join(combination, "+"), func(t *testing.T) {
			t.Parallel()
			dir := filepath.Join(t.TempDir(), "kubernetes")
			if err := os.CopyFS(dir, os.DirFS(deployDir+"/kubernetes")); err != nil {
				t.Fatal(err)
			}
			text, variants := "resources: [../overlays/"+overlay+"]\ncomponents:\n", []string{variantOf[overlay]}
			for _, c := range components {
				text += "  - ../components/" + c + "\n"
				variants = append(variants, variantOf[c])
			}
			if err := errors.Join(os.Mkdir(dir+"/mine", 0o700), os.WriteFile(dir+"/mine/kustomization.yaml", []byte(text), 0o600)); err != nil {
				t.Fatal(err)
			}
			sameObjects(t, kustomize(t, dir+"/mine"), variants...)
		})
	}
	for _, e := range entries {
		if !used[e.Name()] {
			t.Errorf("component %s is combined with nothing", e.Name())
		}
	}
}

// sameObjects compares objects with those of the chart with values files.
func sameObjects(t *testing.T, objects []object, variants ...string) {
	t.Helper()
	var args []string
	for _, v := range variants {
		args = append(args, "--values", values(v))
	}
	have, want := normal(t, objects), normal(t, template(t, args...))
	for _, key := range slices.Sorted(maps.Keys(want)) {
		if have[key] != want[key] {
			t.Errorf("%s is\n%s\nand with values %s it is\n%s", key, have[key], variants, want[key])
		}
		delete(have, key)
	}
	for key := range have {
		t.Errorf("%s is not there with values %s", key, variants)
	}
}

func TestOffClusterObjects(t *testing.T) {
	objects := kustomize(t, deployDir+"/off-cluster")
	secret := one(t, objects, "Secret")
	account := one(t, objects, "ServiceAccount")
	if secret.Metadata.Annotations["kubernetes.io/service-account.name"] != account.Metadata.Name || secret.Metadata.Namespace != account.Metadata.Namespace {
		t.Errorf("the token is not that of %s", account.Metadata.Name)
	}
	inside := template(t)
	for _, kind := range []string{"ClusterRole", "Role"} {
		if have, want := rights(objects, kind), rights(inside, kind); !slices.Equal(have, want) || len(have) == 0 {
			t.Errorf("%s: %q, in the cluster %q", kind, have, want)
		}
	}
	script, err := os.ReadFile(deployDir + "/off-cluster/kubeconfig")
	if err != nil || !strings.Contains(string(script), "\nsecret="+secret.Metadata.Name+"\n") {
		t.Errorf("deploy/off-cluster/kubeconfig does not read %s (%v)", secret.Metadata.Name, err)
	}
}

func kustomize(t *testing.T, dir string) []object {
	t.Helper()
	out, all, err := run(t, kubectl(t), "kustomize", dir)
	if err != nil {
		t.Fatalf("%v\n%s", err, all)
	}
	return parse(t, out)
}

// normal returns each object as JSON by kind, namespace and name, without irrelevant differences: labels of objects, the order of
// arguments, volumes and mounts, and the format of the config file.
func normal(t *testing.T, objects []object) map[string]string {
	t.Helper()
	texts := map[string]string{}
	for _, o := range objects {
		if o.Metadata.Annotations["helm.sh/hook"] != "" {
			continue // Helm's
		}
		if metadata, ok := o.raw["metadata"].(map[string]any); ok {
			delete(metadata, "labels")
		}
		if data, ok := o.raw["data"].(map[string]any); ok {
			for key, value := range data {
				var content any
				if text, ok := value.(string); ok && yaml.Unmarshal([]byte(text), &content) == nil {
					data[key] = content
				}
			}
		}
		sortLists(t, o.raw)
		b, err := json.MarshalIndent(o.raw, "", " ")
		if err != nil {
			t.Fatal(err)
		}
		texts[strings.Join([]string{o.Kind, o.Metadata.Namespace, o.Metadata.Name}, " ")] = string(b)
	}
	return texts
}

func sortLists(t *testing.T, value any) {
	t.Helper()
	switch v := value.(type) {
	case map[string]any:
		for key, inner := range v {
			sortLists(t, inner)
			if list, ok := inner.([]any); ok && slices.Contains([]string{"args", "volumes", "volumeMounts"}, key) {
				slices.SortFunc(list, func(a, b any) int { return strings.Compare(text(t, a), text(t, b)) })
			}
		}
	case []any:
		for _, inner := range v {
			sortLists(t, inner)
		}
	}
}

func text(t *testing.T, value any) string {
	t.Helper()
	b, err := json.Marshal(value)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}
