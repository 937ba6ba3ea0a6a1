package lifecycle_test

// What the Controller service answers where it works with roles and sessions.

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
	"github.com/s3-csi/s3-csi-driver/tests/internal/s3server"
)

func TestControllersInARoleAnswerAsTheTokenServiceDoes(t *testing.T) {
	t.Parallel()
	s := rigtest.StartServer(t, s3server.Options{})
	const everything = `{"Version":"2012-10-17","Statement":[{"Effect":"Allow","Action":["s3:*"],"Resource":["*"]}]}`
	user, err := s.AddUser(t.Context(), "controller", "")
	if err != nil {
		t.Fatal(err)
	}
	role, err := s.SetRole(t.Context(), s3server.Role{Name: "csi", Policy: everything, Trust: s3server.Trust{Users: []string{"controller"}}})
	if err != nil {
		t.Fatal(err)
	}
	config := filepath.Join(t.TempDir(), "config.yaml")
	text := fmt.Sprintf("backends:\n  default:\n    endpoint: %s\n    controllerRoleARN: %s\n    sts: {endpoint: %q}\n    allow: [{namespaces: [team-*]}]\n",
		s.Endpoint(), role, s.STS())
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	behave := func(b s3server.STS) {
		t.Helper()
		if err := s.SetSTS(t.Context(), b); err != nil {
			t.Fatal(err)
		}
	}
	start := func() (connection, *process) {
		endpoint, _ := socket(t)
		p := launch(t, environment(s, "AWS_ACCESS_KEY_ID="+user.AccessKeyID, "AWS_SECRET_ACCESS_KEY="+user.SecretAccessKey), "controller", "--endpoint="+endpoint,
			"--config="+config, "--v=10")
		c := dial(t, endpoint)
		p.ready(t, c)
		return c, p
	}
	create := func(c connection, name string, parameters ...string) (*csi.CreateVolumeResponse, error) {
		return c.CreateVolume(rigtest.Context(t, patience), rigtest.CreateRequest(name, append(parameters, "csi.storage.k8s.io/pvc/namespace", "team-a")...))
	}

	c, p := start()
	for fault, code := range map[string]codes.Code{
		s3server.FaultRefuse: codes.PermissionDenied, s3server.FaultThrottle: codes.Aborted, s3server.FaultDown: codes.Unavailable,
	} {
		behave(s3server.STS{Fault: fault})
		_, err := create(c, "vol")
		hasCode(t, err, code, role)
	}
	behave(s3server.STS{})
	resp, err := create(c, "vol", "scope", "required")
	if err != nil {
		t.Fatal(err)
	}
	if got := resp.GetVolume().GetVolumeContext()["scope"]; got != "required" {
		t.Errorf("the node gets scope %q", got)
	}
	_, err = c.CreateVolume(rigtest.Context(t, patience), rigtest.CreateRequest("stranger", "csi.storage.k8s.io/pvc/namespace", "elsewhere"))
	hasCode(t, err, codes.PermissionDenied, "elsewhere")
	behave(s3server.STS{Fault: s3server.FaultRefuse})
	_, err = c.DeleteVolume(rigtest.Context(t, patience), &csi.DeleteVolumeRequest{VolumeId: resp.GetVolume().GetVolumeId()})
	hasCode(t, err, codes.PermissionDenied, "a session for the deletion of volume")
	behave(s3server.STS{})
	rigtest.Delete(t, c, resp.GetVolume().GetVolumeId())

	behave(s3server.STS{IgnorePolicies: true})
	other, q := start()
	_, err = create(other, "vol-2", "scope", "required")
	hasCode(t, err, codes.FailedPrecondition, "does not enforce session policies")
	if out := p.stderr.String() + q.stderr.String(); strings.Contains(out, user.SecretAccessKey) || !strings.Contains(out, "deleting volume") {
		t.Error("the log shows the secret, or nothing")
	}
}
