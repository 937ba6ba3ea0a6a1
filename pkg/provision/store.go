package provision

import (
	"bytes"
	"context"
	"crypto/md5" //nolint:gosec // Content-MD5 guards against damage in transit, nothing else
	"encoding/base64"
	"errors"
	"io"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// errLost says that a conditional write found another state than it was made for: read and decide anew.
var errLost = errors.New("somebody else changed the record first")

// writeAttempts is how often a write is sent whose outcome is not known and that has not happened.
const writeAttempts = 3

// stored is a record as it was read.
type stored struct {
	record
	etag string
}

// readRecord reads a record. NotFound: there is none. Precondition: what is there cannot be read as one.
func (p *Provisioner) readRecord(ctx context.Context, pl place, segment string) (stored, error) {
	data, etag, err := readObject(ctx, pl, recordKey(segment))
	if err != nil {
		return stored{}, err
	}
	r, err := decodeRecord(data)
	if err != nil {
		return stored{}, fault.Errorf(fault.Precondition, "%s in %s is not a volume record that this driver can read: %w. Nothing was changed; find out who wrote it before you touch it", recordKey(segment), pl, err)
	}
	return stored{r, etag}, nil
}

func readObject(ctx context.Context, pl place, key string) (data []byte, etag string, err error) {
	what := "reading " + key + " of " + pl.String()
	out, err := pl.client.GetObject(ctx, &s3.GetObjectInput{Bucket: pl.bucket(), Key: &key})
	if err != nil {
		return nil, "", backend.Classify(err, what)
	}
	defer out.Body.Close()
	data, err = io.ReadAll(io.LimitReader(out.Body, maxRecord+1))
	if err != nil {
		return nil, "", fault.Errorf(fault.Unavailable, "%s: %w", what, err)
	}
	return data, aws.ToString(out.ETag), nil
}

// writeRecord writes a record under the condition that there is none (etag "") or that it is still the one with that etag.
//
// nil: it is written. errLost: the condition does not hold. A write whose outcome is not known is resolved by reading; if that
// cannot be done either the error is Busy or Timeout, because the write may still happen.
func (p *Provisioner) writeRecord(ctx context.Context, pl place, segment, etag string, r record) error {
	data, err := r.encode()
	if err != nil {
		return fault.Errorf(fault.Unknown, "the record that would be written for %q is wrong: %w", r.Name, err)
	}
	conditional, err := p.conditional(ctx, pl)
	if err != nil {
		return err
	}
	put := p.putIf
	if !conditional {
		put = p.putEmulated
	}
	key := recordKey(segment)
	what := "writing " + key + " of " + pl.String()
	for attempt := range writeAttempts {
		err = put(ctx, pl, key, etag, data)
		switch {
		case err == nil, errors.Is(err, errLost):
			return err
		case backend.IsConflict(err):
			return fault.Errorf(fault.Busy, "%s: another controller is writing it at the same time: %w", what, err)
		}
		err = backend.Classify(err, what)
		if !indeterminate(err) {
			if attempt > 0 { // the one before may still arrive
				return unknownOutcome(ctx, err)
			}
			return err
		}
		happened, settleErr := settle(ctx, pl, key, etag, data)
		if settleErr != nil && !errors.Is(settleErr, errLost) {
			return unknownOutcome(ctx, err)
		}
		if happened || settleErr != nil {
			return settleErr
		}
		if !sleep(ctx, 100*time.Millisecond) {
			break
		}
	}
	return unknownOutcome(ctx, err)
}

// indeterminate tells whether a request with this error may have had its effect.
func indeterminate(err error) bool {
	switch fault.KindOf(err) {
	case fault.Unavailable, fault.Timeout, fault.Busy, fault.Unknown:
		return true
	}
	return false
}

func unknownOutcome(ctx context.Context, err error) error {
	kind := fault.Busy
	if ctx.Err() != nil {
		kind = fault.Timeout
	}
	return fault.Errorf(kind, "whether it happened is not known, a retry will find out: %w", err)
}

// settle finds out what became of a write. false, nil: it has not happened yet.
func settle(ctx context.Context, pl place, key, etag string, data []byte) (happened bool, err error) {
	now, nowEtag, err := readObject(ctx, pl, key)
	switch {
	case fault.Is(err, fault.NotFound) && !backend.IsNoSuchBucket(err):
		if etag == "" {
			return false, nil
		}
		return false, errLost
	case err != nil:
		return false, err
	case bytes.Equal(now, data): // it names the time of the write, so that it is this one
		return true, nil
	case etag != "" && nowEtag == etag:
		return false, nil
	}
	return false, errLost
}

// putIf is a conditional write. It is sent once: a retry inside the SDK would hide that its first attempt succeeded.
func (p *Provisioner) putIf(ctx context.Context, pl place, key, etag string, data []byte) error {
	in := putInput(pl, key, data)
	if etag == "" {
		in.IfNoneMatch = aws.String("*")
	} else {
		in.IfMatch = &etag
	}
	_, err := pl.client.PutObject(ctx, in, once)
	switch {
	case backend.IsPreconditionFailed(err):
		return errLost
	case etag != "" && backend.IsNotFound(err) && !backend.IsNoSuchBucket(err):
		return errLost // S3 answers If-Match on a missing key so
	}
	return err
}

// putEmulated is for services without conditional writes, where the operator promised that this is the only controller:
// then a lock of this process and a look before the write are as good.
func (p *Provisioner) putEmulated(ctx context.Context, pl place, key, etag string, data []byte) error {
	release, err := p.locks.Lock(ctx, "write "+pl.be.Name+" "+pl.info.Name)
	if err != nil {
		return err
	}
	defer release()
	_, now, err := readObject(ctx, pl, key)
	switch {
	case fault.Is(err, fault.NotFound) && !backend.IsNoSuchBucket(err):
		if etag != "" {
			return errLost
		}
	case err != nil:
		return err
	case now != etag || etag == "":
		return errLost
	}
	_, err = pl.client.PutObject(ctx, putInput(pl, key, data), once)
	return err
}

func putInput(pl place, key string, data []byte) *s3.PutObjectInput {
	sum := md5.Sum(data) //nolint:gosec // see above
	return &s3.PutObjectInput{
		Bucket: pl.bucket(), Key: &key, Body: bytes.NewReader(data), ContentType: aws.String("application/json"),
		// Buckets with a default retention refuse objects without a checksum, and every service knows this one.
		ContentMD5: aws.String(base64.StdEncoding.EncodeToString(sum[:])),
	}
}

// once sends a request without retries.
func once(o *s3.Options) { o.Retryer, o.RetryMaxAttempts = aws.NopRetryer{}, 0 }

// isEmpty tells whether no object is below the prefix: one request.
func isEmpty(ctx context.Context, pl place, prefix string) (bool, error) {
	return nothingIn(ctx, pl, prefix, currentObjects(pl, prefix, 1))
}

// isUnused tells whether neither an object nor a version or delete marker is below the prefix: one request.
func isUnused(ctx context.Context, pl place, prefix string) (bool, error) {
	return nothingIn(ctx, pl, prefix, allVersions(pl, prefix, 1))
}

// nothingIn tells whether a listing has nothing. A page may be empty although more follow.
func nothingIn(ctx context.Context, pl place, prefix string, next pager) (bool, error) {
	for {
		page, more, err := next(ctx)
		if err != nil {
			return false, backend.Classify(err, "listing "+pl.info.Name+"/"+prefix+" of "+pl.be.String())
		}
		if len(page) > 0 || !more {
			return len(page) == 0, nil
		}
	}
}

// sleep waits, or tells that ctx ended before.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
