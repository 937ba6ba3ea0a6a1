package mount

import (
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

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
