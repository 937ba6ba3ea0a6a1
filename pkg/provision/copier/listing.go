package copier

import (
	"context"
	"strings"
	"unicode/utf8"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// Current is the source of the current objects of a place.
type Current struct{ Of Place }

// Place implements Source.
func (c Current) Place() Place { return c.Of }

// Page implements Source: one listing.
func (c Current) Page(ctx context.Context, _ int, after string) (Page, error) {
	return list(ctx, c.Of, after)
}

// list lists a page of current objects after a key, which is below the prefix.
func list(ctx context.Context, p Place, after string) (Page, error) {
	ctx, cancel := context.WithTimeout(ctx, buckets.RequestBound)
	defer cancel()
	in := &s3.ListObjectsV2Input{Bucket: p.Bucket.Name(), Prefix: backend.Optional(p.Prefix), EncodingType: types.EncodingTypeUrl}
	if after != "" {
		in.StartAfter = aws.String(p.Prefix + after)
	}
	out, err := p.Bucket.Client.ListObjectsV2(ctx, in, buckets.NoRetry)
	if err != nil {
		return Page{}, err
	}
	page := Page{Last: after, More: aws.ToBool(out.IsTruncated)}
	for _, o := range out.Contents {
		full, err := buckets.PlainKey(o.Key, out.EncodingType)
		if err != nil {
			return Page{}, err
		}
		key, below := strings.CutPrefix(full, p.Prefix)
		switch {
		case !below:
			return Page{}, fault.Errorf(fault.Unavailable, "the service listed the key %q, which is not below %q: its listings are unreliable", full, p.Prefix)
		case key != "" && key <= page.Last:
			return Page{}, fault.Errorf(fault.Unsupported, "the service lists the key %q after %q: a copy needs listings in the order of keys", full, p.Prefix+page.Last)
		case !utf8.ValidString(key):
			return Page{}, fault.Errorf(fault.Precondition, "the key %q is not UTF-8 and cannot be copied", full)
		}
		page.Last = max(page.Last, key)
		if p.Prefix == "" && strings.HasPrefix(key, volume.RecordPrefix+"/") {
			continue
		}
		if key != "" { // the directory of the prefix itself is not part of the volume's content
			page.Objects = append(page.Objects, Object{Key: key, ETag: aws.ToString(o.ETag), Size: aws.ToInt64(o.Size)})
		}
	}
	if page.More && page.Last == after {
		return Page{}, fault.Errorf(fault.Busy, "the service reports a truncated listing below %s but no keys: its listings are unreliable", p)
	}
	return page, nil
}

// page reads a page of the source.
func (r *run) page(ctx context.Context, number int, after string) (page Page, err error) {
	err = r.send(ctx, func(ctx context.Context) (err error) {
		page, err = r.Source.Page(ctx, number, after)
		return err
	})
	return page, classify(err, "listing "+r.Source.Place().String()+" of "+r.Source.Place().Bucket.Backend.String())
}

// there lists what is at the target after a key, up to and including the key last; toEnd: up to the end. beyond is whether there may be more
// after last.
func (r *run) there(ctx context.Context, after, last string, toEnd bool, each func(Object)) (beyond bool, err error) {
	for {
		var page Page
		err := r.send(ctx, func(ctx context.Context) (err error) {
			page, err = list(ctx, r.Target, after)
			return err
		})
		if err != nil {
			return true, classify(err, "listing "+r.Target.String()+" of "+r.Target.Bucket.Backend.String())
		}
		for _, o := range page.Objects {
			if toEnd || o.Key <= last {
				each(o)
			} else {
				return true, nil
			}
		}
		if !page.More || !toEnd && page.Last >= last {
			return page.More, nil
		}
		after = page.Last
	}
}

// classify is backend.Classify, but keeps the text of errors that have a kind.
func classify(err error, what string) error {
	if err == nil {
		return nil
	}
	return backend.Classify(err, what)
}
