// Package list finds the volumes of this driver by their records and tags, in bounded pages, and looks one up.
package list

import (
	"context"
	"slices"

	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/identity"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/records"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

const (
	// MaxPage is the maximum number of volumes in a page.
	MaxPage = 1000
	// maxRecords and maxBuckets are how many records and buckets are read for one page. A page that reaches one of them may be short
	// or empty, and has a token.
	maxRecords = 4 * MaxPage
	maxBuckets = 200
	// readers is how many records are read concurrently.
	readers = 16
)

// Volume is a volume of this driver.
type Volume struct {
	ID            volume.ID
	CapacityBytes int64 // 0: unknown
}

// Lister finds volumes. All methods may be called concurrently.
type Lister struct {
	Config     backend.Configured // read at each call
	Identities *identity.Identities
	Clients    *backend.Clients
	Opener     *buckets.Opener
	Records    *records.Store
}

// CanList reports whether the controller has credentials of its own for every backend: requests to list volumes, and to look one up, bring
// no secret.
func (l *Lister) CanList() bool {
	return !slices.ContainsFunc(l.Config.Config().Declared(), func(be backend.Backend) bool { return be.ControllerCredentials == credentials.SourceSecret })
}

// List returns at most limit volumes (0: MaxPage), in the order of their backends, buckets and names, and the token of the next page ("":
// this was the last one). Volumes that are being deleted are not listed. Busy: the token is not valid, or not any more.
func (l *Lister) List(ctx context.Context, limit int, token string) (page []Volume, next string, err error) {
	if limit <= 0 || limit > MaxPage {
		limit = MaxPage
	}
	from, err := parseToken(token)
	if err != nil {
		return nil, "", err
	}
	w := walk{lister: l, limit: limit}
	all := l.Config.Config().Declared()
	if from.Backend != "" && !slices.ContainsFunc(all, func(be backend.Backend) bool { return be.Name == from.Backend }) {
		return nil, "", fault.Errorf(fault.Busy, "starting_token: backend %q is no longer configured: start again without a token", from.Backend)
	}
	for _, be := range all {
		if be.Name < from.Backend {
			continue
		}
		start := cursor{Backend: be.Name}
		if be.Name == from.Backend {
			start = from
		}
		stopped, err := w.backend(ctx, be, start)
		if err != nil {
			return nil, "", err
		}
		if stopped != nil {
			return w.page, stopped.token(), nil
		}
	}
	return w.page, "", nil
}

// walk is one List.
type walk struct {
	lister           *Lister
	limit            int
	page             []Volume
	records, buckets int // that were read
}

// backend adds the volumes of a backend. It returns where it stopped; nil: at the end.
func (w *walk) backend(ctx context.Context, be backend.Backend, from cursor) (stopped *cursor, err error) {
	be, who, err := w.lister.Identities.Find(be.Name, credentials.Keys{}, "")
	if err != nil {
		return nil, err
	}
	keys, err := w.lister.Identities.Keys(ctx, be, who)
	if err != nil {
		return nil, err
	}
	defer func() { w.lister.Identities.Invalidate(be, who, keys, err) }()
	names, err := w.lister.bucketNames(ctx, be, keys)
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		if name < from.Bucket {
			continue
		}
		at := cursor{Backend: be.Name, Bucket: name}
		if name == from.Bucket {
			at = from
		}
		if w.buckets++; w.buckets > maxBuckets {
			return &at, nil
		}
		stopped, err := w.bucket(ctx, be, keys, at)
		switch {
		case fault.Is(err, fault.NotFound): // deleted meanwhile
			w.lister.Opener.Invalidate(be, name)
		case fault.Is(err, fault.Denied) && !slices.Contains(be.VolumeBuckets, name):
			klog.FromContext(ctx).V(2).Info("Not listing volumes of inaccessible bucket", "backend", be.Name, "bucket", name, "reason", err.Error())
		case err != nil || stopped != nil:
			return stopped, err
		}
	}
	return nil, nil
}

// bucketNames returns the names of the buckets that may have volumes, sorted.
func (l *Lister) bucketNames(ctx context.Context, be backend.Backend, keys credentials.Keys) ([]string, error) {
	names, patterns := be.ListedBuckets()
	if len(patterns) > 0 {
		client, err := l.Clients.S3(ctx, be, keys, "")
		if err != nil {
			return nil, err
		}
		all, err := buckets.Names(ctx, client)
		err = backend.Classify(err, "listing the buckets of "+be.String())
		if fault.Is(err, fault.Denied) {
			err = fault.Errorf(fault.Denied, "%w; allow s3:ListAllMyBuckets, or set volumeBuckets for the backend in the driver's config file", err)
		}
		if err != nil {
			return nil, err
		}
		for _, name := range all {
			if backend.MatchesAny(patterns, name) {
				names = append(names, name)
			}
		}
	}
	slices.Sort(names)
	return slices.Compact(names), nil
}

// bucket adds the volume that the bucket is, or those in it. It returns where it stopped; nil: at the end.
func (w *walk) bucket(ctx context.Context, be backend.Backend, keys credentials.Keys, at cursor) (stopped *cursor, err error) {
	b, err := w.lister.Opener.Open(ctx, be, keys, at.Bucket, "")
	if err != nil {
		return nil, err
	}
	if at.After == "" {
		tags, err := records.ReadTags(ctx, b.Client, at.Bucket)
		switch {
		case err == nil && len(tags.Ours()) > 0:
			if v, ok := w.lister.ofTags(be, at.Bucket, tags); ok {
				if len(w.page) == w.limit {
					return &at, nil
				}
				w.page = append(w.page, v)
			}
			return nil, nil
		case err != nil && !fault.Is(err, fault.Denied) && !fault.Is(err, fault.Unsupported): // as CreateVolume does, for volumes in the bucket
			return nil, err
		}
	}
	for {
		segments, more, err := w.lister.Records.Segments(ctx, b, at.After)
		if err != nil {
			return nil, err
		}
		for chunk := range slices.Chunk(segments, readers) {
			if len(w.page) == w.limit || w.records >= maxRecords {
				return &at, nil
			}
			if at.After, err = w.read(ctx, b, chunk); err != nil {
				return nil, err
			}
			if at.After != chunk[len(chunk)-1] {
				return &at, nil
			}
		}
		if !more {
			return nil, nil
		}
	}
}

// read adds the volumes of some records while the page, which has room for one, has more. It returns the last segment that the page covers.
func (w *walk) read(ctx context.Context, b buckets.Bucket, segments []string) (last string, err error) {
	found := make([]records.Stored, len(segments))
	group, reading := errgroup.WithContext(ctx)
	for i, segment := range segments {
		group.Go(func() (err error) {
			found[i], err = w.lister.Records.Read(reading, b, segment)
			switch {
			case fault.Is(err, fault.Precondition):
				klog.FromContext(ctx).Info("Not listing volume with unreadable record", "bucket", b.Info.Name, "segment", segment, "reason", err.Error())
				return nil
			case fault.Is(err, fault.NotFound) && !backend.IsNoSuchBucket(err):
				return nil
			}
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return "", err
	}
	w.records += len(segments)
	for i, r := range found {
		if v, ok := w.lister.ofRecord(b, r.Record); ok {
			if len(w.page) == w.limit {
				break
			}
			w.page = append(w.page, v)
		}
		last = segments[i]
	}
	return last, nil
}

// ofRecord returns the volume of a record, if it is this driver's and exists.
func (l *Lister) ofRecord(b buckets.Bucket, r records.Record) (Volume, bool) {
	if r.State != records.StateActive || r.Owner() != l.Records.Owner {
		return Volume{}, false
	}
	id, err := volume.ParseID(r.VolumeID)
	// A record never says where its volume is. Two backends may be the same service, and a bucket may have several names.
	if err != nil || id.Backend != b.Backend.Name || id.Bucket != b.Info.Name {
		return Volume{}, false
	}
	return Volume{id, r.CapacityBytes}, true
}

// ofTags returns the volume that a bucket is, if it is this driver's and exists.
func (l *Lister) ofTags(be backend.Backend, bucket string, tags records.Tags) (Volume, bool) {
	id := volume.ID{Backend: be.Name, Bucket: bucket}
	if !tags.Of(l.Records.Owner, id) || tags[records.TagState] != string(records.StateActive) {
		return Volume{}, false
	}
	return Volume{id, tags.Capacity()}, true
}

// Get returns a volume. NotFound: it does not exist, or is being deleted.
func (l *Lister) Get(ctx context.Context, id volume.ID) (v Volume, err error) {
	be, who, err := l.Identities.Find(id.Backend, credentials.Keys{}, "")
	if err != nil {
		return Volume{}, err
	}
	keys, err := l.Identities.Keys(ctx, be, who)
	if err != nil {
		return Volume{}, err
	}
	defer func() { l.Identities.Invalidate(be, who, keys, err) }()
	b, err := l.Opener.OpenUncached(ctx, be, keys, id.Bucket)
	if err != nil {
		return Volume{}, err
	}
	found, err := l.Records.ReadActive(ctx, b, id)
	return Volume{id, found.CapacityBytes}, err
}
