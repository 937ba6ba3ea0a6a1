package chart

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const (
	root      = "../.."
	chartDir  = root + "/charts/s3-csi-driver"
	deployDir = root + "/deploy"
	release   = "s3-csi-driver"
	namespace = "kube-system"
	// kubeVersion is what hack/render renders for.
	kubeVersion = "1.36.0"
)

// helm is the program to render with; without it the test is skipped.
func helm(t *testing.T) string {
	t.Helper()
	path := os.Getenv("HELM")
	if path == "" {
		t.Skip("HELM does not name a helm to render the chart with")
	}
	if _, err := exec.LookPath(path); err != nil {
		t.Skipf("HELM names no program: %v", err)
	}
	return path
}

// kubectl is the program to build overlays with; without it the test is skipped.
func kubectl(t *testing.T) string {
	t.Helper()
	if path := os.Getenv("KUBECTL"); path != "" {
		return path
	}
	path := filepath.Join(filepath.Dir(helm(t)), "kubectl")
	if _, err := exec.LookPath(path); err != nil {
		t.Skipf("KUBECTL does not name a kubectl to build overlays with, and there is none beside helm: %v", err)
	}
	return path
}

// run gives what a program writes to its standard output, and all that it writes.
func run(t *testing.T, name string, args ...string) (out, all string, err error) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), name, args...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err = cmd.Run()
	return stdout.String(), stdout.String() + stderr.String(), err
}

// variants are the values files of testdata, by their names without .yaml.
func variants(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob("testdata/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	names := make([]string, len(files))
	for i, file := range files {
		names[i] = strings.TrimSuffix(filepath.Base(file), ".yaml")
	}
	slices.Sort(names)
	return names
}

func values(variant string) string { return "testdata/" + variant + ".yaml" }

// template renders the chart, and fails the test if helm does not.
func template(t *testing.T, args ...string) []object {
	t.Helper()
	out, all, err := tryTemplate(t, args...)
	if err != nil {
		t.Fatalf("helm template %s: %v\n%s", strings.Join(args, " "), err, all)
	}
	return parse(t, out)
}

func tryTemplate(t *testing.T, args ...string) (out, all string, err error) {
	t.Helper()
	args = append([]string{"template", release, chartDir, "--namespace", namespace, "--kube-version", kubeVersion}, args...)
	return run(t, helm(t), args...)
}

// withValues writes a values file and gives the arguments that name it.
func withValues(t *testing.T, yaml string) []string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "values.yaml")
	if err := os.WriteFile(file, []byte(yaml), 0o600); err != nil {
		t.Fatal(err)
	}
	return []string{"--values", file}
}

// eachVariant runs a test for what each values file makes.
func eachVariant(t *testing.T, test func(t *testing.T, variant string, objects []object)) {
	t.Helper()
	helm(t)
	for _, variant := range variants(t) {
		t.Run(variant, func(t *testing.T) {
			t.Parallel()
			test(t, variant, template(t, "--values", values(variant)))
		})
	}
}
