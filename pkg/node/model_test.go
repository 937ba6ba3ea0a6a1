package node

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/service/s3"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"
	"pgregory.net/rapid"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/launcher"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/mounttest"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
	"github.com/s3-csi/s3-csi-driver/pkg/session"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// The model: volumes are published, unpublished, rotated and reconfigured while clients, helpers and the driver are killed and copies of
// mounts come and go. After retries and one quiet reconcile pass, what is there is what the CO wants. The kernel's mounts and FUSE
// connections are real.

// TestNode_ConvergesAfterAnyHistory runs random histories. A failure prints the commands and the driver's log.
func TestNode_ConvergesAfterAnyHistory(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root: it mounts file systems")
	}
	if _, err := os.Stat(host.FuseDevice); err != nil {
		t.Skip("needs /dev/fuse")
	}
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld(t)
		defer w.close()
		for range rapid.IntRange(1, 14).Draw(t, "commands") {
			w.step()
		}
		w.settle()
		w.check()
		for i := range w.targets {
			w.targets[i].wanted = false
		}
		w.settle()
		w.check()
		w.checkEmpty()
	})
}

// world is a node and its CO.
type world struct {
	t        *rapid.T
	dir      string
	ctx      context.Context
	log      *bytes.Buffer
	history  []string
	volumes  []modelVolume
	targets  []modelTarget
	fleet    *fleet
	services *services
	copies   map[string]bool

	node   *Node
	stop   context.CancelFunc
	ended  chan error
	mu     sync.Mutex
	passes int
}

type modelVolume struct {
	client, source string
	secret         int // the number of its secret
}

type modelTarget struct {
	path   string
	volume int
	wanted bool
	used   bool // a publish was tried, and no unpublish has succeeded since
}

func newWorld(t *rapid.T) *world {
	dir, err := os.MkdirTemp("", "n") // paths of sockets are short
	if err == nil {
		err = os.Chmod(dir, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	w := &world{t: t, dir: dir, log: &bytes.Buffer{}, fleet: &fleet{units: map[uint32]*unit{}}, copies: map[string]bool{}}
	logger := textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(lockedWriter{&w.mu, w.log}), textlogger.Verbosity(0)))
	w.ctx = klog.NewContext(context.Background(), logger)
	w.services = &services{kind: rapid.SampledFrom([]credentials.Kind{credentials.AsIs, credentials.AssumeRole}).Draw(t, "sessions"), changed: make(chan struct{})}
	for range 3 {
		w.volumes = append(w.volumes, modelVolume{
			client: rapid.SampledFrom([]string{"mountpoint-s3", "rclone"}).Draw(t, "client"),
			source: rapid.SampledFrom([]string{credentials.SourceDriver, credentials.SourceSecret}).Draw(t, "source"),
		})
	}
	for i := range 2 * len(w.volumes) {
		w.targets = append(w.targets, modelTarget{path: filepath.Join(dir, "targets", fmt.Sprint(i), "mount"), volume: i % len(w.volumes)})
		w.must(os.MkdirAll(filepath.Dir(w.targets[i].path), 0o755))
	}
	w.must(os.MkdirAll(filepath.Join(dir, "bin"), 0o755))
	for _, cl := range (client.Set{}).All() {
		for _, name := range cl.Programs {
			w.must(os.WriteFile(filepath.Join(dir, "bin", name), nil, 0o755))
		}
	}
	w.start()
	return w
}

// lockedWriter is a log that several goroutines write to.
type lockedWriter struct {
	mu *sync.Mutex
	to *bytes.Buffer
}

func (l lockedWriter) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.to.Write(b)
}

func (w *world) must(err error) {
	w.t.Helper()
	if err != nil {
		w.fail("%v", err)
	}
}

func (w *world) fail(format string, args ...any) {
	w.t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.t.Fatalf("%s\nvolumes: %+v\nhistory:\n%s\nlog:\n%s", fmt.Sprintf(format, args...), w.volumes, strings.Join(w.history, "\n"), w.log)
}

func (w *world) note(format string, args ...any) {
	line := fmt.Sprintf(format, args...)
	w.history = append(w.history, line)
	fmt.Fprintf(lockedWriter{&w.mu, w.log}, "--- %s\n", line)
}

// start starts a driver and waits for its first pass.
func (w *world) start() {
	w.t.Helper()
	n, err := New(w.ctx, Options{
		Namespace: host.Own(), Launcher: w.fleet, Backends: w.services, Sessions: w.services, Clients: client.Set{}, DefaultClient: "mountpoint-s3",
		StateDir: filepath.Join(w.dir, "state"), CacheDir: filepath.Join(w.dir, "cache"), Programs: mounttest.Programs(filepath.Join(w.dir, "bin")),
		UIDs: launcher.UIDRange{First: 5000, Last: 5099}, MountTimeout: 20 * time.Second, DrainTimeout: 20 * time.Second, Heal: true,
		CleanPrograms: func(context.Context, []string) error { // the end of a pass
			w.mu.Lock()
			defer w.mu.Unlock()
			w.passes++
			return nil
		},
		Reach:    func(context.Context, backend.Backend) error { return nil },
		Declared: func() []backend.Backend { return nil },
		Status:   Status{Notes: func() []string { return nil }},
	})
	w.must(err)
	ctx, stop := context.WithCancel(w.ctx)
	w.node, w.stop, w.ended = n, stop, make(chan error, 1)
	before := w.passed()
	go func() { w.ended <- n.Run(ctx) }()
	w.awaitPass(before)
}

// awaitPass waits until a pass has ended. A pass waits for clients that drain, so slow ones finish after a while.
func (w *world) awaitPass(before int) {
	w.t.Helper()
	began := time.Now()
	w.await("end of a reconcile pass", func() bool {
		if time.Since(began) > 300*time.Millisecond {
			w.finishAll()
		}
		return w.passed() > before
	})
}

func (w *world) finishAll() {
	for _, u := range w.fleet.all() {
		u.finish()
	}
}

func (w *world) passed() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.passes
}

func (w *world) await(what string, happened func() bool) {
	w.t.Helper()
	const bound = 30 * time.Second
	for began := time.Now(); !happened(); time.Sleep(time.Millisecond) {
		if time.Since(began) > bound {
			w.fail("no %s within %s", what, bound)
		}
	}
}

// pass waits for a whole reconcile pass that begins now: another may be running.
func (w *world) pass() {
	w.t.Helper()
	for range 2 {
		before := w.passed()
		w.services.signal()
		w.awaitPass(before)
	}
}

func (w *world) restart() {
	w.t.Helper()
	w.stop()
	w.must(<-w.ended)
	w.start()
}

// step runs a random command.
func (w *world) step() {
	target := &w.targets[rapid.IntRange(0, len(w.targets)-1).Draw(w.t, "target")]
	switch command := rapid.SampledFrom([]string{
		"publish", "publish", "publish", "unpublish", "unpublish", "kill client", "kill helper", "kill both", "rotate", "reconfigure", "restart", "slow", "finish",
		"copy", "remove copy", "copy and unpublish", "pass", "rotate and pass",
	}).Draw(w.t, "command"); command {
	case "publish":
		if target.wanted = target.wanted || !target.used; target.wanted {
			_ = w.publish(target)
		}
	case "unpublish":
		if target.used {
			target.wanted = false
			_ = w.unpublish(target, 200*time.Millisecond) // one that waits for the client times out
		}
	case "rotate", "rotate and pass":
		w.note("%s: the keys of volume %d", command, target.volume)
		w.volumes[target.volume].secret++
		w.services.rotate()
		if command != "rotate" {
			w.pass()
			w.checkKeys()
		}
	case "reconfigure":
		w.note("reconfigure")
		w.services.reconfigure()
	case "restart":
		w.note("restart the driver")
		w.restart()
	case "pass":
		w.note("reconcile pass")
		w.pass()
		w.checkKeys()
	case "copy":
		w.copy(target)
	case "copy and unpublish": // the client stays, because a copy of its mount does
		w.copy(target)
		for i := range w.targets {
			if other := &w.targets[i]; other.volume == target.volume && other.used {
				other.wanted = false
				_ = w.unpublish(other, 200*time.Millisecond)
			}
		}
	case "remove copy":
		w.removeCopies()
	default:
		w.disturb(command)
	}
}

// disturb does something to a client or a helper.
func (w *world) disturb(command string) {
	units := w.fleet.all()
	if len(units) == 0 {
		return
	}
	// Keys contain a salt, so their order would be another one when rapid repeats a history.
	slices.SortFunc(units, func(a, b *unit) int {
		return cmp.Or(cmp.Compare(a.shows(), b.shows()), cmp.Compare(a.number, b.number))
	})
	u := units[rapid.IntRange(0, len(units)-1).Draw(w.t, "unit")]
	w.note("%s of %s", command, u.Name)
	switch command {
	case "kill client":
		u.killClient()
	case "kill helper":
		u.killHelper()
	case "kill both":
		u.killHelper()
		u.killClient()
	case "slow":
		u.mu.Lock()
		u.slow = true
		u.mu.Unlock()
	case "finish":
		u.finish()
	}
}

// finish lets a client exit whose mount has ended.
func (u *unit) finish() {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.slow = false
	if u.release != nil {
		close(u.release)
		u.release = nil
	}
}

// copy bind-mounts a target elsewhere, as kubelet does for a subPath.
func (w *world) copy(target *modelTarget) {
	path := filepath.Join(w.dir, "copies", fmt.Sprint(len(w.copies)))
	w.must(os.MkdirAll(path, 0o755))
	if err := unix.Mount(target.path, path, "", unix.MS_BIND, ""); err == nil {
		w.note("copy %s to %s", target.path, path)
		w.copies[path] = true
	}
}

func (w *world) removeCopies() {
	w.note("remove copies")
	for path, mounted := range w.copies {
		if mounted {
			_ = unix.Unmount(path, unix.MNT_DETACH) // the driver may have replaced or detached it
			w.copies[path] = false
		}
	}
}

func (w *world) publish(target *modelTarget) error {
	v := w.volumes[target.volume]
	prefix := fmt.Sprintf("vol-%d/", target.volume)
	r := mount.Request{
		VolumeID: "default:bucket/" + prefix, Target: target.path, Volume: volume.ID{Backend: "default", Bucket: "bucket", Prefix: prefix},
		Attributes: volume.Attributes{Client: v.client}, Source: v.source, Identity: v.source,
	}
	if v.source == credentials.SourceSecret {
		r.Keys = credentials.Keys{AccessKeyID: w.keyOf(target.volume), SecretAccessKey: "secret"}
	}
	target.used = true
	err := w.node.Publish(w.ctx, r, nil)
	w.note("publish %s (volume %d): %v", target.path, target.volume, err)
	return err
}

// keyOf is the id of the keys that a volume's clients must have now.
func (w *world) keyOf(volume int) string {
	if v := w.volumes[volume]; v.source == credentials.SourceSecret {
		return fmt.Sprintf("SECRET%d-%d", volume, v.secret)
	}
	return w.services.driverKey()
}

func (w *world) unpublish(target *modelTarget, bound time.Duration) error {
	ctx, cancel := context.WithTimeout(w.ctx, bound)
	defer cancel()
	err := w.node.Unpublish(ctx, fmt.Sprintf("default:bucket/vol-%d/", target.volume), target.path)
	w.note("unpublish %s: %v", target.path, err)
	if err == nil {
		target.used = false
	}
	return err
}

// settle removes the disturbances and repeats all requests until they succeed, and then has one pass.
func (w *world) settle() {
	w.t.Helper()
	w.removeCopies()
	for round := 0; ; round++ {
		w.finishAll()
		var failed error
		for i := range w.targets {
			target := &w.targets[i]
			var err error
			if target.wanted {
				err = w.publish(target)
			} else if target.used {
				if err = w.unpublish(target, 20*time.Second); err != nil && w.volumes[target.volume].source == credentials.SourceSecret {
					// The keys of a secret are lost if helper and client are killed. Another publish of the volume supplies them.
					_ = w.publish(&w.targets[(i+len(w.volumes))%len(w.targets)])
				}
			}
			if err != nil {
				failed = err
			}
		}
		if failed == nil {
			break
		}
		if round == 20 {
			w.fail("requests still fail: %v", failed)
		}
		time.Sleep(5 * time.Millisecond)
	}
	w.note("settled")
	w.pass()
}

// check waits for work of the last pass that is still in flight, and fails unless what is there is then what is wanted.
func (w *world) check() {
	w.t.Helper()
	problem := ""
	for began := time.Now(); time.Since(began) < 10*time.Second; time.Sleep(2 * time.Millisecond) {
		if problem = w.difference(); problem == "" {
			return
		}
	}
	w.fail("%s", problem)
}

// checkKeys fails if a client that can be used after a pass does not have the driver's keys of today, whatever its mount is doing.
func (w *world) checkKeys() {
	w.t.Helper()
	mounts, err := w.node.store.Mounts(w.ctx)
	w.must(err)
	table, err := host.Own().Mounts(w.ctx)
	w.must(err)
	for _, m := range mounts {
		shown := slices.ContainsFunc(table, func(mnt host.Mount) bool {
			return mnt.Source == m.Source && mnt.Mountpoint != w.node.store.SourceDir(m.Name)
		})
		u := w.fleet.of(m.UID)
		if !shown || u == nil || m.Spec.Source != credentials.SourceDriver {
			continue
		}
		// A pass leaves out a mount that another call works on, which may have the former keys. The next one does not.
		tries := 0
		w.await("change to the new keys at "+m.Name, func() bool {
			if tries++; tries%500 == 0 {
				w.pass()
			}
			return u.hasKey(w.services.driverKey()) || !u.serves()
		})
	}
}

// difference compares what is there with what is wanted.
func (w *world) difference() string {
	w.t.Helper()
	pubs, err := w.node.store.Pubs.All(w.ctx)
	w.must(err)
	mounts, err := w.node.store.Mounts(w.ctx)
	w.must(err)
	var recorded, wanted []string
	for _, p := range pubs {
		recorded = append(recorded, p.Target)
	}
	for _, target := range w.targets {
		if !target.wanted {
			continue
		}
		wanted = append(wanted, target.path)
		entries, err := os.ReadDir(target.path)
		if name := fmt.Sprintf("vol-%d", target.volume); err != nil || len(entries) != 1 || entries[0].Name() != name {
			return fmt.Sprintf("target %s shows %v, %v, want %s", target.path, entries, err, name)
		}
	}
	slices.Sort(recorded)
	slices.Sort(wanted)
	if !slices.Equal(recorded, wanted) {
		return fmt.Sprintf("publications of %v, want %v", recorded, wanted)
	}
	// A mount that took over another secret keeps its key, so a volume may have two.
	keys := map[string]bool{}
	for _, m := range mounts {
		if keys[m.Key] || !slices.ContainsFunc(pubs, func(p state.Publication) bool { return p.Mount == m.Name }) {
			return fmt.Sprintf("mount %s is not the only one of its key, or has no publication", m.Name)
		}
		keys[m.Key] = true
	}
	if units := w.fleet.all(); len(units) != len(mounts) {
		return fmt.Sprintf("%d helpers of %d mounts", len(units), len(mounts))
	}
	for _, m := range mounts {
		u := w.fleet.of(m.UID)
		volume := int(m.Spec.Prefix[len("vol-")] - '0')
		u.mu.Lock()
		gone, state, serving := u.gone, u.status.State, u.serving
		u.mu.Unlock()
		if gone || state != helper.StateRunning || serving != strings.TrimSuffix(m.Spec.Prefix, "/") {
			return fmt.Sprintf("mount %s: its helper is gone: %t, its client is %s and shows %s", m.Name, gone, state, serving)
		}
		if want := w.keyOf(volume); !u.hasKey(want) {
			return fmt.Sprintf("mount %s of volume %d does not have the keys %s", m.Name, volume, want)
		}
	}
	if shown := w.mounted(); len(shown) != len(mounts)+len(wanted) {
		return fmt.Sprintf("%d mounts and %d targets, but the mount table has %q", len(mounts), len(wanted), shown)
	}
	return ""
}

// mounted returns where volumes show.
func (w *world) mounted() (places []string) {
	all, err := host.Own().Mounts(w.ctx)
	w.must(err)
	for _, m := range all {
		if strings.HasPrefix(m.Mountpoint, w.dir+"/") && strings.HasPrefix(m.Source, "s3csi:") {
			places = append(places, m.Mountpoint)
		}
	}
	return places
}

// checkEmpty checks that nothing is left of any mount.
func (w *world) checkEmpty() {
	w.t.Helper()
	names, err := w.node.store.Names(w.ctx)
	w.must(err)
	caches, err := os.ReadDir(filepath.Join(w.dir, "cache"))
	w.must(err)
	caches = slices.DeleteFunc(caches, func(e os.DirEntry) bool { return !mount.ValidName(e.Name()) })
	if len(names) > 0 || len(caches) > 0 {
		w.fail("left: mounts %v, caches %v", names, caches)
	}
}

func (w *world) close() {
	if w.stop != nil {
		w.stop()
		<-w.ended
	}
	for _, u := range w.fleet.all() {
		_ = w.fleet.Kill(w.ctx, u.UID)
	}
	mounts, _ := host.Own().Mounts(w.ctx)
	for _, m := range slices.Backward(mounts) {
		if strings.HasPrefix(m.Mountpoint, w.dir+"/") {
			_ = unix.Unmount(m.Mountpoint, unix.MNT_DETACH)
		}
	}
	_ = os.RemoveAll(w.dir)
}

// services are S3, the token service and the config file.
type services struct {
	mounttest.S3
	kind credentials.Kind

	mu      sync.Mutex
	keys    int // the number of the driver's keys
	config  int
	changed chan struct{}
}

func (s *services) Backend(name string) (backend.Backend, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return backend.Backend{Name: name, Endpoint: fmt.Sprintf("https://s3-%d.example", s.config)}, nil
}

// With is for measuring usage, which no volume of the model asks for.
func (*services) With(context.Context, backend.Backend, backend.Access, func(context.Context, *s3.Client) error) (backend.BucketInfo,
	error) {
	return backend.BucketInfo{}, errors.ErrUnsupported
}

func (s *services) Changed() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.changed
}

func (s *services) signal() {
	s.mu.Lock()
	defer s.mu.Unlock()
	close(s.changed)
	s.changed = make(chan struct{})
}

func (s *services) rotate() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.keys++
}

func (s *services) reconfigure() {
	s.mu.Lock()
	s.config++
	s.mu.Unlock()
	s.signal()
}

func (s *services) driverKey() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return fmt.Sprintf("DRIVER%d", s.keys)
}

func (s *services) Plan(_ context.Context, r session.Request) (credentials.Order, error) {
	o := credentials.Order{Kind: s.kind, Keys: r.Keys, RoleARN: r.RoleARN, Name: r.Name}
	if r.Source == credentials.SourceDriver {
		o.Keys = credentials.Keys{AccessKeyID: s.driverKey(), SecretAccessKey: "secret"}
	}
	return o, nil
}

func (s *services) Make(_ context.Context, o credentials.Order) (credentials.Keys, error) {
	if o.Kind == credentials.AsIs {
		return o.Keys, nil
	}
	return credentials.Keys{AccessKeyID: "SESSION-" + o.Keys.AccessKeyID, SecretAccessKey: "s", SessionToken: "t", Expires: time.Now().Add(time.Hour)}, nil
}
