package symptoms

import (
	"context"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/status"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/tests/internal/faultproxy"
	"github.com/s3-csi/s3-csi-driver/tests/internal/pages"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
	"github.com/s3-csi/s3-csi-driver/tests/internal/s3server"
	"github.com/s3-csi/s3-csi-driver/tests/internal/sts"
)

const (
	bucket   = rigtest.Bucket
	client   = rigtest.Client
	audience = "s3-csi-test"
	// namespace and account are the pods'.
	namespace, account = "apps", "web"
	everything         = `{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Action":"*","Resource":"*"}]}`
)

func TestMain(m *testing.M) { os.Exit(rigtest.Main(m)) }

// env is a node with one driver of mode all, behind a proxy from its S3 service, which has a token service.
type env struct {
	*rigtest.Node
	*rig.Driver

	t      *testing.T
	proxy  *faultproxy.Proxy
	issuer *sts.Issuer
	owner  credentials.Keys // of a user who may do everything
	role   string           // which pods of the namespace may assume
	config string
}

// newEnv starts everything but the driver.
func newEnv(t *testing.T) *env {
	t.Helper()
	e := &env{t: t, Node: rigtest.New(t)}
	var err error
	if e.issuer, err = sts.NewIssuer(); err != nil {
		t.Fatal(err)
	}
	e.proxy = rigtest.Proxy(t, e.Process.Endpoint())
	t.Cleanup(func() {
		if err := e.issuer.Close(); err != nil {
			t.Error(err)
		}
	})
	if e.owner, err = e.AddUser(t.Context(), "owner", everything); err != nil {
		t.Fatal(err)
	}
	e.Rig.S3.Keys = e.owner
	subject := "system:serviceaccount:" + namespace + ":" + account
	e.role, err = e.SetRole(t.Context(), s3server.Role{Name: namespace + "." + account, Policy: everything, Trust: s3server.Trust{
		Users: []string{"owner"}, Issuers: []s3server.TrustedIssuer{{URL: e.issuer.URL(), Audiences: []string{audience}, Subjects: []string{subject}}}}})
	if err != nil {
		t.Fatal(err)
	}
	if err := e.AddIssuer(t.Context(), e.issuer.URL(), audience); err != nil {
		t.Fatal(err)
	}
	e.config = filepath.Join(e.Dir, "config.yaml")
	backend := fmt.Sprintf("endpoint: %s, region: %s", e.proxy.Endpoint(), e.Process.Region())
	config := fmt.Sprintf(`backends:
  default: {%s, workloadRoleARN: %q, sts: {endpoint: %q, audience: %s, kinds: [assumeRole, webIdentity, federationToken]}}
  plain: {%s}
  secret: {%s, controllerCredentials: secret}
  nowhere: {endpoint: "http://minio.storage.svc:9000", region: us-east-1}
`, backend, e.role, e.STS(), audience, backend, backend)
	if err := os.WriteFile(e.config, []byte(config), 0o644); err != nil {
		t.Fatal(err)
	}
	return e
}

// start is newEnv with a driver.
func start(t *testing.T, flags ...string) *env {
	t.Helper()
	e := newEnv(t)
	e.drive(flags...)
	return e
}

// drive starts a driver; the previous one must be gone.
func (e *env) drive(flags ...string) {
	e.t.Helper()
	e.Driver = e.Drive(e.t, "all", append([]string{"--config=" + e.config, "--cluster-id=here"}, flags...)...)
}

func (e *env) sts(behaviour s3server.STS) {
	e.t.Helper()
	if err := e.SetSTS(e.t.Context(), behaviour); err != nil {
		e.t.Fatal(err)
	}
}

// change is one way in which a request differs from an ordinary one.
type change func(*csi.NodePublishVolumeRequest)

// secret supplies the keys of a node publish secret.
func secret(pairs ...string) change {
	return func(r *csi.NodePublishVolumeRequest) {
		r.VolumeContext["credentials"], r.Secrets = "secret", map[string]string{}
		for i := 0; i+1 < len(pairs); i += 2 {
			r.Secrets[pairs[i]] = pairs[i+1]
		}
	}
}

// keys is the secret of these keys.
func keys(k credentials.Keys) change {
	return secret("accessKeyID", k.AccessKeyID, "secretAccessKey", k.SecretAccessKey)
}

// workload supplies the token of the pod's service account.
func (e *env) workload(lifetime time.Duration) change {
	return func(r *csi.NodePublishVolumeRequest) {
		token, err := e.issuer.Token(sts.TokenRequest{Namespace: namespace, ServiceAccount: account, Pod: "web-0", Audiences: []string{audience}, Lifetime: lifetime})
		if err != nil {
			e.t.Fatal(err)
		}
		r.VolumeContext["credentials"] = "workload"
		r.Secrets = map[string]string{"csi.storage.k8s.io/serviceAccount.tokens": sts.CSITokens(map[string]sts.Token{audience: token})}
	}
}

// volume is a prefix of the bucket that no controller made. Its sessions are those of the backend "default".
func volume(name string, pairs ...string) *csi.Volume { return rigtest.Static(name, client, pairs...) }

// plain is a volume whose mounts use keys as they are.
func plain(name string, pairs ...string) *csi.Volume {
	return volume(name, append([]string{"backend", "plain", "scope", "off"}, pairs...)...)
}

func (e *env) tryPublish(limit time.Duration, v *csi.Volume, target string, changes ...change) error {
	r := rigtest.PublishRequest(v, target)
	r.VolumeContext = maps.Clone(v.GetVolumeContext())
	for key, value := range map[string]string{"pod.name": "web-0", "pod.namespace": namespace, "pod.uid": "0f2b8a52-0000-4000-8000-000000000000",
		"serviceAccount.name": account} {
		r.VolumeContext["csi.storage.k8s.io/"+key] = value
	}
	for _, c := range changes {
		c(r)
	}
	ctx, cancel := context.WithTimeout(e.t.Context(), limit)
	defer cancel()
	_, err := e.NodePublishVolume(ctx, r)
	return err
}

func (e *env) publish(v *csi.Volume, name string, changes ...change) (target string) {
	e.t.Helper()
	target = e.Target(name)
	if err := e.tryPublish(time.Minute, v, target, changes...); err != nil {
		e.t.Fatal(err)
	}
	return target
}

func (e *env) tryUnpublish(limit time.Duration, v *csi.Volume, target string) error {
	ctx, cancel := context.WithTimeout(e.t.Context(), limit)
	defer cancel()
	_, err := e.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: v.GetVolumeId(), TargetPath: target})
	return err
}

// status is what the command prints.
func (e *env) status() string {
	e.t.Helper()
	out, err := exec.CommandContext(rigtest.Context(e.t, 30*time.Second), e.Program, "status", "--state-dir="+e.State).CombinedOutput()
	if err != nil {
		e.t.Fatalf("%v: %s", err, out)
	}
	return string(out)
}

// awaitStatus waits until a line of the status has all the words, and returns it. A problem of a mount is below it, a note above all.
func (e *env) awaitStatus(words ...string) (found string) {
	e.t.Helper()
	rigtest.Await(e.t, time.Minute, fmt.Sprintf("a line of the status with %q", words), func() bool {
		found = e.statusLine(words...)
		return found != ""
	})
	return found
}

// statusLine is the line of the status that has all words, or "".
func (e *env) statusLine(words ...string) string {
	e.t.Helper()
	for line := range strings.Lines(e.status()) {
		if !slices.ContainsFunc(words, func(w string) bool { return !strings.Contains(line, w) }) {
			return strings.TrimSpace(line)
		}
	}
	return ""
}

// page matches the page that a text names.
var page = regexp.MustCompile(`see (docs/[a-z0-9/-]+\.md(?:#[a-z0-9-]+)?)`)

// leads follows what an operator sees, an error or a line of the status, to the entry that explains it, in the section where. An error
// must name its section; one that names a page without sections must explain itself.
func leads(t *testing.T, symptom, text, where string) {
	t.Helper()
	checkCode(t, symptom, text)
	if m := page.FindStringSubmatch(text); strings.HasPrefix(text, "rpc error") && (m == nil || m[1] != where) {
		t.Errorf("%s: the error does not lead to %s: %s", symptom, where, text)
	}
	file, heading, _ := strings.Cut(strings.TrimPrefix(where, "docs/"), ".md")
	if heading == "" {
		t.Logf("%s: %s", symptom, text)
		return
	}
	seen := text
	if reason, _, ok := strings.Cut(text, ": "); ok && where == shown && reason != "note" {
		seen = reason
	}
	for _, e := range pages.Entries(t, file) {
		if e.Anchor() == where && e.Explains(seen) {
			t.Logf("%s: %s\n=> %s, %d words: %s", symptom, text, where, e.Words, e.Text)
			return
		}
	}
	t.Errorf("%s: no entry of %s explains: %s", symptom, where, text)
}

// message is an error as an event shows it, without kubelet's own words.
func message(t *testing.T, symptom string, err error) string {
	t.Helper()
	if err == nil {
		t.Errorf("%s: no error", symptom)
	}
	s := status.Convert(err)
	return fmt.Sprintf("rpc error: code = %s desc = %s", s.Code(), s.Message())
}

// tmpfs mounts a small file system at a directory.
func (e *env) tmpfs(dir, size string) {
	e.t.Helper()
	out, err := exec.CommandContext(e.t.Context(), "mount", "-t", "tmpfs", "-o", "mode=0755,size="+size, "tmpfs", dir).CombinedOutput()
	if err != nil {
		e.t.Fatalf("%v: %s", err, out)
	}
}

// fill leaves no space on a file system.
func fill(t *testing.T, dir string) {
	t.Helper()
	f, err := os.Create(filepath.Join(dir, "rest"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for err == nil {
		_, err = f.Write(make([]byte, 4096))
	}
}
