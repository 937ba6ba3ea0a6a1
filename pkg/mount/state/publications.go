package state

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/conc"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
)

// Publications are the records of targets.
type Publications struct {
	base
	records publicationFiles
	shared  *conc.Reader[[]Publication]
}

func newPublications(b base) Publications {
	return Publications{b, publicationFiles{b.files}, &conc.Reader[[]Publication]{}}
}

// Get returns the record of a target; ok is false if there is none.
func (s Publications) Get(ctx context.Context, target string) (p Publication, ok bool, err error) {
	return find(ctx, s.base, func() (Publication, bool, error) { return s.records.get(target) })
}

// All returns the records of all targets. Concurrent callers share a read that began after they called, and its result: do not modify
// it.
func (s Publications) All(ctx context.Context) ([]Publication, error) {
	return s.shared.Read(ctx, func(ctx context.Context) ([]Publication, error) {
		ctx, cancel := context.WithTimeout(ctx, readBound)
		defer cancel()
		all, err := get(ctx, s.base, s.records.all)
		return slices.Clip(all), err
	})
}

// Of returns those of one mount.
func (s Publications) Of(ctx context.Context, name string) ([]Publication, error) {
	all, err := s.All(ctx)
	return slices.DeleteFunc(slices.Clone(all), func(p Publication) bool { return p.Mount != name }), err
}

// Write writes the record of a target.
func (s Publications) Write(ctx context.Context, p Publication) error {
	return s.do(ctx, func() error { return s.records.write(p) })
}

// Remove removes the record of a target.
func (s Publications) Remove(ctx context.Context, target string) error {
	return s.do(ctx, func() error { return s.records.remove(target) })
}

// Succeed moves the publications of a mount's predecessors to it. The file systems at their targets follow later.
func (s Publications) Succeed(ctx context.Context, m Mount) error {
	return s.do(ctx, func() error { return s.succeed(m) })
}

// RemoveStale removes the records of publications whose target and whose mount are gone, and that are older than age: the
// CO does not unpublish them any more.
func (s Publications) RemoveStale(ctx context.Context, age time.Duration) error {
	removed, err := get(ctx, s.base, func() (removed []Publication, err error) {
		all, err := s.records.all()
		if err != nil {
			return nil, err
		}
		for _, p := range all {
			if time.Since(p.Created) < age {
				continue
			}
			_, terr := host.Inspect(p.Target) // the file system there may be unresponsive
			_, merr := os.Lstat(s.MountDir(p.Mount))
			if errors.Is(terr, fs.ErrNotExist) && errors.Is(merr, fs.ErrNotExist) {
				if err := s.records.remove(p.Target); err != nil {
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

// publicationFiles reads and writes the records of targets. Like those of files, its methods do plain file I/O.
type publicationFiles struct{ files }

func (f publicationFiles) of(name string) ([]Publication, error) {
	all, err := f.all()
	return slices.DeleteFunc(all, func(p Publication) bool { return p.Mount != name }), err
}

func (f publicationFiles) get(target string) (p Publication, ok bool, err error) {
	file := f.publicationFile(target)
	p, ok, err = f.publications.read(f.files, file)
	if ok && p.Target != target {
		return p, false, fmt.Errorf("%s describes another target, %q", file, p.Target)
	}
	return p, ok, err
}

func (f publicationFiles) write(p Publication) error {
	file := f.publicationFile(p.Target)
	defer f.publications.forget(file)
	return writeJSON(file, p)
}

func (f publicationFiles) remove(target string) error {
	return ignoreMissing(os.Remove(f.publicationFile(target)))
}

func (f publicationFiles) all() ([]Publication, error) {
	entries, err := os.ReadDir(f.publicationsDir())
	if err != nil {
		return nil, err
	}
	var all []Publication
	for _, e := range entries {
		if !strings.HasSuffix(e.Name(), ".json") {
			continue
		}
		p, ok, err := f.publications.read(f.files, filepath.Join(f.publicationsDir(), e.Name()))
		if err != nil {
			return nil, err
		}
		if ok {
			all = append(all, p)
		}
	}
	f.publications.prune(len(entries))
	return all, nil
}
