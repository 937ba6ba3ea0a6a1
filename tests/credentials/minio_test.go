//go:build !lane || ordinary

package credentials

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	awscredentials "github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/tests/internal/minio"
	"github.com/s3-csi/s3-csi-driver/tests/internal/pages"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
	"github.com/s3-csi/s3-csi-driver/tests/internal/sts"
	"github.com/s3-csi/s3-csi-driver/tests/policy"
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
	file := fmt.Sprintf("backends:\n  default:\n    endpoint: %s\n    region: %s\n    scope: required\n    sts: {roleOptional: true, audience: %s}\n    "+
		"workloadRoleARN: %s\n",
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

// The policies of docs/how-to/minio.md are enough on MinIO, and keep a namespace in its prefix.
func TestThePoliciesOfTheMinIOPage(t *testing.T) {
	e := startMinIO(t)
	const shared = "team-data" // the page's
	if _, err := e.Server.S3.CreateBucket(t.Context(), &s3.CreateBucketInput{Bucket: aws.String(shared)}); err != nil {
		t.Fatal(err)
	}
	files := pages.Files(pages.Read(t, "how-to/minio"))
	user := func(name string) credentials.Keys {
		t.Helper()
		keys, err := e.server.AddUser(t.Context(), name, files[name+".json"])
		if err != nil {
			t.Fatalf("%s: %v", files[name+".json"], err)
		}
		return keys
	}
	team := e.secretOf(user("team-a"))
	ofTeam := volume("minio-team", rclone, "bucketName", shared, "prefix", "team-a/pvc-1/", "credentials", "secret")
	target := e.publish(ofTeam, "t", team)
	if err := os.WriteFile(filepath.Join(target, "file"), []byte("x"), 0o644); err != nil {
		t.Error(err)
	}
	e.unpublish(ofTeam, target)
	if got := e.Object(t, shared, "team-a/pvc-1/file"); got != "x" {
		t.Errorf("the object is %q", got)
	}
	other := volume("minio-other", rclone, "bucketName", shared, "prefix", "team-b/pvc-1/", "credentials", "secret")
	if err := e.tryPublish(other, e.Target("u"), team); status.Code(err) != codes.PermissionDenied {
		t.Errorf("another namespace's prefix: %v", err)
	}

	config, err := os.ReadFile(e.config)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(e.config, []byte(strings.ReplaceAll(string(config), "scope: required", "scope: required\n    controllerCredentials: secret")),
		0o644); err != nil {
		t.Fatal(err)
	}
	e.Kill()
	e.Driver = e.Drive(t, "all", "--config="+e.config)
	keys := user("provisioner")
	secrets := map[string]string{"accessKeyID": keys.AccessKeyID, "secretAccessKey": keys.SecretAccessKey}
	create := rigtest.CreateRequest("pvc-2", "bucketName", shared, "prefix", "team-a/", "credentials", "secret")
	create.Secrets = secrets
	made, err := e.CreateVolume(rigtest.Context(t, time.Minute), create)
	if err != nil {
		t.Fatal(err)
	}
	at := e.publish(made.GetVolume(), "v", team)
	if err := os.WriteFile(filepath.Join(at, "file"), []byte("x"), 0o644); err != nil {
		t.Error(err)
	}
	e.unpublish(made.GetVolume(), at)
	if _, err := e.DeleteVolume(rigtest.Context(t, time.Minute), &csi.DeleteVolumeRequest{VolumeId: made.GetVolume().GetVolumeId(),
		Secrets: secrets}); err != nil {
		t.Error(err)
	}
	if left := e.Keys(t, shared, "team-a/pvc-2"); len(left) > 0 {
		t.Errorf("the deletion left %q", left)
	}
	e.NothingLeft(t)
}
