package check

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	awsmiddleware "github.com/aws/aws-sdk-go-v2/aws/middleware"
	awshttp "github.com/aws/aws-sdk-go-v2/aws/transport/http"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"
	smithyhttp "github.com/aws/smithy-go/transport/http"
	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/policy"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
	"github.com/s3-csi/s3-csi-driver/pkg/session"
)

const (
	// bound limits all checks of one backend.
	bound = 5 * time.Minute
	// cleanupBound limits the cleanup, which also happens after an interrupt.
	cleanupBound = time.Minute
	// straggling is how long to wait for the service to carry out an interrupted request.
	straggling = time.Second
	// BucketPrefix is the prefix of buckets that checks create.
	BucketPrefix = "s3-csi-check-"
)

// Sessions plans and makes sessions (session.Planner and session.Maker).
type Sessions interface {
	Plan(ctx context.Context, r session.Request) (credentials.Order, error)
	Make(ctx context.Context, o credentials.Order) (credentials.Keys, error)
}

// Services checks backends with the credentials of this process.
type Services struct {
	Clients  *backend.Clients
	Buckets  *backend.Buckets
	Sessions Sessions
	// Bucket is an existing bucket, in which only objects below a random prefix of policy.CheckPrefix are written. "": none.
	Bucket string
	// CreateBucket means that each backend gets a temporary bucket if Bucket is "". Without either nothing is created.
	CreateBucket bool
	// Workload is a workload to check, besides the driver's own credentials.
	Workload Workload
	// Checksums means that the client of volumes needs checksums of uploads.
	Checksums bool
	// Below is a prefix in Bucket for the test objects of operations, which are then the only checks. "": policy.CheckPrefix.
	Below string
	// NeedNoKeys means that the process, like a node, needs no credentials: then services only have to respond.
	NeedNoKeys bool
}

// Check checks one backend.
func (s Services) Check(ctx context.Context, be backend.Backend) Section {
	ctx, cancel := context.WithTimeout(ctx, bound)
	defer cancel()
	r := &run{Services: s, be: be, prefix: cmp.Or(s.Below, policy.CheckPrefix) + strings.ToLower(rand.Text()) + "/", wrote: map[buckets.Object]bool{}}
	r.do(ctx)
	r.needLess()
	if s.Workload.RoleARN != "" {
		r.add(r.workload(ctx))
	}
	return Section{Name: be.String(), Rows: r.all}
}

// run is one check of a backend.
type run struct {
	Services
	rows
	be     backend.Backend
	keys   credentials.Keys // this process's own
	info   backend.BucketInfo
	client *s3.Client              // of the bucket
	prefix string                  // of everything that is written
	made   bool                    // the check created the bucket
	wrote  map[buckets.Object]bool // objects and versions that may exist

	stored   []string // the names that could be stored
	listed   []string // the names in a listing; nil: it failed
	noParts  bool     // multipart uploads fail
	overfull bool     // pages of listings are larger than requested
}

// items returns the first items of the table.
func (r *run) items() (reachable, identity, bucket item) {
	bucket = item{"createBucket", "create a bucket", false}
	if r.Bucket != "" {
		bucket = item{"bucket", "use the bucket " + r.Bucket, true}
	}
	return item{"reachable", "the service responds", true}, item{"credentials", "the driver's own credentials", true}, bucket
}

// bucketItems returns the items about a bucket.
func bucketItems() (region, owner item) {
	return item{"region", "the bucket's region", false}, item{"bucketOwner", "the owner of buckets is checked", false}
}

func (r *run) do(ctx context.Context) {
	reachable, identity, bucket := r.items()
	region, owner := bucketItems()
	keys, err := r.Clients.DriverKeys(ctx)
	r.keys = keys
	r.reach(ctx, reachable)
	if err != nil {
		r.add(identity.row(No, one(err), "run the check with credentials for this backend in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, like those of its volumes"))
	} else {
		r.add(identity.row(Yes, "access key "+keys.AccessKeyID, ""))
	}
	s, storage := &stsRun{run: r}, r.storageProbes()
	onBucket := append([]item{region, owner}, items(storage)...)
	if err != nil || r.all[0].Result == No {
		why := "there are no credentials"
		if r.all[0].Result == No {
			why = "the service does not respond"
		}
		r.unknown(why, append([]item{bucket}, onBucket...)...)
		if r.Below == "" {
			r.unknown(why, append(items(s.probes()), r.timeProbe().item)...)
		}
		return
	}
	if r.bucket(ctx, bucket); r.client != nil {
		defer r.cleanUp(ctx)
		r.storage(ctx, storage)
	} else {
		r.unknown(noBucket, onBucket...)
	}
	if r.Below != "" {
		return
	}
	if s.client, err = r.Clients.STS(ctx, r.be, r.keys); err != nil {
		r.unknown(one(err), items(s.probes())...)
	} else {
		r.each(ctx, s.probes()...)
	}
	r.each(ctx, r.timeProbe())
}

const noBucket = "there is no bucket to test with"

// storage tries what is needed of a bucket. Without objects, there is nothing to try the other operations with.
func (r *run) storage(ctx context.Context, probes []probe) {
	for i, p := range probes {
		r.each(ctx, p)
		if p.check == "objects" && r.all[len(r.all)-1].Result != Yes {
			r.unknown("no object could be stored and read", items(probes[i+1:])...)
			return
		}
	}
}

// needLess marks what was not tried as not needed if NeedNoKeys is set, because credentials or a bucket that was asked for are missing.
func (r *run) needLess() {
	if asked := r.Bucket != "" || r.CreateBucket; !r.NeedNoKeys || asked && !r.keys.IsZero() {
		return
	}
	for i, row := range r.all {
		if row.Result == Unknown || row.Check == "credentials" {
			r.all[i].Needed = false
		}
	}
}

// reach checks whether an S3 service responds, with any credentials, and its clock.
func (r *run) reach(ctx context.Context, what item) {
	keys := r.keys
	if keys.IsZero() {
		keys = credentials.Keys{AccessKeyID: "s3-csi-check", SecretAccessKey: "none"}
	}
	out := &s3.ListBucketsOutput{}
	client, err := r.Clients.S3(ctx, r.be, keys, "")
	if err == nil {
		out, err = client.ListBuckets(ctx, &s3.ListBucketsInput{})
	}
	where := "AWS in region " + r.be.StartRegion()
	if !r.be.AWS() {
		where = r.be.Endpoint
	}
	if err == nil || backend.ErrorCode(err) != "" {
		r.add(what.row(Yes, where, ""))
	} else {
		r.add(what.row(No, one(backend.Classify(err, "list buckets of "+where)),
			"check endpoint and caFile of the backend in the driver's config file, and network, proxies and firewalls"))
	}
	r.add(clock(dateOf(out, err), time.Now()))
}

// Differences of clocks: services refuse requests whose time differs by more than 15 minutes.
const (
	clockFails = 15 * time.Minute
	clockWarns = 5 * time.Minute
)

// clock compares the Date header of an answer with the time of this host.
func clock(date string, now time.Time) Row {
	what := item{"clock", "the clocks of this host and the service agree", false}
	served, err := http.ParseTime(date)
	if err != nil {
		return what.row(Unknown, "no answer of the service has a Date", "")
	}
	differ := now.Sub(served).Abs().Round(time.Second)
	what.needed = differ > clockFails
	if differ <= clockWarns {
		return what.row(Yes, "", "")
	}
	why := fmt.Sprintf("they differ by %s: the service has %s", differ, served.UTC().Format(time.RFC3339))
	row := what.row(No, why, "check time synchronization of this host and of the service")
	row.Affects = "every request, when they differ by more than 15 minutes; sessions"
	return row
}

// dateOf returns the Date header of an answer.
func dateOf(out *s3.ListBucketsOutput, err error) string {
	var raw any
	if out != nil {
		raw = awsmiddleware.GetRawResponse(out.ResultMetadata)
	}
	if failed := (*awshttp.ResponseError)(nil); errors.As(err, &failed) {
		raw = failed.Response
	}
	if response, ok := raw.(*smithyhttp.Response); ok && response != nil {
		return response.Header.Get("Date")
	}
	return ""
}

// bucket validates the given bucket, or creates one.
func (r *run) bucket(ctx context.Context, what item) {
	if r.Bucket != "" {
		info, err := r.Buckets.Validate(ctx, r.be, r.keys, backend.BucketInfo{Name: r.Bucket})
		if err == nil {
			r.client, err = r.Clients.Bucket(ctx, r.be, r.keys, info)
		}
		if err != nil {
			r.add(r.located(ctx, what.row(No, one(err), ""), err, r.Bucket))
			return
		}
		r.info = info
		r.add(what.row(Yes, r.written(), ""))
		r.known(nil)
		return
	}
	if !r.CreateBucket {
		r.add(what.row(Unknown, "nothing was created", "use --bucket to check in an existing bucket, or --create-bucket to check in one that is deleted afterwards"))
		return
	}
	if r.create(ctx, what) {
		info, err := r.Buckets.Validate(ctx, r.be, r.keys, backend.BucketInfo{Name: r.info.Name})
		if err == nil {
			r.info = info
			r.client, err = r.Clients.Bucket(ctx, r.be, r.keys, info)
		}
		r.known(err)
	}
}

// located adds the setting that locates a bucket, if an error is about that: the other addressing if a listing works with it, or the region.
func (r *run) located(ctx context.Context, row Row, err error, bucket string) Row {
	switch backend.ErrorCode(err) {
	case "PermanentRedirect", "TemporaryRedirect", "MovedPermanently", "AuthorizationHeaderMalformed", "InvalidRegion",
		"IllegalLocationConstraintException", "InvalidLocationConstraint":
		return row.with(settingRegion)
	case "SecondLevelDomainForbidden":
		return row.with(settingVirtual)
	}
	if r.be.AWS() || r.addressed(ctx, r.be, bucket) {
		return row
	}
	other, setting := r.be, settingVirtual
	if other.PathStyle = !other.PathStyle; other.PathStyle {
		setting = settingPath
	}
	if r.addressed(ctx, other, bucket) {
		return row.with(setting)
	}
	return row
}

// addressed reports whether the service lists a bucket of that name, or knows that there is none. One that looks for it elsewhere lists
// something else.
func (r *run) addressed(ctx context.Context, be backend.Backend, bucket string) bool {
	client, err := r.Clients.S3(ctx, be, r.keys, "")
	if err != nil {
		return false
	}
	out, err := client.ListObjectsV2(ctx, &s3.ListObjectsV2Input{Bucket: &bucket, MaxKeys: aws.Int32(1)}, buckets.NoRetry)
	return err == nil && aws.ToString(out.Name) == bucket || backend.IsNoSuchBucket(err)
}

// known adds the rows about the bucket, or err.
func (r *run) known(err error) {
	region, owner := bucketItems()
	if err != nil {
		owner.needed = true
		r.unknown("the driver cannot use the bucket", region)
		r.add(owner.row(No, "the driver cannot use a bucket that it created: "+one(err), "set expectedBucketOwner of the backend in the driver's config file, or correct its sts"))
		return
	}
	r.add(region.row(Yes, r.info.Region, ""))
	if r.info.Owner == "" {
		r.add(owner.row(No, "the account is unknown, so the owner of buckets is not checked", ""))
	} else {
		r.add(owner.row(Yes, "account "+r.info.Owner, ""))
	}
}

func (r *run) written() string {
	return fmt.Sprintf("test objects in bucket %s are below %s and are deleted", r.info.Name, r.prefix)
}

// create creates a bucket for this check.
func (r *run) create(ctx context.Context, what item) bool {
	name := BucketPrefix + strings.ToLower(rand.Text())
	client, err := r.Clients.S3(ctx, r.be, r.keys, "")
	var tagged bool
	if err == nil {
		tagged, err = buckets.Create(ctx, client, r.be, name, []types.Tag{testTag()})
	}
	if err != nil {
		if buckets.Indeterminate(backend.Classify(err, "")) { // it may still be created
			r.info, r.made = backend.BucketInfo{Name: name, Region: r.be.StartRegion()}, true
			r.client = client
			r.cleanUp(ctx)
			r.client = nil
		}
		row := what.row(No, one(backend.Classify(err, "create bucket "+name)),
			"volumes with bucketName do not need it; use --bucket to check the rest in an existing bucket")
		r.add(r.located(ctx, row, err, name))
		return false
	}
	r.made = true
	r.info, r.client = backend.BucketInfo{Name: name, Region: r.be.StartRegion()}, client
	why := "created bucket " + name
	if !tagged {
		why += ", without tags"
	}
	r.add(what.row(Yes, why, ""))
	return true
}

// cleanUp removes what was written, even if ctx has ended, and reports what is left.
func (r *run) cleanUp(ctx context.Context) {
	interrupted := ctx.Err() != nil
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupBound)
	defer cancel()
	what := item{"removed", "the check deletes everything that it creates", true}
	err := r.remove(ctx)
	if interrupted {
		// The service may still carry out an interrupted request.
		select {
		case <-time.After(straggling):
			err = r.remove(ctx)
		case <-ctx.Done():
		}
	}
	left := "below " + r.prefix + " in bucket " + r.info.Name
	if r.made {
		left = "bucket " + r.info.Name
	}
	if err != nil {
		klog.FromContext(ctx).Error(err, "Cleanup after check failed", "left", left)
		r.add(what.row(No, one(backend.Classify(err, "delete the test objects")), "delete it manually: "+left))
	}
}

// remove removes what was written, and the bucket if the check created it.
func (r *run) remove(ctx context.Context) error {
	err := r.removeBelow(ctx)
	if r.made && err == nil {
		_, err = r.client.DeleteBucket(ctx, &s3.DeleteBucketInput{Bucket: &r.info.Name})
	}
	if r.made && backend.IsNoSuchBucket(err) {
		return nil
	}
	return err
}
