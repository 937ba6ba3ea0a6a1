package copier

import (
	"context"
	"errors"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/policy"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/erase"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/identity"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/records"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/runs"
)

// Status is what a record says about the copy that it describes.
type Status struct {
	State  State
	Claims []string
	// Erased is set if what a run may have copied has been erased meanwhile, or is being erased: by a deletion, with all versions if Purged is set.
	Erased, Purged bool
}

// State is the state of a copy.
type State int

// States of a copy.
const (
	Over   State = iota // the record no longer asks for the copy
	Wanted              // it asks for the copy
	Done                // the copy is complete, and its users'
)

// Target is what a copy makes: a volume or a snapshot. S is the type of its record.
type Target[S any] interface {
	// Place returns the place of the record.
	Place(b buckets.Bucket) records.Place[S]
	// Status returns what the record says that a read of the place returned, or the error of the read.
	Status(found S, readErr error) (Status, error)
	// WithClaims returns the record with other claims.
	WithClaims(found S, claims []string) S
	// WithTotals returns the record of a copy that is complete.
	WithTotals(found S, t Totals) S
	// Prepare sets what c copies: Source and Limits of its Task, Expected and Exact.
	Prepare(ctx context.Context, c *Claimed[S]) error
	// CheckSource returns NotFound if the source no longer exists. It is called again and again.
	CheckSource(ctx context.Context, c *Claimed[S]) error
	// Discard deletes what there is, because the copy failed for good.
	Discard(ctx context.Context, who identity.Identity, why error) error
}

// Services are what claimed copies use. All are required.
type Services struct {
	Identities *identity.Identities
	Clients    *backend.Clients
	Opener     *buckets.Opener
	Copier     *Copier
	Eraser     *erase.Eraser
	Claims     *runs.Claims
}

// Claimed is a copy that a record asks for. Several processes may be asked for it at the same time: the run whose claim is the last one in the record
// makes the copy, the others stop. Each run continues what earlier ones have copied.
type Claimed[S any] struct {
	Services Services
	Target   Target[S]
	What     string // "volume lab:data/v/", for messages
	Backend  backend.Backend
	// Policy is what the sessions of the copy may read and write.
	Policy policy.Copy
	// Task is the copy. Prepare completes it, Make sets the bucket of its Target.
	Task Task
	// Leftovers are the prefixes that hold something of the copy: they are erased after a copy that another process has erased meanwhile. Scratch is the
	// prefix that is erased when the copy is complete; "": none.
	Leftovers []string
	Scratch   string

	// Run is the run, From the bucket of the source and Found the record, all for Prepare.
	Run   *runs.Run
	From  buckets.Bucket
	Found S
	// Expected is what the copy will have. If Exact is set, anything else is an error.
	Expected Totals
	Exact    bool

	claim *runs.Claim // nil: the target needs no copy
}

// ErrOver means that the record no longer asks for the copy.
var ErrOver = errors.New("its record no longer asks for the copy")

var (
	errDone  = errors.New("another controller has completed the copy")
	errTaken = errors.New("another controller has begun to copy")
)

// Make makes the copy, from whatever an earlier run left:
//
//  1. write the claim of this run into the record, so that any other run stops
//  2. prepare: list the source if necessary, and refuse one that is above the limits
//  3. copy, and verify the copy
//  4. if other runs were stopped, wait until they can write no more, and verify the copy again
//  5. write into the record that the copy is complete
//  6. erase what was only for the copy
//
// If it fails for good, it waits as in step 4 and discards the target. Otherwise another run continues, which need not wait for this one.
func (c *Claimed[S]) Make(ctx context.Context, run *runs.Run) error {
	c.Run, c.claim = run, c.Services.Claims.New()
	defer c.claim.End()
	if err := c.openBuckets(ctx); err != nil {
		return c.discard(ctx, err)
	}
	err := c.makeCopy(ctx)
	c.claim.End()
	switch {
	case err == nil, errors.Is(err, errDone):
		return nil
	case errors.Is(err, ErrOver) && ctx.Err() == nil:
		err = c.sweep(ctx, err)
		fallthrough
	case !fault.KindOf(err).Permanent(), ctx.Err() != nil:
		c.releaseClaim(ctx)
		return err
	}
	if waitErr := c.outwaitOthers(ctx); waitErr != nil {
		return fault.Errorf(fault.Busy, "%w; before deleting what was copied: %w", err, waitErr)
	}
	return c.discard(ctx, err)
}

func (c *Claimed[S]) makeCopy(ctx context.Context) error {
	others, err := c.claimTarget(ctx)
	if err != nil {
		return err
	}
	c.Task.Still, c.Task.Unanswered = c.checkWanted, c.claim.Unanswered
	if err := c.Target.Prepare(ctx, c); err != nil {
		return err
	}
	c.Task.Progress.Expect(c.Expected)
	totals, err := c.Services.Copier.Copy(ctx, c.Task)
	if err == nil && len(others) > 0 {
		if err = c.outwaitOthers(ctx); err == nil && !c.Task.Keep {
			totals, err = c.Services.Copier.Copy(ctx, c.Task) // all is copied: this compares, and removes what came late
		}
	}
	switch {
	case err != nil:
		return err
	case c.Exact && (totals.Objects != c.Expected.Objects || totals.Bytes != c.Expected.Bytes):
		return fault.Errorf(fault.Precondition, "%s has %d objects and %d bytes, its source had %d and %d: another program changed one of them",
			c.What, totals.Objects, totals.Bytes, c.Expected.Objects, c.Expected.Bytes)
	}
	if err := c.Finish(ctx, totals); err != nil || c.Scratch == "" {
		return err
	}
	if err := c.Services.Eraser.Erase(ctx, erase.Task{Bucket: c.record(), Prefix: c.Scratch, Progress: &erase.Progress{}}); err != nil {
		klog.FromContext(ctx).Error(err, "Removing what was for the copy failed", "of", c.What) // the target's deletion removes it
	}
	return nil
}

// openBuckets opens the buckets of the copy. If the backend supports sessions, their clients use one that is limited to the copy, so that a bug in
// this program, or a service that lists wrong keys, reaches no other data. Records and manifests are written with the controller's own
// identity.
func (c *Claimed[S]) openBuckets(ctx context.Context) error {
	s, latest := c.Services, c.Run.Latest
	own := s.Identities.Own(c.Backend, s.Clients.DriverKeys, latest)
	scoped, err := s.Identities.Narrow(ctx, c.Backend, identity.Narrowing{
		Bucket: c.Policy.Target.Bucket, Name: identity.SessionName("copy", c.What), Purpose: "the copy of " + c.What, Latest: latest,
		Policy: func(aws bool, partition string) (string, error) {
			p := c.Policy
			for _, scope := range []*policy.Scope{&p.Source, &p.Target} {
				scope.Partition, scope.KMS, scope.AWS = partition, aws, aws
			}
			return p.Policy()
		},
	})
	if err != nil {
		return err
	}
	keys, err := s.Identities.Keys(ctx, c.Backend, latest())
	if err != nil {
		return err
	}
	open := func(name string) (buckets.Bucket, error) {
		b, err := s.Opener.Open(ctx, c.Backend, keys, name, "")
		if err != nil {
			return b, err
		}
		return buckets.ForRun(ctx, s.Clients, b, own, scoped)
	}
	if c.From, err = open(c.Policy.Source.Bucket); err == nil {
		c.Task.Target.Bucket, err = open(c.Policy.Target.Bucket)
	}
	return err
}

// record returns the bucket of the record, with the controller's own identity.
func (c *Claimed[S]) record() buckets.Bucket { return c.Task.Target.Bucket.AsOwn() }

// place returns the place of the record. A write is not broken off: it would arrive later where the service has no conditions.
func (c *Claimed[S]) place() records.Place[S] {
	at := c.Target.Place(c.record())
	write := at.Write
	at.Write = func(ctx context.Context, next S) (S, error) {
		if ctx.Err() != nil {
			return next, context.Cause(ctx)
		}
		ctx, cancel := c.Services.Copier.Whole(ctx)
		defer cancel()
		return write(ctx, next)
	}
	return at
}

// status returns what the record says, if it asks for the copy.
func (c *Claimed[S]) status(found S, readErr error) (Status, error) {
	s, err := c.Target.Status(found, readErr)
	switch {
	case err != nil:
		return s, err
	case s.State == Done:
		return s, errDone
	case s.State == Over:
		return s, fault.Errorf(fault.Busy, "%s: %w", c.What, ErrOver)
	}
	return s, nil
}

// errLost is the error for a copy that another run makes.
func (c *Claimed[S]) errLost(claims []string) error {
	c.Services.Claims.LostTo(runs.Last(claims))
	return fault.Errorf(fault.Busy, "%s: %w", c.What, errTaken)
}

// holdsClaim returns what the record says, and an error unless this run is the one that makes the copy.
func (c *Claimed[S]) holdsClaim(found S, readErr error) (Status, error) {
	s, err := c.status(found, readErr)
	if err == nil && c.claim != nil && !c.claim.Is(s.Claims) {
		err = c.errLost(s.Claims)
	}
	return s, err
}

// claimTarget makes this run the one that makes the copy. It returns the claims of the runs that it stops.
func (c *Claimed[S]) claimTarget(ctx context.Context) (others []string, err error) {
	claims := c.Services.Claims
	c.Found, err = records.Update(ctx, c.place(), func(found S, readErr error) (*S, error) {
		s, err := c.status(found, readErr)
		switch {
		case err != nil:
			return nil, err
		case !claims.MayTakeOver(runs.Last(s.Claims)):
			return nil, c.errLost(s.Claims)
		}
		others = claims.Open(s.Claims)
		next := c.Target.WithClaims(found, c.claim.Add(s.Claims))
		return &next, nil
	})
	if err == nil {
		claims.Revoke(others)
	}
	return others, err
}

// Update changes the record, if this run is the one that makes the copy.
func (c *Claimed[S]) Update(ctx context.Context, change func(found S) S) (err error) {
	c.Found, err = records.Update(ctx, c.place(), func(found S, readErr error) (*S, error) {
		if _, err := c.holdsClaim(found, readErr); err != nil {
			return nil, err
		}
		next := change(found)
		return &next, nil
	})
	return err
}

// Finish writes into the record that the copy is complete. Without Make, it does that for a target that needs no copy.
func (c *Claimed[S]) Finish(ctx context.Context, t Totals) error {
	err := c.Update(ctx, func(found S) S { return c.Target.WithTotals(found, t) })
	if errors.Is(err, errDone) {
		return nil
	}
	return err
}

// checkWanted implements Task.Still.
func (c *Claimed[S]) checkWanted(ctx context.Context) error {
	if _, err := c.holdsClaim(c.Target.Place(c.record()).Read(ctx)); err != nil {
		return err
	}
	err := c.Target.CheckSource(ctx, c)
	if fault.Is(err, fault.NotFound) {
		err = fault.Errorf(fault.NotFound, "the source was deleted while it was copied: %w", err)
	}
	return err
}

// outwaitOthers waits until no other run can write to the target any more.
func (c *Claimed[S]) outwaitOthers(ctx context.Context) error {
	return c.Services.Claims.Outwait(ctx, func(ctx context.Context) ([]string, error) {
		s, err := c.holdsClaim(c.Target.Place(c.record()).Read(ctx))
		return c.claim.Others(s.Claims), err
	})
}

// releaseBound is how long releaseClaim takes at most.
const releaseBound = time.Second

// releaseClaim takes the claim of this run, which has ended, out of the record, so that no other process waits for it. If that fails, they wait. Writes
// of tags are not conditional, so that the claim of a bucket stays.
func (c *Claimed[S]) releaseClaim(ctx context.Context) {
	at := c.Target.Place(c.record())
	if at.Lock != nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseBound)
	defer cancel()
	_, err := records.Update(ctx, at, func(found S, readErr error) (*S, error) {
		s, err := c.Target.Status(found, readErr)
		open := c.Services.Claims.Open(s.Claims)
		if err != nil || slices.Contains(open, c.claim.ID) || !slices.Contains(s.Claims, c.claim.ID) {
			return nil, err
		}
		next := c.Target.WithClaims(found, open)
		return &next, nil
	})
	if err != nil {
		klog.FromContext(ctx).Info("Cannot release claim", "of", c.What, "reason", err)
	}
}

// sweep erases what this run may have copied after another process had erased the target.
func (c *Claimed[S]) sweep(ctx context.Context, why error) error {
	s, err := c.Target.Status(c.Target.Place(c.record()).Read(ctx))
	for _, prefix := range c.Leftovers {
		if err == nil && s.Erased {
			err = c.Services.Eraser.Erase(ctx, erase.Task{Bucket: c.record(), Prefix: prefix, Versions: s.Purged, Progress: &erase.Progress{}})
		}
	}
	if err != nil {
		return fault.Errorf(fault.Busy, "%w; removing what was copied: %w", why, err)
	}
	return why
}

// discard discards the target if the error is final, and returns the error.
func (c *Claimed[S]) discard(ctx context.Context, why error) error {
	if !fault.KindOf(why).Permanent() || ctx.Err() != nil {
		return why
	}
	if err := c.Target.Discard(ctx, c.Run.Latest(), why); err != nil {
		return fault.Errorf(fault.Busy, "%w; deleting what was copied: %w", why, err)
	}
	return why
}
