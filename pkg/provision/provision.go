// Package provision is the controller's engine: what creating and deleting a volume means on S3. It knows nothing of CSI.
//
// A volume is a prefix of a bucket, proven by a volume record, or a whole bucket, proven by its tags. All state is in S3, so
// that any process of the same driver and cluster can take over at any moment: what one began and did not finish, the next
// one finishes. Every error has a pkg/fault kind; an outcome that is not known is Busy, Timeout or Unavailable and never
// anything that a caller takes for final.
package provision

import (
	"context"
	"crypto/rand"
	"errors"
	"strings"
	"sync"
	"time"

	"github.com/aws/aws-sdk-go-v2/service/s3"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/namedlock"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// Defaults of Options.
const (
	DefaultRuns    = 4
	DefaultWorkers = 8
)

// Options are what a Provisioner works with.
type Options struct {
	Config  backend.Configured // required; asked at each call
	Clients *backend.Clients   // required
	Buckets *backend.Buckets   // required
	// Sessions makes the sessions of roles and of deletions; required.
	Sessions Sessions
	// DriverName and ClusterID are the owner that records and tags name. Two clusters that share a bucket and have the same
	// of both would delete each other's volumes. ClusterID may be empty.
	DriverName string
	ClusterID  string
	// Now is the clock; nil is time.Now.
	Now func() time.Time
	// Runs is how many deletions run at once, Workers how many requests they all have under way per backend; 0: the default.
	Runs    int
	Workers int
}

// Provisioner creates and deletes volumes. All methods may be called concurrently.
type Provisioner struct {
	config   backend.Configured
	clients  *backend.Clients
	buckets  *backend.Buckets
	sessions Sessions
	owner    owner
	now      func() time.Time
	workers  int
	salt     []byte // of identities' digests, which are kept in memory only

	locks  namedlock.Locks // a bucket's record writes where it has no conditional ones; what is found out once; bucket volumes
	known  *knowledge
	proofs *proofs
	roles  roles
	runs   *runs

	mu        sync.Mutex
	throttles map[string]*throttle // by backend name
}

// New makes a Provisioner. It starts nothing: deletions wait for Run.
func New(o Options) (*Provisioner, error) {
	switch {
	case o.Config == nil || o.Clients == nil || o.Buckets == nil || o.Sessions == nil:
		return nil, fault.Errorf(fault.Invalid, "a Provisioner needs Config, Clients, Buckets and Sessions")
	case o.Runs < 0 || o.Workers < 0:
		return nil, fault.Errorf(fault.Invalid, "negative numbers of runs (%d) or workers (%d)", o.Runs, o.Workers)
	}
	who := owner{driver: o.DriverName, cluster: o.ClusterID}
	if err := who.check(); err != nil {
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
	salt := make([]byte, 16)
	if _, err := rand.Read(salt); err != nil {
		return nil, err
	}
	return &Provisioner{
		config: o.Config, clients: o.Clients, buckets: o.Buckets, sessions: o.Sessions, owner: who, now: o.Now, workers: o.Workers, salt: salt,
		known: newKnowledge(o.Now), proofs: newProofs(o.Now), roles: roles{all: map[roleKey]*lease{}}, runs: newRuns(o.Runs), throttles: map[string]*throttle{},
	}, nil
}

// CreateRequest asks for a volume.
type CreateRequest struct {
	Name       string // as the CO gave it
	Namespace  string // of the claim, where the CO tells it; it decides nothing but whether the operator's rules allow the volume
	Parameters volume.Parameters
	Keys       credentials.Keys // of the request's secret; zero: none
	RoleARN    string           // of the request's secret; "": none
}

// DeleteRequest asks for a volume's end.
type DeleteRequest struct {
	ID      volume.ID
	Keys    credentials.Keys // of the request's secret; zero: none
	RoleARN string           // of the request's secret; "": none
}

// LookupRequest asks whether a volume is there.
type LookupRequest = DeleteRequest

// Create makes the volume of that name, or finds that it has been made with the same parameters. A warm call, in a bucket and
// below a base prefix that were used before, is two S3 requests.
//
// Exists: something else has that name or place. Precondition: the bucket or its service cannot carry such a volume. Denied: a
// rule of the operator, or the service, does not allow it.
func (p *Provisioner) Create(ctx context.Context, r CreateRequest) (id volume.ID, err error) {
	be, who, err := p.identify(r.Parameters.Backend, r.Keys, r.RoleARN)
	if err != nil {
		return volume.ID{}, err
	}
	if err := admit(be, r); err != nil {
		return volume.ID{}, err
	}
	keys, err := p.keysOf(ctx, be, who)
	if err != nil {
		return volume.ID{}, err
	}
	defer func() { p.distrust(be, who, keys, err) }()
	if r.Parameters.BucketName == "" {
		return p.createBucket(ctx, be, who, keys, r)
	}
	return p.createPrefix(ctx, be, who, keys, r)
}

// Delete ends the volume as its record or its bucket's tags say (volume.OnDelete). nil: it is gone, or never was. While it is
// under way the answer is Busy with the progress so far; it goes on without the caller, and calls for the same volume join it.
// The work is done by Run: while that has not started, the answer is Busy too.
func (p *Provisioner) Delete(ctx context.Context, r DeleteRequest) (err error) {
	be, who, err := p.identify(r.ID.Backend, r.Keys, r.RoleARN)
	if err != nil {
		return err
	}
	if run := p.runs.join(r.ID.String(), who); run != nil {
		return p.runs.wait(ctx, run)
	}
	keys, err := p.keysOf(ctx, be, who)
	if err != nil {
		return err
	}
	defer func() { p.distrust(be, who, keys, err) }()
	job := p.deletePrefix
	find := p.findPrefix
	if r.ID.Prefix == "" {
		job, find = p.deleteBucket, p.findBucket
	}
	// What needs no work is answered at once, however many deletions are under way.
	state, err := find(ctx, be, keys, r.ID)
	if err != nil || state == stateGone {
		return err
	}
	run, err := p.runs.start(r.ID.String(), who, func(ctx context.Context, run *run) error {
		return p.whileConfigured(ctx, be, func(ctx context.Context) error { return job(ctx, be, run, r.ID) })
	})
	if err != nil {
		return err
	}
	return p.runs.wait(ctx, run)
}

// Lookup tells whether this driver's volume of that id is there; one that is being deleted is not.
func (p *Provisioner) Lookup(ctx context.Context, r LookupRequest) (err error) {
	be, who, err := p.identify(r.ID.Backend, r.Keys, r.RoleARN)
	if err != nil {
		return err
	}
	keys, err := p.keysOf(ctx, be, who)
	if err != nil {
		return err
	}
	defer func() { p.distrust(be, who, keys, err) }()
	find := p.lookPrefix
	if r.ID.Prefix == "" {
		find = p.lookBucket
	}
	return find(ctx, be, keys, r.ID)
}

// Run does the deletions until ctx ends. What is not finished then is left as it is in S3, and the next DeleteVolume of any
// process goes on with it. Run can be called once.
func (p *Provisioner) Run(ctx context.Context) error { return p.runs.run(ctx) }

// errReconfigured ends work on a backend that the config file describes differently by now.
var errReconfigured = errors.New("the config file says something else about the backend by now")

// whileConfigured works with a backend as long as the config has it as it is, and calls what was reached Busy otherwise: the
// next DeleteVolume looks where the volume is now, and what was found elsewhere proves nothing of it.
func (p *Provisioner) whileConfigured(ctx context.Context, be backend.Backend, work func(context.Context) error) error {
	revision := be.Revision()
	same := func() bool {
		now, err := p.config.Config().Backend(be.Name)
		return err == nil && now.Revision() == revision
	}
	working, stop := context.WithCancelCause(ctx)
	var watcher sync.WaitGroup
	watcher.Go(func() {
		for {
			changed := p.config.Changed()
			if !same() {
				stop(errReconfigured)
				return
			}
			select {
			case <-changed:
			case <-working.Done():
				return
			}
		}
	})
	err := work(working)
	stop(nil)
	watcher.Wait()
	if ctx.Err() == nil && !same() {
		return fault.Errorf(fault.Busy, "%s: %w; a retry goes on there", be, errReconfigured)
	}
	return err
}

// place is a bucket with all that is needed to work on it.
type place struct {
	be     backend.Backend
	keys   credentials.Keys
	info   backend.BucketInfo
	client *s3.Client
	// own is a client of the controller's own identity, where client is a session's that reaches one volume only; nil: client is.
	own *s3.Client
}

// asOwn is the place for what is found out about a bucket once, which is not one volume's business.
func (pl place) asOwn() place {
	if pl.own != nil {
		pl.client = pl.own
	}
	return pl
}

func (pl place) bucket() *string { return &pl.info.Name }

// String names the bucket in messages.
func (pl place) String() string { return "bucket " + pl.info.Name + " of " + pl.be.String() }

// place validates the bucket and makes a client for it. NotFound: there is no such bucket.
func (p *Provisioner) place(ctx context.Context, be backend.Backend, keys credentials.Keys, bucket, expectedOwner string) (place, error) {
	info, err := p.buckets.Validate(ctx, be, keys, bucket, expectedOwner)
	if err != nil {
		return place{}, err
	}
	client, err := p.clients.Bucket(ctx, be, keys, info)
	if err != nil {
		return place{}, err
	}
	return place{be: be, keys: keys, info: info, client: client}, nil
}

// forget drops what is known of a bucket that turned out not to be there any more.
func (p *Provisioner) forget(be backend.Backend, bucket string) {
	p.buckets.Forget(be, bucket)
	p.known.forget(bucketID{be.Revision(), bucket})
}

// owner is whom a volume belongs to.
type owner struct{ driver, cluster string }

// maxOwner bounds both halves: they become values of bucket tags.
const maxOwner = 128

func (o owner) check() error {
	if o.driver == "" {
		return fault.Errorf(fault.Invalid, "the driver has no name")
	}
	for what, s := range map[string]string{"driver name": o.driver, "cluster id": o.cluster} {
		if len(s) > maxOwner {
			return fault.Errorf(fault.Invalid, "the %s has more than %d bytes", what, maxOwner)
		}
		if strings.ContainsFunc(s, func(r rune) bool { return !tagRune(r) || r == ' ' }) {
			return fault.Errorf(fault.Invalid, "the %s %q may hold only letters, digits and + - = . _ : / @, because it is written to bucket tags", what, s)
		}
	}
	return nil
}

func (o owner) String() string {
	if o.cluster == "" {
		return "driver " + o.driver + " without a cluster id"
	}
	return "driver " + o.driver + " of cluster " + o.cluster
}
