//go:build !lane || shared

package e2e

import (
	"crypto/sha256"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/s3-csi/s3-csi-driver/tests/internal/s3server"
)

// inlineMounts are the lines of the node's mount table that have to do with the inline volume of a pod.
func inlineMounts(t testing.TB, pod object) []string {
	t.Helper()
	if pod.Metadata.UID == "" {
		t.Fatal("a pod without a UID")
	}
	table, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", world.PID()))
	if err != nil {
		t.Fatal(err)
	}
	handle := fmt.Sprintf("csi-%x", sha256.Sum256([]byte(pod.Metadata.UID+"data"))) // makeVolumeHandle of Kubernetes' pkg/volume/csi
	var lines []string
	for line := range strings.Lines(string(table)) {
		if strings.Contains(line, handle) || strings.Contains(line, pod.Metadata.UID+"/volumes/kubernetes.io~csi/") {
			lines = append(lines, line)
		}
	}
	return lines
}

// TestInlineVolumes: pods define their volumes themselves, with a secret of their namespace or as their service account, and never
// with what the driver has. What they store stays when they go, and nothing else does.
func TestInlineVolumes(t *testing.T) {
	t.Parallel()
	ns := newNamespace(t)
	b := bucket(t)
	k, err := world.s3.AddUser(t.Context(), "inline-"+ns, everything)
	if err != nil {
		t.Fatal(err)
	}
	apply(t, ns, secret("s3-keys", k))
	apply(t, ns, "apiVersion: v1\nkind: ServiceAccount\nmetadata: {name: app}")
	role, err := world.s3.SetRole(t.Context(), s3server.Role{Name: ns + ".app", Policy: everything, Trust: s3server.Trust{Issuers: []s3server.TrustedIssuer{{
		URL: world.issuer.URL(), Audiences: []string{audience}, Subjects: []string{"system:serviceaccount:" + ns + ":app"},
	}}}})
	if err != nil {
		t.Fatal(err)
	}
	role = strings.Replace(role, ns+".app", "${pod.namespace}.${pod.serviceAccountName}", 1)
	attributes := func(prefix, client string, more ...string) map[string]string {
		a := map[string]string{"bucketName": b, "prefix": prefix, "client": client, "scope": "required"}
		for i := 0; i < len(more); i += 2 {
			a[more[i]] = more[i+1]
		}
		return a
	}
	const keysOf = "nodePublishSecretRef: {name: s3-keys}"
	pods := map[string]inlinePod{
		"secret": {attributes: attributes("secret/", "mountpoint-s3"), source: keysOf, command: "echo with a secret >/v/file"},
		// What an author writes in kubelet's name is not what the driver gets.
		"workload": {
			attributes: attributes("workload/", "rclone", "roleARN", role, "csi.storage.k8s.io/pod.namespace", "kube-system", "csi.storage.k8s.io/serviceAccount.name",
				"admin"),
			pod: "serviceAccountName: app, securityContext: {runAsUser: 1000, runAsGroup: 1000, fsGroup: 2000}", command: "echo as the service account >/v/file",
		},
		"reader":   {attributes: attributes("reader/", "mountpoint-s3"), source: keysOf + ", readOnly: true", command: "cat /v/file"},
		"driver":   {attributes: attributes("driver/", "mountpoint-s3", "credentials", "driver")},
		"nobody":   {attributes: attributes("nobody/", "mountpoint-s3", "roleARN", role)}, // of the service account "default"
		"nowhere":  {attributes: map[string]string{"prefix": "nowhere/"}, source: keysOf},
		"glutton":  {attributes: attributes("glutton/", "rclone", "memoryLimit", "1Ti"), source: keysOf},
		"keepsake": {attributes: attributes("secret/", "rclone"), source: keysOf, command: "cp /v/file /v/copy"},
	}
	put(t, b, "reader/file", "from elsewhere\n")
	running := map[string]object{}
	for name, p := range pods {
		if name != "keepsake" { // it reads what another has written, in the end
			p.name = name
			apply(t, ns, p.yaml())
		}
	}
	for _, name := range []string{"secret", "workload", "reader"} {
		running[name] = podReady(t, ns, name)
		if len(inlineMounts(t, running[name])) == 0 {
			t.Errorf("the mount table shows nothing of pod %s", name)
		}
	}
	for name, words := range map[string][]string{
		"driver":  {"PermissionDenied", "inline volumes never use the driver's own credentials", "nodePublishSecretRef"},
		"nobody":  {"PermissionDenied", ns + ".default", "AssumeRoleWithWebIdentity"},
		"nowhere": {"InvalidArgument", "volume_context.bucketName: is missing"},
		"glutton": {"PermissionDenied", "volume_context.memoryLimit: 1Ti", "--memory-limit"},
	} {
		t.Log(event(t, ns, name, words...))
		if get(t, "pod", ns, name).ready() {
			t.Errorf("pod %s has its volume", name)
		}
	}

	if got := execute(t, ns, "workload", "sh", "-c", "stat -c %g:%a /v && cat /v/file"); got != "2000:770\nas the service account\n" {
		t.Errorf("the pod with the identity has %q", got)
	}
	if got := execute(t, ns, "reader", "cat", "/v/file"); got != "from elsewhere\n" {
		t.Errorf("the reader reads %q", got)
	}
	if _, err := tryExecute(ns, "reader", "sh", "-c", "echo x >/v/x"); err == nil || !strings.Contains(err.Error(), "Read-only file system") {
		t.Errorf("the reader writes: %v", err)
	}
	calls, err := world.s3.STSCalls(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if !slices.ContainsFunc(calls.Sessions, func(name string) bool { return strings.HasPrefix(name, ns+".app.") }) {
		t.Errorf("no session is named after the pod: %q", calls.Sessions)
	}

	for name := range pods {
		remove(t, "pod", ns, name)
	}
	for name, o := range running {
		if left := inlineMounts(t, o); len(left) > 0 {
			t.Errorf("pod %s is gone, and this is mounted: %q", name, left)
		}
	}
	last := pods["keepsake"]
	last.name = "keepsake"
	apply(t, ns, last.yaml())
	podReady(t, ns, "keepsake")
	remove(t, "pod", ns, "keepsake")
	all := keys(t, b, "")
	slices.Sort(all)
	if want := []string{"reader/file", "secret/copy", "secret/file", "workload/file"}; !slices.Equal(all, want) {
		t.Errorf("S3 has %q, want %q", all, want)
	}
	for key, want := range map[string]string{"secret/copy": "with a secret\n", "workload/file": "as the service account\n"} {
		if got := content(t, b, key); got != want {
			t.Errorf("%s holds %q", key, got)
		}
	}
}
