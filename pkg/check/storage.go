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

// storageProbes returns what the controller and the clients need of the service and a bucket, in the order in which it is tried. Without
// objects, there is nothing to try the other operations with.
func (r *run) storageProbes() []probe {
	const all, copying = "every volume", "snapshots, clones and renames"
	none, service, bucket := []*string{}, []*string{&r.noService}, []*string{&r.noService, &r.noBucket}
	object := []*string{&r.noService, &r.noBucket, &r.noObject}
	return []probe{
		{Needed("reachable", "the service responds"), "", none, r.reach},
		{Optional("clock", "the clocks of this host and the service agree"), "", none,
			func(_ context.Context, what Item) Row { return clock(what, r.date, time.Now()) }},
		{Needed("credentials", "the driver's own credentials"), "", none, r.identity},
		{r.bucketItem(), "", service, r.bucket},
		{Optional("region", "the bucket's region"), "", bucket, r.region},
		{Optional("bucketOwner", "the owner of buckets is checked"), "", bucket, r.owner},
		{Optional("bucketTags", "buckets can be tagged when they are created"), "", bucket, r.tags},
		{Needed("missingKey", "HEAD of a missing key returns 404"), all, bucket, r.missingKey},
		{Needed("emptyListing", "listings of no keys (max-keys=0)"), "mountpoint-s3", bucket, r.emptyListing},
		{Optional("uploadListing", "unfinished uploads are listed by prefix"), "", bucket, r.uploadListing},
		{Optional("versioning", "the versioning state of a bucket can be read"), "", bucket, r.versioning},
		{Needed("objects", "store and read an object"), all, bucket, r.objects},
		{Needed("metadata", "HEAD, GET and listings agree on size, ETag and time"), all, object, r.proven(r.metadata)},
		{Needed("emptyObjects", "store an empty object"), "empty files", object, r.proven(r.empty)},
		{Needed("ranges", "read a part of an object"), "reads of large files", object, r.proven(r.ranges)},
		{Needed("conditionalReads", "conditional reads (If-Match)"), "reads of files that another writer replaces", object, r.proven(r.conditionalReads)},
		{NeededIf(!r.be.SingleController, "conditionalWrites", "conditional writes (If-None-Match, If-Match)"), "several controllers", object, r.conditional},
		{Needed("names", "names with special characters"), "files with such names", object, r.proven(r.storeNames)},
		{Needed("pagination", "listings have every object once"), "directories, snapshots, clones and deletions", object, r.proven(r.pagination)},
		{NeededIf(!directoryBucket(r.in.Bucket), "listingOrder", "listings are sorted"), "directories, snapshots and clones", object, r.proven(r.listingOrder)},
		{Needed("listingNames", "listings encode names correctly"), "snapshots, clones and deletions of files with such names", object, r.proven(r.encoding)},
		{Needed("directories", "list one directory (delimiter)"), all, object, r.proven(r.directories)},
		{Optional("controlNames", "names with control characters"), "snapshots, clones and deletions of files with such names", object, r.proven(r.controls)},
		{Needed("copies", "server-side copies"), copying, object, r.proven(r.copies)},
		{Needed("conditionalCopies", "conditional copies (x-amz-copy-source-if-match)"), copying + " of files that change", object, r.proven(r.conditionalCopies)},
		{Needed("multipart", "multipart uploads"), "writes of large files; of all files with mountpoint-s3", object, r.proven(r.multipart)},
		{Needed("partCopies", "server-side copies of parts"), copying + " of files of 1 GiB or more", object, r.proven(r.partCopies)},
		{Optional("manyParts", "multipart uploads of 10,000 parts"), "large files", object, r.helped(r.manyParts, settingPartSize)},
		{NeededIf(r.in.Checksums, "checksums", "uploads with checksums in trailers"), "writes with mountpoint-s3", object, r.helped(r.checksums, settingChecksums)},
		{Needed("multiDelete", "delete several objects with one request"), "deletions of volumes", object, r.proven(r.multiDelete)},
		{Needed("deletes", "deleted objects are gone"), "deletions", object, r.proven(r.deletes)},
	}
}

// warningError is a finding that the driver works around.
type warningError struct{ err error }

// Error implements error.
func (w warningError) Error() string { return w.err.Error() }

// Unwrap returns the finding.
func (w warningError) Unwrap() error { return w.err }

func isWarning(err error) bool {
	_, ok := errors.AsType[warningError](err)
	return ok
}

// proven returns the function of a probe whose error is the finding.
func (r *run) proven(try func(context.Context) error) func(context.Context, Item) Row {
	return func(ctx context.Context, what Item) Row {
		err := try(ctx)
		if err == nil {
			return what.Row(Yes, "", "")
		}
		what.needed = what.needed && !isWarning(err)
		if noAnswer := fault.Is(err, fault.Unavailable) || fault.Is(err, fault.Timeout); noAnswer && backend.ErrorCode(err) == "" {
			return what.Row(Unknown, OneLine(err), "")
		}
		return what.Row(No, OneLine(err), "")
	}
}

// helped is proven for a finding that a setting helps against.
func (r *run) helped(try func(context.Context) error, setting string) func(context.Context, Item) Row {
	return func(ctx context.Context, what Item) Row {
		row := r.proven(try)(ctx, what)
		if row.Result == No {
			row = row.with(setting)
		}
		return row
	}
}

// failed returns the row of a check without a result.
func failed(what Item, err error, doing string) Row {
	return what.Row(Unknown, OneLine(backend.Classify(err, doing)), "")
}

func (r *run) tags(ctx context.Context, what Item) Row {
	if !r.made {
		return what.Row(Unknown, "only checked without --bucket", "")
	}
	have, err := r.client.GetBucketTagging(ctx, &s3.GetBucketTaggingInput{Bucket: &r.info.Name})
	switch {
	case err == nil && hasTag(have.TagSet):
		return what.Row(Yes, "volumes can have their own bucket, identified by its tags", "")
	case err != nil && !backend.IsNotFound(err) && backend.ErrorCode(err) == "":
		return failed(what, err, "read the tags of the bucket")
	}
	_, err = r.client.PutBucketTagging(ctx, &s3.PutBucketTaggingInput{Bucket: &r.info.Name, Tagging: &types.Tagging{TagSet: []types.Tag{testTag()}}})
	if err == nil {
		have, err = r.client.GetBucketTagging(ctx, &s3.GetBucketTaggingInput{Bucket: &r.info.Name})
	}
	switch {
	case err != nil:
		return what.Row(No, "tagging after creation also fails: "+OneLine(backend.Classify(err, "tag the bucket")), "").with(settingBucketName)
	case !hasTag(have.TagSet):
		return what.Row(No, "the service accepts tags but does not store them", "").with(settingBucketName)
	}
	return what.Row(No, "only after creation: the driver tags buckets after creating them", "")
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

func (r *run) objects(ctx context.Context, what Item) Row {
	key := r.prefix + objectName
	err := r.put(ctx, r.client, key, content)
	if err == nil {
		err = r.get(ctx, r.client, key, content)
	}
	if err != nil {
		r.noObject = "no object could be stored and read"
		return r.withLocation(ctx, what.Row(No, OneLine(backend.Classify(err, "write and read "+key)), ""), err, r.info.Name)
	}
	return what.Row(Yes, "", "")
}

// directoryBucket reports whether a bucket is one of S3 Express, whose listings are not sorted.
func directoryBucket(name string) bool { return strings.HasSuffix(name, "--x-s3") }

func (r *run) opened() buckets.Bucket {
	return buckets.Bucket{Backend: r.be, Info: r.info, Client: r.client}
}

func (r *run) conditional(ctx context.Context, what Item) Row {
	honoured, err := buckets.ProbeConditional(ctx, r.opened(), r.prefix)
	switch {
	case err != nil:
		return failed(what, err, "testing conditional writes")
	case honoured:
		return what.Row(Yes, "several controllers can work on this backend", "")
	case r.be.SingleController:
		return what.Row(No, "the backend has singleController: true, so only one controller may use it", "")
	}
	return what.Row(No, "two controllers could create the same volume twice", "").with(settingSingleController)
}

func (r *run) missingKey(ctx context.Context, what Item) Row {
	key := r.prefix + "missing-" + rand.Text()
	_, err := r.client.HeadObject(ctx, &s3.HeadObjectInput{Bucket: &r.info.Name, Key: &key})
	switch {
	case backend.IsNotFound(err):
		return what.Row(Yes, "", "")
	case err == nil:
		return what.Row(No, "the service returns an object", "")
	case fault.Is(backend.Classify(err, ""), fault.Denied):
		return what.Row(No, "it returns 403, so clients cannot create files", "allow the credentials to list the bucket (s3:ListBucket); services that always "+
			"return 403 cannot be used with mountpoint-s3")
	}
	return failed(what, err, "head a missing key")
}

func (r *run) emptyListing(ctx context.Context, what Item) Row {
	out, err := r.client.ListObjectsV2(ctx, &s3.ListObjectsV2Input{Bucket: &r.info.Name, Prefix: &r.prefix, MaxKeys: aws.Int32(0)})
	switch {
	case err == nil && len(out.Contents) == 0:
		return what.Row(Yes, "", "")
	case err == nil:
		what.needed = false
		return what.Row(No, "the service ignores max-keys=0, so mounting with mountpoint-s3 takes a little longer", "")
	case backend.ErrorCode(err) != "" && !fault.Is(backend.Classify(err, ""), fault.Denied):
		return what.Row(No, "mountpoint-s3 sends one when it starts: "+OneLine(backend.Classify(err, "list no keys")), "").with(settingRclone)
	}
	return failed(what, err, "list no keys")
}

func (r *run) uploadListing(ctx context.Context, what Item) Row {
	how, err := buckets.ProbeUploadListing(ctx, r.opened(), r.prefix)
	switch {
	case err != nil:
		return failed(what, err, "testing how unfinished uploads are listed")
	case how == buckets.UploadsByPrefix:
		return what.Row(Yes, "unfinished uploads of a deleted volume can be listed", "")
	case how == buckets.UploadsWide:
		return what.Row(No, "the driver lists all uploads of the bucket and selects the volume's", "")
	}
	return what.Row(No, "unfinished uploads of deleted volumes stay until the service expires them",
		"set a lifecycle rule that aborts incomplete uploads, if the service supports it")
}

func (r *run) versioning(ctx context.Context, what Item) Row {
	out, err := r.client.GetBucketVersioning(ctx, &s3.GetBucketVersioningInput{Bucket: &r.info.Name})
	switch {
	case backend.IsNotImplemented(err):
		return what.Row(No, "the service does not support versioning", "")
	case err != nil && fault.Is(backend.Classify(err, ""), fault.Denied):
		return what.Row(Unknown, OneLine(backend.Classify(err, "read the versioning state")), "allow s3:GetBucketVersioning; otherwise the driver does not know "+
			"what onDelete leaves behind")
	case err != nil:
		return failed(what, err, "read the versioning state")
	case out.Status == "":
		return what.Row(Yes, "the bucket is not versioned", "")
	}
	return what.Row(Yes, "the bucket's versioning is "+strings.ToLower(string(out.Status))+": onDelete: delete leaves versions behind, purge does not", "")
}

// timeSnapshots proves what a snapshot of one time needs, as the controller does before each.
func (r *run) timeSnapshots(ctx context.Context, what Item) Row {
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
			return what.Row(No, "the service does not support versioning", "")
		case err != nil:
			row := failed(what, err, "enabling the versioning of the test bucket")
			row.Advice = "allow s3:PutBucketVersioning, or use --bucket with a bucket whose versioning is enabled"
			return row
		}
	}
	_, err := buckets.Cut(ctx, r.opened(), r.prefix, time.Nanosecond)
	switch {
	case err == nil:
		return what.Row(Yes, "the bucket's versions can be read and copied as of one time", "")
	case fault.Is(err, fault.Precondition):
		return what.Row(No, OneLine(err), "")
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
