package state

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"time"

	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/host"
)

// Publications are the records of targets.
type Publications struct{ base }

// Get returns the record of a target; ok is false if there is none.
func (s Publications) Get(ctx context.Context, target string) (p Publication, ok bool, err error) {
	type found struct {
		p  Publication
		ok bool
	}
	v, err := get(ctx, s.base, func() (v found, err error) { v.p, v.ok, err = s.publication(target); return v, err })
	return v.p, v.ok, err
}

// All returns the records of all targets.
func (s Publications) All(ctx context.Context) ([]Publication, error) {
	return get(ctx, s.base, s.allPublications)
}

// Of returns those of one mount.
func (s Publications) Of(ctx context.Context, name string) ([]Publication, error) {
	return get(ctx, s.base, func() ([]Publication, error) { return s.publicationsOf(name) })
}

// Write writes the record of a target.
func (s Publications) Write(ctx context.Context, p Publication) error {
	return s.do(ctx, func() error { return s.writePublication(p) })
}

// Remove removes the record of a target.
func (s Publications) Remove(ctx context.Context, target string) error {
	return s.do(ctx, func() error { return s.removePublication(target) })
}

// Succeed moves the publications of a mount's predecessors to it. The file systems at their targets follow later.
func (s Publications) Succeed(ctx context.Context, m Mount) error {
	return s.do(ctx, func() error { return s.succeed(m) })
}

// RemoveStale removes the records of publications whose target and whose mount are gone, and that are older than age: the
// CO does not unpublish them any more.
func (s Publications) RemoveStale(ctx context.Context, age time.Duration) error {
	removed, err := get(ctx, s.base, func() (removed []Publication, err error) {
		all, err := s.allPublications()
		if err != nil {
			return nil, err
		}
		for _, p := range all {
			if time.Since(p.Created) < age {
				continue
			}
			_, terr := host.Inspect(p.Target) // what is mounted there may be unresponsive
			_, merr := os.Lstat(s.MountDir(p.Mount))
			if errors.Is(terr, fs.ErrNotExist) && errors.Is(merr, fs.ErrNotExist) {
				if err := s.removePublication(p.Target); err != nil {
					return removed, err
				}
				removed = append(removed, p)
			}
		}
		return removed, nil
	})
	for _, p := range removed {
		klog.FromContext(ctx).Info("Removed stale publication record", "volume", p.VolumeID, "target", p.Target)
	}
	return err
}
