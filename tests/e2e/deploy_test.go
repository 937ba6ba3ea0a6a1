//go:build !lane || deploy

package e2e

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/s3-csi/s3-csi-driver/tests/e2e/cluster"
	"github.com/s3-csi/s3-csi-driver/tests/internal/minio"
	"github.com/s3-csi/s3-csi-driver/tests/internal/pages"
	"github.com/s3-csi/s3-csi-driver/tests/internal/registry"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
)

// TestInlineVolumesOfNamespaces: the admission policy that docs/how-to/inline-security.md has lets those namespaces define volumes in pods that have
// its label, and forbids nothing else.
func TestInlineVolumesOfNamespaces(t *testing.T) {
	ns := newNamespace(t)
	page, err := os.ReadFile("../../docs/how-to/inline-security.md")
	if err != nil {
		t.Fatal(err)
	}
	_, block, _ := strings.Cut(string(page), "```yaml\napiVersion: admissionregistration.k8s.io/v1\n")
	block, _, found := strings.Cut(block, "```")
	if !found {
		t.Fatal("docs/how-to/inline-security.md has no admission policy")
	}
	apply(t, "", "apiVersion: admissionregistration.k8s.io/v1\n"+block)
	t.Cleanup(func() {
		remove(t, "validatingadmissionpolicybinding", "", "s3-inline-volumes")
		remove(t, "validatingadmissionpolicy", "", "s3-inline-volumes")
	})
	create := func(pod string) error {
		_, err := world.Kubectl(t.Context(), []byte(pod), "create", "--dry-run=server", "-n", ns, "-f", "-")
		return err
	}
	inline := inlinePod{name: "p", attributes: map[string]string{"bucketName": "some-bucket"}}.yaml()
	eventually(t, "the pod to be refused", func() error { // the API server takes a moment to know the policy
		err := create(inline)
		if err == nil {
			return errors.New("it is not")
		}
		if strings.Contains(err.Error(), "through claims only") {
			return nil
		}
		return err
	})
	for what, pod := range map[string]string{
		"a claim":                    podSpec{name: "p", claims: map[string]string{"/v": "data"}}.yaml(),
		"an inline volume of others": strings.ReplaceAll(inline, csiName, "another.csi.driver"),
	} {
		if err := create(pod); err != nil {
			t.Errorf("a pod with %s is refused: %v", what, err)
		}
	}
	kubectl(t, "label", "namespace", ns, "s3.csi.driver/inline-volumes=allowed")
	eventually(t, "the pod to be allowed", func() error { return create(inline) })
}

// The driver is installed without Helm, by the tutorial, and from a registry.
func TestInstallation(t *testing.T) {
	need(t)
	releaseBin := t.TempDir()
	pulled, released := make(chan error, 1), make(chan error, 1)
	go func() { // most of the test waits
		pulled <- tutorialImages(t.Context(), pages.Read(t, "tutorial/tutorial"))
		released <- releaseImage(t.Context(), releaseBin)
	}()
	makeRoom(t)
	t.Run("kustomize", kustomize)

	kubectl(t, "delete", "namespace", driverNamespace)
	t.Cleanup(func() { // before the driver comes back
		err := errors.Join(world.surround(context.Background()), world.ImportArchive(context.Background(), world.images.driver, driverArchive(os.Getenv(rig.EnvBin))))
		if err != nil {
			t.Fatal(err)
		}
	})
	if err := <-pulled; err != nil {
		t.Fatal(err)
	}
	t.Run("tutorial", tutorial)
	if err := <-released; err != nil {
		t.Fatal(err)
	}
	t.Run("registry", func(t *testing.T) { fromARegistry(t, driverArchive(releaseBin)) })
}

// notRun are the command blocks of the tutorial that the test does not run, by their first line, and why.
var notRun = map[string]string{
	"git clone https://github.com/s3-csi/s3-csi-driver && cd s3-csi-driver": "make e2e runs in a checkout, and has built the image before this test",
}

// tutorial runs the commands of docs/tutorial/tutorial.md as they are printed, and compares what they write with what the page says.
func tutorial(t *testing.T) {
	page := pages.Read(t, "tutorial/tutorial")
	dir := t.TempDir()
	archive := filepath.Join(dir, "bin", "image", filepath.Base(driverArchive("")))
	err := errors.Join(
		os.MkdirAll(filepath.Dir(archive), 0o700), os.CopyFS(filepath.Join(dir, chartPath), os.DirFS(filepath.Join(root, chartPath))),
		rig.WriteProgram(filepath.Join(dir, "bin", "kind"), fmt.Appendf(nil, kind, world.Program("ctr"), world.Path(cluster.ContainerdSocket))),
		unpin(filepath.Join(dir, chartPath, "values.yaml")),
		// The name that it has with the page's VERSION.
		renamed(archive, driverArchive(os.Getenv(rig.EnvBin)), world.images.driver))
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(page, "make image VERSION="+world.images.driver[strings.LastIndex(world.images.driver, ":")+1:]+"\n") {
		t.Errorf("the page builds another version than %s, which the chart names", world.images.driver)
	}
	if err := world.RemoveImage(t.Context(), world.images.driver); err != nil { // the tutorial has to bring it
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			for _, ns := range []string{driverNamespace, "minio", "default"} {
				explain(t, ns)
			}
			remove(t, "pod", "default", "app")
			remove(t, "pvc", "default", "data")
			uninstall(t)
		}
		kubectl(t, "delete", "namespace", "minio", "--ignore-not-found", "--wait=false")
	})

	var script strings.Builder
	fmt.Fprintf(&script, "cd %q\nPATH=%q:$PATH\ntrap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n", dir, filepath.Join(dir, "bin"))
	const mark = "=== the next block ==="
	var outputs []*regexp.Regexp // of the blocks that are run; nil: the page does not say
	skipped := map[string]bool{}
	last := ""
	for _, b := range pages.Blocks(page) {
		switch {
		case b.Language == "sh" && notRun[b.First()] != "":
			skipped[b.First()] = true
		case b.Language == "sh":
			fmt.Fprintf(&script, "echo %q\n%s", mark, b.Text)
			outputs = append(outputs, nil)
		case b.Language == "text" && last == "sh":
			outputs[len(outputs)-1] = expected(b.Text)
		default:
			t.Errorf("line %d: the block is neither commands (sh) nor what they write (text): %s", b.Line, b.First())
		}
		last = b.Language
	}
	if len(skipped) != len(notRun) || len(outputs) < 8 {
		t.Fatalf("%d blocks are run, %v are not", len(outputs), skipped)
	}
	file := filepath.Join(dir, "script")
	if err := os.WriteFile(file, []byte(script.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	// In the node's network, where no other process has the port of the page.
	out, errs, err := shell(t.Context(), t, "", fmt.Sprintf("exec nsenter --net=/proc/%d/ns/net bash -e %q", world.PID(), file))
	said := strings.Split(out, mark+"\n")[1:]
	if err != nil || len(said) != len(outputs) {
		t.Fatalf("block %d of %d: %v\n%s\n%s", len(said), len(outputs), err, out, errs)
	}
	for i, want := range outputs {
		if want != nil && !want.MatchString(said[i]) {
			t.Errorf("the page does not say what this block writes:\n%s\nwant %s", said[i], want)
		}
	}
	volumesGone(t)
}

// uninstall takes a release away that a test has made, if it is there.
func uninstall(t *testing.T) {
	t.Helper()
	if _, err := world.Helm(context.Background(), "uninstall", release, "--namespace", driverNamespace, "--wait", "--timeout=2m",
		"--ignore-not-found"); err != nil {
		t.Error(err)
	}
}

// tutorialImages brings the images that the tutorial's pods name, because none can be pulled: the MinIO that make builds, and the
// shell of the other tests.
func tutorialImages(ctx context.Context, page string) error {
	server, err := minio.Binary()
	if err != nil {
		return err
	}
	var names []string
	for _, m := range regexp.MustCompile(`(?m)^ +image: (\S+)$`).FindAllStringSubmatch(page, -1) {
		names = append(names, m[1])
	}
	if len(names) != 2 || !strings.Contains(names[0], "minio/minio:") || !strings.HasPrefix(names[1], "busybox:") {
		return fmt.Errorf("the page names the images %q", names)
	}
	return errors.Join(
		world.Import(ctx, cluster.Image{Name: names[0], Files: map[string]string{"usr/bin/minio": server}, Dirs: []string{"tmp"},
			Entrypoint: []string{"/usr/bin/minio"}}),
		world.ImportBusybox(ctx, "docker.io/library/"+names[1]))
}

// unpin removes the digests from a file of the chart: the sidecars' images of this cluster are made here.
func unpin(file string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	return os.WriteFile(file, regexp.MustCompile(`(?m)^( +digest: ).*$`).ReplaceAll(text, []byte(`$1""`)), 0o600)
}

// renamed writes an archive of the format that make image writes, in which the image has another name.
func renamed(to, from, name string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.Create(to)
	if err != nil {
		return err
	}
	r, w := tar.NewReader(in), tar.NewWriter(out)
	for {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return errors.Join(w.Close(), out.Close())
		}
		content := io.Reader(r)
		if err == nil && h.Name == "index.json" {
			var index map[string]any
			if err = json.NewDecoder(r).Decode(&index); err == nil {
				manifest := index["manifests"].([]any)[0].(map[string]any)
				manifest["annotations"] = map[string]any{"org.opencontainers.image.ref.name": name}
				var text []byte
				text, err = json.Marshal(index)
				h.Size, content = int64(len(text)), bytes.NewReader(text)
			}
		}
		if err == nil {
			err = w.WriteHeader(h)
		}
		if err == nil {
			_, err = io.Copy(w, content)
		}
		if err != nil {
			return errors.Join(err, out.Close())
		}
	}
}

// releaseVersion is what the test publishes.
const releaseVersion = "1.2.3"

// releaseRepository is where in the registry.
func releaseRepository() string { return world.Registry() + "/team" }

// releaseImage makes the image that is published. Its version makes it another image of the same programs, which the node does not have.
func releaseImage(ctx context.Context, bin string) error {
	var errs []error
	for _, name := range driverPrograms {
		errs = append(errs, symlink(filepath.Join(os.Getenv(rig.EnvBin), name), filepath.Join(bin, name)))
	}
	_, err := buildImage(ctx, releaseRepository()+"/s3-csi-driver:v"+releaseVersion, bin)
	return errors.Join(append(errs, err)...)
}

// fromARegistry publishes image and chart as make release does, to a registry that knows its users and has a certificate of a private
// authority, and installs with the chart's address alone. The node pulls the driver's image from there.
func fromARegistry(t *testing.T, archive string) {
	if err := world.surround(t.Context()); err != nil {
		t.Fatal(err)
	}
	certificate, err := world.Certificate("registry")
	if err != nil {
		t.Fatal(err)
	}
	const user, password = "team", "registry-secret"
	server, err := registry.Start(t.Context(), registry.Options{Addr: world.Registry(), Dir: t.TempDir(), Certificate: &certificate, User: user,
		Password: password})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := server.Close(); err != nil {
			t.Error(err)
		}
	})
	dir := t.TempDir()
	admin := func(line string) string {
		t.Helper()
		out, errs, err := shell(t.Context(), t, password, fmt.Sprintf("cd %q && export SSL_CERT_FILE=%q REGISTRY_AUTH_FILE=%q/auth.json && %s", dir, world.CA(), dir,
			line))
		if err != nil {
			t.Fatalf("%v\n%s%s", err, out, errs)
		}
		return out
	}
	publish, err := filepath.Abs(root + "/hack/release")
	err = errors.Join(err, os.WriteFile(filepath.Join(dir, "values.yaml"), []byte(values+"imagePullSecrets: [{name: registry}]\n"), 0o600))
	if err != nil {
		t.Fatal(err)
	}
	repository := releaseRepository()
	admin(fmt.Sprintf("buildah login --username %s --password-stdin %s", user, server.Host()))
	admin(fmt.Sprintf("helm registry login --username %s --password-stdin %s", user, server.Host()))
	published := strings.Fields(admin(fmt.Sprintf("%s %s v%s published %s", publish, repository, releaseVersion, archive)))
	reference := published[len(published)-1]

	kubectl(t, "create", "secret", "docker-registry", "registry", "--namespace", driverNamespace, "--docker-server="+server.Host(), "--docker-username="+user,
		"--docker-password="+password)
	t.Cleanup(func() {
		if t.Failed() {
			explain(t, driverNamespace)
		}
		uninstall(t)
	})
	admin(fmt.Sprintf("helm install %s oci://%s/charts/s3-csi-driver --version %s --namespace %s --values values.yaml --wait --timeout=2m", release, repository,
		releaseVersion, driverNamespace))
	image, digest, _ := strings.Cut(reference, "@")
	if image != repository+"/s3-csi-driver:v"+releaseVersion || digest == "" {
		t.Errorf("published %q", published)
	}
	used := strings.Fields(kubectl(t, "get", "pods", "--namespace", driverNamespace, "--output",
		`jsonpath={range .items[*]}{range .status.containerStatuses[?(@.name=="s3-csi-driver")]}{.imageID}{"\n"}{end}{end}`))
	if len(used) < 2 {
		t.Errorf("the driver's containers have the images %q", used)
	}
	for _, id := range used {
		if !strings.HasPrefix(id, repository+"/s3-csi-driver@sha256:") {
			t.Errorf("a container of the driver has the image %s", id)
		}
	}

	const ns = "default"
	claim(t, ns, "data", class(t, map[string]string{"bucketName": bucket(t)}), "ReadWriteMany")
	at, prefix := place(t, bound(t, ns, "data"))
	podSpec{name: "pod", claims: map[string]string{"/v": "data"}, command: "echo written > /v/file && " + forever}.run(t, ns)
	stored(t, at, prefix+"file", "written\n")
	remove(t, "pod", ns, "pod")
	remove(t, "pvc", ns, "data")
	volumesGone(t)
}

// clusterScoped are the names of all objects that are in no namespace, but for namespaces themselves.
func clusterScoped(t *testing.T) []string {
	t.Helper()
	var kinds []string
	for kind := range strings.FieldsSeq(kubectl(t, "api-resources", "--namespaced=false", "--verbs=list", "-o", "name")) {
		if kind != "componentstatuses" && kind != "namespaces" {
			kinds = append(kinds, kind)
		}
	}
	names := strings.Fields(kubectl(t, "get", strings.Join(kinds, ","), "-o", "name"))
	for _, node := range list(t, "csinodes", "") {
		for _, d := range node.Spec.Drivers {
			names = append(names, "driver/"+d.Name+" of "+node.Metadata.Name)
		}
	}
	slices.Sort(names)
	return names
}

// secondRelease installs the chart again, for a driver of another name beside the first, and waits until it is ready. When the
// test ends it is taken away, and what it leaves in the cluster fails the test.
func secondRelease(t *testing.T, driverName, values string) (namespace string) {
	t.Helper()
	ns := newNamespace(t)
	volumesGone(t) // those of the tests before, which the release would seem to take along
	before := clusterScoped(t)
	file, images := filepath.Join(t.TempDir(), "values.yaml"), filepath.Join(t.TempDir(), "images.yaml")
	if err := errors.Join(os.WriteFile(file, []byte(values), 0o600), os.WriteFile(images, []byte(noDigests), 0o600)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			explain(t, ns)
			for _, name := range []string{"deployment/second-s3-controller", "daemonset/second-s3-node"} {
				out, err := try("logs", "-n", ns, name, "--all-containers", "--tail=30")
				t.Logf("%s: %v\n%s", name, err, out)
			}
		}
		if _, err := world.Helm(context.Background(), "uninstall", "second", "--namespace", ns, "--wait", "--timeout=2m"); err != nil {
			t.Fatal(err)
		}
		eventually(t, "nothing of the release to be left", func() error {
			after := clusterScoped(t)
			left := slices.DeleteFunc(slices.Clone(after), func(n string) bool { return slices.Contains(before, n) })
			gone := slices.DeleteFunc(slices.Clone(before), func(n string) bool { return slices.Contains(after, n) })
			if len(left)+len(gone) > 0 {
				return fmt.Errorf("left: %q, taken along: %q", left, gone)
			}
			return nil
		})
	})
	_, err := world.Helm(t.Context(), "install", "second", chart, "--namespace", ns, "--values", variants+"/second-driver.yaml", "--values", file, "--values",
		images,
		"--set", "driverName="+driverName, "--wait", "--timeout=2m")
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Contains(clusterScoped(t), "csidriver.storage.k8s.io/"+driverName) {
		t.Errorf("there is no CSIDriver %s in %q", driverName, clusterScoped(t))
	}
	eventually(t, "kubelet to know the driver", func() error {
		if all := clusterScoped(t); !slices.Contains(all, "driver/"+driverName+" of "+cluster.Node) {
			return fmt.Errorf("there is %q", all)
		}
		return nil
	})
	return ns
}

// A second driver lives beside the first, can be upgraded, and leaves nothing when it goes.
func TestSecondRelease(t *testing.T) {
	need(t)
	ns := secondRelease(t, "second.s3.example.com", "{}")
	out, err := world.Helm(t.Context(), "upgrade", "second", chart, "--namespace", ns, "--reuse-values", "--set", "inlineVolumes=false,logging.level=3",
		"--dry-run=server")
	if err != nil || !strings.Contains(out, "--v=3") {
		t.Errorf("upgrade: %v\n%s", err, out)
	}
}

// An upgrade can be tried before it is done.
func TestUpgradeIsTried(t *testing.T) {
	need(t)
	history := func() string {
		out, err := world.Helm(t.Context(), "history", release, "--namespace", driverNamespace)
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	before := history()
	out, err := world.Helm(t.Context(), "upgrade", release, chart, "--namespace", driverNamespace, "--reuse-values", "--set", "logging.level=3",
		"--dry-run=server")
	if err != nil || !strings.Contains(out, "--v=3") {
		t.Errorf("%v\n%s", err, out)
	}
	if after := history(); after != before {
		t.Errorf("it was done:\n%s\nbefore:\n%s", after, before)
	}
}

// makeRoom takes the release away for a test that installs the driver otherwise, and brings it back. No volume is left to be deleted
// when it goes.
func makeRoom(t *testing.T) {
	t.Helper()
	need(t)
	volumesGone(t)
	t.Cleanup(func() {
		if err := world.upgrade(context.Background(), "install"); err != nil {
			t.Fatalf("no test after this one has a driver: %v", err)
		}
	})
	if _, err := world.Helm(t.Context(), "uninstall", release, "--namespace", driverNamespace, "--wait", "--timeout=2m"); err != nil {
		t.Fatal(err)
	}
}

// serviceConfig is the config file of an installation without the chart.
const serviceConfig = `
backends:
  minio:
    endpoint: http://s3.storage.svc:9000
    region: us-east-1
    controllerCredentials: secret
    adoptUntaggedBuckets: true
    sts:
      endpoint: http://s3.storage.svc:9001
      kinds: [federationToken]
`

// kustomize installs the driver without Helm.
func kustomize(t *testing.T) {
	eventually(t, "the uninstalled release to leave nothing", func() error { // kubelet takes a moment
		for _, name := range clusterScoped(t) {
			if strings.Contains(name, release) || strings.HasSuffix(name, csiName) || strings.Contains(name, csiName+" of ") {
				return fmt.Errorf("there is %s", name)
			}
		}
		return nil
	})

	overlays, err := filepath.Glob(deployDir + "/kubernetes/overlays/*")
	if err != nil || len(overlays) < 3 {
		t.Fatal(overlays, err)
	}
	for _, dir := range append(overlays, deployDir+"/kubernetes/base", deployDir+"/off-cluster") {
		t.Run(filepath.Base(dir), func(t *testing.T) { judged(t, kubectl(t, "kustomize", dir), warned[filepath.Base(dir)]) })
	}

	t.Run("apply", func(t *testing.T) {
		dir := filepath.Join(t.TempDir(), "kubernetes")
		if err := os.CopyFS(dir, os.DirFS(deployDir+"/kubernetes")); err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{"base/controller-deployment.yaml", "base/node-daemonset.yaml"} { // the images are made here
			file := filepath.Join(dir, name)
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(file, pinned.ReplaceAll(text, nil), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		dir = filepath.Join(dir, "overlays/minio")
		if err := os.WriteFile(filepath.Join(dir, "config.yaml"), []byte(serviceConfig), 0o600); err != nil {
			t.Fatal(err)
		}
		k, err := world.s3.AddUser(t.Context(), "kustomize", everything)
		if err != nil {
			t.Fatal(err)
		}
		namedBucket(t, "volumes")
		apply(t, "storage", secret("s3-keys", k))
		t.Cleanup(func() { remove(t, "secret", "storage", "s3-keys") })

		kubectl(t, "apply", "-k", dir)
		t.Cleanup(func() {
			kubectl(t, "delete", "-k", dir, "--timeout="+patience.String())
			eventually(t, "nothing to be left", func() error {
				for name := range strings.FieldsSeq(kubectl(t, "get", "all,configmaps,serviceaccounts,roles,rolebindings", "-n", "s3-csi", "-o", "name")) {
					if strings.Contains(name, release) {
						return fmt.Errorf("there is %s", name)
					}
				}
				return nil
			})
		})
		for _, name := range []string{"daemonset/" + release + "-node", "deployment/" + release + "-controller"} {
			kubectl(t, "rollout", "status", "-n", "s3-csi", name, "--timeout="+patience.String())
		}
		ns := newNamespace(t)
		claim(t, ns, "data", "minio", "ReadWriteMany")
		at, prefix := place(t, bound(t, ns, "data"))
		if at != "volumes" || !strings.HasPrefix(prefix, ns+"/") {
			t.Errorf("the volume is %s %s", at, prefix)
		}
		podSpec{name: "pod", claims: map[string]string{"/v": "data"}, command: "echo written > /v/file && " + forever}.run(t, ns)
		stored(t, at, prefix+"file", "written\n")
		remove(t, "pod", ns, "pod")
		remove(t, "pvc", ns, "data")
		volumesGone(t)
		if all := keys(t, at, prefix); len(all) > 0 {
			t.Errorf("left in S3: %q", all)
		}
	})
}
