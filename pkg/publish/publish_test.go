package publish

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/mounttest"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/mounttest/parts"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/want"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// fakeMounts are mounts without processes.
type fakeMounts struct {
	mount  state.Mount // that Ensure binds
	err    error       // of Ensure
	health mount.Health
	called []string
	undone bool
	leased int  // leases that are not released
	again  bool // AwaitDrained succeeds once
}

func (f *fakeMounts) Health(context.Context, state.Mount) (mount.Health, error) {
	return f.health, nil
}

func (f *fakeMounts) Refresh(context.Context, state.Mount, state.Publication, want.Mount) error {
	f.called = append(f.called, "refresh")
	return nil
}

func (f *fakeMounts) Rotate(context.Context, want.Mount, state.Mount, state.Publication) error {
	f.called = append(f.called, "rotate")
	return nil
}

func (f *fakeMounts) Ensure(context.Context, want.Mount) (want.Lease, error) {
	f.called = append(f.called, "ensure")
	if f.err != nil {
		return want.Lease{}, f.err
	}
	f.leased++
	return want.Lease{Mount: f.mount, Release: func() { f.leased-- }, Abandon: func(context.Context) error {
		f.undone = f.leased == 1 // the key is still locked
		return nil
	}}, nil
}

func (f *fakeMounts) Reassign(context.Context, string, state.Publication) error {
	f.called = append(f.called, "reassign")
	return nil
}

func (f *fakeMounts) AwaitDrained(_ context.Context, _ want.Mount, failed error) (bool, error) {
	if f.again {
		f.again, f.err = false, nil
		return true, nil
	}
	return false, failed
}

func (f *fakeMounts) Release(ctx context.Context, _ state.Publication, unmount func(context.Context) error) error {
	f.called = append(f.called, "release")
	return unmount(ctx)
}

// fakeTargets accept every target.
type fakeTargets struct{}

func (fakeTargets) ReplaceTarget(context.Context, state.Mount, string, bool) (bool, error) {
	return true, nil
}
func (fakeTargets) CheckTarget(context.Context, state.Mount, string) error { return nil }

// fakeUsage has measured what the test says.
type fakeUsage struct {
	observed []string
	measured map[string]mount.Usage
}

func (f *fakeUsage) Observe(r mount.Request, _ mount.Spec) { f.observed = append(f.observed, r.Target) }

func (f *fakeUsage) Of(volumeID string) (u mount.Usage, ok bool) {
	u, ok = f.measured[volumeID]
	return u, ok
}

func newPublisher(t *testing.T, change func(*Options)) (*Publisher, *parts.Parts, *fakeMounts) {
	t.Helper()
	p, mounts := parts.New(t, mounttest.S3{}), &fakeMounts{health: mount.Healthy}
	o := Options{
		Namespace: p.Namespace, Store: p.Store, Mounts: mounts, Targets: fakeTargets{}, Backends: mounttest.S3{}, Creds: p.Creds, Usage: &fakeUsage{},
		Clients:      p.Clients,
		MountTimeout: time.Minute, DrainTimeout: time.Minute, Share: client.Share{CPUWeight: 100, Tasks: 1024},
	}
	if change != nil {
		change(&o)
	}
	pub, err := New(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	return pub, p, mounts
}

func requestFor(target string) mount.Request {
	r := mounttest.Request()
	r.Target, r.Attributes.Client = target, "rclone"
	return r
}

// After a final error the CO takes a target for unpublished, and leaves it as it is. So if the target shows a volume, only errors in
// the request itself are final.
func TestPublish_ErrorsAtShownTargetsAreNotFinal(t *testing.T) {
	denied := fault.Errorf(fault.Denied, "no")
	p, all, mounts := newPublisher(t, nil)
	mounts.err, mounts.health = denied, mount.Down
	shown := all.Show(all.Mount("a", "1", "mountpoint-s3", nil)).Target
	for what, tc := range map[string]struct {
		change        func(*mount.Request)
		refused       error
		absent, shown fault.Kind
	}{
		"credentials denied": {func(*mount.Request) {}, nil, fault.Denied, fault.Unavailable},
		"an invalid option":  {func(r *mount.Request) { r.Options = []volume.Option{{Name: "no-such-option"}} }, nil, fault.Invalid, fault.Invalid},
		"refused":            {func(*mount.Request) {}, fault.Errorf(fault.Precondition, "isolated"), fault.Precondition, fault.Unavailable},
		"refused as invalid": {func(*mount.Request) {}, fault.Errorf(fault.Invalid, "x"), fault.Invalid, fault.Invalid},
		"refused, unknown":   {func(*mount.Request) {}, errors.New("x"), fault.Unknown, fault.Unavailable},
	} {
		for target, kind := range map[string]fault.Kind{filepath.Join(t.TempDir(), "absent"): tc.absent, shown: tc.shown} {
			r := requestFor(target)
			tc.change(&r)
			if err := p.Publish(t.Context(), r, tc.refused); err == nil || fault.KindOf(err) != kind {
				t.Errorf("%s at %s: kind %s, want %s: %v", what, target, fault.KindOf(err), kind, err)
			}
		}
	}
	if at, err := host.Inspect(shown); err != nil || !at.Mountpoint {
		t.Errorf("the target is not mounted any more: %v", err)
	}
}

func TestGroups_TheClientCannotShowAreRefused(t *testing.T) {
	pub, _, _ := newPublisher(t, nil)
	for client, refused := range map[string]bool{"mountpoint-s3": true, "rclone": false} {
		r := requestFor("/pods/1/mount")
		r.Attributes.Client, r.MountGroup = client, new(uint32(0))
		f, err := (*fault.Error)(nil), pub.checkClient(r)
		if named := errors.As(err, &f) && f.Kind == fault.Invalid && f.Field == "volume_capability.mount.volume_mount_group"; named != refused {
			t.Errorf("%s: %v", client, err)
		}
		r.Attributes.GID = new(uint32(1)) // which is used instead of the group
		if err := pub.checkClient(r); fault.Is(err, fault.Invalid) {
			t.Errorf("%s with another gid: %v", client, err)
		}
	}
}

func TestTarget_RefusalsNameTargetAndVolume(t *testing.T) {
	pub, _, _ := newPublisher(t, nil)
	shown := state.Mount{Name: "k-1", VolumeID: "default:bucket/shown/"}
	w := want.Mount{Publication: state.Publication{Target: "/pods/1/mount", VolumeID: "default:bucket/wanted/"}}
	for what, recorded := range map[string]state.Publication{
		"the record is lost":       {},
		"a record of another":      {Target: "/pods/1/mount", VolumeID: "default:bucket/shown/", Mount: "k-1"},
		"a record of another user": {Target: "/pods/1/mount", VolumeID: "default:bucket/wanted/", Mount: "k-2"},
	} {
		_, err := pub.compare(t.Context(), w, target{mount: shown, pub: recorded})
		if !fault.Is(err, fault.Exists) || !strings.Contains(err.Error(), "/pods/1/mount shows volume default:bucket/shown/") {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// What is impossible by configuration is found out before anything is made for it.
func TestPublish_ImpossibleCredentialsMakeNothing(t *testing.T) {
	p, all, mounts := newPublisher(t, nil)
	all.Tokens.Nothing = fault.Errorf(fault.Precondition, "no way")
	target := filepath.Join(t.TempDir(), "target")
	if err := p.Publish(t.Context(), requestFor(target), nil); !fault.Is(err, fault.Precondition) {
		t.Errorf("kind %s: %v", fault.KindOf(err), err)
	}
	if _, err := os.Lstat(target); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the target was made: %v", err)
	}
	if len(mounts.called) > 0 {
		t.Errorf("called: %v", mounts.called)
	}
}

// A publish whose mount has to wait for another one to drain is repeated, and one that cannot bind is undone.
func TestPublish_WaitsAndIsUndone(t *testing.T) {
	p, all, mounts := newPublisher(t, nil)
	mounts.mount = all.Mount("a", "1", "rclone", nil)
	mounts.err, mounts.again = fault.Errorf(fault.Busy, "another mount drains"), true
	bound := filepath.Join(t.TempDir(), "target")
	if err := p.Publish(t.Context(), requestFor(bound), nil); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := host.Unmount(bound); err != nil {
			t.Error(err)
		}
	})
	if _, ok, err := p.parts.Store.Pubs.Get(t.Context(), bound); !ok || err != nil || len(mounts.called) != 2 {
		t.Errorf("recorded: %t, %v; called: %v", ok, err, mounts.called)
	}
	mounts.mount.Name = "gone"
	target := filepath.Join(t.TempDir(), "target")
	if err := p.Publish(t.Context(), requestFor(target), nil); err == nil || !mounts.undone || mounts.leased != 0 {
		t.Errorf("undone: %t, leases: %d, %v", mounts.undone, mounts.leased, err)
	}
	if _, err := os.Lstat(target); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the target is left: %v", err)
	}
	if u, ok := p.parts.Usage.(*fakeUsage); !ok || !slices.Equal(u.observed, []string{bound}) {
		t.Errorf("observed by what measures usage: %+v", u)
	}
}

// An inline volume, whose author is a pod's, gets no more of the node than volumes that set no limits.
func TestInlineVolumesGetNoMoreThanOthers(t *testing.T) {
	p, _, _ := newPublisher(t, func(o *Options) { o.Share = client.Share{Memory: 1 << 30, CPUWeight: 100, Tasks: 200} })
	for _, tt := range []struct {
		memory, weight, tasks uint64
		denied                string
	}{
		{1 << 30, 100, 200, ""},
		{2 << 30, 0, 0, "memoryLimit"},
		{0, 101, 0, "cpuWeight"},
		{0, 0, 201, "tasksMax"},
	} {
		for _, inline := range []bool{true, false} {
			r := requestFor("/data/t")
			r.Ephemeral = inline
			r.Attributes.MemoryLimit, r.Attributes.CPUWeight, r.Attributes.TasksMax = tt.memory, tt.weight, tt.tasks
			_, err := p.checkRequest(&r)
			if want := inline && tt.denied != ""; want != (err != nil) || want && (!fault.Is(err, fault.Denied) || !strings.Contains(err.Error(), tt.denied)) {
				t.Errorf("%+v, inline %t: %v", tt, inline, err)
			}
		}
	}
}

// A label for mount(2) comes from kubelet alone: among the attributes, which are the pod author's, no client has such an option.
func TestInlineVolumesSetNoSELinuxLabel(t *testing.T) {
	p, _, _ := newPublisher(t, nil)
	for _, name := range []string{"rclone", "mountpoint-s3"} {
		r := requestFor("/data/t")
		r.Attributes.Client, r.Ephemeral = name, true
		r.Options = []volume.Option{{Name: "context", Value: "system_u:object_r:shadow_t:s0", HasValue: true}}
		if _, err := p.checkRequest(&r); !fault.Is(err, fault.Invalid) || !strings.Contains(err.Error(), "context") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Pods with the same volume and identity share a mount, whatever their volume handles are.
func TestKey_IgnoresTheVolumeHandle(t *testing.T) {
	p, _, _ := newPublisher(t, nil)
	keys := map[string]bool{}
	for _, handle := range []string{"csi-1", "csi-2", "static"} {
		r := requestFor("/data/t")
		r.VolumeID, r.Ephemeral = handle, handle != "static"
		spec, err := p.checkRequest(&r)
		if err != nil {
			t.Fatal(err)
		}
		keys[spec.Key()] = true
	}
	if len(keys) != 1 {
		t.Errorf("%d mounts: %v", len(keys), keys)
	}
}

// A volume whose author expects another service than its backend's is not mounted. What is ignored is no part of the mount.
func TestClaimsAreChecked(t *testing.T) {
	p, _, _ := newPublisher(t, nil)
	r := requestFor("/data/t")
	before, err := p.checkRequest(&r)
	if err != nil {
		t.Fatal(err)
	}
	r.Ignored = []string{"something"}
	if after, err := p.checkRequest(&r); err != nil || after.Key() != before.Key() {
		t.Errorf("the key changed with what is ignored: %v", err)
	}
	r.Claims = []volume.Claim{{Kind: volume.ClaimEndpoint, Field: "secrets.endpoint", Value: "https://elsewhere.example"}}
	if _, err := p.checkRequest(&r); !fault.Is(err, fault.Precondition) {
		t.Errorf("%v", err)
	}
}

// A role in which two pods could expand to the same name is refused before its templates are expanded: namespace a-b with service
// account c is not namespace a with b-c.
func TestRolesAreUniqueToAPod(t *testing.T) {
	p, _, _ := newPublisher(t, nil)
	for role, unique := range map[string]bool{
		"arn:aws:iam::111122223333:role/${pod.namespace}-${pod.serviceAccountName}": false,
		"arn:aws:iam::111122223333:role/${pod.namespace}${pod.serviceAccountName}":  false,
		"arn:aws:iam::111122223333:role/${pod.serviceAccountName}.${pod.namespace}": false,
		"arn:aws:iam::111122223333:role/${pod.namespace}.${pod.serviceAccountName}": true,
		"arn:aws:iam::111122223333:role/${pod.namespace}":                           true,
	} {
		r := requestFor("/data/t")
		r.Attributes.RoleARN, r.PodNamespace, r.ServiceAccount = role, "a-b", "c"
		if _, err := p.checkRequest(&r); unique != (err == nil) || !unique && !fault.Is(err, fault.Precondition) {
			t.Errorf("%s: %v", role, err)
		}
	}
}

// A volume's usage is what was measured, or else what its file system reports.
func TestStats_AreOfPublishedVolumesOnly(t *testing.T) {
	p, all, _ := newPublisher(t, func(o *Options) { o.TargetRoot = "/" })
	pub := all.Show(all.Mount("a", "1", "mountpoint-s3", nil))
	if st, err := p.Stats(t.Context(), "v", pub.Target); err != nil || st.TotalBytes == 0 {
		t.Errorf("%+v, %v", st, err)
	}
	p.parts.Usage = &fakeUsage{measured: map[string]mount.Usage{"v": {Bytes: 5, CapacityBytes: 100}}}
	if st, err := p.Stats(t.Context(), "v", pub.Target); err != nil || st.UsedBytes != 5 || st.TotalBytes != 100 {
		t.Errorf("%+v, %v", st, err)
	}
	gone := state.Publication{Target: t.TempDir(), VolumeID: "v", Mount: pub.Mount}
	all.Publish(gone)
	for what, at := range map[string][2]string{"another volume": {"w", pub.Target}, "no publication": {"v", t.TempDir()}, "no mount": {"v", gone.Target}} {
		if _, err := p.Stats(t.Context(), at[0], at[1]); !fault.Is(err, fault.NotFound) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if target, err := p.PublishedAt(t.Context(), "v"); err != nil || target != pub.Target && target != gone.Target {
		t.Errorf("published at %q, %v", target, err)
	}
	if target, err := p.PublishedAt(t.Context(), "w"); err != nil || target != "" {
		t.Errorf("published at %q, %v", target, err)
	}
}

// An unpublish without a record finds the mount by what the target shows. It touches no mount of another program, and no other volume.
func TestUnpublish_FindsMountsWithoutARecord(t *testing.T) {
	p, all, mounts := newPublisher(t, nil)
	m := all.Mount("a", "1", "mountpoint-s3", nil)
	lost, foreign := t.TempDir(), t.TempDir()
	all.MountAt(m, lost)
	all.MountAt(state.Mount{Source: "another"}, foreign)
	if err := p.Unpublish(t.Context(), "v", foreign); !fault.Is(err, fault.Precondition) {
		t.Errorf("a mount of another program: %v", err)
	}
	if err := p.Unpublish(t.Context(), "v", lost); err != nil || !slices.Equal(mounts.called, []string{"release"}) {
		t.Errorf("without a record: %v, %v", mounts.called, err)
	}
	if pub, ok, err := all.Store.Pubs.Get(t.Context(), lost); err != nil || !ok || pub.Mount != m.Name {
		t.Errorf("the record of the draining mount: %+v, %v", pub, err)
	}
	if err := p.Unpublish(t.Context(), "w", lost); !fault.Is(err, fault.Precondition) {
		t.Errorf("another volume: %v", err)
	}
	if err := p.Unpublish(t.Context(), "v", all.Store.SourceDir(m.Name)); !fault.Is(err, fault.Invalid) {
		t.Errorf("a directory of the driver: %v", err)
	}
}

// A single writer's volume has one target on the node.
func TestPublish_SingleWriterHasOneTarget(t *testing.T) {
	p, all, mounts := newPublisher(t, nil)
	mounts.mount = all.Mount("a", "1", "mountpoint-s3", nil)
	all.Publish(state.Publication{Target: "/elsewhere", VolumeID: mounttest.Request().VolumeID, Mount: mounts.mount.Name})
	r := requestFor(filepath.Join(t.TempDir(), "t"))
	r.SingleWriter = true
	if err := p.Publish(t.Context(), r, nil); !fault.Is(err, fault.Precondition) || !strings.Contains(err.Error(), "/elsewhere") {
		t.Errorf("%v", err)
	}
}
