package chart

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
)

const (
	root      = "../.."
	chartDir  = root + "/charts/s3-csi-driver"
	deployDir = root + "/deploy"
	release   = "s3-csi-driver"
	namespace = "s3-csi"
	// kubeVersion is what hack/render renders for.
	kubeVersion = "1.36.0"
)

// helm returns the path of helm, or skips the test.
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

// kubectl returns the path of kubectl, or skips the test.
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

// run runs a program, and returns its standard output and its whole output.
func run(t *testing.T, name string, args ...string) (out, all string, err error) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), name, args...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err = cmd.Run()
	return stdout.String(), stdout.String() + stderr.String(), err
}

// variants returns the names of the values files in testdata, without .yaml.
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

// tryTemplate runs helm once for the same arguments, whichever tests need the result.
func tryTemplate(t *testing.T, args ...string) (out, all string, err error) {
	t.Helper()
	program := helm(t)
	render, _ := rendered.LoadOrStore(strings.Join(args, "\x00"), sync.OnceValues(func() ([2]string, error) {
		out, all, err := run(t, program, append([]string{"template", release, chartDir, "--namespace", namespace, "--kube-version", kubeVersion}, args...)...)
		return [2]string{out, all}, err
	}))
	texts, err := render.(func() ([2]string, error))()
	return texts[0], texts[1], err
}

// rendered has the results of helm by its arguments.
var rendered sync.Map

// withValues writes a values file, and returns the arguments to use it.
func withValues(t *testing.T, yaml string) []string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "values.yaml")
	if err := os.WriteFile(file, []byte(yaml), 0o600); err != nil {
		t.Fatal(err)
	}
	return []string{"--values", file}
}

// eachVariant runs a test with the objects of each values file.
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
