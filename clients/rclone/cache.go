package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	iofs "io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/rclone/rclone/fs"
	"github.com/rclone/rclone/fs/rc"
	"github.com/rclone/rclone/lib/encoder"
	"github.com/rclone/rclone/lib/ranges"
	"github.com/rclone/rclone/vfs"
	"github.com/rclone/rclone/vfs/vfscache"
)

// cache is rclone's cache directory, read from outside: for each file there is one with its data and one that says
// whether it is stored.
type cache struct {
	used       bool // false: there is none
	reads      bool // what is only read is kept in it too
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

// check makes sure that this is the directory that rclone uses: looking into another one would find nothing unsent.
func (c *cache) check(files *vfs.VFS) error {
	if !c.used {
		return nil
	}
	disk, ok := files.Stats()["diskCache"].(rc.Params)
	if !ok || disk["path"] != c.data || disk["pathMeta"] != c.meta {
		return fmt.Errorf("rclone's cache is in %v and %v, not in %s and %s", disk["path"], disk["pathMeta"], c.data, c.meta)
	}
	return nil
}

// unsent is the files with data that is not stored, by their names below the root, and whether an older version of
// them is in S3.
func (c *cache) unsent() (map[string]bool, error) {
	files := map[string]bool{}
	if !c.used {
		return files, nil
	}
	err := filepath.WalkDir(c.meta, func(path string, entry iofs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return ignoreGone(err)
		}
		info, err := readInfo(path)
		if err != nil || !info.Dirty {
			return ignoreGone(err)
		}
		rel, err := filepath.Rel(c.meta, path)
		if err != nil {
			return err
		}
		// Without data it was removed: that needs no upload.
		if _, err := os.Lstat(filepath.Join(c.data, rel)); err != nil {
			return ignoreGone(err)
		}
		files[nameOf(rel)] = objectVersion(info.Fingerprint).named()
		return nil
	})
	return files, ignoreGone(err)
}

// nameOf is a file's name in the file system, by its path in the cache.
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

// lost is the directory in the cache for what cannot be stored without a human.
const lost = "lost"

// repair makes the cache of a killed process whole: what was closed then is stored by the next process. Of files that
// were open, only what is new is.
//
// rclone writes what it knows of a file over the old version, so a process that is killed in that moment leaves an empty
// file, on which the next one removes the data as well. That happens when a file is opened, when it is first written to and
// when it is closed. A closed file is complete: it is marked as such, and unsent. One with holes is not, and what is missing
// is not known any more. It is forgotten where it is like its object, as one is that was only read; else it is put aside and
// never uploaded.
//
// Between the two, what rclone has written down is that the file has changes, and nothing of what they are; and close(2)
// returns before rclone hears of it. All of the file is here, because handles fetches it before the first change.
func (c *cache) repair(ctx context.Context, remote fs.Fs) error {
	if !c.used {
		return nil
	}
	var torn []string
	err := filepath.WalkDir(c.meta, func(path string, entry iofs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return ignoreGone(err)
		}
		rel, err := filepath.Rel(c.meta, path)
		if err != nil {
			return err
		}
		info, err := readInfo(path)
		switch {
		case err != nil:
			torn = append(torn, rel)
			err = nil
		case info.Dirty:
			err = c.complete(rel, info)
		}
		return ignoreGone(err)
	})
	if err != nil {
		return ignoreGone(err)
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
		return os.Remove(filepath.Join(c.meta, rel)) // it says nothing, of nothing
	}
	if err != nil {
		return err
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return err
	}
	// What was only read can have changed in S3 since, so it must not be written back.
	if c.reads || !whole(f, fi.Size()) {
		err := stored(ctx, remote, nameOf(rel), f, fi.Size())
		if err == nil {
			return errors.Join(os.Remove(data), os.Remove(filepath.Join(c.meta, rel)))
		}
		aside, asideErr := c.asidePath(rel)
		if asideErr != nil {
			return asideErr
		}
		fs.Errorf(rel, "a process was killed when it may have written to this file: what there is of it was put aside as %s and is not uploaded (compared with S3: %v)", aside, err)
		if err := os.Rename(data, aside); err != nil {
			return err
		}
		return os.Remove(filepath.Join(c.meta, rel)) // nobody can read it, and everybody would stumble over it
	}
	fs.Logf(rel, "a process was killed when it had closed this file: it is taken up again")
	// Which object it was made from is not known any more: one that was there before it was changed.
	return c.complete(rel, vfscache.Info{
		ModTime: fi.ModTime(), ATime: fi.ModTime(), Dirty: true, Fingerprint: string(storedBefore(fi.ModTime())),
		Size: -1, // still to be written down
	})
}

// complete writes down that all of a changed file is in the cache, where that is not written down.
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

// retryRemote is how often S3 is asked at start when it does not answer.
const retryRemote = 3 * time.Second

// awaitRemote waits until S3 answers, if the cache holds changes of objects that are in S3: left by a process that was
// killed. rclone takes them up when it starts, and if it cannot see the object then, it takes the changed parts for the
// whole file and uploads it with holes.
func (c *cache) awaitRemote(ctx context.Context, remote fs.Fs) error {
	left, err := c.unsent()
	if err != nil {
		return fmt.Errorf("cache of an earlier process: %w", err)
	}
	for name, stored := range left {
		fs.Logf(name, "was written earlier and is not stored yet")
		for stored {
			_, err := remote.NewObject(ctx, name)
			if err == nil || errors.Is(err, fs.ErrorObjectNotFound) {
				break
			}
			fs.Errorf(name, "the cache has changes of it, and S3 does not answer: %v", err)
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(retryRemote):
			}
		}
	}
	return nil
}
