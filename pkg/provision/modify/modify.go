// Package modify changes what is recorded of a volume: the record of a prefix volume, or the tags of a bucket volume. Requests for one
// volume that meet are merged into one write.
package modify

import (
	"context"
	"sync"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/identity"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/records"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// Request is a request to change a volume.
type Request struct {
	ID      volume.ID
	Keys    credentials.Keys // of the request's secret; zero: none
	RoleARN string           // of the request's secret; "": none
	Change  Change
}

// Modifier changes volumes. All methods may be called concurrently.
type Modifier struct {
	Identities *identity.Identities
	Opener     *buckets.Opener
	Records    *records.Store
	Service    buckets.Service

	mu     sync.Mutex
	queues map[queueKey]*queue
}

// queueKey is a volume and a digest of the identity that changes it: no request profits from the credentials of another.
type queueKey struct {
	id   volume.ID
	keys string
	role string
}

// Modify applies the change and returns the volume's size in bytes (0: unknown), once both are recorded. It sends no write if everything
// is recorded already.
//
// NotFound: there is no such volume of this driver. OutOfRange: the volume is larger than the limit. Busy: the volume is being created or
// deleted, or other controllers keep changing it.
func (m *Modifier) Modify(ctx context.Context, r Request) (capacity int64, err error) {
	be, who, err := m.Identities.Find(r.ID.Backend, r.Keys, r.RoleARN)
	if err != nil {
		return 0, err
	}
	keys, err := m.Identities.Keys(ctx, be, who)
	if err != nil {
		return 0, err
	}
	defer func() { m.Identities.Invalidate(be, who, keys, err) }()
	key := queueKey{r.ID, m.Identities.Digest(who.Keys), who.Role}
	return m.merge(ctx, key, r.Change, func(ctx context.Context) (*place, error) {
		b, err := m.Opener.OpenUncached(ctx, be, keys, r.ID.Bucket)
		return &place{records: m.Records, opener: m.Opener, service: m.Service, b: b, id: r.ID}, err
	})
}
