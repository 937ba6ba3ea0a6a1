package lifecycle_test

import (
	"bytes"
	"encoding/base64"
	"fmt"
	"maps"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
	"github.com/s3-csi/s3-csi-driver/tests/internal/s3server"
)

// canaries are secrets that are looked for wherever a secret must not be.
type canaries struct {
	t     *testing.T
	words map[string]string // secret → what it is
	seen  int               // places looked at
}

// add makes a secret a canary and returns it.
func (c *canaries) add(what, secret string) string {
	c.words[secret] = what
	return secret
}

// in looks for every canary in a text, in the forms in which things are printed.
func (c *canaries) in(place string, text []byte) {
	c.t.Helper()
	c.seen++
	for secret, what := range c.words {
		for _, form := range []string{secret, url.QueryEscape(secret), base64.StdEncoding.EncodeToString([]byte(secret)), strconv.Quote(secret)[1 : len(secret)+1]} {
			if at := bytes.Index(text, []byte(form)); at >= 0 {
				c.t.Errorf("%s is in %s: …%s…", what, place, text[max(0, at-80):min(len(text), at+20)])
				break
			}
		}
	}
}

func (c *canaries) inError(err error) {
	c.t.Helper()
	if err == nil {
		c.t.Error("a call that must fail succeeded")
		return
	}
	c.in("an error", []byte(fmt.Sprintf("%v %v", err, status.Convert(err).Proto())))
}

// What the driver prints and stores has no secret. tests/credentials looks into processes and files of a node.
func TestNoSecretIsEverShown(t *testing.T) {
	t.Parallel()
	c := &canaries{t: t, words: map[string]string{}}
	server := rigtest.StartServer(t, s3server.Options{RootAccessKey: "AKIAROOTOFTHETEST0001",
		RootSecretKey: c.add("the driver's own key", "canary/driver+secret==0001")})
	n := rigtest.On(t, server)
	config := filepath.Join(n.Dir, "config.yaml")
	if err := os.WriteFile(config, []byte(fmt.Sprintf("backends: {secrets: {endpoint: %q, controllerCredentials: secret}}\n", n.Endpoint())), 0o600); err != nil {
		t.Fatal(err)
	}
	d := n.Drive(t, "all", "--v=10", "--config="+config)
	ctx := rigtest.Context(t, time.Minute)

	keys, err := n.AddUser(ctx, "user", `{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Action":"s3:*","Resource":"*"}]}`)
	if err != nil {
		t.Fatal(err)
	}
	secret := map[string]string{"accessKeyID": keys.AccessKeyID, "secretAccessKey": c.add("the secret's key", keys.SecretAccessKey)}
	token := func(s string) string {
		return `{"sts.amazonaws.com":{"token":"` + c.add("a service account's token", s) + `","expirationTimestamp":"2030-01-01T00:00:00Z"}}`
	}

	own := rigtest.Create(t, d, "own", "mountOptions", "debug")
	given, err := d.CreateVolume(ctx, withSecrets(rigtest.CreateRequest("given", "backend", "secrets"), secret))
	if err != nil {
		t.Fatal(err)
	}

	publish := func(v *csi.Volume, target string, secrets map[string]string) *csi.NodePublishVolumeRequest {
		req := rigtest.PublishRequest(v, n.Target(target))
		req.Secrets = secrets
		req.VolumeContext = map[string]string{}
		maps.Copy(req.VolumeContext, v.GetVolumeContext())
		return req
	}
	first := publish(own, "own", nil)
	first.VolumeContext["csi.storage.k8s.io/serviceAccount.tokens"] = token("eyJhbGciOiJub25lIn0.canary-context-0002.sig")
	second := publish(given.GetVolume(), "given", map[string]string{
		"accessKeyID": secret["accessKeyID"], "secretAccessKey": secret["secretAccessKey"],
		"csi.storage.k8s.io/serviceAccount.tokens": token("eyJhbGciOiJub25lIn0.canary-secrets-0003.sig"),
	})
	for _, req := range []*csi.NodePublishVolumeRequest{first, second, first, second} { // the second time: republished
		if _, err := d.NodePublishVolume(ctx, req); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(req.GetTargetPath(), "file"), []byte("content"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	c.failingCalls(d, publish, own, given.GetVolume(), secret)

	for _, req := range []*csi.NodePublishVolumeRequest{first, second} {
		if _, err := d.NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{VolumeId: req.GetVolumeId(), VolumePath: req.GetTargetPath()}); err != nil {
			t.Error(err)
		}
		if _, err := d.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: req.GetVolumeId(), TargetPath: req.GetTargetPath()}); err != nil {
			t.Error(err)
		}
	}
	for _, key := range n.Keys(t, rigtest.Bucket, "") {
		c.in("object "+key, []byte(n.Object(t, rigtest.Bucket, key)))
	}
	if _, err := d.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: given.GetVolume().GetVolumeId(), Secrets: secret}); err != nil {
		t.Error(err)
	}
	rigtest.Delete(t, d, own.GetVolumeId())
	for _, page := range []string{"/metrics", "/readyz", "/healthz"} {
		_, body := get(t, d.HTTP, page)
		c.in(page, []byte(body))
	}
	n.NothingLeft(t)
	if code, err := d.Stop(rigtest.Context(t, patience)); err != nil || code != 0 {
		t.Errorf("exit code %d, %v", code, err)
	}
	log := n.Logs()
	c.in("the driver's log", []byte(log))
	if !strings.Contains(log, "***stripped***") || !strings.Contains(log, "serviceAccount.tokens") {
		t.Error("the log does not show requests: looking at it proves nothing")
	}
	t.Logf("looked at %d places for %d secrets", c.seen, len(c.words))
}

func withSecrets(req *csi.CreateVolumeRequest, secrets map[string]string) *csi.CreateVolumeRequest {
	req.Secrets = secrets
	return req
}

// failingCalls makes the driver complain about everything that may hold a secret.
func (c *canaries) failingCalls(d *rig.Driver, publish func(*csi.Volume, string, map[string]string) *csi.NodePublishVolumeRequest,
	own, given *csi.Volume, secret map[string]string,
) {
	c.t.Helper()
	ctx := rigtest.Context(c.t, time.Minute)
	bad := []map[string]string{
		{"accessKeyID": secret["accessKeyID"], "secretAccessKey": c.add("a wrong key", "canary-wrong-key-0004")},
		{"accessKeyID": "AKIANOBODYKNOWSTHIS01", "secretAccessKey": c.add("a stranger's key", "canary-stranger-0005")},
		{"accessKeyID": secret["accessKeyID"], "secretAccessKey": secret["secretAccessKey"], "sessionToken": c.add("a session token", "canary-session-0006")},
		{"secretAccessKey": c.add("half a secret", "canary-half-0007")},
		{"accessKeyID": secret["accessKeyID"], "secretAccessKey": c.add("a key with white space", "canary with-space-0008")},
		{"secret_access_key": c.add("a key under another name", "canary-other-name-0009")},
	}
	for i, secrets := range bad {
		_, err := d.CreateVolume(ctx, withSecrets(rigtest.CreateRequest(fmt.Sprintf("bad-%d", i), "backend", "secrets"), secrets))
		c.inError(err)
		_, err = d.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: given.GetVolumeId(), Secrets: secrets})
		c.inError(err)
		_, err = d.ValidateVolumeCapabilities(ctx, &csi.ValidateVolumeCapabilitiesRequest{VolumeId: given.GetVolumeId(),
			VolumeCapabilities: []*csi.VolumeCapability{rig.Writer()}, Secrets: secrets})
		c.inError(err)
		_, err = d.NodePublishVolume(ctx, publish(given, fmt.Sprintf("bad-%d", i), secrets))
		c.inError(err)
	}
	// Secrets where they do not belong.
	_, err := d.CreateVolume(ctx, rigtest.CreateRequest("misplaced", "secretAccessKey", c.add("a key among the parameters", "canary-parameter-0010")))
	c.inError(err)
	misplaced := publish(own, "misplaced", nil)
	misplaced.VolumeContext["secretAccessKey"] = c.add("a key in the volume context", "canary-context-0011")
	_, err = d.NodePublishVolume(ctx, misplaced)
	c.inError(err)
	notJSON := publish(own, "not-json", nil)
	notJSON.VolumeContext["csi.storage.k8s.io/serviceAccount.tokens"] = c.add("a token that is not JSON", "canary-not-json-0012")
	if _, err := d.NodePublishVolume(ctx, notJSON); err != nil {
		c.inError(err)
	} else if _, err := d.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: own.GetVolumeId(), TargetPath: notJSON.GetTargetPath()}); err != nil {
		c.t.Error(err)
	}
	// No option that a client knows has a secret value, so of those alone the value may be named.
	for i, flag := range []string{"sse-customer-key=%s", "--secret-access-key=%s", "-o secret=%s", "-osecret=%s", "--token %s", "s3-secret %s extra", "-o=%s"} {
		req := publish(own, fmt.Sprintf("flag-%d", i), nil)
		req.VolumeCapability = rig.Writer(fmt.Sprintf(flag, c.add("the value of mount flag "+flag, fmt.Sprintf("canary-flag-%04d", 20+i))))
		_, err := d.NodePublishVolume(ctx, req)
		c.inError(err)
	}
}

func TestTheDriversOwnRefusedCredentialsAreNotShown(t *testing.T) {
	t.Parallel()
	c := &canaries{t: t, words: map[string]string{}}
	s := rigtest.StartServer(t, s3server.Options{})
	endpoint, _ := socket(t)
	http := port(t)
	p := launch(t, append(environment(s), "AWS_SECRET_ACCESS_KEY="+c.add("the key", "canary/own+key==0001"),
		"AWS_SESSION_TOKEN="+c.add("the session token", "canary/own+token==0002")),
		"controller", "--endpoint="+endpoint, "--http-endpoint="+http, "--v=10", "--logging-format=json")
	d := dial(t, endpoint)
	p.ready(t, d)
	_, err := d.CreateVolume(rigtest.Context(t, patience), rigtest.CreateRequest("vol"))
	c.inError(err)
	hasCode(t, err, codes.Unauthenticated, rigtest.Bucket)
	_, err = d.DeleteVolume(rigtest.Context(t, patience), &csi.DeleteVolumeRequest{VolumeId: "default:" + rigtest.Bucket + "/vol/"})
	c.inError(err)
	_, body := get(t, http, "/metrics")
	c.in("/metrics", []byte(body))
	p.signal(t, endSignal)
	p.exit(t)
	c.in("the log", []byte(p.stderr.String()))
}
