package runner

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"maps"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/launcher"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
)

// uids allocates names and uids for mounts, and kills processes of uids that belong to no mount.
type uids struct {
	*Options
	mu          sync.Mutex
	quarantined map[uint32]bool // uids whose leftover processes are being killed
}

// allocate allocates the generation, the uid and the directories of a new mount. Uid and directories are those of the spare, if it has
// one.
func (u *uids) allocate(ctx context.Context, volumeID string, spec mount.Spec, cl client.Client, spare *state.Spare) (state.Mount, error) {
	taken := map[uint32]bool{}
	for {
		m, err := u.reserve(ctx, volumeID, spec, cl, taken, spare)
		if err != nil || spare != nil {
			return m, err
		}
		free, err := u.Launcher.Free(ctx, m.UID)
		if err == nil && free {
			return m, nil
		}
		taken[m.UID] = true
		cctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupBound)
		rerr := u.Store.Remove(cctx, m.Name)
		cancel()
		if err := errors.Join(err, rerr); err != nil {
			return state.Mount{}, err
		}
	}
}

// reserve makes a mount's directories, which mark its name and its uid as used.
func (u *uids) reserve(ctx context.Context, volumeID string, spec mount.Spec, cl client.Client, taken map[uint32]bool, spare *state.Spare) (state.Mount, error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	fail := func(err error) (state.Mount, error) {
		return state.Mount{}, fmt.Errorf("allocating a new mount: %w", err)
	}
	key := spec.Key()
	generation, err := u.Store.NextGeneration(ctx, key)
	if err != nil {
		return fail(err)
	}
	name := mount.Name(key, generation)
	m := state.Mount{
		Name: name, Key: key, Generation: generation, Phase: state.Starting, VolumeID: volumeID,
		Source: mount.SourceName(volumeID, name), Client: cl.Name, Spec: spec, Created: time.Now(),
	}
	if spare != nil {
		m.UID, m.Spare = spare.UID, spare.Name
	} else if m.UID, err = u.unused(ctx, key, taken); err != nil {
		return fail(err)
	}
	if err := u.Store.Make(ctx, m); err != nil {
		cctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupBound)
		defer cancel()
		return state.Mount{}, mount.WithCleanupError(fmt.Errorf("making the directories of mount %s: %w", name, err), u.Store.Remove(cctx, name))
	}
	return m, nil
}

// unused returns a uid that no mount and no spare has, and that is not taken. Call under mu.
func (u *uids) unused(ctx context.Context, key string, taken map[uint32]bool) (uint32, error) {
	used, err := u.Store.UIDs(ctx)
	if err != nil {
		return 0, err
	}
	maps.Copy(used, taken)
	maps.Copy(used, u.quarantined)
	return u.freeUID(key, used)
}

// freeUID returns an unused uid of the range. The search starts at a hash of the key, so that a volume tends to keep its uid.
func (u *uids) freeUID(key string, used map[uint32]bool) (uint32, error) {
	h := fnv.New32a()
	h.Write([]byte(key))
	size := uint64(u.UIDs.Last-u.UIDs.First) + 1
	for i := range size {
		if uid := u.UIDs.First + uint32((uint64(h.Sum32())+i)%size); !used[uid] {
			return uid, nil
		}
	}
	return 0, fault.See(pageClients, fault.Errorf(fault.Exhausted, "all %d uids of --uid-range are in use by mounts: unpublish volumes or widen the range", size))
}

// KillOrphans kills helpers that belong to no mount: their directories were removed by a crash or by hand. Those that still serve a
// mounted file system are left alone.
func (r *Runner) KillOrphans(ctx context.Context) error {
	units, err := r.Launcher.List(ctx)
	if err != nil {
		return fmt.Errorf("listing helpers: %w", err)
	}
	orphans, err := r.uids.quarantine(ctx, units)
	if err != nil {
		return err
	}
	var errs []error
	for _, o := range orphans {
		klog.FromContext(ctx).Info("Killing orphaned helper", "unit", o.Name, "uid", o.UID)
		kctx, cancel := context.WithTimeout(ctx, cleanupBound) // a helper that is blocked in the kernel must not delay the others
		errs = append(errs, r.Launcher.Kill(kctx, o.UID))
		cancel()
		r.uids.mu.Lock()
		delete(r.uids.quarantined, o.UID)
		r.uids.mu.Unlock()
	}
	return errors.Join(errs...)
}

// quarantine returns the units that belong to no mount, and bars their uids until they are killed: a new mount of the same volume
// tends to get the same uid, and would be killed instead.
func (u *uids) quarantine(ctx context.Context, units []launcher.UnitInfo) (orphans []launcher.UnitInfo, err error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	used, err := u.Store.UIDs(ctx) // after the units were listed: a mount's directory is made before its unit
	if err != nil {
		return nil, err
	}
	mounts, err := u.Namespace.Mounts(ctx)
	if err != nil {
		return nil, err
	}
	for _, mnt := range mounts {
		if uid, ok := mount.ClientUID(mnt); ok {
			used[uid] = true
		}
	}
	u.quarantined = map[uint32]bool{}
	for _, info := range units {
		if !used[info.UID] && info.UID >= u.UIDs.First && info.UID <= u.UIDs.Last {
			orphans = append(orphans, info)
			u.quarantined[info.UID] = true
		}
	}
	return orphans, nil
}
