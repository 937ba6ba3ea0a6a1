package copier

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// Versions is the source of the objects of a place as they were at a time: of each key, the newest version or delete marker up to and
// including that time. The bucket's versioning must have been enabled since.
type Versions struct {
	Of Place
	At time.Time
}

// Place implements Source.
func (v Versions) Place() Place { return v.Of }

// Page implements Source: one listing, or more if a key has more versions than a listing shows.
func (v Versions) Page(ctx context.Context, _ int, after string) (Page, error) {
	page := Page{Last: after}
	marker, version := "", ""
	if after != "" {
		marker = v.Of.Prefix + after
	}
	var group []buckets.Version // the versions of a key of which the listing may have more, without those that decide nothing
	for {
		listed, err := buckets.ListVersions(ctx, v.Of.Bucket, v.Of.Prefix, buckets.VersionsFrom{Key: marker, Version: version}, buckets.NoRetry)
		if err != nil {
			return Page{}, err
		}
		check := nameCheck{encoded: listed.Encoded}
		for _, item := range listed.Versions {
			key, err := check.below(v.Of, item.Key)
			switch {
			case err != nil:
				return Page{}, err
			case key != "" && (key < after || len(group) > 0 && item.Key < group[0].Key):
				return Page{}, cmp.Or(check.err(v.Of), fault.Errorf(fault.Unsupported,
					"the service lists versions of the key %q after those of greater keys: a copy needs listings in the order of keys, with the encoding that they name",
					item.Key))
			case key == after: // the directory of the prefix itself, or the key after which the page starts
				continue
			}
			if len(group) > 0 && group[0].Key != item.Key {
				if err := v.add(&page, group); err != nil {
					return Page{}, err
				}
				group = group[:0]
			}
			if len(group) == 0 || v.decides(group, item) {
				group = append(group, item)
			}
		}
		switch err := check.err(v.Of); {
		case err != nil:
			return Page{}, err
		case listed.More && (listed.NextKey == "" || listed.NextKey == marker && listed.NextVersion == version):
			return Page{}, fault.Errorf(fault.Busy, "the service reports a truncated listing of versions but repeats its marker: its listings are unreliable")
		}
		if !listed.More {
			page.More = false
			err := v.add(&page, group)
			return page, err
		}
		if page.Last != after {
			page.More = true
			return page, nil // the next page starts with the key of the group
		}
		marker, version = listed.NextKey, listed.NextVersion
	}
}

// decides reports whether asOf needs another version of a key. A key can have millions of them.
func (v Versions) decides(group []buckets.Version, item buckets.Version) bool {
	if item.Time.After(v.At) {
		return item.ID == "null"
	}
	return !slices.ContainsFunc(group, func(g buckets.Version) bool { return g.Deleted == item.Deleted && !g.Time.After(v.At) })
}

// add adds the object that a key had.
func (v Versions) add(page *Page, group []buckets.Version) error {
	if len(group) == 0 {
		return nil
	}
	key := strings.TrimPrefix(group[0].Key, v.Of.Prefix)
	page.Last = key
	if v.Of.Prefix == "" && strings.HasPrefix(key, volume.RecordPrefix+"/") {
		return nil
	}
	was, found, err := asOf(group, v.At)
	if found && err == nil {
		page.Objects = append(page.Objects, Object{Key: key, ETag: was.ETag, Version: was.ID, Size: was.Size})
	}
	return err
}

// asOf returns which of the versions of a key was the current one at a time, if it was not deleted. They are in the order of a listing.
//
// A write and a deletion can have the same time. Then their order in the listing decides. A service that lists versions and delete markers apart
// shows none, and the object counts as not deleted.
func asOf(versions []buckets.Version, at time.Time) (was buckets.Version, found bool, err error) {
	object, marker := -1, -1
	for i, v := range versions {
		switch {
		case v.Time.After(at) && v.ID == "null" && !strings.HasSuffix(v.Key, "/"): // versitygw has no versions of directories
			return was, false, fault.Errorf(fault.Precondition,
				"the versioning of the bucket was suspended after %s, the time of the snapshot: %q has been overwritten since without a version",
				at.UTC().Format(time.RFC3339Nano), v.Key)
		case v.Time.After(at):
		case v.Deleted && marker < 0:
			marker = i
		case !v.Deleted && object < 0:
			object = i
		}
	}
	switch {
	case object < 0:
		return was, false, nil
	case marker < 0:
	case versions[marker].Latest, !versions[object].Latest && versions[marker].Time.After(versions[object].Time):
		return was, false, nil
	case versions[object].Latest, versions[object].Time.After(versions[marker].Time):
	case marker < object:
		return was, false, nil
	}
	return versions[object], true, nil
}
