//go:build !lane || shared

package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/aws/aws-sdk-go-v2/aws"
	awscredentials "github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	smithyhttp "github.com/aws/smithy-go/transport/http"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/tests/internal/s3server"
	"github.com/s3-csi/s3-csi-driver/tests/policy"
)

// tenantPolicy lets a tenant have what lies in a bucket below the prefix of their namespace, and the driver work there for them.
func tenantPolicy(bucket, namespace string) string {
	return fmt.Sprintf(`{"Version": "2012-10-17", "Statement": [
		{"Effect": "Allow", "Action": ["s3:ListBucket", "s3:ListBucketMultipartUploads", "s3:GetBucketTagging"], "Resource": "arn:aws:s3:::%[1]s"},
		{"Effect": "Allow", "Action": ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"], "Resource": ["arn:aws:s3:::%[1]s/%[2]s/*",
   "arn:aws:s3:::%[1]s/.s3-csi/*"]}]}`, bucket, namespace)
}

// tenantClass is a class whose volumes work with the secret s3-keys of the claim's namespace.
func tenantClass(t testing.TB, bucket, client string) string {
	t.Helper()
	return class(t, map[string]string{
		"backend": "tenants", "bucketName": bucket, "prefix": "${pvc.namespace}/", "client": client, "credentials": "secret", "scope": "required",
		"csi.storage.k8s.io/provisioner-secret-name": "s3-keys", "csi.storage.k8s.io/provisioner-secret-namespace": "${pvc.namespace}",
		"csi.storage.k8s.io/node-publish-secret-name": "s3-keys", "csi.storage.k8s.io/node-publish-secret-namespace": "${pvc.namespace}",
	})
}

// TestSecretsOfNamespaces: one class, two namespaces, each with the keys of a user of its own.
func TestSecretsOfNamespaces(t *testing.T) {
	t.Parallel()
	a, z := newNamespace(t), newNamespace(t)
	b := bucket(t)
	c := tenantClass(t, b, "mountpoint-s3")
	volumes := map[string]object{}
	secrets := map[string]string{}
	for _, ns := range []string{a, z} {
		k, err := world.s3.AddUser(t.Context(), "user-"+ns, tenantPolicy(b, ns))
		if err != nil {
			t.Fatal(err)
		}
		secrets[ns] = secret("s3-keys", k)
		claim(t, ns, "data", c, "ReadWriteMany")
	}
	said := event(t, a, "data", "s3-keys", a, "not found")
	t.Logf("without a secret: %s", said)
	for _, ns := range []string{a, z} {
		apply(t, ns, secrets[ns])
		volumes[ns] = bound(t, ns, "data")
		// A namespace's secret goes with it and with its claims, and without it the volume cannot be deleted.
		t.Cleanup(func() {
			remove(t, "pod", ns, "p")
			remove(t, "pvc", ns, "data")
			volumeGone(t, volumes[ns].Metadata.Name)
		})
		apply(t, ns, podSpec{name: "p", claims: map[string]string{"/v": "data"}, command: "echo of " + ns + " >/v/file && " + forever}.yaml())
	}
	for _, ns := range []string{a, z} {
		podReady(t, ns, "p")
		if got := execute(t, ns, "p", "sh", "-c", "ls /v && cat /v/file"); got != "file\nof "+ns+"\n" {
			t.Errorf("the pod of %s has %q", ns, got)
		}
		_, prefix := place(t, volumes[ns])
		if c := content(t, b, prefix+"file"); c != "of "+ns+"\n" || !strings.HasPrefix(prefix, ns+"/") {
			t.Errorf("%sfile holds %q", prefix, c)
		}
	}

	t.Run("the other's volume", func(t *testing.T) {
		_, prefix := place(t, volumes[a])
		staticClaim{name: "stolen", handle: "stolen", mode: "ReadWriteMany",
			attributes: map[string]string{"backend": "tenants", "bucketName": b, "prefix": prefix, "credentials": "secret"},
			more:       "nodePublishSecretRef: {name: s3-keys, namespace: " + z + "}"}.make(t, z)
		apply(t, z, podSpec{name: "thief", claims: map[string]string{"/v": "stolen"}}.yaml())
		t.Log(event(t, z, "thief", "PermissionDenied", b))
		if get(t, "pod", z, "thief").ready() {
			t.Error("the pod has the other's volume")
		}
		remove(t, "pod", z, "thief")
	})
	t.Run("a bucket that no role allows", func(t *testing.T) {
		claim(t, z, "greedy", tenantClass(t, bucket(t), "mountpoint-s3"), "ReadWriteMany")
		t.Log(event(t, z, "greedy", "PermissionDenied", "s3:ListBucket"))
		if o := get(t, "pvc", z, "greedy"); o.Status.Phase != "Pending" {
			t.Errorf("the claim is %s", o.Status.Phase)
		}
		remove(t, "pvc", z, "greedy")
	})
	t.Run("a secret that is not there", func(t *testing.T) {
		// kubelet would republish the volume for this pod, fail, and wait before it tries the volume again, for whichever pod.
		remove(t, "pod", z, "p")
		remove(t, "secret", z, "s3-keys")
		apply(t, z, podSpec{name: "late", claims: map[string]string{"/v": "data"}}.yaml())
		t.Log(event(t, z, "late", "s3-keys", "not found"))
		apply(t, z, secrets[z])
		podReady(t, z, "late")
		if got := execute(t, z, "late", "cat", "/v/file"); got != "of "+z+"\n" {
			t.Errorf("the pod reads %q", got)
		}
		remove(t, "pod", z, "late")
	})
	t.Run("a deletion without its secret", func(t *testing.T) {
		claim(t, z, "last", c, "ReadWriteMany")
		v := bound(t, z, "last")
		remove(t, "secret", z, "s3-keys")
		remove(t, "pvc", z, "last")
		t.Log(event(t, "default", v.Metadata.Name, "FailedPrecondition", "secret"))
		apply(t, z, secrets[z])
		volumeGone(t, v.Metadata.Name)
	})
}

// TestSecretRotation: a pod that runs continues with the keys that its secret holds now, without a restart.
func TestSecretRotation(t *testing.T) {
	t.Parallel()
	ns := newNamespace(t)
	b := bucket(t)
	users := []string{"first-" + ns, "second-" + ns}
	var secrets []string
	for _, name := range users {
		k, err := world.s3.AddUser(t.Context(), name, tenantPolicy(b, ns))
		if err != nil {
			t.Fatal(err)
		}
		secrets = append(secrets, secret("s3-keys", k))
	}
	apply(t, ns, secrets[0])
	claims := map[string]object{}
	t.Cleanup(func() {
		for name, v := range claims {
			remove(t, "pod", ns, name)
			remove(t, "pvc", ns, name)
			volumeGone(t, v.Metadata.Name)
		}
	})
	for _, client := range clients() {
		name := strings.ReplaceAll(client, "-", "")
		claim(t, ns, name, tenantClass(t, b, client), "ReadWriteMany")
		claims[name] = bound(t, ns, name)
		// Each round is a file of its own. The first that cannot be written is noted.
		apply(t, ns, podSpec{name: name, claims: map[string]string{"/v": name},
			command: "i=0; while :; do i=$((i+1)); echo $i >/v/$i || date >>/tmp/failed; sleep 0.2; done"}.yaml())
	}
	for name := range claims {
		podReady(t, ns, name)
	}
	// What is in the secret and is no good changes nothing, and is said.
	apply(t, ns, secret("s3-keys", credentials.Keys{AccessKeyID: "AKIANOBODYSKEY000000", SecretAccessKey: "nobodys"}))
	for name := range claims {
		t.Log(event(t, ns, name, "secret has changed", "do not work"))
	}
	before := map[string]string{}
	for name, v := range claims {
		before[name] = sessionOf(t, v).keys.AccessKeyID
	}
	apply(t, ns, secrets[1])
	for name, v := range claims {
		eventually(t, name+" to have a session of the new keys", func() error {
			if now := sessionOf(t, v); now.keys.AccessKeyID == before[name] {
				return errors.New("it has the old one")
			}
			return nil
		})
	}
	for name := range claims {
		if out, err := tryExecute(ns, name, "cat", "/tmp/failed"); err == nil {
			t.Errorf("%s could not write: %s", name, out)
		}
	}
	// The old user is allowed nothing any more, so what works has the new user's session.
	if err := world.s3.SetPolicy(t.Context(),
		users[0], `{"Version": "2012-10-17", "Statement": [{"Effect": "Deny", "Action": "*", "Resource": "*"}]}`); err != nil {
		t.Fatal(err)
	}
	for name, v := range claims {
		_, prefix := place(t, v)
		if _, err := sessionOf(t, v).put(b, prefix+"of-the-session"); err != nil {
			t.Errorf("the session of %s is of the old keys: %v", name, err)
		}
		seen := len(keys(t, b, prefix))
		eventually(t, name+" to store files again", func() error {
			if n := len(keys(t, b, prefix)) - seen; n < 10 {
				return fmt.Errorf("it has stored %d since", n)
			}
			return nil
		})
		if restarts := get(t, "pod", ns, name).Status.ContainerStatuses[0].RestartCount; restarts > 0 {
			t.Errorf("the container of %s was restarted %d times", name, restarts)
		}
	}
}

// TestWorkloadIdentity: a pod works as its own service account, and reaches its volume with that and nothing else.
func TestWorkloadIdentity(t *testing.T) {
	t.Parallel()
	ns := newNamespace(t)
	for _, name := range []string{"app", "other"} {
		apply(t, ns, account(name))
		workloadRole(t, ns, name, everything, "app") // the other's role trusts another service account
	}
	b := bucket(t)
	put(t, b, "neighbour/file", "not for the pod")
	claim(t, ns, "data", class(t, map[string]string{
		"bucketName": b, "prefix": "team/", "credentials": "workload", "roleARN": roleOfWorkload, "scope": "required",
	}), "ReadWriteMany")
	v := bound(t, ns, "data")
	_, prefix := place(t, v)
	podSpec{name: "app", claims: map[string]string{"/v": "data"}, pod: "serviceAccountName: app", command: "echo of app >/v/file && " + forever}.run(t, ns)
	apply(t, ns, podSpec{name: "other", claims: map[string]string{"/v": "data"}, pod: "serviceAccountName: other"}.yaml())
	if got := execute(t, ns, "app", "sh", "-c", "ls /v && cat /v/file"); got != "file\nof app\n" {
		t.Errorf("the pod has %q", got)
	}
	if c := content(t, b, prefix+"file"); c != "of app\n" {
		t.Errorf("S3 has %q", c)
	}
	t.Log(event(t, ns, "other", "PermissionDenied", ns+".other", "AssumeRoleWithWebIdentity"))
	if get(t, "pod", ns, "other").ready() {
		t.Error("the pod of another service account has the volume")
	}
	calls, err := world.s3.STSCalls(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if !slices.ContainsFunc(calls.Sessions, func(name string) bool { return strings.HasPrefix(name, ns+".app.") }) {
		t.Errorf("no session is named after the pod: %q", calls.Sessions)
	}
	if slices.ContainsFunc(calls.Sessions, func(name string) bool { return strings.HasPrefix(name, ns+".other.") }) {
		t.Errorf("the other pod has had a session: %q", calls.Sessions)
	}
	remove(t, "pod", ns, "other")

	// The role may do everything, and the bucket lets everybody in. What the mount has of that is its volume.
	t.Run("scope", func(t *testing.T) {
		p := policy.NewPlace(t, policy.Service{
			Name: policy.Versitygw, Endpoint: world.s3.Endpoint(), Region: world.s3.Region(), Root: world.s3.Keys(),
			STS:       credentials.STSService{Endpoint: world.s3.STS(), Region: world.s3.Region()},
			OtherRole: s3server.RoleARN(ns + ".other"), Principal: "*",
		}, true)
		for _, client := range clients() {
			t.Run(client, func(t *testing.T) {
				name := "scoped-" + strings.ReplaceAll(client, "-", "")
				pv := staticClaim{name: name, handle: name + ns, mode: "ReadWriteMany", attributes: map[string]string{
					"bucketName": p.Bucket, "prefix": policy.Prefix, "client": client, "credentials": "workload", "roleARN": roleOfWorkload, "scope": "required",
				}}.make(t, ns)
				podSpec{name: name, claims: map[string]string{"/v": name}, pod: "serviceAccountName: app"}.run(t, ns)
				if got := execute(t, ns, name, "sh", "-c", "ls -A /v"); got != "a\ndir\ndoomed\ndoomed2\n" {
					t.Errorf("the pod has %q", got)
				}
				if client == "rclone" { // it may do all that Mountpoint may, and the table takes away what it needs
					policy.Try(t, p, policy.Writing, sessionOf(t, get(t, "pv", "", pv)).keys)
				}
				remove(t, "pod", ns, name)
			})
		}
	})
}

// put writes an object with the session.
func (s session) put(bucket, key string) (*s3.PutObjectOutput, error) {
	c := s3.New(s3.Options{
		BaseEndpoint: aws.String(world.s3.Endpoint()), Region: world.s3.Region(), UsePathStyle: true, RetryMaxAttempts: 1,
		Credentials: awscredentials.NewStaticCredentialsProvider(s.keys.AccessKeyID, s.keys.SecretAccessKey, s.keys.SessionToken),
	})
	return c.PutObject(context.Background(), &s3.PutObjectInput{Bucket: &bucket, Key: &key, Body: strings.NewReader("by a session")})
}

// isForbidden reports whether S3 has refused.
func isForbidden(err error) bool {
	r, ok := errors.AsType[*smithyhttp.ResponseError](err)
	return ok && r.HTTPStatusCode() == http.StatusForbidden
}
