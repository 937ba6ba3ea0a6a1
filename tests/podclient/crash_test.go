package podclient

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// A driver that is killed at any step leaves nothing that the next one cannot go on with.
func TestKilledAtEachStep(t *testing.T) {
	t.Parallel()
	steps := map[string]func(p *pod) (interrupted func()){
		"podclient.empty": func(p *pod) func() { return func() { _ = p.tryPublish(nil) } },
		"podclient.mounting": func(p *pod) func() {
			p.publish()
			return func() { p.client() }
		},
		"podclient.mounted": func(p *pod) func() {
			p.publish()
			return func() { p.client() }
		},
		"podclient.answered": func(p *pod) func() {
			p.publish()
			return func() { p.client() }
		},
		"podclient.aborted": func(p *pod) func() {
			p.publish()
			p.serve()
			return func() {
				ctx, cancel := context.WithTimeout(context.Background(), eventually)
				defer cancel()
				_, _ = p.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: p.handle(), TargetPath: p.target})
			}
		},
	}
	inSource := stepsOfSource(t)
	for step := range steps {
		if !slices.Contains(inSource, step) {
			t.Errorf("step %s is not in the source", step)
		}
	}
	for _, step := range inSource {
		t.Run(step, func(t *testing.T) {
			t.Parallel()
			begin := steps[step]
			if begin == nil {
				t.Fatal("no test kills the driver at this step")
			}
			e, points := startWithFailpoints(t)
			e.Put(t, bucket, "file", "content")
			p := e.pod(t, podUID)
			interrupted := begin(p)
			hold := filepath.Join(points, "hold-"+step)
			if err := os.WriteFile(hold, nil, 0o600); err != nil {
				t.Fatal(err)
			}
			done := make(chan struct{})
			go func() {
				defer close(done)
				interrupted()
			}()
			rigtest.Await(t, eventually, step, func() bool { _, err := os.Stat(filepath.Join(points, "at-"+step)); return err == nil })
			e.Kill()
			<-done
			if err := os.Remove(hold); err != nil {
				t.Fatal(err)
			}
			e.drive()
			rigtest.Await(t, eventually, "the target to be there again", func() bool { // the driver may just have aborted its connection
				err := p.look()
				return err == nil || errors.Is(err, os.ErrNotExist)
			})
			if step != "podclient.aborted" {
				p.publish()
				p.serve()
			}
			p.unpublish()
			p.NothingLeft(t)
		})
	}
}

// startWithFailpoints starts a driver that stops at a step while points has the step's file.
func startWithFailpoints(t testing.TB) (e *env, points string) {
	t.Helper()
	e, points = &env{Node: rigtest.New(t), t: t}, t.TempDir()
	program, err := e.InstallDriver(filepath.Join(rigtest.Bin(t), "test", "failpoints"))
	if err != nil {
		t.Fatal(err)
	}
	e.Program, e.Wrapper = program, []string{"env", "S3CSI_FAILPOINTS=" + points}
	e.flags = []string{"--pod-clients", "--target-root=" + e.kubelet()}
	if err := os.MkdirAll(e.kubelet(), 0o755); err != nil {
		t.Fatal(err)
	}
	e.drive()
	return e, points
}

// A file system that is being mounted for a client while the volume is unpublished does not stay.
func TestUnpublishWhileAClientConnects(t *testing.T) {
	t.Parallel()
	e, points := startWithFailpoints(t)
	p := e.pod(t, podUID)
	p.publish()
	const step = "podclient.mounting"
	hold := filepath.Join(points, "hold-"+step)
	if err := os.WriteFile(hold, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	p.connectFrom(podUID)
	rigtest.Await(t, eventually, step, func() bool { _, err := os.Stat(filepath.Join(points, "at-"+step)); return err == nil })
	done := make(chan struct{})
	go func() {
		defer close(done)
		p.unpublish()
	}()
	select {
	case <-done:
		t.Error("unpublish did not wait for the mount")
	case <-time.After(time.Second):
	}
	if err := os.Remove(hold); err != nil {
		t.Fatal(err)
	}
	<-done
	p.NothingLeft(t)
}

// A volume that is published again after its unpublish timed out is served again.
func TestPublishAfterAnUnpublishThatTimedOut(t *testing.T) {
	t.Parallel()
	e, points := startWithFailpoints(t)
	e.Put(t, bucket, "file", "content")
	p := e.pod(t, podUID)
	p.publish()
	const step = "podclient.mounting"
	hold := filepath.Join(points, "hold-"+step)
	if err := os.WriteFile(hold, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	c := p.connectFrom(podUID)
	rigtest.Await(t, eventually, step, func() bool { _, err := os.Stat(filepath.Join(points, "at-"+step)); return err == nil })
	_, err := p.NodeUnpublishVolume(rigtest.Context(t, time.Second), &csi.NodeUnpublishVolumeRequest{VolumeId: p.handle(), TargetPath: p.target})
	if err == nil {
		t.Fatal("unpublish did not time out")
	}
	if err := os.Remove(hold); err != nil {
		t.Fatal(err)
	}
	p.publish()
	c.kill()
	p.serve()
	p.unpublish()
	p.NothingLeft(t)
}

// stepsOfSource are the steps of the packages that this package tests.
func stepsOfSource(t testing.TB) (steps []string) {
	t.Helper()
	files, err := filepath.Glob("../../pkg/podclient/*.go")
	if err != nil || len(files) == 0 {
		t.Fatal("no source", err)
	}
	pattern := regexp.MustCompile(`failpoint\.Here\("([^"]*)"\)`)
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, match := range pattern.FindAllStringSubmatch(string(b), -1) {
			steps = append(steps, match[1])
		}
	}
	if len(steps) == 0 {
		t.Fatal("no step was found")
	}
	return steps
}
