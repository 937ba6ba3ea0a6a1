package credentials

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/tests/internal/faultproxy"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
	"github.com/s3-csi/s3-csi-driver/tests/internal/s3server"
	"github.com/s3-csi/s3-csi-driver/tests/internal/sts"
	"github.com/s3-csi/s3-csi-driver/tests/policy"
)

const (
	rclone     = "rclone"
	mountpoint = "mountpoint-s3"
	bucket     = rigtest.Bucket
	audience   = "s3-csi-test"
	namespace  = "apps"
	account    = "web"
	tokensKey  = "csi.storage.k8s.io/serviceAccount.tokens"
	everything = `{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Action":"*","Resource":"*"}]}`
)

// programs are the process names of the clients.
var programs = rig.Programs()

// The suite holds for every launcher; see rigtest.Main.
func TestMain(m *testing.M) { os.Exit(rigtest.Main(m)) }

// env is a node with one driver, a server with a security token service, and a cluster's issuer of tokens.
type env struct {
	*rigtest.Node
	*rig.Driver

	t      *testing.T
	proxy  *faultproxy.Proxy // between the node and the server
	issuer *sts.Issuer
	user   credentials.Keys // of alice, who may do everything, and take on role
	role   string           // of which pods of the namespace have sessions, too
	config string           // the config file
}

// newEnv starts everything but the driver, whose own keys are alice's.
func newEnv(t *testing.T) *env {
	t.Helper()
	e := &env{t: t, Node: rigtest.New(t)}
	rigtest.NeedClient(t, mountpoint)
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
	if e.user, err = e.AddUser(t.Context(), "alice", everything); err != nil {
		t.Fatal(err)
	}
	e.Rig.S3.Keys = e.user
	e.role, err = e.SetRole(t.Context(), s3server.Role{Name: namespace + "." + account, Policy: everything, Trust: s3server.Trust{
		Users: []string{"alice"}, Issuers: []s3server.TrustedIssuer{{URL: e.issuer.URL(), Audiences: []string{audience},
			Subjects: []string{"system:serviceaccount:" + namespace + ":" + account}}}}})
	if err != nil {
		t.Fatal(err)
	}
	if err := e.AddIssuer(t.Context(), e.issuer.URL(), audience); err != nil {
		t.Fatal(err)
	}
	e.config = filepath.Join(e.Dir, "config.yaml")
	e.configure("kinds: [assumeRole, webIdentity, federationToken]")
	return e
}

// configure writes the config file, with something more about the token service.
func (e *env) configure(aboutSTS string) {
	e.t.Helper()
	file := fmt.Sprintf(`backends:
  default:
    endpoint: %s
    region: %s
    workloadRoleARN: %s
    sts:
      endpoint: %s
      audience: %s
      %s
`, e.proxy.Endpoint(), e.Region(), s3server.RoleARN("${pod.namespace}.${pod.serviceAccountName}"), e.STS(), audience, aboutSTS)
	if err := os.WriteFile(e.config, []byte(file), 0o644); err != nil {
		e.t.Fatal(err)
	}
}

// start is newEnv with a driver in mode node. Nodes wait more than they work, so that some live at a time; a host with systemd is
// one node's.
func start(t *testing.T, flags ...string) *env {
	t.Helper()
	if os.Getenv(rig.EnvLauncher) != rig.LauncherSystemd {
		t.Parallel()
	}
	e := newEnv(t)
	e.drive(flags...)
	return e
}

// drive starts a driver; the previous one must be gone.
func (e *env) drive(flags ...string) {
	e.t.Helper()
	e.Driver = e.Drive(e.t, "node", append([]string{"--config=" + e.config}, flags...)...)
}

func (e *env) Endpoint() string { return e.Process.Endpoint() }
func (e *env) Region() string   { return e.Process.Region() }
func (e *env) PID() int         { return e.Driver.PID() }

// sts changes how the token service behaves.
func (e *env) sts(behaviour s3server.STS) {
	e.t.Helper()
	if err := e.SetSTS(e.t.Context(), behaviour); err != nil {
		e.t.Fatal(err)
	}
}

// named are the names of all sessions that the token service has made.
func (e *env) named() []string {
	e.t.Helper()
	calls, err := e.STSCalls(e.t.Context())
	if err != nil {
		e.t.Fatal(err)
	}
	return calls.Sessions
}

// service is the server, for the table of calls.
func (e *env) service() policy.Service {
	return policy.Service{Name: policy.Versitygw, Endpoint: e.Process.Endpoint(), Region: e.Region(), Root: e.Process.Keys(),
		STS: credentials.STSService{Endpoint: e.STS(), Region: e.Region()}, OtherRole: e.role, Principal: "*"}
}

// volume is a prefix of a bucket that no controller made.
func volume(name, client string, pairs ...string) *csi.Volume {
	return rigtest.Static(name, client, append([]string{"scope", "required"}, pairs...)...)
}

// source is where a publication's credentials come from.
type source struct {
	name string
	// bring adds them to a publication. It is called for each publication, because kubelet supplies new tokens.
	bring func(r *csi.NodePublishVolumeRequest)
}

// sources are all that are scoped on a service that is not AWS.
func (e *env) sources() []source {
	return []source{e.secretOf(e.user), e.secretWithRole(), e.workload(true), e.workload(false), e.own()}
}

// secretOf is a secret with a user's keys, which make a federation token.
func (e *env) secretOf(k credentials.Keys) source {
	return source{"secret", func(r *csi.NodePublishVolumeRequest) {
		r.Secrets = map[string]string{"accessKeyID": k.AccessKeyID, "secretAccessKey": k.SecretAccessKey}
	}}
}

func (e *env) secretWithRole() source {
	return source{"secret with a role", func(r *csi.NodePublishVolumeRequest) {
		r.Secrets = map[string]string{"accessKeyID": e.user.AccessKeyID, "secretAccessKey": e.user.SecretAccessKey, "roleARN": e.role}
	}}
}

// workload is the pod's own token, in the secrets or, as from older kubelets, in the volume context.
func (e *env) workload(inSecrets bool) source {
	name := "workload, token in the volume context"
	if inSecrets {
		name = "workload, token in the secrets"
	}
	return source{name, func(r *csi.NodePublishVolumeRequest) {
		tokens := sts.CSITokens(map[string]sts.Token{audience: e.token(time.Hour, audience), "unused": e.token(time.Hour, "unused")})
		r.VolumeContext["credentials"] = "workload"
		if inSecrets {
			r.Secrets = map[string]string{tokensKey: tokens}
		} else {
			r.VolumeContext[tokensKey] = tokens
		}
	}}
}

func (e *env) token(lifetime time.Duration, audiences ...string) sts.Token {
	e.t.Helper()
	token, err := e.issuer.Token(sts.TokenRequest{Namespace: namespace, ServiceAccount: account, Pod: "web-0", Audiences: audiences, Lifetime: lifetime})
	if err != nil {
		e.t.Fatal(err)
	}
	return token
}

// own is what the driver itself has: alice's keys.
func (e *env) own() source {
	return source{"driver", func(r *csi.NodePublishVolumeRequest) { r.VolumeContext["roleARN"] = e.role }}
}

// request is a publication as kubelet makes it for a pod of the namespace.
func (e *env) request(v *csi.Volume, target string, from source) *csi.NodePublishVolumeRequest {
	r := rigtest.PublishRequest(v, target)
	r.VolumeContext = maps.Clone(v.GetVolumeContext())
	for key, value := range map[string]string{"pod.name": "web-0", "pod.namespace": namespace, "pod.uid": "0f2b8a52-0000-4000-8000-000000000000",
		"serviceAccount.name": account, "ephemeral": "false"} {
		r.VolumeContext["csi.storage.k8s.io/"+key] = value
	}
	from.bring(r)
	return r
}

func (e *env) tryPublish(v *csi.Volume, target string, from source) error {
	ctx, cancel := context.WithTimeout(e.t.Context(), time.Minute)
	defer cancel()
	_, err := e.NodePublishVolume(ctx, e.request(v, target, from))
	return err
}

// publish publishes a volume at the target of that name and returns its path.
func (e *env) publish(v *csi.Volume, name string, from source) string {
	e.t.Helper()
	target := e.Target(name)
	if err := e.tryPublish(v, target, from); err != nil {
		e.t.Fatalf("publishing %s at %s (%s): %v", v.GetVolumeId(), target, from.name, err)
	}
	return target
}

func (e *env) unpublish(v *csi.Volume, target string) {
	e.t.Helper()
	rigtest.Unpublish(e.t, e.NodeClient, v, target)
}

// process is the only process of that name, "s3-csi-helper" or a client's.
func (e *env) process(name string) int { return e.only(name).PID }

func (e *env) only(name string) rig.Process {
	e.t.Helper()
	found := e.Running(name)
	if len(found) != 1 {
		e.t.Fatalf("%d processes %s: %q", len(found), name, e.Processes())
	}
	return found[0]
}

// session returns the credentials that the helper serves to the only client of that kind.
func (e *env) session(client string) credentials.Keys {
	e.t.Helper()
	process := e.only(programs[client])
	environ, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", process.PID))
	if err != nil {
		e.t.Fatal(err)
	}
	var uri, token string
	for kv := range strings.SplitSeq(string(environ), "\x00") {
		switch name, value, _ := strings.Cut(kv, "="); name {
		case "AWS_CONTAINER_CREDENTIALS_FULL_URI":
			uri = value
		case "AWS_CONTAINER_AUTHORIZATION_TOKEN":
			token = value
		}
	}
	req, err := http.NewRequestWithContext(e.t.Context(), http.MethodGet, uri, nil)
	if err != nil {
		e.t.Fatal(err)
	}
	req.Header.Set("Authorization", token)
	asClient := http.Client{Transport: &http.Transport{DialContext: rigtest.DialAs(int(process.UID), new(net.Dialer).DialContext), DisableKeepAlives: true}}
	resp, err := asClient.Do(req)
	if err != nil {
		e.t.Fatal(err)
	}
	defer resp.Body.Close()
	var got struct {
		AccessKeyID     string `json:"AccessKeyId"`
		SecretAccessKey string
		Token           string
		Expiration      time.Time
	}
	if err := json.NewDecoder(resp.Body).Decode(&got); err != nil || resp.StatusCode != http.StatusOK {
		e.t.Fatalf("the client's credentials: %s, %v", resp.Status, err)
	}
	return credentials.Keys{AccessKeyID: got.AccessKeyID, SecretAccessKey: got.SecretAccessKey, SessionToken: got.Token, Expires: got.Expiration}
}

// await waits until something is so.
func (e *env) await(limit time.Duration, what string, is func() bool) {
	e.t.Helper()
	for end := time.Now().Add(limit); !is(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			e.t.Fatalf("timed out after %s waiting for %s; %s", limit, what, e.states())
		}
	}
}

// states are what the metrics say of sessions.
func (e *env) states() string {
	var said []string
	select {
	case <-e.Exited():
		return "there is no driver"
	default:
	}
	for line := range strings.Lines(e.metrics()) {
		if strings.HasPrefix(line, "s3csi_mount_session") {
			said = append(said, strings.TrimSpace(line))
		}
	}
	return strings.Join(said, ", ")
}

// sessions reports whether exactly n mounts of that client have a session, all in that state.
func (e *env) sessions(client, state string, n int) bool {
	e.t.Helper()
	total := 0
	for line := range strings.Lines(e.metrics()) {
		var has int
		if rest, ok := strings.CutPrefix(line, `s3csi_mount_sessions{client="`+client+`",state="`); ok {
			is, value, _ := strings.Cut(rest, `"} `)
			if _, err := fmt.Sscan(value, &has); err != nil || is != state && has > 0 {
				return false
			}
			total += has
		}
	}
	return total == n
}

// metrics are all of the driver's.
func (e *env) metrics() string {
	e.t.Helper()
	return rigtest.Get(e.t, e.Driver, "/metrics")
}

// tokens are a publication's, of that lifetime.
func tokens(e *env, lifetime time.Duration) string {
	return sts.CSITokens(map[string]sts.Token{audience: e.token(lifetime, audience)})
}
