package mount

import (
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// A volume whose author expects another service than its backend's is not mounted. What is expected is no part of the mount.
func TestAVolumeIsHeldAgainstItsBackend(t *testing.T) {
	m := newTestManager(t, &uids{}, s3{})
	r := request()
	r.Attributes.Client = "rclone"
	before, err := m.check(&r)
	if err != nil {
		t.Fatal(err)
	}
	r.Ignored = []string{"something"}
	if after, err := m.check(&r); err != nil || after.Key() != before.Key() {
		t.Errorf("the key changed with what is ignored: %v", err)
	}
	r.Claims = []volume.Claim{{Kind: volume.ClaimEndpoint, Field: "secrets.endpoint", Value: "https://elsewhere.example"}}
	if _, err := m.check(&r); !fault.Is(err, fault.Precondition) {
		t.Errorf("mounted all the same: %v", err)
	}
}

// A role in which two pods could expand to the same name is refused before its templates are gone: namespace a-b with service
// account c is not namespace a with b-c.
func TestARoleIsOnePods(t *testing.T) {
	m := newTestManager(t, &uids{}, s3{})
	for role, unique := range map[string]bool{
		"arn:aws:iam::111122223333:role/${pod.namespace}-${pod.serviceAccountName}": false,
		"arn:aws:iam::111122223333:role/${pod.namespace}${pod.serviceAccountName}":  false,
		"arn:aws:iam::111122223333:role/${pod.serviceAccountName}.${pod.namespace}": false,
		"arn:aws:iam::111122223333:role/${pod.namespace}.${pod.serviceAccountName}": true,
		"arn:aws:iam::111122223333:role/${pod.namespace}":                           true,
	} {
		r := request()
		r.Attributes.Client, r.Attributes.RoleARN = "rclone", role
		r.PodNamespace, r.ServiceAccount = "a-b", "c"
		if _, err := m.check(&r); unique != (err == nil) || !unique && !fault.Is(err, fault.Precondition) {
			t.Errorf("%s: %v", role, err)
		}
	}
}
