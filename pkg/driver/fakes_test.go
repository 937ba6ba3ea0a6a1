package driver

import (
	"context"
	"maps"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/provision"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// fakeProvisioner keeps volumes in memory with the rules of the real one that the services depend on.
type fakeProvisioner struct {
	mu      sync.Mutex
	volumes map[string]string // volume id → digest
	sizes   map[string]int64  // volume id → recorded size
	set     []volume.Mutable  // of all calls of Modify
	places  map[string]error  // place of data without a record → result of LookupPlace
	// secretsOnly is set if a backend works only with the secrets of requests.
	secretsOnly bool
	last        provision.CreateRequest
	secret      provision.Secret
	calls       int
	err         error         // returned by every call
	block       chan struct{} // calls wait until it is closed or ctx ends
	entered     chan struct{} // gets one element per call, if set
}

func newFakeProvisioner() *fakeProvisioner {
	return &fakeProvisioner{volumes: map[string]string{}, sizes: map[string]int64{}}
}

func (f *fakeProvisioner) enter(ctx context.Context, secret provision.Secret) error {
	if f.entered != nil {
		f.entered <- struct{}{}
	}
	if f.block != nil {
		select {
		case <-f.block:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls++
	f.secret = secret
	return f.err
}

func (f *fakeProvisioner) Create(ctx context.Context, v provision.CreateRequest) (volume.ID, error) {
	if err := f.enter(ctx, provision.Secret{Keys: v.Keys, RoleARN: v.RoleARN}); err != nil {
		return volume.ID{}, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.last = v
	id := v.Parameters.ID(v.Name, 1)
	if have, ok := f.volumes[id.String()]; ok && have != v.Parameters.Digest() {
		return volume.ID{}, fault.Errorf(fault.Exists, "made with other parameters")
	}
	f.volumes[id.String()] = v.Parameters.Digest()
	f.sizes[id.String()] = max(f.sizes[id.String()], v.Parameters.CapacityBytes)
	return id, nil
}

func (f *fakeProvisioner) Modify(ctx context.Context, r provision.ModifyRequest) (int64, error) {
	if err := f.Lookup(ctx, provision.LookupRequest{ID: r.ID, Keys: r.Keys, RoleARN: r.RoleARN}); err != nil {
		return 0, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if r.Change.Required == 0 && r.Change.Limit == 0 {
		f.set = append(f.set, r.Change.Set)
	}
	f.sizes[r.ID.String()] = max(f.sizes[r.ID.String()], r.Change.Required)
	return f.sizes[r.ID.String()], nil
}

func (f *fakeProvisioner) CanList() bool { return !f.secretsOnly }

// List has the index of the next volume as its token.
func (f *fakeProvisioner) List(ctx context.Context, limit int, token string) (page []provision.Volume, next string, err error) {
	if err := f.enter(ctx, provision.Secret{}); err != nil {
		return nil, "", err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	all := slices.Sorted(maps.Keys(f.volumes))
	start := 0
	if token != "" {
		if start, err = strconv.Atoi(token); err != nil || start > len(all) {
			return nil, "", fault.Errorf(fault.Busy, "no token")
		}
	}
	end := len(all)
	if limit > 0 && start+limit < end {
		end = start + limit
		next = strconv.Itoa(end)
	}
	for _, text := range all[start:end] {
		id, err := volume.ParseID(text)
		if err != nil {
			return nil, "", err
		}
		page = append(page, provision.Volume{ID: id, CapacityBytes: f.sizes[text]})
	}
	return page, next, nil
}

func (f *fakeProvisioner) Get(ctx context.Context, id volume.ID) (provision.Volume, error) {
	if err := f.Lookup(ctx, about(id, provision.Secret{})); err != nil {
		return provision.Volume{}, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return provision.Volume{ID: id, CapacityBytes: f.sizes[id.String()]}, nil
}

func (f *fakeProvisioner) Delete(ctx context.Context, r provision.DeleteRequest) error {
	if err := f.enter(ctx, provision.Secret{Keys: r.Keys, RoleARN: r.RoleARN}); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.volumes, r.ID.String())
	return nil
}

func (f *fakeProvisioner) Lookup(ctx context.Context, r provision.LookupRequest) error {
	if err := f.enter(ctx, provision.Secret{Keys: r.Keys, RoleARN: r.RoleARN}); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, ok := f.volumes[r.ID.String()]; !ok {
		return fault.Errorf(fault.NotFound, "no record of %s", r.ID)
	}
	return nil
}

func (f *fakeProvisioner) LookupPlace(ctx context.Context, r provision.LookupRequest) error {
	if err := f.enter(ctx, provision.Secret{Keys: r.Keys, RoleARN: r.RoleARN}); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if err, ok := f.places[r.ID.String()]; ok {
		return err
	}
	return fault.Errorf(fault.NotFound, "nothing at %s", r.ID)
}

// fakeSnapshots keeps snapshots in memory with the rules of the real one that the service depends on.
type fakeSnapshots struct {
	mu    sync.Mutex
	made  map[string]provision.Snapshot // by id
	last  provision.SnapshotRequest
	query provision.ListSnapshotsRequest
	err   error
}

func newFakeSnapshots() *fakeSnapshots { return &fakeSnapshots{made: map[string]provision.Snapshot{}} }

func (f *fakeSnapshots) CreateSnapshot(_ context.Context, s provision.SnapshotRequest) (provision.Snapshot, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.err != nil {
		return provision.Snapshot{}, f.err
	}
	f.last = s
	id := s.Parameters.ID(s.Source, s.Name, 1)
	have, ok := f.made[id.String()]
	if ok && have.Source != s.Source.String() {
		return provision.Snapshot{}, fault.Errorf(fault.Exists, "of another source")
	}
	f.made[id.String()] = provision.Snapshot{ID: id, Source: s.Source.String(), Bytes: 7, Cut: time.Unix(1, 0), Ready: true}
	return f.made[id.String()], nil
}

func (f *fakeSnapshots) DeleteSnapshot(_ context.Context, r provision.DeleteSnapshotRequest) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.made, r.ID.String())
	return f.err
}

func (f *fakeSnapshots) GetSnapshot(_ context.Context, id volume.SnapshotID, _ provision.Secret) (provision.Snapshot, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	s, ok := f.made[id.String()]
	if !ok {
		return s, fault.Errorf(fault.NotFound, "no record of %s", id)
	}
	return s, f.err
}

func (f *fakeSnapshots) ListSnapshots(_ context.Context, q provision.ListSnapshotsRequest) (list []provision.Snapshot, next string, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.query = q
	for _, s := range f.made {
		list = append(list, s)
	}
	return list, "next", f.err
}

// fakeBackends has three backends: "default" works with the driver's credentials, "tenants" with the request's, and volumes of "cached" use
// rclone.
type fakeBackends struct{}

func (fakeBackends) Backend(name string) (backend.Backend, error) {
	switch name {
	case "default":
		return backend.Backend{Name: name, ControllerCredentials: credentials.SourceDriver}, nil
	case "cached":
		return backend.Backend{Name: name, ControllerCredentials: credentials.SourceDriver, DefaultClient: "rclone"}, nil
	case "tenants":
		return backend.Backend{Name: name, ControllerCredentials: credentials.SourceSecret}, nil
	}
	return backend.Backend{}, fault.Errorf(fault.Precondition, "there is no backend %q in the driver's config", name)
}

// CheckClaims knows one endpoint, that of all its backends.
func (fakeBackends) CheckClaims(name string, claims []volume.Claim) error {
	for _, c := range claims {
		if c.Kind == volume.ClaimEndpoint && c.Value != "https://s3.example" {
			return fault.Errorf(fault.Precondition, "%s: backend %s is elsewhere", c.Field, name)
		}
	}
	return nil
}

// fakeMounter keeps publications in memory.
type fakeMounter struct {
	mu         sync.Mutex
	published  map[string]mount.Request // by target
	conditions []mount.Condition        // of every volume and backend
	last       mount.Request
	calls      int
	err        error
	panics     any
	block      chan struct{}
	entered    chan struct{}
	stubborn   bool // with block: do not even listen to ctx
}

func newFakeMounter() *fakeMounter { return &fakeMounter{published: map[string]mount.Request{}} }

func (f *fakeMounter) enter(ctx context.Context) error {
	if f.entered != nil {
		f.entered <- struct{}{}
	}
	if f.block != nil {
		done := ctx.Done()
		if f.stubborn {
			done = nil
		}
		select {
		case <-f.block:
		case <-done:
			return context.Cause(ctx)
		}
	}
	if f.panics != nil {
		panic(f.panics)
	}
	return f.err
}

func (f *fakeMounter) Publish(ctx context.Context, p mount.Request, refused error) error {
	if refused != nil {
		return f.refuse(p.Target, refused)
	}
	f.mu.Lock()
	f.calls++
	f.last = p
	f.mu.Unlock()
	if err := f.enter(ctx); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.published[p.Target] = p
	return nil
}

func (f *fakeMounter) refuse(target string, err error) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, ok := f.published[target]; ok && fault.Is(err, fault.Precondition) {
		return fault.Errorf(fault.Unavailable, "%w", err)
	}
	return err
}

func (f *fakeMounter) Unpublish(ctx context.Context, _, target string) error {
	if err := f.enter(ctx); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.published, target)
	return nil
}

func (f *fakeMounter) Stats(ctx context.Context, volumeID, path string) (mount.Stats, error) {
	if err := f.enter(ctx); err != nil {
		return mount.Stats{}, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if p, ok := f.published[path]; !ok || p.VolumeID != volumeID {
		return mount.Stats{}, fault.Errorf(fault.NotFound, "not published there")
	}
	return mount.Stats{TotalBytes: 6, UsedBytes: 1, AvailableBytes: 5, Inodes: 60, InodesUsed: 10, InodesFree: 50}, nil
}

func (fakeBackends) Clients() client.Set { return client.Set{} }

func (f *fakeMounter) VolumeHealth(ctx context.Context, volumeID, target string) ([]mount.Condition, error) {
	if err := f.enter(ctx); err != nil {
		return nil, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for path, p := range f.published {
		if p.VolumeID == volumeID && (target == "" || target == path) {
			return f.conditions, nil
		}
	}
	return nil, fault.Errorf(fault.NotFound, "not published there")
}

func (f *fakeMounter) StorageHealth(ctx context.Context) ([]mount.Condition, error) {
	return f.conditions, f.enter(ctx)
}
