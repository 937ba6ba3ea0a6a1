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

func (r *run) storageItems() []item {
	return []item{
		{"bucketTags", "buckets can be tagged when they are created", false},
		{"objects", "store, read and list an object", true},
		{"conditionalWrites", "conditional writes (If-None-Match, If-Match)", !r.be.SingleController},
		{"missingKey", "HEAD of a missing key returns 404", true},
		{"emptyListing", "listings of no keys (max-keys=0)", true},
		{"uploadListing", "unfinished uploads are listed by prefix", false},
		{"versioning", "the versioning state of a bucket can be read", false},
	}
}

// timeSnapshotsItem is checked last, because it changes the bucket of the check.
func timeSnapshotsItem() item {
	return item{"timeSnapshots", "snapshots of one time (consistency: time)", false}
}

// storage checks what the controller and the clients need of a bucket.
func (r *run) storage(ctx context.Context) {
	tries := map[string]func(context.Context, item) Row{
		"bucketTags": r.tags, "objects": r.objects, "conditionalWrites": r.conditional, "missingKey": r.missingKey, "emptyListing": r.emptyListing,
		"uploadListing": r.uploadListing, "versioning": r.versioning,
	}
	r.each(ctx, r.storageItems(), tries)
}

// each adds the row of each item by its function, by the names of items.
func (r *run) each(ctx context.Context, items []item, tries map[string]func(context.Context, item) Row) {
	for _, what := range items {
		if ctx.Err() != nil {
			r.unknown("the check was stopped before", what)
			continue
		}
		r.add(tries[what.check](ctx, what))
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
	const use = "use bucketName in StorageClasses, so that volumes are prefixes of a bucket"
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
		return what.row(No, "tagging after creation also fails: "+one(backend.Classify(err, "tag the bucket")), use)
	case !hasTag(have.TagSet):
		return what.row(No, "the service accepts tags but does not store them", use)
	}
	return what.row(No, "only after creation: the driver tags buckets after creating them", "")
}

func hasTag(tags []types.Tag) bool {
	return slices.ContainsFunc(tags, func(x types.Tag) bool {
		return aws.ToString(x.Key) == *testTag().Key && aws.ToString(x.Value) == *testTag().Value
	})
}

func (r *run) put(ctx context.Context, client *s3.Client, key string) error {
	_, err := client.PutObject(ctx, &s3.PutObjectInput{Bucket: &r.info.Name, Key: &key, Body: strings.NewReader(content)})
	return err
}

func (r *run) get(ctx context.Context, client *s3.Client, key string) error {
	out, err := client.GetObject(ctx, &s3.GetObjectInput{Bucket: &r.info.Name, Key: &key})
	if err != nil {
		return err
	}
	defer out.Body.Close()
	data, err := io.ReadAll(io.LimitReader(out.Body, int64(len(content))+1))
	if err == nil && string(data) != content {
		err = errors.New("the object differs from what was written")
	}
	return err
}

func (r *run) objects(ctx context.Context, what item) Row {
	key := r.prefix + "object"
	if err := r.put(ctx, r.client, key); err != nil {
		return what.row(No, one(backend.Classify(err, "write "+key)), "")
	}
	if err := r.get(ctx, r.client, key); err != nil {
		return what.row(No, one(backend.Classify(err, "read "+key)), "")
	}
	out, err := r.client.ListObjectsV2(ctx, &s3.ListObjectsV2Input{Bucket: &r.info.Name, Prefix: &r.prefix})
	switch {
	case err != nil:
		return what.row(No, one(backend.Classify(err, "list "+r.prefix)), "")
	case len(out.Contents) != 1 || aws.ToString(out.Contents[0].Key) != key:
		return what.row(No, "a new object is missing in a listing", "the driver and its clients need a service with strong consistency")
	}
	return what.row(Yes, "", "")
}

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
	return what.row(No, "two controllers could create the same volume twice", "if only one controller of one cluster ever uses this backend, set singleController: true for it in the driver's config file")
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
	case backend.ErrorCode(err) != "":
		return what.row(No, "mountpoint-s3 sends one when it starts: "+one(backend.Classify(err, "list no keys")), "use the client rclone")
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

// removeBelow removes all objects and versions below the check's prefix.
func (r *run) removeBelow(ctx context.Context) error {
	return RemoveBelow(ctx, r.opened(), r.prefix)
}

// RemoveBelow removes all objects and versions of a check below its prefix, of which there is less than one page.
func RemoveBelow(ctx context.Context, b buckets.Bucket, prefix string) error {
	found, _, err := buckets.AllVersions(b, prefix, 0)(ctx)
	if !backend.IsNoSuchBucket(err) && len(found) == 0 {
		found, _, err = buckets.CurrentObjects(b, prefix, 0)(ctx)
	}
	if err != nil {
		if backend.IsNoSuchBucket(err) {
			return nil
		}
		return err
	}
	var errs []error
	for _, o := range found {
		if !strings.HasPrefix(o.Key, prefix) {
			return errors.New("the service listed " + o.Key + ", which is not below " + prefix + "; stopped the cleanup")
		}
		in := &s3.DeleteObjectInput{Bucket: b.Name(), Key: &o.Key}
		if o.Version != "null" {
			in.VersionId = o.VersionID()
		}
		_, err := b.Client.DeleteObject(ctx, in)
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}
