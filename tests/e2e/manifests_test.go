package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/s3-csi/s3-csi-driver/tests/e2e/cluster"
)

const (
	root      = "../.."
	deployDir = root + "/deploy"
	variants  = root + "/tests/chart/testdata"
)

// monitors are the kinds of Prometheus Operator that the chart makes.
func monitors() []string { return []string{"ServiceMonitor", "PodMonitor", "PrometheusRule"} }

// monitorCRD is as much of the CRD of such a kind as its objects need to be taken: their fields are not looked at.
func monitorCRD(kind string) (name, object string) {
	plural := strings.ToLower(kind) + "s"
	name = plural + ".monitoring.coreos.com"
	return name, fmt.Sprintf(`
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: %s}
spec:
  group: monitoring.coreos.com
  scope: Namespaced
  names: {kind: %s, plural: %s}
  versions: [{name: v1, served: true, storage: true, schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}}]
`, name, kind, plural)
}

// shell runs a command line as an administrator of the cluster does, with kubectl and helm on the PATH, and gives what it writes to
// both of its outputs.
func shell(ctx context.Context, t testing.TB, in, line string) (out, errs string, err error) {
	t.Helper()
	bin := filepath.Join(world.Dir, "bin")
	for name, program := range map[string]string{"kubectl": os.Getenv("KUBECTL"), "helm": os.Getenv("HELM")} {
		if err := errors.Join(os.MkdirAll(bin, 0o700), symlink(program, filepath.Join(bin, name))); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.CommandContext(ctx, "sh", "-c", line)
	cmd.Env = append(os.Environ(), "PATH="+bin+":"+os.Getenv("PATH"), "KUBECONFIG="+world.Kubeconfig(), "HOME="+world.Dir,
		"HELM_CACHE_HOME="+world.Dir, "HELM_CONFIG_HOME="+world.Dir, "HELM_DATA_HOME="+world.Dir)
	var stdout, stderr bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(in), &stdout, &stderr
	if err = cmd.Run(); err != nil {
		err = fmt.Errorf("%s: %w: %s", line, err, stderr.String())
	}
	return stdout.String(), stderr.String(), err
}

func symlink(to, name string) error {
	to, err := filepath.Abs(to)
	if err != nil {
		return err
	}
	if err := os.Symlink(to, name); !errors.Is(err, os.ErrExist) {
		return err
	}
	return nil
}

// dryRun lets the API server judge objects strictly, and gives its warnings.
func dryRun(ctx context.Context, t testing.TB, objects string) (warnings string, err error) {
	t.Helper()
	out, warnings, err := shell(ctx, t, objects, "kubectl apply --dry-run=server --validate=strict -f -")
	if err == nil && !strings.Contains(out, "(server dry run)") {
		err = fmt.Errorf("nothing was judged: %q", out)
	}
	return warnings, err
}

// judged fails the test where the API server does not take objects as they are, or warns of anything else than is expected.
func judged(t *testing.T, objects, warning string) {
	t.Helper()
	warnings, err := dryRun(t.Context(), t, objects)
	if err != nil {
		t.Error(err)
	} else if warnings != warning {
		t.Errorf("it says %q", warnings)
	}
}

// rendered is what helm makes of the chart for a release that is not installed. A driver of the name that is installed would be
// changed, which some fields of its object do not allow: then it gets another name.
func rendered(t *testing.T, namespace string, args ...string) string {
	t.Helper()
	// The pod of helm test needs the service account, which is not there.
	args = append([]string{"template", "variant", chart, "--namespace", namespace, "--skip-tests"}, args...)
	out, err := world.Helm(t.Context(), args...)
	if regexp.MustCompile(`(?m)^kind: CSIDriver\nmetadata:\n  name: ` + regexp.QuoteMeta(csiName) + `$`).MatchString(out) {
		args = append(args, "--set", "driverName=variant.csi.driver")
	}
	if err == nil {
		out, err = world.Helm(t.Context(), append(args, "--dry-run=server")...) // for the API server as it is
	}
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// tokensInContext is what the API server says of a driver that is installed for older ones.
const tokensInContext = "Warning: spec.serviceAccountTokenInSecrets is unset; if supported by this CSI driver, set to true to prevent possible logging of tokens in volume attributes\n"

// warned are the variants and overlays that are to be warned of, and the warning.
var warned = map[string]string{"before-1.35": tokensInContext, "tokens-in-context": tokensInContext}

// A strict API server takes what the chart makes, without a warning.
func TestVariantsOfTheChart(t *testing.T) {
	t.Parallel()
	ns := newNamespace(t)
	t.Run("the judge is strict", func(t *testing.T) {
		const object = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: one}\ndata: {a: b}\n"
		judged(t, object, "")
		if _, err := dryRun(t.Context(), t, object+"bogus: true\n"); err == nil {
			t.Error("an unknown field is taken")
		}
		const deprecated = "apiVersion: v1\nkind: Endpoints\nmetadata: {name: one}\n"
		if warnings, err := dryRun(t.Context(), t, deprecated); err != nil || warnings == "" {
			t.Errorf("no warning about a deprecated kind: %v", err)
		}
	})

	for _, kind := range monitors() {
		name, object := monitorCRD(kind)
		apply(t, "", object)
		t.Cleanup(func() { remove(t, "crd", "", name) })
		kubectl(t, "wait", "--for=condition=Established", "crd/"+name, "--timeout="+patience.String())
	}
	files, err := filepath.Glob(variants + "/*.yaml")
	if err != nil || len(files) < 10 {
		t.Fatal(files, err)
	}
	kinds := map[string]bool{}
	for _, file := range files {
		name := strings.TrimSuffix(filepath.Base(file), ".yaml")
		t.Run(name, func(t *testing.T) {
			objects := rendered(t, ns, "--values", file)
			for _, m := range regexp.MustCompile(`(?m)^kind: (\w+)$`).FindAllStringSubmatch(objects, -1) {
				kinds[m[1]] = true
			}
			judged(t, objects, warned[name])
		})
	}
	for _, kind := range []string{
		"ClusterRole", "ClusterRoleBinding", "ConfigMap", "CSIDriver", "DaemonSet", "Deployment", "NetworkPolicy", "PodDisruptionBudget", "PodMonitor", "PrometheusRule", "Role", "RoleBinding",
		"Secret", "Service", "ServiceAccount", "ServiceMonitor", "StorageClass",
	} {
		if !kinds[kind] {
			t.Errorf("no variant has a %s", kind)
		}
	}

	t.Run("values of pages", func(t *testing.T) {
		tried := 0
		for _, name := range []string{"credentials-setup.md", "minio.md"} {
			page, err := os.ReadFile(root + "/docs/how-to/" + name)
			if err != nil {
				t.Fatal(err)
			}
			for _, block := range regexp.MustCompile("(?s)```yaml\n(.*?)```").FindAllStringSubmatch(string(page), -1) {
				if strings.Contains(block[1], "kind: ") {
					continue
				}
				tried++
				file := filepath.Join(t.TempDir(), "values.yaml")
				if err := os.WriteFile(file, []byte(block[1]), 0o600); err != nil {
					t.Fatal(err)
				}
				judged(t, rendered(t, ns, "--values", file), "")
			}
		}
		if tried < 3 {
			t.Errorf("%d blocks", tried)
		}
	})

	// The controller's pods need nothing that Pod Security's strictest level refuses; the nodes' do.
	t.Run("restricted", func(t *testing.T) {
		kubectl(t, "label", "namespace", ns, "pod-security.kubernetes.io/warn=restricted")
		judged(t, rendered(t, ns, "--values", variants+"/controller-only.yaml"), "")
		if warnings, err := dryRun(t.Context(), t, rendered(t, ns, "--values", variants+"/node-only.yaml")); err != nil || !strings.Contains(warnings, "hostPID=true") {
			t.Errorf("the node's pods: %q %v", warnings, err)
		}
	})
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

// secondRelease installs the chart once more, for a driver of another name beside the first, and waits until it is ready. When the
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
	_, err := world.Helm(t.Context(), "install", "second", chart, "--namespace", ns, "--values", variants+"/second-driver.yaml", "--values", file, "--values", images,
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
	out, err := world.Helm(t.Context(), "upgrade", "second", chart, "--namespace", ns, "--reuse-values", "--set", "inlineVolumes=false,logging.level=3", "--dry-run=server")
	if err != nil || !strings.Contains(out, "--v=3") {
		t.Errorf("upgrade: %v\n%s", err, out)
	}
}

// What the release says of how to check it works as it stands there.
func TestNotes(t *testing.T) {
	t.Parallel()
	need(t)
	notes, err := world.Helm(t.Context(), "get", "notes", release, "--namespace", driverNamespace)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { remove(t, "pod", driverNamespace, release+"-check") }) // of helm test, which leaves it for its log
	lines := regexp.MustCompile(`(?m)^  ((?:kubectl|helm) (?:.*\\\n)*.*)$`).FindAllStringSubmatch(notes, -1)
	said := map[string]string{}
	for _, line := range lines {
		out, errs, err := shell(t.Context(), t, "", line[1])
		if err != nil {
			t.Errorf("%v\n%s", err, out)
		}
		if errs != "" {
			t.Errorf("%s says %q", line[1], errs)
		}
		for _, what := range []string{"rollout status deployment", "rollout status daemonset", "csinodes", "check --node", "check --config", "helm test"} {
			if strings.Contains(line[1], what) {
				said[what] = out
			}
		}
	}
	for what, rows := range map[string][]string{
		"rollout status deployment": {`successfully rolled out`},
		"rollout status daemonset":  {`successfully rolled out`},
		"csinodes":                  {`(?m)^` + cluster.Node + ` .*` + regexp.QuoteMeta(csiName)},
		"check --config": {
			`(?m)^backend default \(http://s3\.storage\.svc:9000\)$`, `(?m)^backend minio `, `(?m)^backend tenants `,
			yes("the service responds"), yes("the driver's own credentials"), yes("create a bucket"), yes("conditional writes (If-None-Match, If-Match)"),
			yes("STS AssumeRoleWithWebIdentity"), yes("session policies are enforced"),
		},
		"helm test": {`(?m)^Phase: +Succeeded$`, `(?m)^backend default \(http://s3\.storage\.svc:9000\)$`, yes("conditional writes (If-None-Match, If-Match)")},
		"check --node": {
			`(?m)^node$`, yes("the host's mount namespace"), yes("/dev/fuse"), yes("mounting FUSE"), yes("the launcher of helpers"), yes("mounts survive driver restarts"),
			yes("programs run from the host's directory"), yes("clients see the pids of their callers"), yes("the client mountpoint-s3"), yes("the client rclone"),
			yes("DNS of backend default"),
		},
	} {
		for _, row := range rows {
			if !regexp.MustCompile(row).MatchString(said[what]) {
				t.Errorf("%s says nothing like %s:\n%s", what, row, said[what])
			}
		}
	}
}

// yes is what a row of the driver's check looks like that has no objection.
func yes(row string) string { return `(?m)^  yes +` + regexp.QuoteMeta(row) + `( |$)` }

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
	out, err := world.Helm(t.Context(), "upgrade", release, chart, "--namespace", driverNamespace, "--reuse-values", "--set", "logging.level=3", "--dry-run=server")
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
