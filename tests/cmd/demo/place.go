package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
	"github.com/s3-csi/s3-csi-driver/tests/internal/s3server"

	keys "github.com/s3-csi/s3-csi-driver/pkg/credentials"
)

// place is what a demo plays in and has to clean up.
type place struct {
	server    *s3server.Process // nil: the user's own
	serverDir string
	s3        *s3.Client
	bucket    string
	ownBucket bool // made by the demo
	neighbour string
	rig       *rig.Rig
	driver    *rig.Driver
	client    string
	volume    *csi.Volume
	published []string // targets
}

// chooseClient returns the client that CLIENT names, mountpoint-s3 without it, or rclone where that has not been built.
func chooseClient() (string, error) {
	_, missing := rig.Mountpoint(os.Getenv(rig.EnvBin))
	switch name := os.Getenv("CLIENT"); {
	case name == "" && missing != nil:
		say("The client is rclone: mountpoint-s3 is built where Rust is installed.")
		return "rclone", nil //nolint:nilerr // the demo needs one client only
	case name == "":
		return "mountpoint-s3", nil
	case rig.Programs()[name] == "":
		return "", fmt.Errorf("CLIENT is %q: want one of %q", name, slices.Sorted(maps.Keys(rig.Programs())))
	case name != "rclone" && missing != nil:
		return "", fmt.Errorf("CLIENT is %q: %w", name, missing)
	default:
		return name, nil
	}
}

// prepare finds or starts an S3 server and makes the directories.
func prepare(ctx context.Context) (_ *place, err error) {
	p := &place{bucket: "demo-bucket", neighbour: "not-the-drivers/file.txt"}
	if p.client, err = chooseClient(); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.stopServer())
		}
	}()
	service := rig.S3{
		Endpoint: os.Getenv("DEMO_S3_ENDPOINT"), Region: os.Getenv("AWS_REGION"),
		Keys: keys.Keys{AccessKeyID: os.Getenv("AWS_ACCESS_KEY_ID"), SecretAccessKey: os.Getenv("AWS_SECRET_ACCESS_KEY"),
			SessionToken: os.Getenv("AWS_SESSION_TOKEN")},
	}
	if service.Region == "" {
		service.Region = s3server.DefaultRegion
	}
	if service.Endpoint == "" {
		step("Starting an S3 server on this machine")
		if p.serverDir, err = os.MkdirTemp("", "s3csi-demo-server-"); err != nil {
			return nil, err
		}
		if p.server, err = s3server.StartProcess(ctx, s3server.Options{Dir: p.serverDir}); err != nil {
			return nil, err
		}
		service.Endpoint, service.Region, service.Keys = p.server.Endpoint(), p.server.Region(), p.server.Keys()
	} else {
		step("Using the S3 server of DEMO_S3_ENDPOINT")
		if service.Keys.IsZero() {
			return nil, errors.New("DEMO_S3_ENDPOINT is set: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY too")
		}
		if b := os.Getenv("DEMO_BUCKET"); b != "" {
			p.bucket = b
		} else {
			p.bucket = fmt.Sprintf("s3-csi-demo-%d", time.Now().UnixNano())
		}
		p.neighbour = fmt.Sprintf("s3-csi-demo-neighbour-%d/file.txt", time.Now().UnixNano())
	}
	say("%s", service.Endpoint)
	p.s3 = s3.New(s3.Options{
		BaseEndpoint: &service.Endpoint, Region: service.Region, UsePathStyle: true,
		Credentials: credentials.NewStaticCredentialsProvider(service.Keys.AccessKeyID, service.Keys.SecretAccessKey, service.Keys.SessionToken),
	})
	p.rig, err = rig.New(service)
	if err != nil {
		return nil, err
	}
	return p, nil
}

func (p *place) stopServer() error {
	var err error
	if p.server != nil {
		err = p.server.Stop()
	}
	if p.serverDir != "" {
		err = errors.Join(err, os.RemoveAll(p.serverDir))
	}
	return err
}

// clean takes away whatever the demo made, however far it came.
func (p *place) clean(ctx context.Context) error {
	var errs []error
	if p.driver != nil && (len(p.published) > 0 || p.volume != nil) {
		select {
		case <-p.driver.Exited():
			errs = append(errs, p.start(ctx))
		default:
		}
		for _, target := range p.published {
			if _, err := p.driver.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: p.volume.GetVolumeId(), TargetPath: target}); err != nil {
				errs = append(errs, err)
			}
		}
		if p.volume != nil {
			if _, err := p.driver.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: p.volume.GetVolumeId()}); err != nil {
				errs = append(errs, err)
			}
		}
	}
	if _, err := p.s3.DeleteObject(ctx, &s3.DeleteObjectInput{Bucket: &p.bucket, Key: &p.neighbour}); err != nil && p.ownBucket {
		errs = append(errs, err)
	}
	if p.ownBucket && p.server == nil { // what is on the server of the demo's own goes with it
		errs = append(errs, p.removeBucket(ctx))
	}
	errs = append(errs, p.rig.Close(), p.stopServer())
	return errors.Join(errs...)
}

// removeBucket removes the demo's bucket with the volume records that the driver keeps.
func (p *place) removeBucket(ctx context.Context) error {
	objects, err := p.keys(ctx)
	if err != nil {
		return err
	}
	for _, key := range objects {
		if _, err := p.s3.DeleteObject(ctx, &s3.DeleteObjectInput{Bucket: &p.bucket, Key: &key}); err != nil {
			return err
		}
	}
	_, err = p.s3.DeleteBucket(ctx, &s3.DeleteBucketInput{Bucket: &p.bucket})
	return err
}

func (p *place) start(ctx context.Context) (err error) {
	p.driver, err = p.rig.Start(ctx, "all", "--default-client="+p.client)
	return err
}

// keys are all objects of the bucket.
func (p *place) keys(ctx context.Context) ([]string, error) {
	var all []string
	pages := s3.NewListObjectsV2Paginator(p.s3, &s3.ListObjectsV2Input{Bucket: &p.bucket})
	for pages.HasMorePages() {
		page, err := pages.NextPage(ctx)
		if err != nil {
			return nil, err
		}
		for _, o := range page.Contents {
			all = append(all, aws.ToString(o.Key))
		}
	}
	return all, nil
}

// object is the content of one.
func (p *place) object(ctx context.Context, key string) (string, error) {
	out, err := p.s3.GetObject(ctx, &s3.GetObjectInput{Bucket: &p.bucket, Key: &key})
	if err != nil {
		return "", err
	}
	defer out.Body.Close()
	b, err := io.ReadAll(out.Body)
	return string(b), err
}

// expect compares a file's content.
func expect(dir, name, want string) error {
	got, err := os.ReadFile(filepath.Join(dir, name))
	if err != nil {
		return err
	}
	if string(got) != want {
		return fmt.Errorf("%s holds %q instead of %q", filepath.Join(dir, name), got, want)
	}
	return nil
}
