package podclient

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/osfile"
	"github.com/s3-csi/s3-csi-driver/pkg/podvolume"
)

const (
	sourcePrefix = "s3csi-pod:"
	recordSuffix = ".json"
	emptySuffix  = ".empty"
)

// idOf returns the id of the volume at a target.
func idOf(target string) string {
	sum := sha256.Sum256([]byte(target))
	return hex.EncodeToString(sum[:12])
}

// sourceOf is the source of a volume's mounts in mount tables.
func sourceOf(id string) string { return sourcePrefix + id }

// records are the files of volumes, and their places for mounts. Its methods enter the host's mount namespace.
type records struct {
	ns  *host.Namespace
	dir string
}

func (r records) mounts() string { return filepath.Join(r.dir, "mounts") }

// empty is the mount point of a volume's empty file system.
func (r records) empty(id string) string { return filepath.Join(r.mounts(), id) + emptySuffix }

// client is the mount point of the file system of a volume's n-th client.
func (r records) client(id string, n uint64) string {
	return filepath.Join(r.mounts(), id) + "." + strconv.FormatUint(n, 10)
}

func (r records) file(target string) string { return filepath.Join(r.dir, idOf(target)) + recordSuffix }

func (r records) prepare(ctx context.Context) error {
	return r.ns.Do(ctx, "preparing "+r.dir, func() error {
		if err := os.MkdirAll(r.mounts(), 0o700); err != nil {
			return err
		}
		return host.SharedMountpoint(r.mounts())
	})
}

func (r records) get(ctx context.Context, target string) (v podvolume.Volume, ok bool, err error) {
	file := r.file(target)
	v, err = host.Call(ctx, r.ns, "reading "+file, nil, func() (podvolume.Volume, error) { return readRecord(file) })
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return v, false, nil
	case err != nil:
		return v, false, err
	case v.Target != target:
		return v, false, fmt.Errorf("%s describes another target, %q", file, v.Target)
	}
	return v, true, nil
}

func readRecord(file string) (v podvolume.Volume, err error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return v, err
	}
	if err := json.Unmarshal(b, &v); err != nil {
		return v, fmt.Errorf("%s: %w", file, err)
	}
	return v, nil
}

// all returns the records that can be read, or an error if none can. A request for the other volumes reports theirs.
func (r records) all(ctx context.Context) (all []podvolume.Volume, err error) {
	return host.Call(ctx, r.ns, "reading "+r.dir, nil, func() (all []podvolume.Volume, err error) {
		entries, err := os.ReadDir(r.dir)
		for _, e := range entries {
			if !strings.HasSuffix(e.Name(), recordSuffix) {
				continue
			}
			if v, rerr := readRecord(filepath.Join(r.dir, e.Name())); rerr != nil {
				err = errors.Join(err, rerr)
			} else {
				all = append(all, v)
			}
		}
		if len(all) > 0 {
			return all, nil //nolint:nilerr // see above
		}
		return nil, err
	})
}

func (r records) write(ctx context.Context, v podvolume.Volume) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	file := r.file(v.Target)
	return r.ns.Do(ctx, "writing "+file, func() error { return osfile.Writer{}.Write(file, b) })
}

func (r records) remove(ctx context.Context, target string) error {
	file := r.file(target)
	return r.ns.Do(ctx, "removing "+file, func() error {
		if err := os.Remove(file); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		return nil
	})
}

// fileSystem is one of a volume's mounts in the driver's directory.
type fileSystem struct {
	mount host.Mount
	n     uint64 // of the client; 0: the empty file system
}

// of returns a volume's mounts in the mount table, in the order of the table.
func (r records) of(mounts []host.Mount, id string) (all []fileSystem) {
	place, source := filepath.Join(r.mounts(), id)+".", sourceOf(id)
	for _, m := range mounts {
		rest, ok := strings.CutPrefix(m.Mountpoint, place)
		if !ok || m.Source != source {
			continue
		}
		if n, err := strconv.ParseUint(rest, 10, 64); err == nil && n > 0 {
			all = append(all, fileSystem{m, n})
		} else if m.Mountpoint == r.empty(id) {
			all = append(all, fileSystem{m, 0})
		}
	}
	return all
}

// current returns the file system of the latest client; ok is false if there is none.
func (r records) current(mounts []host.Mount, id string) (current fileSystem, ok bool) {
	for _, m := range r.of(mounts, id) {
		if m.n > 0 && m.n >= current.n {
			current, ok = m, true
		}
	}
	return current, ok
}
