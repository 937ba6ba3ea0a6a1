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
	"github.com/aws/aws-sdk-go-v2/service/sts"
	smithyhttp "github.com/aws/smithy-go/transport/http"
	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/policy"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
	"github.com/s3-csi/s3-csi-driver/pkg/session"
)

const (
	bound        = 5 * time.Minute // limits all checks of one backend
	cleanupBound = time.Minute     // limits the cleanup, which also happens after an interrupt
	straggling   = time.Second     // how long to wait for the service to carry out an interrupted request
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
	Clients      *backend.Clients
	Buckets      *backend.Buckets
	Sessions     Sessions
	Bucket       string   // an existing bucket, in which only objects below a random prefix of policy.CheckPrefix are written. "": none.
	CreateBucket bool     // each backend gets a temporary bucket if Bucket is "". Without either nothing is created.
	Workload     Workload // a workload to check, besides the driver's own credentials
	Checksums    bool     // the client of volumes needs checksums of uploads
	Below        string   // a prefix in Bucket for the test objects of operations, which are then the only checks. "": policy.CheckPrefix.
	NeedNoKeys   bool     // the process, like a node, needs no credentials: then services only have to respond
}

// Check checks one backend.
func (s Services) Check(ctx context.Context, be backend.Backend) Section {
	ctx, cancel := context.WithTimeout(ctx, bound)
	defer cancel()
	r := &run{in: s, be: be, prefix: cmp.Or(s.Below, policy.CheckPrefix) + strings.ToLower(rand.Text()) + "/", wrote: map[buckets.Object]bool{}}
	r.noBucket = "there is no bucket to test with"
	r.keys, r.noKeys = s.Clients.DriverKeys(ctx)
	r.rows.tryAll(ctx, r.storageProbes())
	if s.Below == "" {
		r.openSTS(ctx)
		r.rows.tryAll(ctx, r.sessionProbes())
	}
	if r.client != nil {
		r.cleanUp(ctx)
	}
	r.needLess()
	if s.Workload.RoleARN != "" {
		r.rows = append(r.rows, r.workload(ctx))
	}
	return Section{Name: be.String(), Rows: r.rows}
}

// run is one check of a backend.
type run struct {
	in     Services
	rows   rows
	be     backend.Backend
	keys   credentials.Keys // this process's own
	noKeys error            // why there are none
	date   string           // in the service's first answer
	info   backend.BucketInfo
	client *s3.Client              // of the bucket
	prefix string                  // of everything that is written
	made   bool                    // the check created the bucket
	unfit  error                   // why the driver cannot use the bucket that it created
	wrote  map[buckets.Object]bool // objects and versions that may exist

	noService, noBucket, noObject, noSTS string // why something cannot be tried; "": it can

	stored   []string // the names that could be stored
	listed   []string // the names in a listing; nil: it failed
	noParts  bool     // multipart uploads fail
	overfull bool     // pages of listings are larger than requested

	sts   *sts.Client
	order credentials.Order // one that worked, for a session without a policy; zero: none did
	odd   string            // the unspecific code that the token service returns for an unknown action; "": unknown
}

// bucketItem is the item of the given bucket, or of one that is created.
func (r *run) bucketItem() Item {
	if r.in.Bucket != "" {
		return Needed("bucket", "use the bucket "+r.in.Bucket)
	}
	return Optional("createBucket", "create a bucket")
}

func (r *run) identity(_ context.Context, what Item) Row {
	if r.noKeys != nil {
		r.noService = cmp.Or(r.noService, "there are no credentials")
		return what.Row(No, OneLine(r.noKeys),
			"run the check with credentials for this backend in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, like those of its volumes")
	}
	return what.Row(Yes, "access key "+r.keys.AccessKeyID, "")
}

// needLess marks what was not tried as not needed if NeedNoKeys is set, because credentials or a bucket that was asked for are missing.
func (r *run) needLess() {
	if asked := r.in.Bucket != "" || r.in.CreateBucket; !r.in.NeedNoKeys || asked && !r.keys.IsZero() {
		return
	}
	for i, row := range r.rows {
		if row.Result == Unknown || row.Check == "credentials" {
			r.rows[i].Needed = false
		}
	}
}

// reach checks whether an S3 service responds, with any credentials.
func (r *run) reach(ctx context.Context, what Item) Row {
	keys := r.keys
	if keys.IsZero() {
		keys = credentials.Keys{AccessKeyID: "s3-csi-check", SecretAccessKey: "none"}
	}
	out := &s3.ListBucketsOutput{}
	client, err := r.in.Clients.S3(ctx, r.be, keys, "")
	if err == nil {
		out, err = client.ListBuckets(ctx, &s3.ListBucketsInput{})
	}
	r.date = dateOf(out, err)
	where := "AWS in region " + r.be.StartRegion()
	if !r.be.AWS() {
		where = r.be.Endpoint
	}
	if err == nil || backend.ErrorCode(err) != "" {
		return what.Row(Yes, where, "")
	}
	r.noService = "the service does not respond"
	return what.Row(No, OneLine(backend.Classify(err, "list buckets of "+where)),
		"check endpoint and caFile of the backend in the driver's config file, and network, proxies and firewalls")
}

// Differences of clocks: services refuse requests whose time differs by more than 15 minutes.
const (
	clockFails = 15 * time.Minute
	clockWarns = 5 * time.Minute
)

// clock compares the Date header of an answer with the time of this host.
func clock(what Item, date string, now time.Time) Row {
	served, err := http.ParseTime(date)
	if err != nil {
		return what.Row(Unknown, "no answer of the service has a Date", "")
	}
	differ := now.Sub(served).Abs().Round(time.Second)
	what.needed = differ > clockFails
	if differ <= clockWarns {
		return what.Row(Yes, "", "")
	}
	why := fmt.Sprintf("they differ by %s: the service has %s", differ, served.UTC().Format(time.RFC3339))
	row := what.Row(No, why, "check time synchronization of this host and of the service")
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
func (r *run) bucket(ctx context.Context, what Item) Row {
	if r.in.Bucket != "" {
		if err := r.open(ctx, r.in.Bucket); err != nil {
			return r.withLocation(ctx, what.Row(No, OneLine(err), ""), err, r.in.Bucket)
		}
		r.noBucket = ""
		return what.Row(Yes, fmt.Sprintf("test objects in bucket %s are below %s and are deleted", r.info.Name, r.prefix), "")
	}
	if !r.in.CreateBucket {
		return what.Row(Unknown, "nothing was created", "use --bucket to check in an existing bucket, or --create-bucket to check in one that is deleted afterwards")
	}
	row := r.create(ctx, what)
	if row.Result == Yes {
		r.unfit, r.noBucket = r.open(ctx, r.info.Name), ""
	}
	return row
}

// open opens the bucket like the driver does.
func (r *run) open(ctx context.Context, name string) error {
	info, err := r.in.Buckets.Validate(ctx, r.be, r.keys, backend.BucketInfo{Name: name})
	if err != nil {
		return err
	}
	client, err := r.in.Clients.Bucket(ctx, r.be, r.keys, info)
	if err == nil {
		r.info, r.client = info, client
	}
	return err
}

// withLocation adds the setting that locates a bucket, if an error is about that: the other addressing if a listing works with it, or the region.
func (r *run) withLocation(ctx context.Context, row Row, err error, bucket string) Row {
	switch backend.ErrorCode(err) {
	case "PermanentRedirect", "TemporaryRedirect", "MovedPermanently", "AuthorizationHeaderMalformed", "InvalidRegion",
		"IllegalLocationConstraintException", "InvalidLocationConstraint":
		return row.with(settingRegion)
	case "SecondLevelDomainForbidden":
		return row.with(settingVirtual)
	}
	if r.be.AWS() || r.listsBucket(ctx, r.be, bucket) {
		return row
	}
	other, setting := r.be, settingVirtual
	if other.PathStyle = !other.PathStyle; other.PathStyle {
		setting = settingPath
	}
	if r.listsBucket(ctx, other, bucket) {
		return row.with(setting)
	}
	return row
}

// listsBucket reports whether the service lists a bucket of that name, or knows that there is none. One that looks for it elsewhere lists
// something else.
func (r *run) listsBucket(ctx context.Context, be backend.Backend, bucket string) bool {
	client, err := r.in.Clients.S3(ctx, be, r.keys, "")
	if err != nil {
		return false
	}
	out, err := client.ListObjectsV2(ctx, &s3.ListObjectsV2Input{Bucket: &bucket, MaxKeys: aws.Int32(1)}, buckets.NoRetry)
	return err == nil && aws.ToString(out.Name) == bucket || backend.IsNoSuchBucket(err)
}

func (r *run) region(_ context.Context, what Item) Row {
	if r.unfit != nil {
		return what.Row(Unknown, "the driver cannot use the bucket", "")
	}
	return what.Row(Yes, r.info.Region, "")
}

func (r *run) owner(_ context.Context, what Item) Row {
	switch {
	case r.unfit != nil:
		what.needed = true
		return what.Row(No, "the driver cannot use a bucket that it created: "+OneLine(r.unfit),
			"set expectedBucketOwner of the backend in the driver's config file, or correct its sts")
	case r.info.Owner == "":
		return what.Row(No, "the account is unknown, so the owner of buckets is not checked", "")
	}
	return what.Row(Yes, "account "+r.info.Owner, "")
}

// create creates a bucket for this check.
func (r *run) create(ctx context.Context, what Item) Row {
	name := BucketPrefix + strings.ToLower(rand.Text())
	client, err := r.in.Clients.S3(ctx, r.be, r.keys, "")
	var tagged bool
	if err == nil {
		tagged, err = buckets.Create(ctx, client, r.be, name, []types.Tag{testTag()})
	}
	made := err == nil
	if made || buckets.Indeterminate(backend.Classify(err, "")) { // it may still be created
		r.made, r.info, r.client = true, backend.BucketInfo{Name: name, Region: r.be.StartRegion()}, client
	}
	switch {
	case made && tagged:
		return what.Row(Yes, "created bucket "+name, "")
	case made:
		return what.Row(Yes, "created bucket "+name+", without tags", "")
	case r.made:
		r.cleanUp(ctx)
		r.client = nil
	}
	row := what.Row(No, OneLine(backend.Classify(err, "create bucket "+name)),
		"volumes with bucketName do not need it; use --bucket to check the rest in an existing bucket")
	return r.withLocation(ctx, row, err, name)
}

// cleanUp removes what was written, even if ctx has ended, and reports what is left.
func (r *run) cleanUp(ctx context.Context) {
	err := RemoveAll(ctx, cleanupBound, ctx.Err() != nil, r.remove)
	if err == nil {
		return
	}
	left := "below " + r.prefix + " in bucket " + r.info.Name
	if r.made {
		left = "bucket " + r.info.Name
	}
	klog.FromContext(ctx).Error(err, "Cleanup after check failed", "left", left)
	what := Needed("removed", "the check deletes everything that it creates")
	r.rows = append(r.rows, what.Row(No, OneLine(backend.Classify(err, "delete the test objects")), "delete it manually: "+left))
}

// RemoveAll calls remove, also after ctx has ended. After an interrupt, it calls it again: the service may still carry out requests.
func RemoveAll(ctx context.Context, bound time.Duration, interrupted bool, remove func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), bound)
	defer cancel()
	err := remove(ctx)
	if interrupted {
		select {
		case <-time.After(straggling):
			err = remove(ctx)
		case <-ctx.Done():
		}
	}
	return err
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
