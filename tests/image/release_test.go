package image

import (
	"encoding/json"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/s3-csi/s3-csi-driver/tests/internal/registry"
)

// testRelease publishes image and chart to a registry, and installs from there as users do, with nothing but the chart's address.
func testRelease(t *testing.T, archive string) {
	helm := os.Getenv("HELM")
	if helm == "" {
		t.Skip("needs helm: run make test, or set HELM to its path")
	}
	server, err := registry.Start(t.Context(), registry.Options{Addr: "127.0.0.1:0", Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := server.Close(); err != nil {
			t.Error(err)
		}
	})
	repository := server.Host() + "/team"
	out := t.TempDir()
	run := func(name string, args ...string) string {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), name, args...)
		cmd.Env = append(os.Environ(), "PLAIN_HTTP=1", "HELM="+helm, "HOME="+t.TempDir())
		b, err := cmd.Output()
		if err != nil {
			var stderr []byte
			if exit, ok := err.(*exec.ExitError); ok { //nolint:errorlint // as os/exec returns it
				stderr = exit.Stderr
			}
			t.Fatalf("%s: %v\n%s%s", filepath.Base(name), err, b, stderr)
		}
		return string(b)
	}
	published := run("../../hack/release", repository, "v1.2.3", out, archive)
	lines := strings.Fields(published)
	reference := lines[len(lines)-1]
	if published, digest, _ := strings.Cut(lines[len(lines)-2], "@"); published != repository+"/charts/s3-csi-driver:1.2.3" ||
		!strings.HasPrefix(digest, "sha256:") {
		t.Errorf("published the chart %q", lines[len(lines)-2])
	}
	image, digest, _ := strings.Cut(reference, "@")
	if image != repository+"/s3-csi-driver:v1.2.3" || !strings.HasPrefix(digest, "sha256:") {
		t.Fatalf("published %q", published)
	}

	// kubelet gets the image for its platform by this reference.
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+server.Host()+"/v2/team/s3-csi-driver/manifests/"+digest, nil)
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("Accept", "application/vnd.oci.image.index.v1+json")
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	var index struct {
		Manifests []struct {
			Platform struct{ OS, Architecture string }
		}
	}
	if err := json.NewDecoder(response.Body).Decode(&index); err != nil || len(index.Manifests) != 1 ||
		index.Manifests[0].Platform.OS != "linux" || index.Manifests[0].Platform.Architecture != runtime.GOARCH {
		t.Errorf("index: %+v, %v", index, err)
	}

	rendered := run(helm, "template", "s3", "oci://"+repository+"/charts/s3-csi-driver", "--version", "1.2.3", "--plain-http")
	var images []string
	for line := range strings.Lines(rendered) {
		if _, name, ok := strings.Cut(line, "image: "); ok && strings.Contains(name, "s3-csi-driver") {
			images = append(images, strings.Trim(strings.TrimSpace(name), `"`))
		}
	}
	// Of the controller, the node and the chart's test.
	if len(images) != 3 || slices.ContainsFunc(images, func(image string) bool { return image != reference }) {
		t.Errorf("the chart has the images %q, not %s", images, reference)
	}
	if checksums, err := os.ReadFile(filepath.Join(out, "checksums.txt")); err != nil || len(strings.Fields(string(checksums))) != 4 {
		t.Errorf("checksums: %q, %v", checksums, err)
	}
}
