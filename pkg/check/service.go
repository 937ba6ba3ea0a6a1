package check

import (
	"context"
	"crypto/rand"
	"fmt"
	"strings"
	"time"

	"github.com/aws/aws-sdk-go-v2/service/s3"
	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/policy"
	"github.com/s3-csi/s3-csi-driver/pkg/session"
)

const (
	// bound is what all checks of one backend may take.
	bound = 3 * time.Minute
	// cleanupBound is what removing their traces may take, which happens even when the operator has had enough.
	cleanupBound = 30 * time.Second
	// straggling is how long a service may take to carry out a request that was broken off.
	straggling = time.Second
	// BucketPrefix begins the name of a bucket that is made for a check.
	BucketPrefix = "s3-csi-check-"
)

// Sessions decides how sessions are made and makes them (session.Planner and session.Maker).
type Sessions interface {
	Plan(ctx context.Context, r session.Request) (credentials.Order, error)
	Make(ctx context.Context, o credentials.Order) (credentials.Keys, error)
}

// Services checks backends. It uses the credentials of this process.
type Services struct {
	Clients  *backend.Clients
	Buckets  *backend.Buckets
	Sessions Sessions
	// Bucket is one that is there already: only objects below a random prefix of policy.TrialPrefix are written in it. "": a bucket is made
	// for each backend and removed again.
	Bucket string
	// NeedNoKeys says that the process may have no credentials, as nodes: then it is enough that the services answer.
	NeedNoKeys bool
}

// Check checks one backend.
func (s Services) Check(ctx context.Context, be backend.Backend) Section {
	ctx, cancel := context.WithTimeout(ctx, bound)
	defer cancel()
	t := &trial{Services: s, be: be, prefix: policy.TrialPrefix + strings.ToLower(rand.Text()) + "/"}
	t.run(ctx)
	return Section{Name: be.String(), Rows: t.all}
}

// trial is the check of one backend.
type trial struct {
	Services
	rows
	be     backend.Backend
	keys   credentials.Keys // this process's own
	info   backend.BucketInfo
	client *s3.Client // of the bucket
	prefix string     // of all that is written
	made   bool       // the bucket is this check's own
}

// What is looked at, in the order of the table.
func (t *trial) things() (reachable, identity, bucket thing) {
	bucket = thing{"createBucket", "make a bucket", false}
	if t.Bucket != "" {
		bucket = thing{"bucket", "use the bucket " + t.Bucket, true}
	}
	return thing{"reachable", "the service answers", true}, thing{"credentials", "the driver's own credentials", true}, bucket
}

// What is known of a bucket.
func bucketThings() (region, owner thing) {
	return thing{"region", "the bucket's region", false}, thing{"bucketOwner", "whose the bucket is, is checked", false}
}

func (t *trial) run(ctx context.Context) {
	reachable, identity, bucket := t.things()
	region, owner := bucketThings()
	keys, err := t.Clients.DriverKeys(ctx)
	t.keys = keys
	t.reach(ctx, reachable)
	if err != nil {
		defer t.withoutKeys()
		t.add(identity.row(No, one(err), "run the check with credentials for this backend in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, as its volumes will have them"))
	} else {
		t.add(identity.row(Yes, "access key "+keys.AccessKeyID, ""))
	}
	if err != nil || t.all[0].Result == No {
		why := "there are no credentials to try it with"
		if t.all[0].Result == No {
			why = "the service does not answer"
		}
		t.unknown(why, append([]thing{bucket, region, owner}, t.storageThings()...)...)
		t.unknown(why, t.sessionThings()...)
		return
	}
	t.bucket(ctx, bucket)
	if t.client == nil {
		t.unknown("there is no bucket to try it in", append([]thing{region, owner}, t.storageThings()...)...)
		t.sessions(ctx)
		return
	}
	defer t.cleanUp(ctx)
	t.storage(ctx)
	t.sessions(ctx)
}

// withoutKeys lets nothing count that takes credentials, where none are needed.
func (t *trial) withoutKeys() {
	for i := range t.all {
		if t.NeedNoKeys && i > 0 {
			t.all[i].Needed = false
		}
	}
}

// reach finds out whether anything that speaks S3 answers, with whatever credentials.
func (t *trial) reach(ctx context.Context, what thing) {
	keys := t.keys
	if keys.IsZero() {
		keys = credentials.Keys{AccessKeyID: "s3-csi-check", SecretAccessKey: "none"}
	}
	client, err := t.Clients.S3(ctx, t.be, keys, "")
	if err == nil {
		_, err = client.ListBuckets(ctx, &s3.ListBucketsInput{})
	}
	where := "AWS in region " + t.be.StartRegion()
	if !t.be.AWS() {
		where = t.be.Endpoint
	}
	if err == nil || backend.ErrorCode(err) != "" {
		t.add(what.row(Yes, where, ""))
		return
	}
	t.add(what.row(No, one(backend.Classify(err, "asking "+where)), "correct endpoint and caFile of the backend in the driver's config file; check the network, proxies and firewalls from here"))
}

// bucket finds the bucket to try things in, or makes one.
func (t *trial) bucket(ctx context.Context, what thing) {
	if t.Bucket != "" {
		info, err := t.Buckets.Validate(ctx, t.be, t.keys, t.Bucket, "")
		if err == nil {
			t.client, err = t.Clients.Bucket(ctx, t.be, t.keys, info)
		}
		if err != nil {
			t.add(what.row(No, one(err), ""))
			return
		}
		t.info = info
		t.add(what.row(Yes, t.written(), ""))
		t.known(nil)
		return
	}
	if t.create(ctx, what) {
		info, err := t.Buckets.Validate(ctx, t.be, t.keys, t.info.Name, "")
		if err == nil {
			t.info = info
			t.client, err = t.Clients.Bucket(ctx, t.be, t.keys, info)
		}
		t.known(err)
	}
}

// known tells what was found out about the bucket, or err in place of that.
func (t *trial) known(err error) {
	region, owner := bucketThings()
	if err != nil {
		owner.needed = true
		t.unknown("the driver cannot use the bucket", region)
		t.add(owner.row(No, "the driver cannot use a bucket that it made: "+one(err), "give the account that owns the backend's buckets with expectedBucketOwner in the driver's config file, or correct sts of the backend"))
		return
	}
	t.add(region.row(Yes, t.info.Region, ""))
	if t.info.Owner == "" {
		t.add(owner.row(No, "no account is known: buckets are used whoever owns them", ""))
	} else {
		t.add(owner.row(Yes, "account "+t.info.Owner, ""))
	}
}

func (t *trial) written() string {
	return fmt.Sprintf("what is written in bucket %s is below %s and is removed", t.info.Name, t.prefix)
}

// create makes a bucket for this check alone.
func (t *trial) create(ctx context.Context, what thing) bool {
	name := BucketPrefix + strings.ToLower(rand.Text())
	client, err := t.Clients.S3(ctx, t.be, t.keys, "")
	var tagged bool
	if err == nil {
		tagged, err = createBucket(ctx, client, t.be, name)
	}
	if err != nil {
		if !definite(err) { // it may come to be
			t.info, t.made = backend.BucketInfo{Name: name, Region: t.be.StartRegion()}, true
			t.client = client
			t.cleanUp(ctx)
			t.client = nil
		}
		t.add(what.row(No, one(backend.Classify(err, "making bucket "+name)), "volumes that are prefixes of a bucket do not need it: name one that is there with --bucket, and the rest is tried in it"))
		return false
	}
	t.made = true
	t.info, t.client = backend.BucketInfo{Name: name, Region: t.be.StartRegion()}, client
	why := "made bucket " + name
	if !tagged {
		why += ", but not with tags"
	}
	t.add(what.row(Yes, why, ""))
	return true
}

// definite tells whether a refused request had no effect.
func definite(err error) bool {
	switch fault.KindOf(backend.Classify(err, "")) {
	case fault.Unavailable, fault.Timeout, fault.Busy, fault.Unknown:
		return false
	}
	return true
}

// cleanUp removes what was written, also where ctx has ended. What stays is told.
func (t *trial) cleanUp(ctx context.Context) {
	brokenOff := ctx.Err() != nil
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupBound)
	defer cancel()
	what := thing{"removed", "nothing is left of the check", true}
	err := t.remove(ctx)
	if brokenOff {
		// The service may carry out a request after nobody waits for it any more.
		select {
		case <-time.After(straggling):
			err = t.remove(ctx)
		case <-ctx.Done():
		}
	}
	left := "below " + t.prefix + " in bucket " + t.info.Name
	if t.made {
		left = "bucket " + t.info.Name
	}
	if err != nil {
		klog.FromContext(ctx).Error(err, "The check could not remove what it made", "left", left)
		t.add(what.row(No, one(backend.Classify(err, "removing what was written")), "remove it by hand: "+left))
	}
}

// remove removes what was written, and the bucket if the check has made it.
func (t *trial) remove(ctx context.Context) error {
	err := removeBelow(ctx, t.client, t.info.Name, t.prefix)
	if t.made && err == nil {
		_, err = t.client.DeleteBucket(ctx, &s3.DeleteBucketInput{Bucket: &t.info.Name})
	}
	if t.made && backend.IsNoSuchBucket(err) {
		return nil
	}
	return err
}
