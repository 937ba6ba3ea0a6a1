package backend

import (
	"cmp"
	"context"
	"errors"
	"net/url"
	"strings"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// With calls do with a client for the bucket, and again if the service answers that the bucket is in another region. Region "" is the
// backend's, the owner is as in Validate. It returns what was learnt of the bucket.
func (b *Buckets) With(ctx context.Context, be Backend, a Access, do func(context.Context, *s3.Client) error) (BucketInfo, error) {
	info := a.Bucket
	owner, err := b.expectedOwner(ctx, be, a.Keys, info.Owner)
	if err != nil {
		return info, err
	}
	info.Owner = owner
	info.Region = cmp.Or(info.Region, be.StartRegion())
	info, err = b.inRegion(be, info, func(info BucketInfo) (string, error) {
		client, err := b.clients.Bucket(ctx, be, a.Keys, info)
		if err != nil {
			return "", err
		}
		return "", do(ctx, client)
	})
	return info, ownerHint(err, info.Owner)
}

// Count is what a listing found.
type Count struct {
	Bytes, Objects int64
	Pages          int
	// Cut is set if the listing ended early: there is at least that much.
	Cut bool
}

// Listing is what CountObjects counts: the current objects below a prefix, without those below Except ("": all).
type Listing struct {
	Bucket, Prefix, Except string
	MaxPages               int
}

// CountObjects lists at most MaxPages pages, one after the other, until ctx's deadline. A listing that is cut after its first page is no
// error.
func CountObjects(ctx context.Context, client *s3.Client, l Listing) (Count, error) {
	var c Count
	var token *string
	for {
		out, err := client.ListObjectsV2(ctx, &s3.ListObjectsV2Input{Bucket: &l.Bucket, Prefix: Optional(l.Prefix), ContinuationToken: token,
			EncodingType: types.EncodingTypeUrl})
		if err != nil {
			if c.Pages > 0 && errors.Is(context.Cause(ctx), context.DeadlineExceeded) {
				c.Cut = true
				return c, nil
			}
			return c, err
		}
		c.Pages++
		for _, o := range out.Contents {
			if l.Except != "" && isBelow(l.Except, aws.ToString(o.Key), out.EncodingType) {
				continue
			}
			c.Objects++
			c.Bytes += aws.ToInt64(o.Size)
		}
		next := aws.ToString(out.NextContinuationToken)
		switch {
		case !aws.ToBool(out.IsTruncated):
			return c, nil
		case next == "" || next == aws.ToString(token):
			return c, fault.Errorf(fault.Unavailable, "the service reports a truncated listing but repeats its marker: its listings are unreliable")
		case c.Pages >= l.MaxPages:
			c.Cut = true
			return c, nil
		}
		token = &next
	}
}

// isBelow reports whether a listed key is below a prefix.
func isBelow(prefix, key string, encoding types.EncodingType) bool {
	if encoding == types.EncodingTypeUrl {
		if plain, err := url.QueryUnescape(key); err == nil {
			key = plain
		}
	}
	return strings.HasPrefix(key, prefix)
}
