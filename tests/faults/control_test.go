package faults

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/s3-csi/s3-csi-driver/tests/internal/pressure"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// longest is how long the control volume may take to answer, without the time in which the machine's processors or disk stand still for it.
const longest = 10 * time.Second

// controlVolume is a volume that must not notice anything.
type controlVolume struct {
	id, target, mount string // of the volume; the mount's name
	uid               int
}

// volume is one that no controller made.
var volume = rigtest.Static

func publishControl(t *testing.T, l *testNode) *controlVolume {
	t.Helper()
	name := "control-" + filepath.Base(l.Dir)
	target := l.Target("control")
	rigtest.Publish(t, l.driver.Load(), volume(name, rclone), target)
	if err := os.WriteFile(filepath.Join(target, "file"), []byte("content"), 0o644); err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(filepath.Join(l.State, "mounts"))
	procs := l.processes(helperProgram)
	if err != nil || len(entries) != 1 || len(procs) != 1 {
		t.Fatalf("one mount with one helper was made: %v, %v, %v", entries, procs, err)
	}
	return &controlVolume{id: name, target: target, mount: entries[0].Name(), uid: procs[0].UID}
}

func (i *controlVolume) unpublishing() call {
	return func(ctx context.Context, d *rig.Driver) error {
		_, err := d.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: i.id, TargetPath: i.target})
		return err
	}
}

// use uses the volume until stop is called, which tells what went wrong.
func (i *controlVolume) use() (stop func() error) {
	done, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		ended <- func() error {
			for n := 0; ; n++ {
				began := pressure.Now()
				b, err := os.ReadFile(filepath.Join(i.target, "file"))
				if err == nil && string(b) != "content" {
					err = fmt.Errorf("it reads %q", b)
				}
				if err == nil && n%10 == 0 {
					err = os.WriteFile(filepath.Join(i.target, "more"), []byte(fmt.Sprint(n)), 0o644)
				}
				if err != nil {
					return err
				}
				if took := began.Since(); took > longest {
					return fmt.Errorf("it took %s to answer", took)
				}
				select {
				case <-done:
					return nil
				case <-time.After(50 * time.Millisecond):
				}
			}
		}()
	}()
	return func() error {
		close(done)
		for began := pressure.Now(); began.Since() < longest; {
			select {
			case err := <-ended:
				return err
			case <-time.After(100 * time.Millisecond):
			}
		}
		return fmt.Errorf("it has not answered for %s", longest)
	}
}
