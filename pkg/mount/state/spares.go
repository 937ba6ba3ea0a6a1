package state

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
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

// MakeSpare makes the directories of a new spare with that uid and returns its name.
func (s *Store) MakeSpare(ctx context.Context, uid uint32) (Spare, error) {
	return get(ctx, s, func() (Spare, error) { return s.makeSpare(ctx, uid) })
}

func (s *Store) makeSpare(ctx context.Context, uid uint32) (Spare, error) {
	generation, err := s.nextGeneration(sparePrefix)
	if err != nil {
		return Spare{}, err
	}
	spare := Spare{Name: sparePrefix + "-" + strconv.FormatUint(generation, 10), UID: uid}
	err = os.Mkdir(s.spareDir(spare.Name), modeClosed)
	if err == nil {
		err = s.makeCache(spare.Name, int(uid))
	}
	if err == nil {
		err = s.mountScratch(spare.Name, int(uid))
	}
	if err != nil {
		return Spare{}, errors.Join(fmt.Errorf("making the directories of %s: %w", spare.Name, err), s.removeSpare(ctx, spare.Name))
	}
	return spare, nil
}

// takeScratch mounts the file system of a mount's spare as the mount's.
func (s *Store) takeScratch(name, spare string, uid int) error {
	if err := os.Mkdir(s.scratchDir(name), modeClosed); err != nil {
		return err
	}
	if err := unix.Mount(s.scratchDir(spare), s.scratchDir(name), "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("mounting %s on %s: %w", s.scratchDir(spare), s.scratchDir(name), err)
	}
	failpoint.Here("spare.scratch")
	return s.linkScratch(name, uid)
}

// takeCache gives a mount the cache and the socket of its spare.
func (s *Store) takeCache(name, spare string) error {
	if err := os.Rename(s.CacheDir(spare), s.CacheDir(name)); err != nil {
		return err
	}
	failpoint.Here("spare.cache")
	return os.Rename(s.SpareSocket(spare), s.Socket(name))
}

// RemoveSpare removes what is left of a spare that a mount has taken, or that has exited.
func (s *Store) RemoveSpare(ctx context.Context, name string) error {
	return s.do(ctx, func() error { return s.removeSpare(ctx, name) })
}

// removeSpare unmounts the file system without removing its files: they may be those of the mount that has taken the spare.
func (s *Store) removeSpare(ctx context.Context, name string) error {
	dir := s.scratchDir(name)
	mounted, err := isMountPoint(dir)
	if err = ignoreMissing(err); err == nil && mounted {
		err = unix.Unmount(dir, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
	}
	if err == nil {
		err = ignoreMissing(os.Remove(dir))
	}
	return errors.Join(err, osfile.RemoveTree(ctx, s.CacheDir(name)), osfile.RemoveTree(ctx, s.spareDir(name)))
}

// Spares returns the spares that left files behind. UID is 0 if a mount took the spare.
func (s *Store) Spares(ctx context.Context) ([]Spare, error) {
	return get(ctx, s, func() (all []Spare, err error) {
		for _, dir := range []string{s.Cache, s.scratch(), s.sparesDir()} { // after a reboot, only the cache is left
			entries, err := os.ReadDir(dir)
			if err != nil {
				return nil, err
			}
			for _, e := range entries {
				if !isSpare(e.Name()) || slices.ContainsFunc(all, func(seen Spare) bool { return seen.Name == e.Name() }) {
					continue
				}
				uid, err := ownerOf(s.CacheDir(e.Name()))
				if err != nil {
					return nil, err
				}
				all = append(all, Spare{Name: e.Name(), UID: uid})
			}
		}
		return all, nil
	})
}

// isSpare reports whether a name is that of a spare. Names become paths.
func isSpare(name string) bool {
	number, ok := strings.CutPrefix(name, sparePrefix+"-")
	_, err := strconv.ParseUint(number, 10, 64)
	return ok && err == nil
}
