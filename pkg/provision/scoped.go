package provision

import (
	"context"
	"crypto/sha256"
	"encoding/hex"

	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/policy"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// A deletion runs on a session that reaches its volume and its record and nothing else, where the backend can make one: an error
// in this program, or a service that lists what it was not asked for, then cannot touch another volume. What the backend's
// configuration and the controller's identity say decides whether there is a session, and never what a service answers.

// placeToDelete is the place of a run's volume. Its clients ask for keys with each request, because a deletion may take longer
// than a session lasts.
func (p *Provisioner) placeToDelete(ctx context.Context, be backend.Backend, run *run, id volume.ID) (place, error) {
	own := func(ctx context.Context) (credentials.Keys, error) {
		keys, err := p.keysOf(ctx, be, run.latest())
		if err == nil && keys.IsZero() {
			keys, err = p.clients.DriverKeys(ctx)
		}
		return keys, err
	}
	keys, err := p.keysOf(ctx, be, run.latest())
	if err != nil {
		return place{}, err
	}
	pl, err := p.place(ctx, be, keys, id.Bucket, "")
	if err != nil {
		return place{}, err
	}
	if pl.client, err = p.clients.BucketWith(ctx, be, own, pl.info); err != nil {
		return place{}, err
	}
	scoped, err := p.deletionKeys(ctx, be, run, id)
	if err != nil || scoped == nil {
		return pl, err
	}
	pl.own = pl.client
	pl.client, err = p.clients.BucketWith(ctx, be, scoped, pl.info)
	return pl, err
}

// deletionKeys gives the sessions for a deletion, the first of which is made; nil: there is no way to make one.
func (p *Provisioner) deletionKeys(ctx context.Context, be backend.Backend, run *run, id volume.ID) (backend.KeySource, error) {
	if be.Scope == volume.ScopeOff {
		return nil, nil
	}
	order, err := p.planDeletion(ctx, be, run.latest(), id)
	if err != nil || order.Kind == credentials.AsIs {
		return nil, err
	}
	sessions := newLease("deleting volume "+id.String(), p.now, func(ctx context.Context) (credentials.Keys, error) {
		order, err := p.planDeletion(ctx, be, run.latest(), id)
		var keys credentials.Keys
		switch {
		case err == nil && order.Kind == credentials.AsIs:
			err = fault.Errorf(fault.Busy, "the credentials of the latest request for it are of another kind: a retry works with them")
		case err == nil:
			keys, err = p.sessions.Make(ctx, order)
		}
		if err != nil {
			return credentials.Keys{}, fault.Errorf(fault.KindOf(err), "making a session that reaches volume %s and nothing else, to delete it: %w", id, err)
		}
		return keys, nil
	})
	_, err = sessions.get(ctx)
	return sessions.get, err
}

// planDeletion plans the session for a deletion. A volume that no policy can describe, which was made without scope, is deleted
// as it was made: the order is AsIs.
func (p *Provisioner) planDeletion(ctx context.Context, be backend.Backend, who identity, id volume.ID) (credentials.Order, error) {
	var records []string
	if segment, _, ok := id.NameSegment(); ok {
		records = []string{recordKey(segment)}
	}
	var inexpressible error
	order, err := p.plan(ctx, be, who, sessionOf{bucket: id.Bucket, name: "delete-" + shortHash(id.String()), policy: func(aws bool, partition string) (text string, err error) {
		text, err = policy.Scope{Partition: partition, Bucket: id.Bucket, Prefix: id.Prefix, KMS: aws, AWS: aws}.Deletion(records)
		inexpressible = err
		return text, err
	}})
	if inexpressible != nil {
		klog.FromContext(ctx).Info("The volume is deleted without a session of its own: no policy can describe it", "volume", id.String(), "reason", inexpressible)
		return credentials.Order{Kind: credentials.AsIs}, nil //nolint:nilerr // it is said in the log, and decides the way
	}
	return order, err
}

// shortHash names something in a session's name, which has little room.
func shortHash(s string) string {
	sum := sha256.Sum256([]byte(s))
	return hex.EncodeToString(sum[:6])
}
