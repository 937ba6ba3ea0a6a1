package symptoms

import (
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/s3-csi/s3-csi-driver/tests/internal/faultproxy"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

const creates = "docs/reference/errors.md#creating-and-deleting-volumes"

func (e *env) tryCreate(secrets map[string]string, name string, parameters ...string) (*csi.Volume, error) {
	r := rigtest.CreateRequest(name, parameters...)
	r.Secrets = secrets
	resp, err := e.CreateVolume(rigtest.Context(e.t, 10*time.Second), r)
	return resp.GetVolume(), err
}

func (e *env) tryDelete(id string, secrets map[string]string) error {
	_, err := e.DeleteVolume(rigtest.Context(e.t, 10*time.Second), &csi.DeleteVolumeRequest{VolumeId: id, Secrets: secrets})
	return err
}

// A claim stays Pending: the event has the error of the creation.
func TestAClaimStaysPending(t *testing.T) {
	t.Parallel()
	e := start(t)
	blind, err := e.AddUser(t.Context(), "blind", "")
	if err != nil {
		t.Fatal(err)
	}
	e.Put(t, bucket, "taken/file", "x")
	pair := func(id, key string) map[string]string {
		return map[string]string{"accessKeyID": id, "secretAccessKey": key}
	}
	trusted := pair(blind.AccessKeyID, blind.SecretAccessKey)
	trusted["roleARN"] = e.role
	for _, tt := range []struct {
		symptom    string
		secrets    map[string]string
		parameters []string
		s3         faultproxy.Faults
		page       string
	}{
		{"no bucket", nil, []string{"backend", "plain", "bucketName", "no-such-bucket"}, faultproxy.Faults{}, answers},
		{"no backend", nil, []string{"backend", "elsewhere"}, faultproxy.Faults{}, creates},
		{"no secret", nil, []string{"backend", "secret"}, faultproxy.Faults{}, creates},
		{"wrong keys", pair("AKIAUNKNOWN000000000", wrong), []string{"backend", "secret"}, faultproxy.Faults{}, answers},
		{"no permission", pair(blind.AccessKeyID, blind.SecretAccessKey), []string{"backend", "secret"}, faultproxy.Faults{}, answers},
		{"no role", trusted, []string{"backend", "secret"}, faultproxy.Faults{}, creates},
		{"no session", nil, []string{"backend", "plain", "scope", "required"}, faultproxy.Faults{}, creates},
		{"taken", nil, []string{"backend", "plain"}, faultproxy.Faults{}, creates},
		{"S3 refuses connections", nil, []string{"backend", "plain"}, faultproxy.Faults{Refuse: true}, answers},
		{"S3 does not answer", nil, []string{"backend", "plain"}, faultproxy.Faults{Blackhole: true}, answers},
	} {
		e.proxy.Set(tt.s3)
		_, err := e.tryCreate(tt.secrets, tt.symptom, tt.parameters...)
		leads(t, "create, "+tt.symptom, message(t, tt.symptom, err), tt.page)
	}
}

// A volume stays Released: the event has the error of the deletion.
func TestAVolumeStaysReleased(t *testing.T) {
	t.Parallel()
	e := start(t)
	made := func(name string, secrets map[string]string, parameters ...string) string {
		t.Helper()
		v, err := e.tryCreate(secrets, name, parameters...)
		if err != nil {
			t.Fatal(err)
		}
		return v.GetVolumeId()
	}
	full := made("full", nil, "backend", "plain", "onDelete", "requireEmpty")
	e.Put(t, bucket, "full/file", "x")
	e.Put(t, bucket, "foreign/file", "x")
	withKeys := made("keys", map[string]string{"accessKeyID": e.owner.AccessKeyID, "secretAccessKey": e.owner.SecretAccessKey}, "backend", "secret")
	used := rigtest.Create(t, e.ControllerClient, "used", "backend", "plain")
	rigtest.Publish(t, e.NodeClient, used, e.Target("used"))
	away := made("away", nil, "backend", "plain")
	for _, tt := range []struct {
		symptom, id, page string
		s3                faultproxy.Faults
	}{
		{"not empty", full, creates, faultproxy.Faults{}},
		{"no record", "plain:" + bucket + "/foreign/", creates, faultproxy.Faults{}},
		{"no secret", withKeys, creates, faultproxy.Faults{}},
		{"in use", used.GetVolumeId(), creates, faultproxy.Faults{}},
		{"S3 refuses connections", away, answers, faultproxy.Faults{Refuse: true}},
	} {
		e.proxy.Set(tt.s3)
		leads(t, "delete, "+tt.symptom, message(t, tt.symptom, e.tryDelete(tt.id, nil)), tt.page)
	}
	e.proxy.Set(faultproxy.Faults{})
	rigtest.Unpublish(t, e.NodeClient, used, e.Target("used"))
}
