package driver

import (
	"encoding/base64"
	"fmt"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
)

// tokenOf is a token of a service account as far as its payload goes.
func tokenOf(subject string) string {
	return "eyJhbGciOiJub25lIn0." + base64.RawURLEncoding.EncodeToString(fmt.Appendf(nil, `{"sub":%q}`, subject)) + ".canary"
}

func tokensOf(audience, token string) string {
	return fmt.Sprintf(`{%q:{"token":%q,"expirationTimestamp":"2030-01-01T00:00:00Z"}}`, audience, token)
}

const audience = "sts.amazonaws.com"

// workloadRequest is a publication of a volume that uses its pod's service account.
func workloadRequest() *csi.NodePublishVolumeRequest {
	req := publishRequest()
	req.VolumeContext = map[string]string{
		"credentials": "workload", podNamespaceKey: "team-a", serviceAccountKey: "app", tokensKey: tokensOf(audience, tokenOf("system:serviceaccount:team-a:app")),
	}
	return req
}

func TestWorkload_TokenIsRead(t *testing.T) {
	inSecrets := tokenOf("system:serviceaccount:team-a:app") + "x"
	for _, tt := range []struct {
		what   string
		change func(*csi.NodePublishVolumeRequest)
		want   string
	}{
		{"in the volume context", func(*csi.NodePublishVolumeRequest) {}, tokenOf("system:serviceaccount:team-a:app")},
		{"in the secrets, which come first", func(r *csi.NodePublishVolumeRequest) {
			r.Secrets = map[string]string{tokensKey: tokensOf(audience, inSecrets)}
		}, inSecrets},
		{"whose payload the driver cannot read", func(r *csi.NodePublishVolumeRequest) { r.VolumeContext[tokensKey] = tokensOf(audience, "opaque") }, "opaque"},
	} {
		n, m := newTestNode(t)
		req := workloadRequest()
		tt.change(req)
		if _, err := n.NodePublishVolume(t.Context(), req); err != nil {
			t.Errorf("%s: %v", tt.what, err)
		}
		p := m.last
		if p.Source != credentials.SourceWorkload || p.Identity != "workload:team-a/app" || p.PodNamespace != "team-a" || p.ServiceAccount != "app" ||
			p.Tokens[audience].Value != tt.want {
			t.Errorf("%s: %+v", tt.what, p)
		}
		if shown := fmt.Sprintf("%v %+v %#v", p, p, p); strings.Contains(shown, tt.want) {
			t.Errorf("%s: a publication shows its token: %s", tt.what, shown)
		}
	}
}

func TestWorkload_InvalidIsRefused(t *testing.T) {
	refusePublish(t, newTestNode, workloadRequest, []refusedPublish{
		{"no pod", func(r *csi.NodePublishVolumeRequest) { delete(r.VolumeContext, podNamespaceKey) }, codes.FailedPrecondition, []string{"podInfoOnMount"}},
		{"no service account", func(r *csi.NodePublishVolumeRequest) { delete(r.VolumeContext, serviceAccountKey) }, codes.FailedPrecondition,
			[]string{"podInfoOnMount"}},
		{"no token", func(r *csi.NodePublishVolumeRequest) { delete(r.VolumeContext, tokensKey) }, codes.FailedPrecondition, []string{"tokenRequests"}},
		{"no JSON", func(r *csi.NodePublishVolumeRequest) { r.VolumeContext[tokensKey] = "canary" }, codes.InvalidArgument, []string{"serviceAccount.tokens"}},
		{"another pod's token", func(r *csi.NodePublishVolumeRequest) {
			r.VolumeContext[tokensKey] = tokensOf(audience, tokenOf("system:serviceaccount:kube-system:app"))
		}, codes.InvalidArgument, []string{"kube-system/app"}},
		{"a namespace that is none", func(r *csi.NodePublishVolumeRequest) { r.VolumeContext[podNamespaceKey] = "a/b" }, codes.InvalidArgument,
			[]string{"pod.namespace"}},
		{"keys beside it", func(r *csi.NodePublishVolumeRequest) { r.Secrets = tenantKeys() }, codes.InvalidArgument, []string{"credentials: workload"}},
	})
}

// A published volume stays when kubelet does not supply its token any more: after a final error kubelet would forget it.
func TestWorkload_MissingTokenIsNotFinalForPublishedVolume(t *testing.T) {
	n, _ := newTestNode(t)
	if _, err := n.NodePublishVolume(t.Context(), workloadRequest()); err != nil {
		t.Fatal(err)
	}
	req := workloadRequest()
	delete(req.VolumeContext, tokensKey)
	_, err := n.NodePublishVolume(t.Context(), req)
	refused(t, "no token", csi.Node_NodePublishVolume_FullMethodName, err, codes.Unavailable, "tokenRequests")
}

// A volume that does not use tokens has none in memory, and is not refused for ones that cannot be read.
func TestWorkload_UnusedTokensAreDropped(t *testing.T) {
	for _, source := range []string{"driver", "secret"} {
		n, m := newTestNode(t)
		req := workloadRequest()
		req.VolumeContext["credentials"], req.VolumeContext[tokensKey] = source, "not even JSON"
		if source == "secret" {
			req.Secrets = tenantKeys()
			req.Secrets["roleARN"] = "arn:aws:iam::111122223333:role/x"
		}
		if _, err := n.NodePublishVolume(t.Context(), req); err != nil || m.last.Source != source || len(m.last.Tokens) > 0 {
			t.Errorf("%s: %+v, %v", source, m.last, err)
		}
		if role := m.last.SecretRoleARN; (role != "") != (source == "secret") {
			t.Errorf("%s: role %q", source, role)
		}
		if m.last.PodNamespace != "team-a" || m.last.ServiceAccount != "app" {
			t.Errorf("%s: the pod is %s/%s", source, m.last.PodNamespace, m.last.ServiceAccount)
		}
	}
}

func FuzzSubjectOf(f *testing.F) {
	f.Add(tokenOf("system:serviceaccount:a:b"))
	f.Add(tokenOf("admin"))
	f.Add("a.b.c")
	f.Add("..")
	f.Fuzz(func(t *testing.T, token string) {
		if namespace, account, ok := subjectOf(token); ok && strings.Contains(namespace, ":") {
			t.Errorf("%q is of %s/%s", token, namespace, account)
		}
	})
}
