package credentials

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	awscredentials "github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/tests/minio"
	"github.com/s3-csi/s3-csi-driver/tests/policy"
	"github.com/s3-csi/s3-csi-driver/tests/rig"
	"github.com/s3-csi/s3-csi-driver/tests/rig/rigtest"
	"github.com/s3-csi/s3-csi-driver/tests/sts"
)

// EnvLong switches on what takes longer than MinIO's shortest session, a quarter of an hour.
const EnvLong = "S3CSI_LONG_TESTS"

// minioEnv is a node whose driver uses MinIO, its token service and an issuer that it knows. The driver's own keys are alice's.
type minioEnv struct {
	env

	server *minio.Server
	place  policy.Place
}

func startMinIO(t *testing.T) *minioEnv {
	t.Helper()
	if os.Getenv(rig.EnvLauncher) == rig.LauncherSystemd {
		t.Skip("another service makes no difference to the launcher: it is tried with processes")
	}
	if err := rig.Usable(); err != nil {
		t.Skip(err)
	}
	rigtest.NeedClient(t, mountpoint)
	t.Parallel()
	e := &minioEnv{env: env{t: t}}
	var err error
	if e.issuer, err = sts.NewIssuer(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = e.issuer.Close() })
	e.server, err = minio.Start(t.Context(), t.TempDir(), minio.OpenID(e.issuer.URL(), audience, "readwrite")...)
	if errors.Is(err, minio.ErrMissing) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := e.server.Stop(); err != nil {
			t.Error(err)
		}
	})
	if e.user, err = e.server.AddUser(t.Context(), "alice", everything); err != nil {
		t.Fatal(err)
	}
	r, err := rig.New(rig.S3{Endpoint: e.server.Endpoint(), Region: e.server.Region(), Keys: e.user})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the drivers' log:\n%s", r.Logs())
		}
		if err := r.Close(); err != nil {
			t.Errorf("cleaning up: %v", err)
		}
	})
	e.Node = &rigtest.Node{Rig: r, Server: &rigtest.Server{S3: s3.New(s3.Options{
		BaseEndpoint: aws.String(e.server.Endpoint()), Region: e.server.Region(), UsePathStyle: true,
		Credentials: awscredentials.NewStaticCredentialsProvider(e.server.Keys().AccessKeyID, e.server.Keys().SecretAccessKey, ""),
	})}}
	e.config = filepath.Join(r.Dir, "config.yaml")
	file := fmt.Sprintf("backends:\n  default:\n    endpoint: %s\n    region: %s\n    scope: required\n    sts: {roleOptional: true, audience: %s}\n    workloadRoleARN: %s\n",
		e.server.Endpoint(), e.server.Region(), audience, minio.RoleARN(audience))
	if err := os.WriteFile(e.config, []byte(file), 0o644); err != nil {
		t.Fatal(err)
	}
	e.drive()
	at := credentials.STSService{Endpoint: e.server.Endpoint(), Region: e.server.Region()}
	e.place = policy.NewPlace(t, policy.Service{Name: policy.MinIO, Endpoint: e.server.Endpoint(), Region: e.server.Region(), Root: e.server.Keys(), STS: at,
		OtherRole: minio.RoleARN(audience), Principal: "*"}, true)
	return e
}

// volumeOf says that a volume is a place's.
func (e *minioEnv) volumeOf(p policy.Place, client string) []string {
	return []string{"bucketName", p.Bucket, "prefix", policy.Prefix, "sessionDuration", "15m", "client", client}
}

// The same flow works without AWS: MinIO's own token service, with users' keys and with the pod's tokens.
func TestMinIOsSessionsReachTheirVolumeAlone(t *testing.T) {
	e := startMinIO(t)
	own := source{"driver", func(r *csi.NodePublishVolumeRequest) {}}
	for _, m := range []struct {
		client string
		from   source
	}{{rclone, e.workload(true)}, {mountpoint, e.secretOf(e.user)}, {rclone, own}} {
		t.Run(m.client+", "+m.from.name, func(t *testing.T) {
			e.t = t
			p := policy.NewPlace(t, e.place.Service, true)
			v := volume("minio-"+p.Bucket, m.client, e.volumeOf(p, m.client)...)
			target := e.publish(v, "t", m.from)
			useMount(t, target, policy.Writing)
			policy.Try(t, p, policy.Writing, e.session(m.client))
			e.unpublish(v, target)
			e.NothingLeft(t)
		})
	}
	e.t = t
}

// A new secret is a new session there and then, before the old one ends.
func TestMinIOsSessionIsReplacedByThatOfANewSecret(t *testing.T) {
	e := startMinIO(t)
	v := volume("minio-secret", mountpoint, e.volumeOf(e.place, mountpoint)...)
	target := e.publish(v, "t", e.secretOf(e.user))
	first := e.session(mountpoint)
	bob, err := e.server.AddUser(t.Context(), "bob", everything)
	if err != nil {
		t.Fatal(err)
	}
	e.publish(v, "t", e.secretOf(bob))
	second := e.session(mountpoint)
	if second.AccessKeyID == first.AccessKeyID {
		t.Error("the session is the same")
	}
	useMount(t, target, policy.Writing)
	// Sessions of a user who is gone are gone at once, which the client would notice up to ten minutes later.
	if err := e.server.RemoveUser(t.Context(), "alice"); err != nil {
		t.Fatal(err)
	}
	policy.Try(t, e.place, policy.Writing, second)
	e.unpublish(v, target)
	e.NothingLeft(t)
}

// Sessions of MinIO's shortest are renewed like others, which takes some minutes.
func TestMinIOsSessionsAreRenewed(t *testing.T) {
	if os.Getenv(EnvLong) == "" {
		t.Skip("takes ten minutes: set " + EnvLong)
	}
	e := startMinIO(t)
	v := volume("minio-long", rclone, e.volumeOf(e.place, rclone)...)
	target := e.publish(v, "t", e.workload(true))
	first := e.session(rclone)
	e.await(11*time.Minute, "a renewal", func() bool { return e.session(rclone).AccessKeyID != first.AccessKeyID })
	useMount(t, target, policy.Writing)
	policy.Try(t, e.place, policy.Writing, e.session(rclone))
	e.unpublish(v, target)
	e.NothingLeft(t)
}
