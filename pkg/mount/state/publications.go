package state

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/conc"
	"github.com/s3-csi/s3-csi-driver/pkg/failpoint"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// readBound bounds a read of all publications, which several callers may share.
const readBound = 30 * time.Second

// Publications are the records of targets.
type Publications struct {
	store  *Store
	shared *conc.Reader[[]Publication]
}

// Get returns the record of a target; ok is false if there is none.
func (r Publications) Get(_ context.Context, target string) (p Publication, ok bool, err error) {
	file := hashed(publicationsDir, target)
	p, ok, err = r.store.publications.read(r.store, file)
	if ok && p.Target != target {
		return p, false, fmt.Errorf("%s describes another target, %q", filepath.Join(r.store.Dir, file), p.Target)
	}
	return p, ok, err
}

// All returns the records of all targets. Concurrent callers share a read that began after they called, and its result: do not modify
// it.
func (r Publications) All(ctx context.Context) ([]Publication, error) {
	return r.shared.Read(ctx, func(context.Context) ([]Publication, error) { return r.readAll() })
}

func (r Publications) readAll() (all []Publication, err error) {
	names, err := r.store.readDir(publicationsDir)
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		if !strings.HasSuffix(name, ".json") {
			continue
		}
		p, ok, err := r.store.publications.read(r.store, filepath.Join(publicationsDir, name))
		if err != nil {
			return nil, err
		}
		if ok {
			all = append(all, p)
		}
	}
	r.store.publications.prune(len(names))
	return slices.Clip(all), nil
}

// Of returns those of one mount.
func (r Publications) Of(ctx context.Context, name string) ([]Publication, error) {
	all, err := r.All(ctx)
	return slices.DeleteFunc(slices.Clone(all), func(p Publication) bool { return p.Mount != name }), err
}

// Write writes the record of a target.
func (r Publications) Write(_ context.Context, p Publication) error {
	file := hashed(publicationsDir, p.Target)
	defer r.store.publications.forget(file)
	return r.store.writeRecord(file, p)
}

// Remove removes the record of a target.
func (r Publications) Remove(_ context.Context, target string) error {
	return r.store.removeRecord(hashed(publicationsDir, target))
}

// Succeed moves the publications of a mount's predecessors to it. The file systems at their targets follow later.
func (r Publications) Succeed(ctx context.Context, m Mount) error {
	for _, former := range m.Predecessors {
		old, ok, err := r.store.Mount(ctx, former)
		if err != nil && !errors.Is(err, ErrDamaged) {
			return err
		}
		if ok && err == nil && !old.Superseded {
			if err := r.store.Supersede(ctx, &old); err != nil {
				return err
			}
			failpoint.Here("succeed.superseded")
		}
		moved, err := r.Of(ctx, former)
		if err != nil {
			return err
		}
		for _, p := range moved {
			p.Mount = m.Name
			if err := r.Write(ctx, p); err != nil {
				return err
			}
			failpoint.Here("succeed.moved")
		}
	}
	return nil
}

// RemoveStale removes the records of publications whose target and whose mount are gone, and that are older than age: the
// CO does not unpublish them any more.
func (r Publications) RemoveStale(ctx context.Context, age time.Duration) error {
	all, err := r.All(ctx)
	if err != nil {
		return err
	}
	for _, p := range all {
		if time.Since(p.Created) < age || r.store.Exists(ctx, p.Mount) {
			continue
		}
		gone, err := get(ctx, r.store, func() (bool, error) {
			_, err := host.Inspect(p.Target) // the file system there may be unresponsive
			return errors.Is(err, fs.ErrNotExist), nil
		})
		if err == nil && gone {
			err = r.Remove(ctx, p.Target)
		}
		if err != nil {
			return err
		}
		if gone {
			klog.FromContext(ctx).Info("Removed stale publication record", "volume", p.VolumeID, "target", p.Target)
		}
	}
	return nil
}

// Usage is what is known of the usage of a volume. Its record outlives the volume's publications on the node, so that a volume is not
// measured more often than its interval says because pods come and go.
type Usage struct {
	VolumeID string `json:"volumeID"`
	// Setting and CapacityBytes are what the volume's record said at Read, or else its volume context; the capacity is 0 if it is unknown.
	Setting       volume.Usage `json:"setting"`
	CapacityBytes int64        `json:"capacityBytes,omitempty"`
	Read          time.Time    `json:"read,omitzero"`
	// Bytes and Objects were counted at Measured (zero: not yet). They are a minimum if the listing was cut (AtLeast).
	Measured time.Time `json:"measured,omitzero"`
	Bytes    int64     `json:"bytes,omitempty"`
	Objects  int64     `json:"objects,omitempty"`
	AtLeast  bool      `json:"atLeast,omitempty"`
	// NotBefore is when the volume may be listed again. Retry is when that may be tried again after a number of Failures.
	NotBefore time.Time `json:"notBefore,omitzero"`
	Retry     time.Time `json:"retry,omitzero"`
	Failures  int       `json:"failures,omitempty"`
}

// Usages are the records of the usage of volumes.
type Usages struct{ store *Store }

// All returns the readable records. A damaged one is as good as none: the volume is measured again, and the record replaced.
func (r Usages) All(context.Context) (all []Usage, err error) {
	names, err := r.store.readDir(usageDir)
	for _, name := range names {
		var u Usage
		if !strings.HasSuffix(name, ".json") {
			continue
		}
		if ok, err := r.store.readRecord(filepath.Join(usageDir, name), &u); ok && err == nil {
			all = append(all, u)
		}
	}
	return all, err
}

// Write writes the record of a volume.
func (r Usages) Write(_ context.Context, u Usage) error {
	return r.store.writeRecord(hashed(usageDir, u.VolumeID), u)
}

// Remove removes the record of a volume.
func (r Usages) Remove(_ context.Context, volumeID string) error {
	return r.store.removeRecord(hashed(usageDir, volumeID))
}
