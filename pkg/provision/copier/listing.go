package copier

import (
	"cmp"
	"context"
	"strings"
	"unicode/utf8"

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
	start := ""
	if after != "" {
		start = p.Prefix + after
	}
	out, err := buckets.List(ctx, p.Bucket, p.Prefix, buckets.From{After: start}, buckets.NoRetry)
	if err != nil {
		return Page{}, err
	}
	page := Page{Last: after, More: out.More}
	check := nameCheck{encoded: out.Encoded}
	for _, o := range out.Objects {
		key, err := check.below(p, o.Key)
		if err != nil {
			return Page{}, err
		}
		if key != "" && key <= page.Last {
			return Page{}, cmp.Or(check.err(p), fault.Errorf(fault.Unsupported,
				"the service lists the key %q after %q: a copy needs listings in the order of keys, with the encoding that they name", o.Key, p.Prefix+page.Last))
		}
		page.Last = max(page.Last, key)
		if p.Prefix == "" && strings.HasPrefix(key, volume.RecordPrefix+"/") {
			continue
		}
		if key != "" { // the directory of the prefix itself is not part of the volume's content
			page.Objects = append(page.Objects, Object{Key: key, ETag: o.ETag, Size: o.Size})
		}
	}
	if page.More && page.Last == after {
		return Page{}, fault.Errorf(fault.Busy, "the service reports a truncated listing below %s but no keys: its listings are unreliable", p)
	}
	return page, check.err(p)
}

// nameCheck finds keys in a listing that cannot be the names of objects.
type nameCheck struct {
	encoded bool
	bad     []string
}

// below returns the part of a key below a place.
func (c *nameCheck) below(p Place, full string) (string, error) {
	key, below := strings.CutPrefix(full, p.Prefix)
	if !below {
		return "", fault.Errorf(fault.Unavailable, "the service listed the key %q, which is not below %q: its listings are unreliable", full, p.Prefix)
	}
	if !utf8.ValidString(key) || !c.encoded && strings.ContainsRune(key, utf8.RuneError) {
		c.bad = append(c.bad, key)
	}
	return key, nil
}

// err returns an error that names the keys.
func (c *nameCheck) err(p Place) error {
	if len(c.bad) == 0 {
		return nil
	}
	return fault.Errorf(fault.Precondition, "%s of %s cannot be copied: these names are not UTF-8, or the service lists them without an encoding and with "+
		"U+FFFD in place of other characters, "+
		"so that the names of the objects are unknown; give these objects names without control characters", buckets.Quoted(c.bad), p)
}

// readPage reads a page of the source.
func (r *run) readPage(ctx context.Context, number int, after string) (page Page, err error) {
	err = r.requests.send(ctx, func(ctx context.Context) (err error) {
		page, err = r.source.Page(ctx, number, after)
		return err
	})
	return page, errListing(r.from, err)
}

func errListing(p Place, err error) error {
	return backend.Classify(err, "listing "+p.String()+" of "+p.Bucket.Backend.String())
}

// span is a range of the keys of a place: those after a key, up to and including last; open: up to the end.
type span struct {
	of          Place
	after, last string
	open        bool
}

// listSpan lists the current objects of a span.
func (r *run) listSpan(ctx context.Context, s span, each func(Object)) error {
	for {
		var page Page
		if err := r.requests.send(ctx, func(ctx context.Context) (err error) {
			page, err = list(ctx, s.of, s.after)
			return err
		}); err != nil {
			return errListing(s.of, err)
		}
		for _, o := range page.Objects {
			if !s.open && o.Key > s.last {
				return nil
			}
			each(o)
		}
		if !page.More || !s.open && page.Last >= s.last {
			return nil
		}
		s.after = page.Last
	}
}
