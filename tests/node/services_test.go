package node

import (
	"errors"
	"testing"

	"github.com/aws/aws-sdk-go-v2/aws"
	awscredentials "github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/s3"

	"github.com/s3-csi/s3-csi-driver/tests/internal/minio"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// eachService runs a test on a node whose driver uses versitygw, and on one whose driver uses MinIO.
func eachService(t *testing.T, test func(t *testing.T, e *env), flags ...string) {
	t.Helper()
	for name, begin := range map[string]func(*testing.T, ...string) *env{"versitygw": start, "minio": startOnMinIO} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, begin(t, flags...))
		})
	}
}

// startOnMinIO is start with MinIO as the S3 server.
func startOnMinIO(t *testing.T, flags ...string) *env {
	t.Helper()
	rigtest.Bin(t)
	rigtest.ProcessOnly(t, "another service makes no difference to the launcher")
	if err := rig.Usable(); err != nil {
		t.Skip(err)
	}
	server, err := minio.Start(t.Context(), t.TempDir())
	if errors.Is(err, minio.ErrMissing) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := server.Stop(); err != nil {
			t.Errorf("stopping MinIO: %v", err)
		}
	})
	keys := server.Keys()
	client := s3.New(s3.Options{
		BaseEndpoint: aws.String(server.Endpoint()), Region: server.Region(), UsePathStyle: true,
		Credentials: awscredentials.NewStaticCredentialsProvider(keys.AccessKeyID, keys.SecretAccessKey, ""),
	})
	if _, err := client.CreateBucket(t.Context(), &s3.CreateBucketInput{Bucket: aws.String(bucket)}); err != nil {
		t.Fatal(err)
	}
	proxy := rigtest.Proxy(t, server.Endpoint())
	r, err := rig.New(rig.S3{Endpoint: proxy.Endpoint(), Region: server.Region(), Keys: keys})
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
	e := &env{t: t, Node: &rigtest.Node{Rig: r, Server: &rigtest.Server{S3: client}}, proxy: proxy, secrets: []string{keys.SecretAccessKey}}
	t.Cleanup(func() { e.noSecretIn("the drivers' log", []byte(e.Logs())) })
	e.drive(flags...)
	return e
}
