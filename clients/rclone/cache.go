package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	iofs "io/fs"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/rclone/rclone/fs"
	"github.com/rclone/rclone/fs/rc"
	"github.com/rclone/rclone/lib/encoder"
	"github.com/rclone/rclone/lib/ranges"
	"github.com/rclone/rclone/vfs"
	"github.com/rclone/rclone/vfs/vfscache"
)

// cache reads rclone's cache directory. For each file, it has a data file and a metadata file, which says whether the data is
// uploaded (not dirty).
type cache struct {
	used       bool // false: the mount has no cache
	reads      bool // it also has data that was only read
	dir        string
	data, meta string
	lost       string
}

func newCache(c config) *cache {
	place := filepath.FromSlash(encoder.OS.FromStandardPath("s3/" + c.bucket + "/" + c.prefix))
	return &cache{
		used: c.needsCache(), reads: c.readCache, dir: c.cacheDir, lost: filepath.Join(c.cacheDir, lost),
		data: filepath.Join(c.cacheDir, "vfs", place), meta: filepath.Join(c.cacheDir, "vfsMeta", place),
	}
}

// check returns an error if rclone uses another directory, where unsent would not find its files.
func (c *cache) check(files *vfs.VFS) error {
	if !c.used {
		return nil
	}
	disk, ok := files.Stats()["diskCache"].(rc.Params)
	if !ok || disk["path"] != c.data || disk["pathMeta"] != c.meta {
		return fmt.Errorf("rclone's cache directories are %v and %v, not %s and %s", disk["path"], disk["pathMeta"], c.data, c.meta)
	}
	return nil
}

// unsent returns the files that are not uploaded, by name, and for each whether S3 has an older version.
func (c *cache) unsent() (map[string]bool, error) {
	files := map[string]bool{}
	if !c.used {
		return files, nil
	}
	err := c.each(func(rel string, info vfscache.Info, err error) error {
		if err != nil || !info.Dirty {
			return err
		}
		// A file without data was removed and needs no upload.
		if _, err := os.Lstat(filepath.Join(c.data, rel)); err != nil {
			return err
		}
		files[nameOf(rel)] = objectVersion(info.Fingerprint).named()
		return nil
	})
	return files, err
}

// each calls visit with the path of each metadata file and its content, or the error of reading it. A file that was removed in the
// meantime is skipped.
func (c *cache) each(visit func(rel string, info vfscache.Info, err error) error) error {
	return ignoreGone(filepath.WalkDir(c.meta, func(path string, entry iofs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return ignoreGone(err)
		}
		rel, err := filepath.Rel(c.meta, path)
		if err != nil {
			return err
		}
		info, err := readInfo(path)
		return ignoreGone(visit(rel, info, err))
	}))
}

// nameOf returns the name in the file system of a path in the cache.
func nameOf(rel string) string { return encoder.OS.ToStandardPath(filepath.ToSlash(rel)) }

func readInfo(path string) (vfscache.Info, error) {
	var info vfscache.Info
	b, err := os.ReadFile(path)
	if err != nil {
		return info, err
	}
	if err := json.Unmarshal(b, &info); err != nil {
		return info, fmt.Errorf("%s: %w", path, err)
	}
	return info, nil
}

func ignoreGone(err error) error {
	if errors.Is(err, iofs.ErrNotExist) {
		return nil
	}
	return err
}

// lost is the quarantine: the directory in the cache for files that are not uploaded until a user decides what to do with them.
const lost = "lost"

// repair repairs the cache of a killed process, so that this process uploads the files that were closed:
//
//   - Metadata of a changed file may not list all of its data: rclone records that a file is dirty at the first change, but the
//     changes only after close(2) has returned. The data is complete, because handles fetches a file before its first change, so
//     repair marks all of it as present.
//   - Metadata may be empty: rclone overwrites it when a file is opened, first changed and closed, and can be killed meanwhile.
//     rclone would then remove the data. If the data has no holes, the file was closed, and repair marks it as dirty. If it
//     equals its object, it was only read, and repair removes it. Otherwise repair moves it to lost, and it is never uploaded.
func (c *cache) repair(ctx context.Context, remote fs.Fs) error {
	if !c.used {
		return nil
	}
	var torn []string
	err := c.each(func(rel string, info vfscache.Info, err error) error {
		switch {
		case err != nil:
			torn = append(torn, rel)
		case info.Dirty:
			return c.complete(rel, info)
		}
		return nil
	})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, compareBound)
	defer cancel()
	for _, rel := range torn {
		if err := ignoreGone(c.repairFile(ctx, remote, rel)); err != nil {
			return err
		}
	}
	return nil
}

func (c *cache) repairFile(ctx context.Context, remote fs.Fs, rel string) error {
	data := filepath.Join(c.data, rel)
	f, err := os.Open(data)
	if errors.Is(err, iofs.ErrNotExist) {
		return os.Remove(filepath.Join(c.meta, rel))
	}
	if err != nil {
		return err
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return err
	}
	// A file that was only read must not be uploaded, because its object may have changed since.
	if c.reads || !whole(f, fi.Size()) {
		err := stored(ctx, remote, nameOf(rel), f, fi.Size())
		if err == nil {
			return errors.Join(os.Remove(data), os.Remove(filepath.Join(c.meta, rel)))
		}
		aside, asideErr := c.quarantinePath(rel)
		if asideErr != nil {
			return asideErr
		}
		fs.Errorf(rel, "File may be incomplete, local copy quarantined: file=%q reason=%q", aside, err.Error())
		if err := os.Rename(data, aside); err != nil {
			return err
		}
		return os.Remove(filepath.Join(c.meta, rel))
	}
	fs.Logf(rel, "Recovered file of previous process")
	// The object that it was made from is unknown, but was stored before the file was changed.
	return c.complete(rel, vfscache.Info{
		ModTime: fi.ModTime(), ATime: fi.ModTime(), Dirty: true, Fingerprint: string(storedBefore(fi.ModTime())),
		Size: -1, // complete sets it
	})
}

// complete marks all data of a changed file as present.
func (c *cache) complete(rel string, info vfscache.Info) error {
	fi, err := os.Lstat(filepath.Join(c.data, rel))
	if err != nil {
		return err
	}
	all := ranges.Range{Pos: 0, Size: fi.Size()}
	if info.Size == fi.Size() && info.Rs.Present(all) {
		return nil
	}
	info.Size, info.Rs = fi.Size(), nil
	info.Rs.Insert(all)
	return c.writeInfo(filepath.Join(c.meta, rel), info)
}

// retryRemote is the interval between requests to S3 at start, if it does not respond.
const retryRemote = 3 * time.Second

// awaitRemote waits until S3 responds, if a killed process has left changes of existing objects. rclone reads these objects when
// it starts. If that failed, it would take the changed parts for the whole file and upload it with holes.
func (c *cache) awaitRemote(ctx context.Context, remote fs.Fs) error {
	left, err := c.unsent()
	if err != nil {
		return fmt.Errorf("cache of a previous process: %w", err)
	}
	for name, stored := range left {
		fs.Logf(name, "Found pending upload of previous process")
		for stored {
			_, err := remote.NewObject(ctx, name)
			if err == nil || errors.Is(err, fs.ErrorObjectNotFound) {
				break
			}
			fs.Errorf(name, "Cannot read object of changed file, retrying: %v", err)
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(retryRemote):
			}
		}
	}
	return nil
}

// leftFile is a changed file of a previous process.
type leftFile struct {
	known    objectVersion
	modified time.Time
}

// keepVersions returns the files that are not uploaded. Files without a recorded object get noObject, so that rclone does not take
// an object that it finds later for the one that the file was made from.
func (c *cache) keepVersions() (map[string]leftFile, error) {
	names, err := c.unsent()
	if err != nil {
		return nil, err
	}
	all := map[string]leftFile{}
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
		all[name] = leftFile{objectVersion(info.Fingerprint), info.ModTime}
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
		fs.Errorf(name, "Cannot record rename: %v", err)
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

// quarantinePath returns an unused path below lost for a file.
func (c *cache) quarantinePath(rel string) (string, error) {
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
