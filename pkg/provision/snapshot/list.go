package snapshot

import (
	"context"
	"encoding/base64"
	"errors"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/records"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// readers is how many records a listing reads at once.
const readers = 16

// Credentials are the keys and the role of a request's secret, if it has them.
type Credentials struct {
	Keys    credentials.Keys
	RoleARN string
}

// Get returns a snapshot. NotFound: there is none, or it is not cut yet.
func (m *Maker) Get(ctx context.Context, id volume.SnapshotID, secret Credentials) (info Info, err error) {
	be, who, err := m.opts.Copies.Identities.Find(id.Backend, secret.Keys, secret.RoleARN)
	if err != nil {
		return Info{}, err
	}
	keys, err := m.opts.Copies.Identities.Keys(ctx, be, who)
	if err != nil {
		return Info{}, err
	}
	defer func() { m.opts.Copies.Identities.Invalidate(be, who, keys, err) }()
	b, err := m.opts.Copies.Opener.Open(ctx, be, keys, id.Bucket, "")
	if err != nil {
		return Info{}, err
	}
	return m.Read(ctx, b, id)
}

// Read is Get for a bucket that is open.
func (m *Maker) Read(ctx context.Context, b buckets.Bucket, id volume.SnapshotID) (Info, error) {
	found, err := m.opts.Records.ReadSnapshot(ctx, b, id.Segment)
	if err != nil {
		return Info{}, err
	}
	if found.SnapshotID != id.String() || !m.isListed(found.Snapshot) {
		return Info{}, fault.Errorf(fault.NotFound, "there is no snapshot %s of %s", id, m.opts.Records.Owner)
	}
	return infoOf(found.Snapshot)
}

// isListed reports whether a record is that of a snapshot of this driver that is cut.
func (m *Maker) isListed(s records.Snapshot) bool {
	return s.Owner() == m.opts.Records.Owner && (s.State == records.StateReady || s.State == records.StateCopying && !s.Cut.IsZero())
}

// ListRequest is a request to list snapshots.
type ListRequest struct {
	Source string // volume id; "": all
	Max    int    // 0: no limit
	Token  string // of the page before; "": the first page
	Secret Credentials
}

// position is a place in the list of all snapshots: that after a snapshot.
type position struct{ backend, bucket, segment string }

func (p position) token() string {
	return base64.RawURLEncoding.EncodeToString([]byte(p.backend + ":" + p.bucket + "/" + p.segment))
}

func parseToken(token string) (position, error) {
	text, err := base64.RawURLEncoding.DecodeString(token)
	backend, rest, ok := strings.Cut(string(text), ":")
	bucket, segment, also := strings.Cut(rest, "/")
	if err != nil || !ok || !also || backend == "" || bucket == "" || segment == "" {
		return position{}, fault.Errorf(fault.Busy, "starting_token: not a token of this driver: list from the beginning")
	}
	return position{backend, bucket, segment}, nil
}

// List lists the snapshots in all buckets that the request's credentials, or else the driver's, show: in the order of backends, buckets and
// names. Without a secret these are the backends that use the driver's own credentials, otherwise those that use a secret. next is the token
// of the next page; "": there is none.
func (m *Maker) List(ctx context.Context, r ListRequest) (list []Info, next string, err error) {
	var from position
	if r.Token != "" {
		if from, err = parseToken(r.Token); err != nil {
			return nil, "", err
		}
	}
	l := listing{m: m, r: r}
	for _, be := range m.backends(r) {
		if be.Name < from.backend {
			continue
		}
		at := position{}
		if be.Name == from.backend {
			at = from
		}
		if err := l.backend(ctx, be, at); errors.Is(err, errFull) {
			return l.list, l.last.token(), nil
		} else if err != nil {
			return nil, "", err
		}
	}
	return l.list, "", nil
}

// backends are the backends to look at.
func (m *Maker) backends(r ListRequest) []backend.Backend {
	var list []backend.Backend
	source := ""
	if r.Source != "" {
		id, err := volume.ParseID(r.Source)
		if err != nil {
			return nil
		}
		source = id.Backend
	}
	for _, be := range m.opts.Config.Config().Backends() {
		if (be.ControllerCredentials == credentials.SourceSecret) == !r.Secret.Keys.IsZero() && (source == "" || source == be.Name) {
			list = append(list, be)
		}
	}
	slices.SortFunc(list, func(a, b backend.Backend) int { return strings.Compare(a.Name, b.Name) })
	return list
}

// errFull ends a listing that has as many snapshots as were asked for, and found one more.
var errFull = errors.New("the page is full")

type listing struct {
	m    *Maker
	r    ListRequest
	list []Info
	last position
}

func (l *listing) backend(ctx context.Context, be backend.Backend, at position) (err error) {
	_, who, err := l.m.opts.Copies.Identities.Find(be.Name, l.r.Secret.Keys, l.r.Secret.RoleARN)
	if err != nil {
		return err
	}
	keys, err := l.m.opts.Copies.Identities.Keys(ctx, be, who)
	if err != nil {
		return err
	}
	defer func() { l.m.opts.Copies.Identities.Invalidate(be, who, keys, err) }()
	names, err := l.buckets(ctx, be, keys)
	if err != nil {
		return err
	}
	for _, name := range names {
		after := ""
		switch {
		case name < at.bucket:
			continue
		case name == at.bucket:
			after = at.segment
		}
		b, err := l.m.opts.Copies.Opener.Open(ctx, be, keys, name, "")
		if err == nil {
			err = l.bucket(ctx, b, after)
		}
		switch fault.KindOf(err) {
		case fault.NotFound, fault.Denied, fault.Precondition:
			// Not a bucket in which this driver could have stored a snapshot.
			klog.FromContext(ctx).V(2).Info("Skipping bucket in list of snapshots", "bucket", name, "backend", be.Name, "reason", err)
			continue
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// buckets returns the names of the buckets of a backend, in order.
func (l *listing) buckets(ctx context.Context, be backend.Backend, keys credentials.Keys) ([]string, error) {
	client, err := l.m.opts.Copies.Clients.S3(ctx, be, keys, "")
	if err != nil {
		return nil, err
	}
	names, err := buckets.Names(ctx, client)
	return names, backend.Classify(err, "listing the buckets of "+be.String()+", in which snapshots may be (s3:ListAllMyBuckets)")
}

func (l *listing) bucket(ctx context.Context, b buckets.Bucket, after string) error {
	for more := true; more; {
		var segments []string
		var err error
		if segments, more, err = l.m.opts.Records.SnapshotSegments(ctx, b, after); err != nil {
			return err
		}
		for some := range slices.Chunk(segments, readers) {
			if err := l.read(ctx, b, some); err != nil {
				return err
			}
		}
		if len(segments) > 0 {
			after = segments[len(segments)-1]
		}
	}
	return nil
}

// read reads records and adds those that are asked for to the list.
func (l *listing) read(ctx context.Context, b buckets.Bucket, segments []string) error {
	found := make([]records.StoredSnapshot, len(segments))
	g, gctx := errgroup.WithContext(ctx)
	for i, segment := range segments {
		g.Go(func() (err error) {
			found[i], err = l.m.opts.Records.ReadSnapshot(gctx, b, segment)
			if fault.Is(err, fault.NotFound) || fault.Is(err, fault.Precondition) {
				klog.FromContext(ctx).V(2).Info("Skipping object in list of snapshots", "bucket", b.Info.Name, "name", segment, "reason", err)
				return nil
			}
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	for i, f := range found {
		if f.ETag == "" && f.Name == "" || !l.m.isListed(f.Snapshot) || l.r.Source != "" && f.Source != l.r.Source {
			continue
		}
		info, err := infoOf(f.Snapshot)
		if err != nil || info.ID.Backend != b.Backend.Name || info.ID.Bucket != b.Info.Name {
			continue // a copy of a record
		}
		if l.r.Max > 0 && len(l.list) == l.r.Max {
			return errFull
		}
		l.list = append(l.list, info)
		l.last = position{b.Backend.Name, b.Info.Name, segments[i]}
	}
	return nil
}
