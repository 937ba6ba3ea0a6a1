package mount

import (
	"context"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/launcher"
	"github.com/s3-csi/s3-csi-driver/pkg/session"
)

// undying is a launcher whose processes never end.
type undying struct{}

func (undying) Start(context.Context, launcher.Unit) error               { return nil }
func (undying) Alive(context.Context, uint32) (bool, error)              { return true, nil }
func (undying) Free(context.Context, uint32) (bool, error)               { return false, nil }
func (undying) Kill(ctx context.Context, _ uint32) error                 { <-ctx.Done(); return ctx.Err() }
func (undying) List(context.Context) ([]launcher.UnitInfo, error)        { return nil, nil }
func (undying) OOMKills(context.Context, string, uint32) (uint64, error) { return 0, nil }

// asked tells when the driver's own credentials are asked for.
type asked struct {
	*tokens
	keys chan struct{}
}

func (a asked) Plan(ctx context.Context, r session.Request) (credentials.Order, error) {
	a.keys <- struct{}{}
	return a.tokens.Plan(ctx, r)
}

// A mount that does not come to its end must not keep others from their credentials, which would expire.
func TestAMountThatDrainsHoldsUpNoOther(t *testing.T) {
	s := newStore(t)
	own := asked{&tokens{}, make(chan struct{}, 1)}
	m := newManager(Options{Namespace: host.Own(), Launcher: undying{}, Backends: s3{}, Sessions: own, DefaultClient: "rclone", Client: client.Get, Heal: true})
	m.store = s
	m.ctl = host.NewFusectl(m.Namespace, s.dir+"/fusectl")
	for name, p := range map[string]phase{strings.Repeat("a", 24) + "-1": phaseEnding, strings.Repeat("b", 24) + "-2": phaseRunning} {
		if err := os.Mkdir(s.mountDir(name), 0o700); err != nil {
			t.Fatal(err)
		}
		rec := record{Name: name, Key: keyOf(name), Phase: p, Client: "rclone", UID: 5000, Spec: Spec{Source: credentials.SourceDriver}}
		if err := s.writeRecord(rec); err != nil {
			t.Fatal(err)
		}
		if p == phaseRunning {
			show(t, m, rec)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); _ = m.reconcile(ctx) }()
	select {
	case <-own.keys:
	case <-time.After(5 * time.Second):
		t.Error("the other mount's credentials are not refreshed")
	}
	cancel()
	<-done
}

// show makes a mount show at a target, as far as the mount table is concerned.
func show(t *testing.T, m *Manager, rec record) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root: it mounts a file system")
	}
	target := t.TempDir()
	mountAt(t, rec, target)
	t.Cleanup(func() {
		if err := unix.Unmount(target, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	if err := m.store.writePublication(publication{Target: target, Mount: rec.Name}); err != nil {
		t.Fatal(err)
	}
}

// mountAt mounts something that is a mount's by its source.
func mountAt(t *testing.T, rec record, target string) {
	t.Helper()
	if err := unix.Mount(sourceName("default:bucket", rec.Name), target, "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
}

func TestASuccessorIsTendedToFirst(t *testing.T) {
	a, b := strings.Repeat("a", 24), strings.Repeat("b", 24)
	got := livesByKey([]string{a + "-9", b + "-7", a + "-10", a + "-8"})
	if want := map[string][]string{a: {a + "-10", a + "-9", a + "-8"}, b: {b + "-7"}}; !reflect.DeepEqual(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}
