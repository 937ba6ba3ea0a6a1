package state

import (
	"crypto/sha256"
	"encoding/hex"
	"path/filepath"
	"strings"
)

// The names in the state directory.
const (
	mountsDir, sourcesDir, publicationsDir, usageDir = "mounts", "sources", "publications", "usage"
	recordName, caName                               = "mount.json", "ca.pem"
)

// Paths are the paths of the store's files and directories.
type Paths struct {
	Dir   string // --state-dir
	Cache string // --cache-dir: <name>/ holds what a client keeps on disk
}

// SourcesDir is the directory of sources and of pins.
func (p Paths) SourcesDir() string { return filepath.Join(p.Dir, sourcesDir) }

// SourceDir is the mount point of a mount's FUSE file system.
func (p Paths) SourceDir(name string) string { return filepath.Join(p.SourcesDir(), name) }

// MountsDir is the directory of mounts' directories.
func (p Paths) MountsDir() string { return filepath.Join(p.Dir, mountsDir) }

// MountDir is a mount's directory. It belongs to the driver; the mount's own group can pass it.
func (p Paths) MountDir(name string) string { return filepath.Join(p.MountsDir(), name) }

// HelperDir is the part of a mount's directory that its helper and its client can write to.
func (p Paths) HelperDir(name string) string { return filepath.Join(p.MountDir(name), "state") }

// Socket is the socket of a mount's helper.
func (p Paths) Socket(name string) string { return filepath.Join(p.MountDir(name), "helper.sock") }

// StatusSocket is the socket on which the driver serves its status.
func (p Paths) StatusSocket() string { return filepath.Join(p.Dir, "status.sock") }

// CAFile holds the certificates that a mount's client trusts its backend by.
func (p Paths) CAFile(name string) string { return filepath.Join(p.MountDir(name), caName) }

// CacheDir is where a mount's client keeps data on disk.
func (p Paths) CacheDir(name string) string { return filepath.Join(p.Cache, name) }

// FusectlDir is where the driver mounts FUSE's control file system if the host has not. Its root is open to every user, so the
// directory around it is closed.
func (p Paths) FusectlDir() string { return filepath.Join(p.Dir, "fusectl", "connections") }

// Owns reports whether a path is one of the driver's own directories or inside one.
func (p Paths) Owns(path string) (dir string, owns bool) {
	for _, dir := range []string{p.Dir, p.Cache} {
		if path == dir || strings.HasPrefix(path, dir+"/") {
			return dir, true
		}
	}
	return "", false
}

func (p Paths) keptRecord(name string) string { return p.CacheDir(name) + ".json" }

func (p Paths) publicationsDir() string { return filepath.Join(p.Dir, publicationsDir) }

func (p Paths) usageDir() string { return filepath.Join(p.Dir, usageDir) }

func (p Paths) scratch() string { return filepath.Join(p.Dir, "scratch") }

func (p Paths) scratchDir(name string) string { return filepath.Join(p.scratch(), name) }

// recordFile is the file of a mount's record, in the state directory.
func recordFile(name string) string { return filepath.Join(mountsDir, name, recordName) }

// hashed is the file of a record in one of the state directory's directories, by what the record is of.
func hashed(dir, of string) string {
	sum := sha256.Sum256([]byte(of))
	return filepath.Join(dir, hex.EncodeToString(sum[:16])+".json")
}
