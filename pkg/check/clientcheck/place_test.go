//go:build linux

package clientcheck

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/launcher"
)

// running are the uids with processes.
type running map[uint32]bool

func (r running) List(context.Context) (all []launcher.UnitInfo, err error) {
	for uid := range r {
		all = append(all, launcher.UnitInfo{UID: uid})
	}
	return all, nil
}

func (r running) Kill(_ context.Context, uid uint32) error { delete(r, uid); return nil }

// A mount whose client never answers, and a process that waits for it, are removed with everything else.
func TestPlace_CloseRemovesWhatIsLeft(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root: it mounts")
	}
	fuse, err := host.OpenFuse()
	if err != nil {
		t.Skip("needs FUSE: ", err)
	}
	defer fuse.Close()
	ns, err := host.NewNamespace()
	if err != nil {
		t.Fatal(err)
	}
	base := t.TempDir()
	p, err := NewPlace(t.Context(), ns, filepath.Join(base, "run", "state"), filepath.Join(base, "cache"))
	if err != nil {
		t.Fatal(err)
	}
	processes := running{}
	p.Launcher = processes
	if left, err := p.Left(t.Context()); err != nil || len(left) > 0 {
		t.Errorf("%q, %v", left, err)
	}
	source := filepath.Join(p.State, "sources", "x")
	record, cache := filepath.Join(p.State, "mounts", "x-1"), filepath.Join(p.Cache, "x-1")
	for _, dir := range []string{source, p.Target, record, cache} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	dir, err := host.OpenDir(source)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(host.MountFuse(fuse, dir, host.FuseMount{Source: "s3csi-check", UID: 0, GID: 0}), dir.Close()); err != nil {
		t.Skip("needs to mount: ", err)
	}
	if err := unix.Mount(source, p.Target, "", unix.MS_BIND, ""); err != nil {
		t.Error(err)
	}
	processes[7] = true
	ctx, cancel := context.WithCancel(t.Context())
	waits := make(chan error, 1)
	go func() {
		waits <- p.Do(context.WithoutCancel(ctx), "read the target", func() error {
			_, err := os.ReadDir(p.Target)
			return err
		})
	}()
	lctx, stop := context.WithTimeout(t.Context(), 10*time.Second)
	defer stop()
	left, err := p.Left(lctx)
	for _, want := range []string{"mount " + source, "mount " + p.Target, "directory " + record, "directory " + cache, "processes of uid 7"} {
		if err != nil || !strings.Contains(strings.Join(left, "\n")+"\n", want+"\n") {
			t.Errorf("%q is not in %q, %v", want, left, err)
		}
	}
	cancel() // an interrupt
	if err := p.Close(ctx); err != nil {
		t.Error(err)
	}
	select {
	case err := <-waits:
		if err == nil {
			t.Error("the mount answers")
		}
	case <-time.After(10 * time.Second):
		t.Error("a process still waits for the mount")
	}
	if left, err := os.ReadDir(base); err != nil || len(left) > 0 || len(processes) > 0 {
		t.Errorf("left: %v, %v, %v", left, processes, err)
	}
}
