package mount

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"maps"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/failpoint"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/launcher"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// birth is what a new mount is made from.
type birth struct {
	volumeID string
	identity string // for people
	spec     Spec
	supply   *supply
	// former are the mounts whose publications it is to take over, and rotated the identity that they serve.
	former  []string
	rotated string
}

// start brings a new mount up and returns when a directory read through it has answered. On failure nothing of it is
// left. The key's lock is held.
func (m *Manager) start(ctx context.Context, b birth) (record, error) {
	spec := b.spec
	cl, err := m.clientOf(spec.Client)
	if err != nil {
		return record{}, err
	}
	be, err := m.Backends.Backend(spec.Backend)
	if err != nil {
		return record{}, err
	}
	release, err := m.starts.take(ctx, spec.Backend)
	if err != nil {
		return record{}, err
	}
	defer release()
	defer m.begin(ctx, b.supply)() // it takes as long as all else that a helper's start waits for
	rec, err := m.allocate(ctx, b.volumeID, spec, cl)
	if err != nil {
		return record{}, err
	}
	rec.Former, rec.Rotated = b.former, b.rotated
	failpoint.Here("start.allocated")
	if err := m.bringUp(ctx, &rec, cl, be, b.supply); err != nil {
		uctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoBound)
		defer cancel()
		return record{}, undone(err, m.discard(uctx, rec))
	}
	m.states.set(rec.Name, rec.Client, stateServing)
	m.healed.first(rec.Name) // nothing of it is anywhere yet
	m.watchers.follow(rec.Name)
	klog.FromContext(ctx).Info("Mounted", "mount", rec.Name, "client", cl.Name, "bucket", spec.Bucket, "prefix", spec.Prefix,
		"uid", rec.UID, "identity", b.identity, "session", b.supply.order.Kind, "role", b.supply.order.RoleARN, "took", time.Since(rec.Created).Round(time.Millisecond))
	return rec, nil
}

// bringUp does what can fail, and leaves the undoing to start.
func (m *Manager) bringUp(ctx context.Context, rec *record, cl client.Client, be backend.Backend, s *supply) error {
	var (
		spec   = rec.Spec
		fuse   *os.File
		g, gtx = errgroup.WithContext(ctx)
	)
	// The session is made and tried while the helper starts; the client is started only with one that does.
	g.Go(func() error { return m.prove(gtx, s, be, spec) })
	// These two are short and leave something behind, so they are not cancelled but waited for when the session is refused:
	// what is given up on half-way is done after it was undone.
	g.Go(func() error { return m.launchHelper(ctx, *rec, be) })
	g.Go(func() (err error) {
		fuse, err = m.mountSource(ctx, *rec)
		return err
	})
	if err := g.Wait(); err != nil {
		if fuse != nil {
			fuse.Close()
		}
		return err
	}
	digest, err := be.MountDigest()
	if err == nil {
		err = m.describeFor(rec, cl, be, digest, s.bucket)
	}
	if err != nil {
		fuse.Close()
		return err
	}
	failpoint.Here("start.mounted")
	var up errgroup.Group
	kept := *rec
	up.Go(func() error { // on a disk, which takes its time
		return m.do(ctx, func() error { return m.store.keepRecord(kept, keepsOnDisk(cl, spec)) })
	})
	up.Go(func() error { return m.serve(ctx, *rec, s, fuse) })
	if err := up.Wait(); err != nil {
		return err
	}
	failpoint.Here("start.serving")
	rec.Phase = phaseRunning
	return m.remember(ctx, rec)
}

// allocate gives a mount its generation, uid and directories.
func (m *Manager) allocate(ctx context.Context, volumeID string, spec Spec, cl client.Client) (record, error) {
	taken := map[uint32]bool{}
	for {
		rec, err := m.reserve(ctx, volumeID, spec, cl, taken)
		if err != nil {
			return record{}, err
		}
		free, err := m.Launcher.Free(ctx, rec.UID)
		if err == nil && free {
			return rec, nil
		}
		taken[rec.UID] = true
		uctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoBound)
		rerr := m.do(uctx, func() error { return m.store.remove(rec.Name) })
		cancel()
		if err := errors.Join(err, rerr); err != nil {
			return record{}, err
		}
	}
}

// reserve makes a mount's directories, by which others see that its name and its uid are taken.
func (m *Manager) reserve(ctx context.Context, volumeID string, spec Spec, cl client.Client, taken map[uint32]bool) (record, error) {
	m.alloc.Lock()
	defer m.alloc.Unlock()
	key := spec.Key()
	condemned := maps.Clone(m.condemned) // which others change when this is given up
	var rec record
	if err := m.do(ctx, func() error {
		generation, err := m.store.nextGeneration(key)
		if err != nil {
			return err
		}
		name := mountName(key, generation)
		rec = record{
			Name: name, Key: key, Generation: generation, Phase: phaseStarting, VolumeID: volumeID,
			Source: sourceName(volumeID, name), Client: cl.Name, Spec: spec, Created: time.Now(),
		}
		used, err := m.store.uids()
		if err != nil {
			return err
		}
		maps.Copy(used, taken)
		maps.Copy(used, condemned)
		rec.UID, err = m.freeUID(key, used)
		return err
	}); err != nil {
		return record{}, fmt.Errorf("naming a new mount: %w", err)
	}
	if err := m.do(ctx, func() error { return m.store.make(rec) }); err != nil {
		uctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoBound)
		defer cancel()
		return record{}, undone(fmt.Errorf("making the mount's directories: %w", err), m.do(uctx, func() error { return m.store.remove(rec.Name) }))
	}
	return rec, nil
}

// freeUID finds a uid of the range that is not used. It begins at a place of the key's, so that one volume tends to keep its
// uid.
func (m *Manager) freeUID(key string, used map[uint32]bool) (uint32, error) {
	h := fnv.New32a()
	h.Write([]byte(key))
	size := uint64(m.UIDs.Last-m.UIDs.First) + 1
	for i := range size {
		if uid := m.UIDs.First + uint32((uint64(h.Sum32())+i)%size); !used[uid] {
			return uid, nil
		}
	}
	return 0, fault.Errorf(fault.Exhausted, "all %d user ids of --uid-range are taken by mounts: unpublish volumes or widen the range", size)
}

// launchHelper starts the mount's helper, which waits for a client to run.
func (m *Manager) launchHelper(ctx context.Context, rec record, be backend.Backend) (err error) {
	cl, err := m.clientOf(rec.Client)
	if err != nil {
		return err
	}
	options, err := rec.Spec.options()
	if err != nil {
		return err
	}
	if err := m.writeCA(ctx, rec.Name, be); err != nil {
		return err
	}
	var socket *os.File
	err = m.do(ctx, func() (err error) {
		if err := m.store.remountHelperDir(rec.Name, int(rec.UID)); err != nil {
			return err
		}
		if err := ignoreMissing(os.Remove(m.store.socket(rec.Name))); err != nil { // of a helper that died
			return err
		}
		socket, err = helper.Listen(m.store.socket(rec.Name))
		return err
	})
	if err != nil {
		return fmt.Errorf("preparing the helper: %w", err)
	}
	defer socket.Close()
	failpoint.Here("launch.listening")
	err = m.Launcher.Start(ctx, launcher.Unit{
		Name: rec.Name, Description: fmt.Sprintf("S3 volume %s (%s)", rec.VolumeID, rec.Client),
		UID: rec.UID, GID: rec.UID, StateDir: m.store.helperDir(rec.Name), CacheDir: m.store.cacheDir(rec.Name), Socket: socket,
		Callers: cl.CallerPIDs, Needs: be.Addresses(rec.Spec.Source), Limits: m.limits(rec.Spec, cl, options),
	})
	if err != nil {
		return fmt.Errorf("starting the helper: %w", err)
	}
	failpoint.Here("launch.started")
	return nil
}

// limits are what a mount's processes may use: what its volume says, else what the node's operator does, though never less
// memory than the client needs for its options.
func (m *Manager) limits(spec Spec, cl client.Client, options []volume.Option) launcher.Limits {
	l := launcher.Limits{MemoryMax: spec.MemoryLimit, CPUWeight: spec.CPUWeight, TasksMax: spec.TasksMax}
	if l.MemoryMax == 0 && m.Limits.MemoryMax != 0 {
		l.MemoryMax = max(m.Limits.MemoryMax, cl.NeedsMemory(options))
	}
	return l
}

// What an inline volume may ask for where the operator leaves it to systemd: as much as every service has, and as many tasks as
// --tasks-max is by default, because nobody knows systemd's number.
const (
	inlineCPUWeight = 100
	inlineTasks     = 1024
)

// share is what the author of a pod may ask for: no more of the node than volumes get that say nothing.
func (m *Manager) share() client.Share {
	s := client.Share{Memory: m.Limits.MemoryMax, CPUWeight: m.Limits.CPUWeight, Tasks: m.Limits.TasksMax}
	if s.CPUWeight == 0 {
		s.CPUWeight = inlineCPUWeight
	}
	if s.Tasks == 0 {
		s.Tasks = inlineTasks
	}
	return s
}

// writeCA puts the certificates that the backend is trusted by where the client can read them.
func (m *Manager) writeCA(ctx context.Context, name string, be backend.Backend) error {
	if be.CAFile == "" {
		return nil
	}
	ca, err := be.CA()
	if err != nil {
		return err
	}
	return m.do(ctx, func() error { return os.WriteFile(m.store.caFile(name), []byte(ca), 0o644) }) // for the client's uid
}

// mountSource mounts a new FUSE file system on the source. The descriptor is for the client.
func (m *Manager) mountSource(ctx context.Context, rec record) (*os.File, error) {
	drop := func(f *os.File) { f.Close() } // which leaves a dead mount for whoever undoes the start
	fuse, err := inHost(ctx, m.Namespace, "mounting "+rec.Source, drop, func() (*os.File, error) {
		source, err := host.OpenDir(m.store.sourceDir(rec.Name))
		if err != nil {
			return nil, err
		}
		defer source.Close()
		fuse, err := host.OpenFuse()
		if err != nil {
			return nil, err
		}
		err = host.MountFuse(fuse, source, host.FuseMount{
			Source: rec.Source, UID: rec.UID, GID: rec.UID, ReadOnly: rec.Spec.ReadOnly, SELinuxContext: rec.Spec.SELinuxContext,
		})
		if err == nil && ctx.Err() != nil { // nobody waits for it any more
			err = errors.Join(ctx.Err(), host.Unmount(m.store.sourceDir(rec.Name)))
		}
		if err != nil {
			fuse.Close()
			return nil, err
		}
		failpoint.Here("mount.mounted")
		return fuse, nil
	})
	if err != nil {
		return nil, fmt.Errorf("mounting: %w", err)
	}
	return fuse, nil
}

// serve has the helper run the client on the FUSE descriptor, which it takes over, and waits until the mount answers. A supply
// whose keys nobody has made yet is for a helper that makes its own.
func (m *Manager) serve(ctx context.Context, rec record, s *supply, fuse *os.File) error {
	peer := m.peer(rec.Name)
	status, err := peer.Start(ctx, helper.StartRequest{Client: rec.Client, Command: rec.Command, Keys: s.keys, Order: s.further()}, fuse)
	failpoint.Here("serve.started")
	fuse.Close() // only after ours is closed does the client's death end the connection
	if err != nil {
		return fmt.Errorf("starting client %s: %w", rec.Client, err)
	}
	return m.awaitReady(ctx, rec, peer, status)
}

// invocation fills in everything that the spec's author left open.
func (m *Manager) invocation(rec record, cl client.Client, be backend.Backend, bucket backend.BucketInfo, options []volume.Option) client.Invocation {
	spec := rec.Spec
	in := client.Invocation{
		Binary: filepath.Join(m.ClientDir, cl.Binary), Bucket: spec.Bucket, Prefix: spec.Prefix, Region: bucket.Region,
		Endpoint: be.Endpoint, PathStyle: be.PathStyle, ReadOnly: spec.ReadOnly, Options: options,
		ExpectedBucketOwner: bucket.Owner, UserAgent: "s3-csi-driver/" + m.Version,
		UID: rec.UID, GID: rec.UID, DirMode: 0o777, FileMode: 0o666,
		StateDir: m.store.helperDir(rec.Name), CacheDir: m.store.cacheDir(rec.Name),
		MemoryLimit: m.limits(spec, cl, options).MemoryMax, Cache: spec.Cache, CacheSize: spec.CacheSize,
		ConditionalWrites: !be.SingleController,
	}
	if be.CAFile != "" {
		in.CAFile = m.store.caFile(rec.Name)
	}
	if spec.MountGroup != nil {
		in.GID, in.DirMode, in.FileMode = *spec.MountGroup, 0o770, 0o660
	}
	for _, given := range []struct{ to, from *uint32 }{{&in.UID, spec.UID}, {&in.GID, spec.GID}, {&in.DirMode, spec.DirMode}, {&in.FileMode, spec.FileMode}} {
		if given.from != nil {
			*given.to = *given.from
		}
	}
	return in
}

// discard clears away a mount that no pod ever wrote to. It can be repeated.
func (m *Manager) discard(ctx context.Context, rec record) error {
	if !validName(rec.Name) { // its directories would be everybody's
		return fmt.Errorf("clearing away a mount: %q is not the name of one", rec.Name)
	}
	if rec.UID != 0 {
		if err := m.Launcher.Kill(ctx, rec.UID); err != nil {
			return fmt.Errorf("ending the helper of mount %s: %w", rec.Name, err)
		}
	}
	failpoint.Here("discard.killed")
	if err := m.unmountSource(ctx, rec, false); err != nil {
		return err
	}
	failpoint.Here("discard.unmounted")
	if err := m.do(ctx, func() error { return m.store.remove(rec.Name) }); err != nil {
		return fmt.Errorf("clearing away mount %s: %w", rec.Name, err)
	}
	m.forget(rec.Name)
	return nil
}
