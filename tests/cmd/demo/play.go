package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
)

const (
	greeting = "hello from the first pod\n"
	answer   = "hello from the second pod\n"
)

// play is the demo itself.
func (p *place) play(ctx context.Context) error {
	for _, scene := range []func(context.Context) error{
		p.makeBucket, p.startDriver, p.createVolume, p.publish, p.writeAndRead, p.showObjects, p.crash, p.heal, p.unpublish, p.deleteVolume, p.stopDriver,
	} {
		if err := scene(ctx); err != nil {
			return err
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
	return nil
}

func (p *place) makeBucket(ctx context.Context) error {
	step("A bucket, with an object that is not the driver's")
	if os.Getenv("DEMO_BUCKET") == "" {
		if _, err := p.s3.CreateBucket(ctx, &s3.CreateBucketInput{Bucket: &p.bucket}); err != nil {
			return err
		}
		p.ownBucket = true
	}
	if _, err := p.s3.PutObject(ctx, &s3.PutObjectInput{Bucket: &p.bucket, Key: &p.neighbour, Body: strings.NewReader("leave me alone")}); err != nil {
		return err
	}
	say("s3://%s/%s", p.bucket, p.neighbour)
	return nil
}

func (p *place) startDriver(ctx context.Context) error {
	step("Starting the driver: one process, controller and node")
	if err := p.start(ctx); err != nil {
		return err
	}
	info, err := p.driver.GetPluginInfo(ctx, &csi.GetPluginInfoRequest{})
	if err != nil {
		return err
	}
	say("%s %s, pid %d, %s", info.GetName(), info.GetVendorVersion(), p.driver.PID(), p.driver.Endpoint)
	return nil
}

func (p *place) createVolume(ctx context.Context) error {
	step("CreateVolume: a prefix of the bucket becomes a volume")
	rep, err := p.driver.CreateVolume(ctx, &csi.CreateVolumeRequest{
		Name: "pvc-demo", Parameters: map[string]string{"bucketName": p.bucket, "prefix": "team-a/"},
		VolumeCapabilities: []*csi.VolumeCapability{rig.Writer()},
	})
	if err != nil {
		return err
	}
	p.volume = rep.GetVolume()
	say("volume_id %s", p.volume.GetVolumeId())
	return nil
}

func (p *place) publish(ctx context.Context) error {
	step("NodePublishVolume: the volume appears at two targets, as in two pods")
	for _, name := range []string{"pod-1", "pod-2"} {
		target := p.rig.Target(name)
		began := time.Now()
		if _, err := p.driver.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{
			VolumeId: p.volume.GetVolumeId(), TargetPath: target, VolumeCapability: rig.Writer(), VolumeContext: p.volume.GetVolumeContext(),
		}); err != nil {
			return err
		}
		p.published = append(p.published, target)
		say("%s after %d ms", target, time.Since(began).Milliseconds())
	}
	for _, line := range p.rig.Processes() {
		say("%s", line)
	}
	return nil
}

func (p *place) writeAndRead(context.Context) error {
	step("Files: written in one pod, read in the other")
	one, two := p.published[0], p.published[1]
	if err := os.WriteFile(filepath.Join(one, "greeting.txt"), []byte(greeting), 0o644); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Join(two, "deep", "down"), 0o755); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(two, "deep", "down", "answer.txt"), []byte(answer), 0o644); err != nil {
		return err
	}
	if err := errors.Join(expect(two, "greeting.txt", greeting), expect(one, "deep/down/answer.txt", answer)); err != nil {
		return err
	}
	say("%s: %s", filepath.Join(two, "greeting.txt"), strings.TrimSpace(greeting))
	say("%s: %s", filepath.Join(one, "deep/down/answer.txt"), strings.TrimSpace(answer))
	return nil
}

// showObjects waits for what a client may still hold back for a moment.
func (p *place) showObjects(ctx context.Context) error {
	step("The same files, seen through the S3 API")
	want := map[string]string{"team-a/pvc-demo/greeting.txt": greeting, "team-a/pvc-demo/deep/down/answer.txt": answer}
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	for key, content := range want {
		for {
			got, err := p.object(ctx, key)
			if err == nil && got == content {
				say("s3://%s/%s: %s", p.bucket, key, strings.TrimSpace(got))
				break
			}
			select {
			case <-ctx.Done():
				return fmt.Errorf("s3://%s/%s did not appear: got %q, %w", p.bucket, key, got, err)
			case <-time.After(100 * time.Millisecond):
			}
		}
	}
	return nil
}

func (p *place) crash(ctx context.Context) error {
	step("kill -9 of the driver: mounts keep working")
	p.driver.Kill()
	say("pid %d is gone", p.driver.PID())
	if err := expect(p.published[0], "greeting.txt", greeting); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(p.published[0], "orphan.txt"), []byte("written without a driver\n"), 0o644); err != nil {
		return err
	}
	say("files are still read and written")
	if err := p.start(ctx); err != nil {
		return err
	}
	say("a new driver, pid %d, takes over", p.driver.PID())
	return expect(p.published[1], "orphan.txt", "written without a driver\n")
}

// heal kills the FUSE client and waits until both pods read again.
func (p *place) heal(ctx context.Context) error {
	step("kill -9 of the FUSE client: the driver starts another and replaces the mount in every pod")
	clients := p.rig.Running(rig.Programs()[p.client])
	if len(clients) != 1 {
		return fmt.Errorf("%d clients run, want one", len(clients))
	}
	client := clients[0].PID
	if err := syscall.Kill(client, syscall.SIGKILL); err != nil {
		return err
	}
	died := time.Now()
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	for _, target := range p.published {
		for {
			err := expect(target, "greeting.txt", greeting)
			if err == nil {
				break
			}
			select {
			case <-ctx.Done():
				return fmt.Errorf("the mount did not heal: %w", err)
			case <-time.After(time.Millisecond):
			}
		}
	}
	say("pid %d is gone; both pods read again after %d ms, without a restart", client, time.Since(died).Milliseconds())
	return nil
}

func (p *place) unpublish(ctx context.Context) error {
	step("NodeUnpublishVolume: the last one waits until everything is stored")
	for len(p.published) > 0 {
		target := p.published[0]
		began := time.Now()
		if _, err := p.driver.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: p.volume.GetVolumeId(), TargetPath: target}); err != nil {
			return err
		}
		p.published = p.published[1:]
		say("%s after %d ms", target, time.Since(began).Milliseconds())
	}
	if left := p.rig.Leftovers(); len(left) > 0 {
		return fmt.Errorf("left behind: %s", strings.Join(left, "; "))
	}
	got, err := p.object(ctx, "team-a/pvc-demo/orphan.txt")
	if err != nil {
		return fmt.Errorf("what was written last is not stored: %w", err)
	}
	say("no mount, process or file is left; s3://%s/team-a/pvc-demo/orphan.txt: %s", p.bucket, strings.TrimSpace(got))
	return nil
}

func (p *place) deleteVolume(ctx context.Context) error {
	step("DeleteVolume: this volume's objects go, and nothing else")
	if _, err := p.driver.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: p.volume.GetVolumeId()}); err != nil {
		return err
	}
	p.volume = nil
	left, err := p.keys(ctx)
	if err != nil {
		return err
	}
	for _, key := range left {
		if strings.HasPrefix(key, "team-a/pvc-demo/") {
			return fmt.Errorf("s3://%s/%s is still there", p.bucket, key)
		}
		say("s3://%s/%s", p.bucket, key)
	}
	if !slices.Contains(left, p.neighbour) {
		return fmt.Errorf("s3://%s/%s is gone", p.bucket, p.neighbour)
	}
	return nil
}

func (p *place) stopDriver(ctx context.Context) error {
	step("Stopping the driver")
	code, err := p.driver.Stop(ctx)
	if err != nil || code != 0 {
		return fmt.Errorf("it exited with code %d: %w", code, err)
	}
	say("exit code %d", code)
	return nil
}
