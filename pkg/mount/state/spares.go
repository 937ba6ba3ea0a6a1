package state

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/failpoint"
	"github.com/s3-csi/s3-csi-driver/pkg/osfile"
)

// A spare is a helper without a mount. Its directories become those of the mount that takes it:
//
//	spares/<spare>/helper.sock  the helper's socket, which moves to mounts/<name>
//	scratch/<spare>/            the helper's own file system, which is mounted on scratch/<name>, too
//	<cache>/<spare>/            the cache, which becomes <cache>/<name> and shows that the spare, and its uid, are in use until then
//
// A driver starts without spares: those of the driver before it are ended, whatever its version was.

// sparePrefix is the prefix of the names of spares. It is no mount's key.
const sparePrefix = "spare"

// Spare is the name, which is also that of its unit, and the uid of a spare.
type Spare struct {
	Name string
	UID  uint32
}

func (p Paths) sparesDir() string { return filepath.Join(p.Dir, "spares") }

func (p Paths) spareDir(name string) string { return filepath.Join(p.sparesDir(), name) }

// SpareSocket is the socket of a spare.
func (p Paths) SpareSocket(name string) string { return filepath.Join(p.spareDir(name), "helper.sock") }

// SpareHelperDir is the HelperDir of a spare.
func (p Paths) SpareHelperDir(name string) string { return p.scratchDir(name) }

// Spares are the directories of spares.
type Spares struct{ base }

// Make makes the directories of a new spare with that uid and returns its name.
func (s Spares) Make(ctx context.Context, uid uint32) (Spare, error) {
	return get(ctx, s.base, func() (Spare, error) { return s.makeSpare(ctx, uid) })
}

// All returns the spares of which anything is left. The uid of one that a mount has taken is 0.
func (s Spares) All(ctx context.Context) ([]Spare, error) { return get(ctx, s.base, s.spares) }

// Remove removes what is left of a spare that a mount has taken, or that has exited.
func (s Spares) Remove(ctx context.Context, name string) error {
	return s.do(ctx, func() error { return s.removeSpare(ctx, name) })
}

func (f files) makeSpare(ctx context.Context, uid uint32) (Spare, error) {
	generation, err := f.nextGeneration(sparePrefix)
	if err != nil {
		return Spare{}, err
	}
	s := Spare{Name: sparePrefix + "-" + strconv.FormatUint(generation, 10), UID: uid}
	err = os.Mkdir(f.spareDir(s.Name), modeClosed)
	if err == nil {
		err = os.Mkdir(f.CacheDir(s.Name), modeClosed)
	}
	if err == nil {
		err = os.Lchown(f.CacheDir(s.Name), int(uid), int(uid))
	}
	if err == nil {
		err = f.mountScratch(s.Name, int(uid))
	}
	if err != nil {
		return Spare{}, errors.Join(fmt.Errorf("making the directories of %s: %w", s.Name, err), f.removeSpare(ctx, s.Name))
	}
	return s, nil
}

// takeScratch mounts the file system of a mount's spare as the mount's.
func (f files) takeScratch(name, spare string, uid int) error {
	if err := os.Mkdir(f.scratchDir(name), modeClosed); err != nil {
		return err
	}
	if err := unix.Mount(f.scratchDir(spare), f.scratchDir(name), "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("mounting %s on %s: %w", f.scratchDir(spare), f.scratchDir(name), err)
	}
	failpoint.Here("spare.scratch")
	return f.linkScratch(name, uid)
}

// takeCache gives a mount the cache and the socket of its spare.
func (f files) takeCache(name, spare string) error {
	if err := os.Rename(f.CacheDir(spare), f.CacheDir(name)); err != nil {
		return err
	}
	failpoint.Here("spare.cache")
	return os.Rename(f.SpareSocket(spare), f.Socket(name))
}

// removeSpare unmounts the file system without removing its files: they may be those of the mount that has taken the spare.
func (f files) removeSpare(ctx context.Context, name string) error {
	dir := f.scratchDir(name)
	mounted, err := isMountPoint(dir)
	if err = ignoreMissing(err); err == nil && mounted {
		err = unix.Unmount(dir, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
	}
	if err == nil {
		err = ignoreMissing(os.Remove(dir))
	}
	return errors.Join(err, osfile.RemoveTree(ctx, f.CacheDir(name)), osfile.RemoveTree(ctx, f.spareDir(name)))
}

func (f files) spares() (all []Spare, err error) {
	seen := map[string]bool{}
	for _, dir := range []string{f.Cache, f.scratch(), f.sparesDir()} { // after a reboot, only the cache is left
		entries, err := os.ReadDir(dir)
		if err != nil {
			return nil, err
		}
		for _, e := range entries {
			if !isSpare(e.Name()) || seen[e.Name()] {
				continue
			}
			seen[e.Name()] = true
			uid, err := ownerOf(f.CacheDir(e.Name()))
			if err != nil {
				return nil, err
			}
			all = append(all, Spare{Name: e.Name(), UID: uid})
		}
	}
	return all, nil
}

// isSpare reports whether a name is that of a spare. Names become paths.
func isSpare(name string) bool {
	number, ok := strings.CutPrefix(name, sparePrefix+"-")
	_, err := strconv.ParseUint(number, 10, 64)
	return ok && err == nil
}
