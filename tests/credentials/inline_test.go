//go:build !lane || ordinary

package credentials

import (
	"context"
	"crypto/sha256"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
	"github.com/s3-csi/s3-csi-driver/tests/internal/sts"
	"github.com/s3-csi/s3-csi-driver/tests/policy"
)

// inline is an inline volume "data" of a pod with that UID, as kubelet has it: the handle, and the target below the pod's directory.
func (e *env) inline(pod string, attributes map[string]string) (*csi.Volume, string) {
	v := &csi.Volume{VolumeId: fmt.Sprintf("csi-%x", sha256.Sum256([]byte(pod+"data"))), VolumeContext: maps.Clone(attributes)}
	return v, e.Target(filepath.Join("pods", pod, "volumes", "kubernetes.io~csi", "data"))
}

// podUID is that of a pod of which there are several.
func podUID(n int) string { return fmt.Sprintf("0f2b8a52-0000-4000-8000-%012d", n) }

// tryInline publishes as kubelet does for a pod of the namespace, with podInfoOnMount and tokenRequests: the secret, where the pod
// names one, beside the tokens.
func (e *env) tryInline(pod string, attributes, secret map[string]string, changes ...func(*csi.NodePublishVolumeRequest)) (v *csi.Volume, target string,
	err error) {
	e.t.Helper()
	v, target = e.inline(pod, attributes)
	r := rigtest.PublishRequest(v, target)
	r.VolumeContext = maps.Clone(attributes)
	for key, value := range map[string]string{"pod.name": "web-0", "pod.namespace": namespace, "pod.uid": pod, "serviceAccount.name": account,
		"ephemeral": "true"} {
		r.VolumeContext["csi.storage.k8s.io/"+key] = value
	}
	r.Secrets = map[string]string{tokensKey: sts.CSITokens(map[string]sts.Token{audience: e.token(time.Hour, audience)})}
	maps.Copy(r.Secrets, secret)
	for _, c := range changes {
		c(r)
	}
	ctx, cancel := context.WithTimeout(e.t.Context(), time.Minute)
	defer cancel()
	_, err = e.NodePublishVolume(ctx, r)
	return v, target, err
}

// An inline volume is mounted with what its pod brings, a secret or its own identity, reaches what its author named and nothing
// else, and leaves the data where it is when the pod ends. The driver has keys that may do everything, and they are not used.
func TestInlineVolumesAreMountedWithWhatThePodBrings(t *testing.T) {
	e := start(t, "--inline-volumes")
	keys := map[string]string{"accessKeyID": e.user.AccessKeyID, "secretAccessKey": e.user.SecretAccessKey}
	readOnly := func(r *csi.NodePublishVolumeRequest) { r.Readonly = true }
	for i, tt := range []struct {
		client string
		secret map[string]string
		scope  policy.Scope
		change []func(*csi.NodePublishVolumeRequest)
	}{
		{rclone, nil, policy.Writing, nil},
		{rclone, keys, policy.Writing, nil},
		{mountpoint, nil, policy.Writing, nil},
		{mountpoint, keys, policy.Reading, []func(*csi.NodePublishVolumeRequest){readOnly}},
	} {
		t.Run(fmt.Sprintf("%s, secret %t, %s", tt.client, tt.secret != nil, tt.scope), func(t *testing.T) {
			e.t = t
			p := policy.NewPlace(t, e.service(), true)
			attributes := map[string]string{"bucketName": p.Bucket, "prefix": policy.Prefix, "client": tt.client, "scope": "required"}
			v, target, err := e.tryInline(podUID(2*i), attributes, tt.secret, tt.change...)
			if err != nil {
				t.Fatal(err)
			}
			other, second, err := e.tryInline(podUID(2*i+1), attributes, tt.secret, tt.change...)
			if err != nil {
				t.Fatal(err)
			}
			// One client serves both pods, which e.session holds against the processes.
			useMount(t, target, tt.scope)
			policy.Try(t, p, tt.scope, e.session(tt.client))
			if tt.secret == nil && !slices.ContainsFunc(e.named(), func(name string) bool { return strings.HasPrefix(name, namespace+"."+account+".") }) {
				t.Errorf("no session is the pod's: %q", e.named())
			}
			for path, v := range map[string]*csi.Volume{target: v, second: other} {
				if _, err := e.NodeGetVolumeStats(t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: v.GetVolumeId(), VolumePath: path}); err != nil {
					t.Errorf("statistics of %s: %v", v.GetVolumeId(), err)
				}
			}
			if _, _, err := e.tryInline(podUID(2*i), attributes, tt.secret, tt.change...); err != nil { // as kubelet does each minute
				t.Errorf("publishing again: %v", err)
			}
			e.unpublish(v, target)
			useMount(t, second, tt.scope)
			e.unpublish(other, second)
			e.NothingLeft(t)
			if got := e.Object(t, p.Bucket, policy.Prefix+"dir/b"); got != policy.Prefix+"dir/b" {
				t.Errorf("the object is %q", got)
			}
		})
	}
	e.t = t
}

// What the right to run a pod must not give: the driver's own credentials, another pod's identity, what the operator's rules do not
// allow, more of the node than others.
func TestInlineVolumesThatAreRefused(t *testing.T) {
	e := newEnv(t)
	e.configure("kinds: [webIdentity, federationToken]\n    allow: [{namespaces: [" + namespace + "], buckets: [" + bucket + "]}]")
	e.drive("--inline-volumes")
	for name, tt := range map[string]struct {
		attributes map[string]string
		change     func(*csi.NodePublishVolumeRequest)
		code       codes.Code
		words      []string
	}{
		"the driver's credentials": {map[string]string{"credentials": "driver"}, nil, codes.PermissionDenied, []string{"never use the driver's own credentials"}},
		"another bucket":           {map[string]string{"bucketName": "others"}, nil, codes.PermissionDenied, []string{"operator's rules", "bucket others"}},
		"another namespace": {nil, func(r *csi.NodePublishVolumeRequest) {
			r.VolumeContext["csi.storage.k8s.io/pod.namespace"] = "kube-system"
			r.Secrets = map[string]string{"accessKeyID": e.user.AccessKeyID, "secretAccessKey": e.user.SecretAccessKey}
		}, codes.PermissionDenied, []string{"operator's rules", "namespace kube-system"}},
		"a namespace that the author wrote": {nil, func(r *csi.NodePublishVolumeRequest) {
			r.VolumeContext["csi.storage.k8s.io/pod.uid"] = podUID(1000)
		}, codes.FailedPrecondition, []string{"podInfoOnMount"}},
		"another pod's token": {nil, func(r *csi.NodePublishVolumeRequest) {
			r.VolumeContext["csi.storage.k8s.io/serviceAccount.name"] = "admin"
		}, codes.InvalidArgument, []string{namespace + "/" + account, namespace + "/admin"}},
		"memory": {map[string]string{"memoryLimit": "64Gi"}, nil, codes.PermissionDenied, []string{"memoryLimit: 64Gi", "--memory-limit"}},
		"memory, by name": {map[string]string{"client": mountpoint, "mountOptions": "memory-target=65536"}, nil, codes.PermissionDenied,
			[]string{"mountOptions", "--memory-limit"}},
		"a log":     {map[string]string{"mountOptions": "debug"}, nil, codes.PermissionDenied, []string{`"debug"`}},
		"no bucket": {map[string]string{"bucketName": ""}, nil, codes.InvalidArgument, []string{"volume_context.bucketName"}},
	} {
		attributes := map[string]string{"bucketName": bucket, "prefix": "inline/", "client": rclone}
		maps.Copy(attributes, tt.attributes)
		var changes []func(*csi.NodePublishVolumeRequest)
		if tt.change != nil {
			changes = append(changes, tt.change)
		}
		_, _, err := e.tryInline(podUID(7), attributes, nil, changes...)
		if status.Code(err) != tt.code || !says(err, tt.words...) {
			t.Errorf("%s: %v, want %s with %q", name, err, tt.code, tt.words)
		}
	}
	e.NothingLeft(t)
}

// A driver without --inline-volumes publishes none, leaves those that are there to their pods, and takes them
// away with them.
func TestInlineVolumesThatAreTurnedOffStayUntilTheirPodsEnd(t *testing.T) {
	e := start(t, "--inline-volumes")
	attributes := map[string]string{"bucketName": bucket, "prefix": "inline/", "client": rclone}
	v, target, err := e.tryInline(podUID(1), attributes, nil)
	if err != nil {
		t.Fatal(err)
	}
	if code, err := e.Stop(t.Context()); err != nil || code != 0 {
		t.Fatalf("stopping the driver: %d, %v", code, err)
	}
	e.drive()
	if _, _, err := e.tryInline(podUID(1), attributes, nil); status.Code(err) != codes.Unavailable || !says(err, "left unchanged", "not enabled") {
		t.Errorf("publishing what is there: %v", err)
	}
	if _, _, err := e.tryInline(podUID(2), attributes, nil); status.Code(err) != codes.FailedPrecondition || !says(err, "not enabled", "--inline-volumes") {
		t.Errorf("publishing another: %v", err)
	}
	if err := os.WriteFile(filepath.Join(target, "file"), []byte("x"), 0o644); err != nil {
		t.Fatal(err)
	}
	e.unpublish(v, target)
	e.NothingLeft(t)
	if got := e.Object(t, bucket, "inline/file"); got != "x" {
		t.Errorf("the object is %q", got)
	}
}

// says reports whether an error's text contains all of that.
func says(err error, words ...string) bool {
	for _, w := range words {
		if err == nil || !strings.Contains(err.Error(), w) {
			return false
		}
	}
	return true
}
