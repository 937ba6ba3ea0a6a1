// Package uids allocates names, uids and directories for mounts and for spare helpers, and kills processes whose uid belongs to neither.
package uids

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"maps"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/launcher"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
)

const (
	cleanupBound = 20 * time.Second // for the clean-up of a failed allocation, and for the end of a process
	page         = "docs/reference/errors.md#publishing-clients-and-the-node"
)

// Launcher knows the processes of uids.
type Launcher interface {
	// Alive reports whether a process of an earlier mount has a uid.
	Alive(ctx context.Context, uid uint32) (bool, error)
	// Kill kills the processes of a uid and returns when they have exited.
	Kill(ctx context.Context, uid uint32) error
	// List returns what was started and still exists, running or not.
	List(ctx context.Context) ([]launcher.UnitInfo, error)
}

// Allocator allocates uids of a range.
type Allocator struct {
	Namespace *host.Namespace
	Launcher  Launcher
	Store     *state.Store
	Range     launcher.UIDRange

	mu          sync.Mutex
	quarantined map[uint32]bool // uids whose leftover processes are being killed
}

// Allocate allocates the generation, the uid and the directories of a new mount, of which volume, client and spec are set. Uid and
// directories are those of the spare, if it has one.
func (a *Allocator) Allocate(ctx context.Context, m state.Mount, spare *state.Spare) (state.Mount, error) {
	if spare != nil {
		m.UID, m.Spare = spare.UID, spare.Name
		err := a.reserveMount(ctx, &m, nil)
		return m, err
	}
	err := a.untilUnused(ctx, func(taken map[uint32]bool) (uid uint32, remove func(context.Context) error, err error) {
		err = a.reserveMount(ctx, &m, taken)
		return m.UID, func(ctx context.Context) error { return a.Store.Remove(ctx, m.Name) }, err
	})
	return m, err
}

// AllocateSpare makes the directories of a new spare, which mark its uid as used.
func (a *Allocator) AllocateSpare(ctx context.Context) (spare state.Spare, err error) {
	err = a.untilUnused(ctx, func(taken map[uint32]bool) (uint32, func(context.Context) error, error) {
		if spare, err = a.makeSpare(ctx, taken); err != nil {
			return 0, nil, fmt.Errorf("allocating a new spare: %w", err)
		}
		return spare.UID, func(ctx context.Context) error { return a.Store.RemoveSpare(ctx, spare.Name) }, nil
	})
	return spare, err
}

// untilUnused allocates, and removes again, until there is a uid without processes. taken are those that have some.
func (a *Allocator) untilUnused(ctx context.Context, allocate func(taken map[uint32]bool) (uint32, func(context.Context) error, error)) error {
	for taken := map[uint32]bool{}; ; {
		uid, remove, err := allocate(taken)
		if err != nil {
			return err
		}
		alive, err := a.Launcher.Alive(ctx, uid)
		if err == nil && !alive {
			return nil
		}
		taken[uid] = true
		cctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupBound)
		rerr := remove(cctx)
		cancel()
		if err := errors.Join(err, rerr); err != nil {
			return err
		}
	}
}

// reserveMount makes a mount's directories, which mark its name and its uid as used. A mount without a spare gets a uid that is not taken.
func (a *Allocator) reserveMount(ctx context.Context, m *state.Mount, taken map[uint32]bool) (err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	m.Key = m.Spec.Key()
	if m.Generation, err = a.Store.NextGeneration(ctx, m.Key); err == nil && m.Spare == "" {
		m.UID, err = a.chooseUnused(ctx, m.Key, taken)
	}
	if err != nil {
		return fmt.Errorf("allocating a new mount: %w", err)
	}
	m.Name = mount.Name(m.Key, m.Generation)
	m.Phase, m.Source, m.Created = state.Starting, mount.SourceName(m.VolumeID, m.Name), time.Now()
	if err := a.Store.Make(ctx, *m); err != nil {
		cctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupBound)
		defer cancel()
		return mount.WithCleanupError(fmt.Errorf("making the directories of mount %s: %w", m.Name, err), a.Store.Remove(cctx, m.Name))
	}
	return nil
}

func (a *Allocator) makeSpare(ctx context.Context, taken map[uint32]bool) (state.Spare, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	uid, err := a.chooseUnused(ctx, "spare", taken)
	if err != nil {
		return state.Spare{}, err
	}
	return a.Store.MakeSpare(ctx, uid)
}

// chooseUnused returns a uid that no mount and no spare has, and that is not taken. Call under mu.
func (a *Allocator) chooseUnused(ctx context.Context, key string, taken map[uint32]bool) (uint32, error) {
	used, err := a.Store.UIDs(ctx)
	if err != nil {
		return 0, err
	}
	maps.Copy(used, taken)
	maps.Copy(used, a.quarantined)
	return a.freeUID(key, used)
}

// freeUID returns an unused uid of the range. The search starts at a hash of the key, so that a volume tends to keep its uid.
func (a *Allocator) freeUID(key string, used map[uint32]bool) (uint32, error) {
	h := fnv.New32a()
	h.Write([]byte(key))
	size := uint64(a.Range.Last-a.Range.First) + 1
	for i := range size {
		if uid := a.Range.First + uint32((uint64(h.Sum32())+i)%size); !used[uid] {
			return uid, nil
		}
	}
	return 0, fault.See(page, fault.Errorf(fault.Exhausted, "all %d uids of --uid-range are in use by mounts: unpublish volumes or widen the range", size))
}

// KillOrphans kills helpers that belong to no mount: their directories were removed by a crash or by hand. Those that still serve a
// mounted file system are left alone.
func (a *Allocator) KillOrphans(ctx context.Context) error {
	units, err := a.Launcher.List(ctx)
	if err != nil {
		return fmt.Errorf("listing helpers: %w", err)
	}
	orphans, err := a.quarantineOrphans(ctx, units)
	if err != nil {
		return err
	}
	var errs []error
	for _, o := range orphans {
		klog.FromContext(ctx).Info("Killing orphaned helper", "unit", o.Name, "uid", o.UID)
		kctx, cancel := context.WithTimeout(ctx, cleanupBound) // a helper that is blocked in the kernel must not delay the others
		errs = append(errs, a.Launcher.Kill(kctx, o.UID))
		cancel()
		a.mu.Lock()
		delete(a.quarantined, o.UID)
		a.mu.Unlock()
	}
	return errors.Join(errs...)
}

// quarantineOrphans returns the units that belong to no mount, and bars their uids until they are killed: a new mount of the same volume
// tends to get the same uid, and would be killed instead.
func (a *Allocator) quarantineOrphans(ctx context.Context, units []launcher.UnitInfo) (orphans []launcher.UnitInfo, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	used, err := a.Store.UIDs(ctx) // after the units were listed: a mount's directory is made before its unit
	if err != nil {
		return nil, err
	}
	mounts, err := a.Namespace.Mounts(ctx)
	if err != nil {
		return nil, err
	}
	for _, mnt := range mounts {
		if uid, ok := mount.ClientUID(mnt); ok {
			used[uid] = true
		}
	}
	a.quarantined = map[uint32]bool{}
	for _, info := range units {
		if !used[info.UID] && info.UID >= a.Range.First && info.UID <= a.Range.Last {
			orphans = append(orphans, info)
			a.quarantined[info.UID] = true
		}
	}
	return orphans, nil
}
