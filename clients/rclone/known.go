package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/rclone/rclone/fs"
	"github.com/rclone/rclone/lib/encoder"
)

// left is a changed file of an earlier process.
type left struct {
	known    objectVersion
	modified time.Time
}

// keepVersions returns the files that are not uploaded. Files without a recorded object get noObject, so that rclone does not take
// an object that it finds later for the one that the file was made from.
func (c *cache) keepVersions() (map[string]left, error) {
	names, err := c.unsent()
	if err != nil {
		return nil, err
	}
	all := map[string]left{}
	for name := range names {
		path := c.metaOf(name)
		info, err := readInfo(path)
		if err != nil {
			if ignoreGone(err) == nil {
				continue
			}
			return nil, err
		}
		if info.Fingerprint == "" {
			info.Fingerprint = string(noObject)
			if err := c.writeInfo(path, info); err != nil {
				return nil, err
			}
		}
		all[name] = left{objectVersion(info.Fingerprint), info.ModTime}
	}
	return all, nil
}

// version returns the version of the object that a file was made from, as rclone recorded it.
func (c *cache) version(name string) objectVersion {
	info, err := readInfo(c.metaOf(name))
	if err != nil {
		return noObject
	}
	return objectVersion(info.Fingerprint)
}

// renamedOver records when a new file was renamed: it may replace an object of that name that is older. A file that had an object
// is copied in S3 instead, and rclone knows the copy.
func (c *cache) renamedOver(name string, at time.Time) {
	path := c.metaOf(name)
	info, err := readInfo(path)
	if err != nil || !info.Dirty || objectVersion(info.Fingerprint).named() {
		return
	}
	info.Fingerprint = string(storedBefore(at))
	if err := c.writeInfo(path, info); err != nil {
		fs.Errorf(name, "Cannot record that the file was renamed: %v", err)
	}
}

func (c *cache) metaOf(name string) string { return filepath.Join(c.meta, pathOf(name)) }
func (c *cache) dataOf(name string) string { return filepath.Join(c.data, pathOf(name)) }

// pathOf returns the path in the cache of a name in the file system.
func pathOf(name string) string { return filepath.FromSlash(encoder.OS.FromStandardPath(name)) }

// writeInfo replaces a file's metadata atomically.
func (c *cache) writeInfo(path string, info any) error {
	b, err := json.Marshal(info)
	if err != nil {
		return err
	}
	f, err := os.CreateTemp(c.dir, "info-*") // not in the tree that rclone walks
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		_ = os.Remove(f.Name())
	}
	return err
}

// asidePath returns an unused path below lost for a file.
func (c *cache) asidePath(rel string) (string, error) {
	base := filepath.Join(c.lost, rel)
	if err := os.MkdirAll(filepath.Dir(base), 0o700); err != nil {
		return "", err
	}
	path := base
	for i := 1; ; i++ {
		if _, err := os.Lstat(path); err != nil {
			if ignoreGone(err) != nil {
				return "", err
			}
			return path, nil
		}
		path = base + ".~" + strconv.Itoa(i) + "~"
	}
}
