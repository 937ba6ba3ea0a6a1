//go:build !lane || shared

package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"
)

// TestClaimBecomesPrefix is the driver's main job: a claim becomes a prefix of a bucket, which a pod has as files, and which goes
// with the claim.
func TestClaimBecomesPrefix(t *testing.T) {
	t.Parallel()
	ns := newNamespace(t)
	b := bucket(t)
	for _, client := range []string{"mountpoint-s3", "rclone"} {
		t.Run(client, func(t *testing.T) {
			name := strings.ReplaceAll(client, "-", "")
			claim(t, ns, name, class(t, map[string]string{"bucketName": b, "prefix": "${pvc.namespace}/", "client": client}), "ReadWriteMany")
			v := bound(t, ns, name)
			at, prefix := place(t, v)
			if at != b || !strings.HasPrefix(prefix, ns+"/") {
				t.Errorf("the volume is %s", v.Spec.CSI.VolumeHandle)
			}
			podSpec{name: name, claims: map[string]string{"/v": name}, command: "echo written > /v/file && " + forever}.run(t, ns)
			eventually(t, "the file in S3", func() error {
				if all := keys(t, b, prefix); !slices.Equal(all, []string{prefix + "file"}) {
					return fmt.Errorf("there is %q", all)
				}
				return nil
			})
			if c := content(t, b, prefix+"file"); c != "written\n" {
				t.Errorf("the file holds %q", c)
			}
			put(t, b, prefix+"other", "from elsewhere")
			eventually(t, "the pod to see what others wrote", func() error { // clients keep what they know of a directory for a while
				got, err := tryExecute(ns, name, "cat", "/v/other")
				if err == nil && got != "from elsewhere" {
					err = fmt.Errorf("it reads %q", got)
				}
				return err
			})
			remove(t, "pod", ns, name)
			remove(t, "pvc", ns, name)
			erased(t, v)
		})
	}
}

// TestRetainedVolume: what is retained stays, can be used again, and can be deleted after all.
func TestRetainedVolume(t *testing.T) {
	t.Parallel()
	ns := newNamespace(t)
	b := bucket(t)
	claim(t, ns, "kept", class(t, map[string]string{"bucketName": b, "client": "rclone"}, `"reclaimPolicy": "Retain"`), "ReadWriteMany")
	v := bound(t, ns, "kept")
	_, prefix := place(t, v)
	podSpec{name: "first", claims: map[string]string{"/v": "kept"}, command: "echo kept >/v/file && " + forever}.run(t, ns)
	remove(t, "pod", ns, "first") // which waits for what it wrote
	remove(t, "pvc", ns, "kept")
	phase(t, v, "Released")
	if c := content(t, b, prefix+"file"); c != "kept\n" {
		t.Errorf("the file holds %q", c)
	}
	if state := recordState(t, v); state != "active" {
		t.Errorf("the volume's record says %q", state)
	}

	staticClaim{name: "rescued", handle: v.Spec.CSI.VolumeHandle, mode: "ReadWriteMany", attributes: map[string]string{"client": "rclone"}}.make(t, ns)
	podSpec{name: "second", claims: map[string]string{"/v": "rescued"}}.run(t, ns)
	if got := execute(t, ns, "second", "cat", "/v/file"); got != "kept\n" {
		t.Errorf("the pod of the rescued volume reads %q", got)
	}
	remove(t, "pod", ns, "second")
	remove(t, "pvc", ns, "rescued")

	kubectl(t, "patch", "pv", v.Metadata.Name, "-p", `{"spec":{"persistentVolumeReclaimPolicy":"Delete"}}`)
	erased(t, v)
}

// TestClaimDeletedInUse: a claim that is deleted while a pod has it waits for the pod, and the volume works meanwhile.
func TestClaimDeletedInUse(t *testing.T) {
	t.Parallel()
	ns := newNamespace(t)
	b := bucket(t)
	claim(t, ns, "used", class(t, map[string]string{"bucketName": b}), "ReadWriteMany")
	v := bound(t, ns, "used")
	_, prefix := place(t, v)
	podSpec{name: "user", claims: map[string]string{"/v": "used"}}.run(t, ns)
	kubectl(t, "delete", "pvc", "-n", ns, "used", "--wait=false")
	execute(t, ns, "user", "sh", "-c", "echo meanwhile >/v/file && cat /v/file")
	if o := get(t, "pvc", ns, "used"); o.Metadata.DeletionTimestamp == "" || !slices.Contains(o.Metadata.Finalizers, "kubernetes.io/pvc-protection") {
		t.Errorf("the claim is %s, deleted at %q, and protected by %q", o.Status.Phase, o.Metadata.DeletionTimestamp, o.Metadata.Finalizers)
	}
	if all := keys(t, b, prefix); !slices.Equal(all, []string{prefix + "file"}) || recordState(t, v) != "active" {
		t.Errorf("the volume has %q, and its record says %q", all, recordState(t, v))
	}
	remove(t, "pod", ns, "user")
	eventually(t, "the claim to be gone", func() error {
		if _, there := find(t, "pvc", ns, "used"); there {
			return errors.New("it is there")
		}
		return nil
	})
	erased(t, v)
}

// TestClaimsThatFail: the claim's events say what is wrong with its class.
func TestClaimsThatFail(t *testing.T) {
	t.Parallel()
	ns := newNamespace(t)
	b := bucket(t)
	claims := []struct {
		name       string
		parameters map[string]string
		words      []string
	}{
		{"no-bucket", map[string]string{"bucketName": b + "-gone"}, []string{"FailedPrecondition", "parameters.bucketName", b + "-gone"}},
		{"bad-name", map[string]string{"bucketName": "Not_A_Bucket"}, []string{"InvalidArgument", "parameters.bucketName"}},
		{"misspelt", map[string]string{"bucketname": b}, []string{"InvalidArgument", "parameters.bucketname", "the nearest is bucketName"}},
		{"bad-value", map[string]string{"bucketName": b, "onDelete": "remove"}, []string{"InvalidArgument", "parameters.onDelete", "requireEmpty"}},
		{"no-backend", map[string]string{"bucketName": b, "backend": "elsewhere"},
			[]string{"FailedPrecondition", "no backend \"elsewhere\"", "default, minio, slow, tenants"}},
		{"no-client", map[string]string{"bucketName": b, "client": "s3fs"}, []string{"InvalidArgument", "parameters.client", "mountpoint-s3, rclone"}},
		{"not-an-option", map[string]string{"bucketName": b, "client": "rclone", "mountOptions": "debug-all"},
			[]string{"InvalidArgument", "debug-all", "did you mean \"debug\""}},
	}
	for _, c := range claims {
		claim(t, ns, c.name, class(t, c.parameters), "ReadWriteMany")
	}
	for _, c := range claims {
		t.Logf("%s: %s", c.name, event(t, ns, c.name, c.words...))
		if o := get(t, "pvc", ns, c.name); o.Status.Phase != "Pending" {
			t.Errorf("claim %s is %s", c.name, o.Status.Phase)
		}
	}
}

// TestBucketVolumes: volumes that are buckets come and go with their claims, as onDelete says.
func TestBucketVolumes(t *testing.T) {
	t.Parallel()
	ns := newNamespace(t)
	c := storage(t)
	there := func(b string) bool {
		_, err := c.HeadBucket(t.Context(), &s3.HeadBucketInput{Bucket: &b})
		if _, gone := errors.AsType[*types.NotFound](err); err != nil && !gone {
			t.Fatal(err)
		}
		return err == nil
	}
	volumes := map[string]object{}
	for name, onDelete := range map[string]string{"emptied": "delete", "guarded": "requireEmpty"} {
		claim(t, ns, name, class(t, map[string]string{"bucketNamePrefix": "e2e-whole-", "onDelete": onDelete}), "ReadWriteMany")
	}
	for _, name := range []string{"emptied", "guarded"} {
		volumes[name] = bound(t, ns, name)
		b, prefix := place(t, volumes[name])
		if !strings.HasPrefix(b, "e2e-whole-pvc-") || prefix != "" || !there(b) {
			t.Errorf("%s is %s; bucket there: %t", name, volumes[name].Spec.CSI.VolumeHandle, there(b))
		}
	}
	podSpec{name: "p", claims: map[string]string{"/emptied": "emptied", "/guarded": "guarded"},
		command: "mkdir /emptied/dir && echo x >/emptied/dir/file && echo x >/guarded/file && " + forever}.run(t, ns)
	remove(t, "pod", ns, "p")
	remove(t, "pvc", ns, "emptied")
	remove(t, "pvc", ns, "guarded")
	volumeGone(t, volumes["emptied"].Metadata.Name)
	if b, _ := place(t, volumes["emptied"]); there(b) {
		t.Errorf("bucket %s is there", b)
	}
	guarded := volumes["guarded"]
	b, _ := place(t, guarded)
	event(t, "default", guarded.Metadata.Name, "requireEmpty", b) // events of what is in no namespace are there
	if all := keys(t, b, ""); !slices.Equal(all, []string{"file"}) {
		t.Errorf("the volume that must be empty has %q", all)
	}
	deleteObjects(t, b, "")
	volumeGone(t, guarded.Metadata.Name)
	if there(b) {
		t.Errorf("bucket %s is there", b)
	}
}

// TestStaticVolume: a PersistentVolume that a human wrote is a place that the driver uses and never deletes, whatever it says of
// itself.
func TestStaticVolume(t *testing.T) {
	t.Parallel()
	ns := newNamespace(t)
	b := bucket(t)
	put(t, b, "some/where/file", "from elsewhere")
	put(t, b, "some/whereabouts", "outside")
	v := staticClaim{name: "static", handle: "anything-" + ns, mode: "ReadWriteMany",
		attributes: map[string]string{"bucketName": b, "prefix": "some/where", "client": "rclone"}}.make(t, ns)
	podSpec{name: "p", claims: map[string]string{"/v": "static"}, command: "echo written >/v/new && " + forever}.run(t, ns)
	if got := execute(t, ns, "p", "sh", "-c", "cd /v && ls && cat file"); got != "file\nnew\nfrom elsewhere" {
		t.Errorf("the pod has %q", got)
	}
	remove(t, "pod", ns, "p")
	own := staticClaim{name: "own", handle: "default:" + b + "/some/where/", mode: "ReadWriteMany"}.make(t, ns)
	for claim, v := range map[string]string{"static": v, "own": own} { // so external-provisioner asks the driver to delete it
		kubectl(t, "annotate", "pv", v, "pv.kubernetes.io/provisioned-by="+csiName)
		kubectl(t, "patch", "pv", v, "-p", `{"spec":{"persistentVolumeReclaimPolicy":"Delete"}}`)
		remove(t, "pvc", ns, claim)
	}
	// What the driver has no record of is absent where its handle says nothing, and data of another owner where it does.
	volumeGone(t, v)
	t.Log(event(t, "default", own, "FailedPrecondition", b+"/some/where/"))
	want := []string{"some/where/file", "some/where/new", "some/whereabouts"}
	if all := keys(t, b, ""); !slices.Equal(all, want) {
		t.Errorf("the bucket has %q, want %q", all, want)
	}
	kubectl(t, "patch", "pv", own, "-p", `{"spec":{"persistentVolumeReclaimPolicy":"Retain"}}`)
	remove(t, "pv", "", own)
}

// staticClaim is a claim with a PersistentVolume of its own that no controller makes.
type staticClaim struct {
	name, handle, mode string
	attributes         map[string]string // its volumeAttributes
	more               string            // further fields of spec.csi, as YAML in flow style
}

// make makes them, and gives the PersistentVolume's name.
func (s staticClaim) make(t testing.TB, namespace string) string {
	t.Helper()
	attributes, err := json.Marshal(s.attributes)
	if err != nil {
		t.Fatal(err)
	}
	if s.attributes == nil {
		attributes = []byte("{}")
	}
	name := namespace + "-" + s.name
	apply(t, "", fmt.Sprintf(`
apiVersion: v1
kind: PersistentVolume
metadata: {name: %s}
spec:
  storageClassName: ""
  capacity: {storage: 1Gi}
  accessModes: [%s]
  persistentVolumeReclaimPolicy: Retain
  claimRef: {namespace: %s, name: %s}
  csi: {%s}`, name, s.mode, namespace, s.name,
		join("driver: "+csiName, fmt.Sprintf("volumeHandle: %q", s.handle), "volumeAttributes: "+string(attributes), s.more)))
	t.Cleanup(func() { kubectl(t, "delete", "pv", name, "--ignore-not-found", "--wait=false") }) // it goes when its claim has, with the namespace
	claim(t, namespace, s.name, "", s.mode)
	bound(t, namespace, s.name)
	return name
}

// phase waits until a PersistentVolume is in that phase.
func phase(t testing.TB, v object, want string) {
	t.Helper()
	eventually(t, "the volume to be "+want, func() error {
		if o := get(t, "pv", "", v.Metadata.Name); o.Status.Phase != want {
			return fmt.Errorf("it is %s", o.Status.Phase)
		}
		return nil
	})
}

// deleteObjects deletes what is below a prefix, behind all mounts.
func deleteObjects(t testing.TB, bucket, prefix string) {
	t.Helper()
	for _, key := range keys(t, bucket, prefix) {
		if _, err := storage(t).DeleteObject(t.Context(), &s3.DeleteObjectInput{Bucket: &bucket, Key: aws.String(key)}); err != nil {
			t.Fatal(err)
		}
	}
}
