// Package rigtest gives a test a node of its own: a rig, an S3 server in a process, a bucket, and the certainty that
// nothing is left of them.
package rigtest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	awscredentials "github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/s3-csi/s3-csi-driver/tests/internal/faultproxy"
	"github.com/s3-csi/s3-csi-driver/tests/internal/isolate"
	"github.com/s3-csi/s3-csi-driver/tests/internal/pressure"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
	"github.com/s3-csi/s3-csi-driver/tests/internal/s3server"
	"github.com/s3-csi/s3-csi-driver/tests/internal/systemd"
)

// Bucket is the bucket that every server has.
const Bucket = "volumes"

// Client is the FUSE client of tests for which any will do: every machine with Go can build it.
const Client = "rclone"

// NeedClient skips a test if this machine has no program of a client.
func NeedClient(t testing.TB, client string) {
	t.Helper()
	if _, err := rig.Mountpoint(Bin(t)); err != nil && client == "mountpoint-s3" {
		t.Skip(err)
	}
}

// Server is an S3 server and a connection to it.
type Server struct {
	*s3server.Process
	S3 *s3.Client
}

// Bin is where the programs are. The test is skipped without them.
func Bin(t testing.TB) string {
	t.Helper()
	bin := os.Getenv(rig.EnvBin)
	if bin == "" {
		t.Skipf("needs the built programs: run make test, or set %s to their directory", rig.EnvBin)
	}
	return bin
}

// StartServer starts a server with the bucket.
func StartServer(t testing.TB, opts s3server.Options) *Server {
	t.Helper()
	Bin(t)
	opts.Dir = t.TempDir()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	p, err := s3server.StartProcess(ctx, opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Stop(); err != nil {
			t.Errorf("stopping the S3 server: %v", err)
		}
	})
	s := &Server{Process: p, S3: s3.New(s3.Options{
		BaseEndpoint: aws.String(p.Endpoint()), Region: p.Region(), UsePathStyle: true,
		Credentials: awscredentials.NewStaticCredentialsProvider(p.Keys().AccessKeyID, p.Keys().SecretAccessKey, ""),
	})}
	if _, err := s.S3.CreateBucket(ctx, &s3.CreateBucketInput{Bucket: aws.String(Bucket)}); err != nil {
		t.Fatal(err)
	}
	return s
}

// Keys are the keys of a bucket's objects below a prefix.
func (s *Server) Keys(t testing.TB, bucket, prefix string) []string {
	t.Helper()
	var keys []string
	pages := s3.NewListObjectsV2Paginator(s.S3, &s3.ListObjectsV2Input{Bucket: &bucket, Prefix: &prefix})
	for pages.HasMorePages() {
		page, err := pages.NextPage(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, o := range page.Contents {
			keys = append(keys, aws.ToString(o.Key))
		}
	}
	return keys
}

// Object is an object's content.
func (s *Server) Object(t testing.TB, bucket, key string) string {
	t.Helper()
	out, err := s.S3.GetObject(t.Context(), &s3.GetObjectInput{Bucket: &bucket, Key: &key})
	if err != nil {
		t.Fatalf("object %s: %v", key, err)
	}
	defer out.Body.Close()
	b, err := io.ReadAll(out.Body)
	if err != nil {
		t.Fatalf("object %s: %v", key, err)
	}
	return string(b)
}

// Stored returns a function that reads the objects below a prefix. Its error for a missing one is fs.ErrNotExist.
func (s *Server) Stored(t testing.TB, bucket, prefix string) func(name string) (string, error) {
	return func(name string) (string, error) {
		if !slices.Contains(s.Keys(t, bucket, prefix+name), prefix+name) {
			return "", fmt.Errorf("object %s: %w", prefix+name, fs.ErrNotExist)
		}
		return s.Object(t, bucket, prefix+name), nil
	}
}

// Put stores an object.
func (s *Server) Put(t testing.TB, bucket, key, content string) {
	t.Helper()
	_, err := s.S3.PutObject(t.Context(), &s3.PutObjectInput{Bucket: &bucket, Key: &key, Body: strings.NewReader(content)})
	if err != nil {
		t.Fatalf("object %s: %v", key, err)
	}
}

// Buckets are the names of the server's buckets.
func (s *Server) Buckets(t testing.TB) []string {
	t.Helper()
	out, err := s.S3.ListBuckets(t.Context(), &s3.ListBucketsInput{})
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, b := range out.Buckets {
		names = append(names, aws.ToString(b.Name))
	}
	slices.Sort(names)
	return names
}

// Node is a rig whose drivers use the server.
type Node struct {
	*rig.Rig
	*Server
}

// New makes a node; a test without root or FUSE is skipped. At the test's end everything is taken away, and the drivers'
// log is shown if it failed.
func New(t testing.TB) *Node {
	t.Helper()
	Bin(t)
	if onHost() {
		systemd.Host(t)
	}
	if err := rig.Usable(); err != nil {
		t.Skip(err)
	}
	return On(t, StartServer(t, s3server.Options{}))
}

// On is New with a server that is there.
func On(t testing.TB, server *Server) *Node {
	t.Helper()
	if !isolate.Inside() {
		t.Fatal("the package's TestMain must be isolate.Main: drivers kill what runs as their users, in all PID namespaces below")
	}
	r, err := rig.New(rig.S3{Endpoint: server.Endpoint(), Region: server.Region(), Keys: server.Process.Keys()})
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
	return &Node{Rig: r, Server: server}
}

// Proxy starts a proxy in front of an S3 server.
func Proxy(t testing.TB, endpoint string) *faultproxy.Proxy {
	t.Helper()
	p, err := faultproxy.Start(endpoint)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Stop(); err != nil {
			t.Errorf("stopping the proxy: %v", err)
		}
	})
	return p
}

// Get is a page of a driver's HTTP endpoint, such as "/metrics".
func Get(t testing.TB, d *rig.Driver, path string) string {
	t.Helper()
	req, err := http.NewRequestWithContext(Context(t, 10*time.Second), http.MethodGet, "http://"+d.HTTP+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// Drive starts a driver.
func (n *Node) Drive(t testing.TB, mode string, flags ...string) *rig.Driver {
	t.Helper()
	if mode != "controller" {
		flags = append([]string{"--default-client=" + Client}, flags...)
	}
	d, err := n.Start(t.Context(), mode, flags...)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// ClientProgram is the path of a client's program as the running driver's mounts are started with it.
func (n *Node) ClientProgram(t testing.TB, name string) string {
	t.Helper()
	dir, err := n.Programs()
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Join(dir, name)
}

// NothingLeft fails the test if the node holds anything of a mount.
func (n *Node) NothingLeft(t testing.TB) {
	t.Helper()
	for _, what := range n.Leftovers() {
		t.Errorf("left behind: %s", what)
	}
}

// Await waits until something holds. Time for which the machine keeps all from running does not count.
func Await(t testing.TB, limit time.Duration, what string, holds func() bool) {
	t.Helper()
	for began := pressure.Now(); !holds(); {
		if began.Since() > limit {
			t.Fatalf("timed out after %s waiting for %s", limit, what)
		}
		// What takes long is looked at less often, so that tests which wait leave the processors to others.
		time.Sleep(min(max(time.Since(began.Time)/20, 10*time.Millisecond), 100*time.Millisecond))
	}
}

// Kill ends processes as a crash does, and waits until they are gone. Some may be gone already: a unit's client goes with its helper.
func Kill(t testing.TB, processes ...rig.Process) {
	t.Helper()
	for _, p := range processes {
		if err := unix.Kill(p.PID, unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
			t.Fatal(err)
		}
	}
	for _, p := range processes {
		Await(t, 10*time.Second, "the end of "+p.String(), func() bool { return rig.Ended(p.PID) })
	}
}

// AwaitNothingLeft waits until the driver has cleared away what it finds, and fails the test if it does not.
func (n *Node) AwaitNothingLeft(t testing.TB, limit time.Duration) {
	t.Helper()
	for began := pressure.Now(); len(n.Leftovers()) > 0 && began.Since() <= limit; {
		time.Sleep(20 * time.Millisecond)
	}
	n.NothingLeft(t)
}

// Freeze stops a process as it stands. Each of its threads obeys when its turn comes, and one of a client's may still answer
// until then: it returns when all stand still.
func Freeze(t testing.TB, pid int) {
	t.Helper()
	if err := unix.Kill(pid, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
		if err == nil && len(threads) > 0 && !slices.ContainsFunc(threads, func(file string) bool {
			stat, err := os.ReadFile(file)
			return err == nil && !strings.Contains(string(stat), ") T ")
		}) {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("process %d does not stand still", pid)
		}
	}
}

// Context is a context that bounds a test's calls.
func Context(t testing.TB, limit time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	t.Cleanup(cancel)
	return ctx
}

// CreateRequest asks for a prefix volume in Bucket.
func CreateRequest(name string, parameters ...string) *csi.CreateVolumeRequest {
	p := map[string]string{"bucketName": Bucket}
	for i := 0; i+1 < len(parameters); i += 2 {
		p[parameters[i]] = parameters[i+1]
	}
	return &csi.CreateVolumeRequest{Name: name, VolumeCapabilities: []*csi.VolumeCapability{rig.Writer()}, Parameters: p}
}

// Create makes a prefix volume in Bucket.
func Create(t testing.TB, d csi.ControllerClient, name string, parameters ...string) *csi.Volume {
	t.Helper()
	return insist(t, func(ctx context.Context) (*csi.CreateVolumeResponse, error) {
		return d.CreateVolume(ctx, CreateRequest(name, parameters...))
	}).GetVolume()
}

// insist makes a call again while its outcome is open, as a CO does: S3 services refuse one of two requests that meet.
func insist[R any](t testing.TB, call func(context.Context) (R, error)) R {
	t.Helper()
	ctx := Context(t, time.Minute)
	for {
		resp, err := call(ctx)
		switch status.Code(err) {
		case codes.OK:
			return resp
		case codes.Aborted, codes.Unavailable:
			time.Sleep(100 * time.Millisecond)
		default:
			t.Fatal(err)
		}
	}
}

// Delete deletes a volume.
func Delete(t testing.TB, d csi.ControllerClient, id string) {
	t.Helper()
	insist(t, func(ctx context.Context) (*csi.DeleteVolumeResponse, error) {
		return d.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: id})
	})
}

// Static is a volume that no controller made: the prefix "<name>/" of Bucket, with a handle that says nothing.
func Static(name, client string, pairs ...string) *csi.Volume {
	c := map[string]string{"bucketName": Bucket, "prefix": name + "/", "client": client}
	for i := 0; i+1 < len(pairs); i += 2 {
		c[pairs[i]] = pairs[i+1]
	}
	return &csi.Volume{VolumeId: name, VolumeContext: c}
}

// PublishRequest asks for a volume at a target, for any number of writers.
func PublishRequest(v *csi.Volume, target string) *csi.NodePublishVolumeRequest {
	return &csi.NodePublishVolumeRequest{
		VolumeId: v.GetVolumeId(), VolumeContext: v.GetVolumeContext(), TargetPath: target, VolumeCapability: rig.Writer(),
	}
}

// Publish publishes a volume.
func Publish(t testing.TB, d csi.NodeClient, v *csi.Volume, target string) {
	t.Helper()
	if _, err := d.NodePublishVolume(Context(t, time.Minute), PublishRequest(v, target)); err != nil {
		t.Fatal(err)
	}
}

// Unpublish unpublishes a volume.
func Unpublish(t testing.TB, d csi.NodeClient, v *csi.Volume, target string) {
	t.Helper()
	_, err := d.NodeUnpublishVolume(Context(t, time.Minute), &csi.NodeUnpublishVolumeRequest{VolumeId: v.GetVolumeId(), TargetPath: target})
	if err != nil {
		t.Fatal(err)
	}
}
