//go:build !lane || shared

package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/s3-csi/s3-csi-driver/tests/e2e/cluster"
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
		"ClusterRole", "ClusterRoleBinding", "ConfigMap", "CSIDriver", "DaemonSet", "Deployment", "NetworkPolicy", "PodDisruptionBudget", "PodMonitor",
		"PrometheusRule", "Role", "RoleBinding",
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
		if warnings, err := dryRun(t.Context(), t, rendered(t, ns, "--values", variants+"/node-only.yaml")); err != nil ||
			!strings.Contains(warnings, "hostPID=true") {
			t.Errorf("the node's pods: %q %v", warnings, err)
		}
	})
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
			`(?m)^node$`, yes("the host's mount namespace"), yes("/dev/fuse"), yes("mounting FUSE"), yes("the launcher of helpers"),
			yes("mounts survive driver restarts"),
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
