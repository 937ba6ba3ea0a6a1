package check

import (
	"context"
	"crypto/rand"
	"errors"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
)

// testTag is the tag of buckets that checks create.
func testTag() types.Tag {
	return types.Tag{Key: aws.String("s3.csi/check"), Value: aws.String("can-be-removed")}
}

const content = "Test object of s3-csi-driver check. It can be deleted.\n"

// probe is an item with the function that tries it.
type probe struct {
	item
	affects string // what fails or is limited without it
	try     func(context.Context, item) Row
}

// storageProbes returns what the controller and the clients need of a bucket, in the order in which it is tried.
func (r *run) storageProbes() []probe {
	const all, copying = "every volume", "snapshots, clones and renames"
	return []probe{
		{item{"bucketTags", "buckets can be tagged when they are created", false}, "", r.tags},
		{item{"missingKey", "HEAD of a missing key returns 404", true}, all, r.missingKey},
		{item{"emptyListing", "listings of no keys (max-keys=0)", true}, "mountpoint-s3", r.emptyListing},
		{item{"uploadListing", "unfinished uploads are listed by prefix", false}, "", r.uploadListing},
		{item{"versioning", "the versioning state of a bucket can be read", false}, "", r.versioning},
		{item{"objects", "store and read an object", true}, all, r.objects},
		{item{"metadata", "HEAD, GET and listings agree on size, ETag and time", true}, all, r.proven(r.metadata)},
		{item{"emptyObjects", "store an empty object", true}, "empty files", r.proven(r.empty)},
		{item{"ranges", "read a part of an object", true}, "reads of large files", r.proven(r.ranges)},
		{item{"conditionalReads", "conditional reads (If-Match)", true}, "reads of files that another writer replaces", r.proven(r.conditionalReads)},
		{item{"conditionalWrites", "conditional writes (If-None-Match, If-Match)", !r.be.SingleController}, "several controllers", r.conditional},
		{item{"names", "names with special characters", true}, "files with such names", r.proven(r.storeNames)},
		{item{"pagination", "listings have every object once", true}, "directories, snapshots, clones and deletions", r.proven(r.pagination)},
		{item{"listingOrder", "listings are sorted", !r.directoryBucket()}, "directories, snapshots and clones", r.proven(r.order)},
		{item{"listingNames", "listings encode names correctly", true}, "snapshots, clones and deletions of files with such names", r.proven(r.encoding)},
		{item{"directories", "list one directory (delimiter)", true}, all, r.proven(r.directories)},
		{item{"controlNames", "names with control characters", false}, "snapshots, clones and deletions of files with such names", r.proven(r.controls)},
		{item{"copies", "server-side copies", true}, copying, r.proven(r.copies)},
		{item{"conditionalCopies", "conditional copies (x-amz-copy-source-if-match)", true}, copying + " of files that change", r.proven(r.conditionalCopies)},
		{item{"multipart", "multipart uploads", true}, "writes of large files; of all files with mountpoint-s3", r.proven(r.multipart)},
		{item{"partCopies", "server-side copies of parts", true}, copying + " of files of 1 GiB or more", r.proven(r.partCopies)},
		{item{"manyParts", "multipart uploads of 10,000 parts", false}, "large files", r.helped(r.manyParts, settingPartSize)},
		{item{"checksums", "uploads with checksums in trailers", r.Checksums}, "writes with mountpoint-s3", r.helped(r.checksums, settingChecksums)},
		{item{"multiDelete", "delete several objects with one request", true}, "deletions of volumes", r.proven(r.multiDelete)},
		{item{"deletes", "deleted objects are gone", true}, "deletions", r.proven(r.deletes)},
	}
}

// timeProbe is tried last, because it changes the bucket of the check.
func (r *run) timeProbe() probe {
	return probe{item{"timeSnapshots", "snapshots of one time (consistency: time)", false}, "", r.timeSnapshots}
}

// each adds the rows of probes.
func (r *run) each(ctx context.Context, probes ...probe) {
	for _, p := range probes {
		if ctx.Err() != nil {
			r.unknown("the check was stopped before", p.item)
			continue
		}
		row := p.try(ctx, p.item)
		if row.Result != Yes {
			row.Affects = p.affects
		}
		r.add(row)
	}
}

// items returns the items of probes.
func items(probes []probe) []item {
	all := make([]item, len(probes))
	for i, p := range probes {
		all[i] = p.item
	}
	return all
}

// warningError is a finding that the driver works around.
type warningError struct{ error }

func isWarning(err error) bool {
	_, ok := errors.AsType[warningError](err)
	return ok
}

// proven returns the function of a probe whose error is the finding.
func (r *run) proven(try func(context.Context) error) func(context.Context, item) Row {
	return func(ctx context.Context, what item) Row {
		err := try(ctx)
		if err == nil {
			return what.row(Yes, "", "")
		}
		what.needed = what.needed && !isWarning(err)
		if noAnswer := fault.Is(err, fault.Unavailable) || fault.Is(err, fault.Timeout); noAnswer && backend.ErrorCode(err) == "" {
			return what.row(Unknown, one(err), "")
		}
		return what.row(No, one(err), "")
	}
}

// helped is proven for a finding that a setting helps against.
func (r *run) helped(try func(context.Context) error, setting string) func(context.Context, item) Row {
	return func(ctx context.Context, what item) Row {
		row := r.proven(try)(ctx, what)
		if row.Result == No {
			row = row.with(setting)
		}
		return row
	}
}

// failed returns the row of a check without a result.
func failed(what item, err error, doing string) Row {
	return what.row(Unknown, one(backend.Classify(err, doing)), "")
}

func (r *run) tags(ctx context.Context, what item) Row {
	if !r.made {
		return what.row(Unknown, "only checked without --bucket", "")
	}
	have, err := r.client.GetBucketTagging(ctx, &s3.GetBucketTaggingInput{Bucket: &r.info.Name})
	switch {
	case err == nil && hasTag(have.TagSet):
		return what.row(Yes, "volumes can have their own bucket, identified by its tags", "")
	case err != nil && !backend.IsNotFound(err) && backend.ErrorCode(err) == "":
		return failed(what, err, "read the tags of the bucket")
	}
	_, err = r.client.PutBucketTagging(ctx, &s3.PutBucketTaggingInput{Bucket: &r.info.Name, Tagging: &types.Tagging{TagSet: []types.Tag{testTag()}}})
	if err == nil {
		have, err = r.client.GetBucketTagging(ctx, &s3.GetBucketTaggingInput{Bucket: &r.info.Name})
	}
	switch {
	case err != nil:
		return what.row(No, "tagging after creation also fails: "+one(backend.Classify(err, "tag the bucket")), "").with(settingBucketName)
	case !hasTag(have.TagSet):
		return what.row(No, "the service accepts tags but does not store them", "").with(settingBucketName)
	}
	return what.row(No, "only after creation: the driver tags buckets after creating them", "")
}

func hasTag(tags []types.Tag) bool {
	return slices.ContainsFunc(tags, func(x types.Tag) bool {
		return aws.ToString(x.Key) == *testTag().Key && aws.ToString(x.Value) == *testTag().Value
	})
}

func (r *run) putInput(key, data string) *s3.PutObjectInput {
	return &s3.PutObjectInput{Bucket: &r.info.Name, Key: &key, Body: strings.NewReader(data)}
}

func (r *run) put(ctx context.Context, client *s3.Client, key, data string) error {
	_, err := r.send(ctx, client, r.putInput(key, data))
	return err
}

// send stores an object that cleanUp removes.
func (r *run) send(ctx context.Context, client *s3.Client, in *s3.PutObjectInput, options ...func(*s3.Options)) (etag *string, err error) {
	r.wrote[buckets.Object{Key: *in.Key}] = true
	out, err := client.PutObject(ctx, in, options...)
	if err != nil {
		return nil, err
	}
	r.noteVersion(*in.Key, out.VersionId)
	return out.ETag, nil
}

// noteVersion notes a version of an object, or a delete marker, instead of the object.
func (r *run) noteVersion(key string, version *string) {
	if v := aws.ToString(version); v != "" && v != "null" {
		delete(r.wrote, buckets.Object{Key: key})
		r.wrote[buckets.Object{Key: key, Version: v}] = true
	}
}

func (r *run) get(ctx context.Context, client *s3.Client, key, want string) error {
	out, err := client.GetObject(ctx, &s3.GetObjectInput{Bucket: &r.info.Name, Key: &key})
	if err != nil {
		return err
	}
	defer out.Body.Close()
	data, err := io.ReadAll(io.LimitReader(out.Body, int64(len(want))+1))
	if err == nil && string(data) != want {
		err = fault.Errorf(fault.Precondition, "the object differs from what was written")
	}
	return err
}

func (r *run) objects(ctx context.Context, what item) Row {
	key := r.prefix + objectName
	err := r.put(ctx, r.client, key, content)
	if err == nil {
		err = r.get(ctx, r.client, key, content)
	}
	if err != nil {
		return r.located(ctx, what.row(No, one(backend.Classify(err, "write and read "+key)), ""), err, r.info.Name)
	}
	return what.row(Yes, "", "")
}

// directoryBucket reports whether the bucket is one of S3 Express, whose listings are not sorted.
func (r *run) directoryBucket() bool { return strings.HasSuffix(r.info.Name, "--x-s3") }

func (r *run) opened() buckets.Bucket {
	return buckets.Bucket{Backend: r.be, Info: r.info, Client: r.client}
}

func (r *run) conditional(ctx context.Context, what item) Row {
	honoured, err := buckets.ProbeConditional(ctx, r.opened(), r.prefix)
	switch {
	case err != nil:
		return failed(what, err, "testing conditional writes")
	case honoured:
		return what.row(Yes, "several controllers can work on this backend", "")
	case r.be.SingleController:
		return what.row(No, "the backend has singleController: true, so only one controller may use it", "")
	}
	return what.row(No, "two controllers could create the same volume twice", "").with(settingSingleController)
}

func (r *run) missingKey(ctx context.Context, what item) Row {
	key := r.prefix + "missing-" + rand.Text()
	_, err := r.client.HeadObject(ctx, &s3.HeadObjectInput{Bucket: &r.info.Name, Key: &key})
	switch {
	case backend.IsNotFound(err):
		return what.row(Yes, "", "")
	case err == nil:
		return what.row(No, "the service returns an object", "")
	case fault.Is(backend.Classify(err, ""), fault.Denied):
		return what.row(No, "it returns 403, so clients cannot create files", "allow the credentials to list the bucket (s3:ListBucket); services that always return 403 cannot be used with mountpoint-s3")
	}
	return failed(what, err, "head a missing key")
}

func (r *run) emptyListing(ctx context.Context, what item) Row {
	out, err := r.client.ListObjectsV2(ctx, &s3.ListObjectsV2Input{Bucket: &r.info.Name, Prefix: &r.prefix, MaxKeys: aws.Int32(0)})
	switch {
	case err == nil && len(out.Contents) == 0:
		return what.row(Yes, "", "")
	case err == nil:
		what.needed = false
		return what.row(No, "the service ignores max-keys=0, so mounting with mountpoint-s3 takes a little longer", "")
	case backend.ErrorCode(err) != "" && !fault.Is(backend.Classify(err, ""), fault.Denied):
		return what.row(No, "mountpoint-s3 sends one when it starts: "+one(backend.Classify(err, "list no keys")), "").with(settingRclone)
	}
	return failed(what, err, "list no keys")
}

func (r *run) uploadListing(ctx context.Context, what item) Row {
	how, err := buckets.ProbeUploadListing(ctx, r.opened(), r.prefix)
	switch {
	case err != nil:
		return failed(what, err, "testing how unfinished uploads are listed")
	case how == buckets.UploadsByPrefix:
		return what.row(Yes, "unfinished uploads of a deleted volume can be listed", "")
	case how == buckets.UploadsWide:
		return what.row(No, "the driver lists all uploads of the bucket and selects the volume's", "")
	}
	return what.row(No, "unfinished uploads of deleted volumes stay until the service expires them", "set a lifecycle rule that aborts incomplete uploads, if the service supports it")
}

func (r *run) versioning(ctx context.Context, what item) Row {
	out, err := r.client.GetBucketVersioning(ctx, &s3.GetBucketVersioningInput{Bucket: &r.info.Name})
	switch {
	case backend.IsNotImplemented(err):
		return what.row(No, "the service does not support versioning", "")
	case err != nil && fault.Is(backend.Classify(err, ""), fault.Denied):
		return what.row(Unknown, one(backend.Classify(err, "read the versioning state")), "allow s3:GetBucketVersioning; otherwise the driver does not know what onDelete leaves behind")
	case err != nil:
		return failed(what, err, "read the versioning state")
	case out.Status == "":
		return what.row(Yes, "the bucket is not versioned", "")
	}
	return what.row(Yes, "the bucket's versioning is "+strings.ToLower(string(out.Status))+": onDelete: delete leaves versions behind, purge does not", "")
}

// timeSnapshots proves what a snapshot of one time needs, as the controller does before each.
func (r *run) timeSnapshots(ctx context.Context, what item) Row {
	if r.client == nil {
		return what.row(Unknown, noBucket, "")
	}
	if r.made {
		// Objects from before versioning would keep versions that cannot be told from it.
		err := r.removeBelow(ctx)
		if err == nil {
			_, err = r.client.PutBucketVersioning(ctx, &s3.PutBucketVersioningInput{
				Bucket: &r.info.Name, VersioningConfiguration: &types.VersioningConfiguration{Status: types.BucketVersioningStatusEnabled},
			})
		}
		switch {
		case backend.IsNotImplemented(err):
			return what.row(No, "the service does not support versioning", "")
		case err != nil:
			row := failed(what, err, "enabling the versioning of the test bucket")
			row.Advice = "allow s3:PutBucketVersioning, or use --bucket with a bucket whose versioning is enabled"
			return row
		}
	}
	_, err := buckets.Cut(ctx, r.opened(), r.prefix, time.Nanosecond)
	switch {
	case err == nil:
		return what.row(Yes, "the bucket's versions can be read and copied as of one time", "")
	case fault.Is(err, fault.Precondition):
		return what.row(No, one(err), "")
	}
	return failed(what, err, "testing versions")
}

// removeBelow removes what the check wrote, which the service may list wrongly, and everything else below its prefix.
func (r *run) removeBelow(ctx context.Context) error {
	var errs []error
	for o := range r.wrote {
		_, err := r.client.DeleteObject(ctx, &s3.DeleteObjectInput{Bucket: &r.info.Name, Key: &o.Key, VersionId: o.VersionID()})
		switch {
		case backend.IsNoSuchBucket(err):
			return nil
		case err == nil:
			delete(r.wrote, o)
		}
		errs = append(errs, err)
	}
	return errors.Join(append(errs, RemoveBelow(ctx, r.opened(), r.prefix))...)
}

// removePasses is how often RemoveBelow lists: more often than there are pages, each of which may be as short as a service likes.
const removePasses = 50

// RemoveBelow removes all objects and versions of a check below its prefix.
func RemoveBelow(ctx context.Context, b buckets.Bucket, prefix string) error {
	for range removePasses {
		found, _, err := buckets.AllVersions(b, prefix, 0)(ctx)
		if !backend.IsNoSuchBucket(err) && len(found) == 0 {
			found, _, err = buckets.CurrentObjects(b, prefix, 0)(ctx)
		}
		if err != nil && !backend.IsNoSuchBucket(err) {
			return err
		}
		if len(found) == 0 {
			return nil
		}
		var errs []error
		for _, o := range found {
			if err := buckets.CheckBelow(prefix, o.Key); err != nil {
				return err
			}
			in := &s3.DeleteObjectInput{Bucket: b.Name(), Key: &o.Key}
			if o.Version != "null" {
				in.VersionId = o.VersionID()
			}
			_, err := b.Client.DeleteObject(ctx, in)
			errs = append(errs, err)
		}
		if err := errors.Join(errs...); err != nil {
			return err
		}
	}
	return fault.Errorf(fault.Unavailable, "objects are still listed below %s after they were deleted", prefix)
}
