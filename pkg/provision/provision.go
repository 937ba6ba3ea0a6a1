// Package provision creates, changes and deletes volumes on S3 for the controller. It wires the packages below it and does not depend on CSI.
//
// A volume is a prefix of a bucket, proven by a volume record, or a whole bucket, proven by its tags. All state is in S3, so
// any process of the same driver and cluster can finish what another one started. Every error has a pkg/fault kind; an unknown outcome is
// Busy, Timeout or Unavailable, which are not final.
package provision

import (
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/create"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/erase"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/identity"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/list"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/modify"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/proofs"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/records"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/remove"
)

// Defaults of Options.
const (
	DefaultRuns    = 4
	DefaultWorkers = 8
)

// Options are the dependencies and settings of a Provisioner.
type Options struct {
	Config  backend.Configured // required; read at each call
	Clients *backend.Clients   // required
	Buckets *backend.Buckets   // required
	// Sessions makes the sessions of roles and of deletions; required.
	Sessions identity.Sessions
	// DriverName and ClusterID are the owner in records and tags. Two clusters that share a bucket and have the same
	// of both would delete each other's volumes. ClusterID may be empty.
	DriverName string
	ClusterID  string
	// Now is the clock; nil is time.Now.
	Now func() time.Time
	// Runs is how many volumes are erased at once, Workers how many requests they have in flight per backend; 0: the default.
	// Deletions of empty volumes are not limited by them.
	Runs    int
	Workers int
}

// Provisioner creates, changes and deletes volumes. All methods may be called concurrently.
type Provisioner struct {
	*create.Creator  // Create
	*remove.Remover  // Delete, Lookup and Run
	*list.Lister     // CanList, List and Get
	*modify.Modifier // Modify
}

// CreateRequest is a request to create a volume.
type CreateRequest = create.Request

// DeleteRequest is a request to delete a volume.
type DeleteRequest = remove.Request

// ModifyRequest is a request to change a volume.
type ModifyRequest = modify.Request

// Change is what a ModifyRequest changes.
type Change = modify.Change

// LookupRequest is a request to check that a volume exists.
type LookupRequest = remove.Request

// New returns a Provisioner. It starts nothing: deletions wait for Run.
func New(o Options) (*Provisioner, error) {
	switch {
	case o.Config == nil || o.Clients == nil || o.Buckets == nil || o.Sessions == nil:
		return nil, fault.Errorf(fault.Invalid, "a Provisioner needs Config, Clients, Buckets and Sessions")
	case o.Runs < 0 || o.Workers < 0:
		return nil, fault.Errorf(fault.Invalid, "negative numbers of runs (%d) or workers (%d)", o.Runs, o.Workers)
	}
	who := records.Owner{Driver: o.DriverName, Cluster: o.ClusterID}
	if err := who.Check(); err != nil {
		return nil, err
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Runs == 0 {
		o.Runs = DefaultRuns
	}
	if o.Workers == 0 {
		o.Workers = DefaultWorkers
	}
	identities, err := identity.New(o.Config, o.Sessions, o.Now)
	if err != nil {
		return nil, err
	}
	opener := buckets.NewOpener(o.Clients, o.Buckets, o.Now)
	store := records.NewStore(who, opener, o.Now)
	return &Provisioner{
		Creator: &create.Creator{
			Identities: identities, Clients: o.Clients, Service: o.Buckets, Opener: opener, Records: store,
			Proofs: proofs.New(identities, o.Clients, o.Buckets, o.Now),
		},
		Remover: remove.New(remove.Options{
			Config: o.Config, Identities: identities, Clients: o.Clients, Opener: opener, Records: store,
			Eraser: erase.New(opener, o.Workers), Runs: o.Runs,
		}),
		Lister:   &list.Lister{Config: o.Config, Identities: identities, Clients: o.Clients, Opener: opener, Records: store},
		Modifier: &modify.Modifier{Identities: identities, Opener: opener, Records: store, Service: o.Buckets},
	}, nil
}
