package backend

import (
	"context"
	"errors"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/sts"
	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

const (
	// accountTTL is long because the account of a key never changes.
	accountTTL = time.Hour
	// noAccountTTL is long because a network without access to STS rarely gets it, and each attempt takes stsBound.
	noAccountTTL = 10 * time.Minute
	// stsBound bounds the request for the account. It is short because many networks have no access to STS.
	stsBound = 3 * time.Second
	// declaredSTSBound is the bound for an STS of the config file. It is longer because an STS that does not answer is an error then.
	declaredSTSBound = 10 * time.Second
)

// keepAccount returns how long an account id is kept; "" is unknown.
func keepAccount(id string, err error) time.Duration {
	switch {
	case err != nil:
		return keepShortly(id, err)
	case id == "":
		return noAccountTTL
	}
	return accountTTL
}

// expectedOwner returns the account that must own a bucket: the given one, the configured one, or the caller's own. "" disables
// the check.
//
// The caller's own account is requested on AWS and if the backend declares an STS. It is unknown if the STS refuses the request
// (MinIO's does not support it), and on AWS if STS cannot be reached, because private networks often have access to S3 only.
// But a declared STS that does not respond is an error, because an outage must not disable the check silently.
func (b *Buckets) expectedOwner(ctx context.Context, be Backend, keys credentials.Keys, given string) (string, error) {
	switch {
	case given != "":
		return given, nil
	case be.ExpectedBucketOwner != "":
		return be.ExpectedBucketOwner, nil
	case !be.AWS() && be.STS == nil:
		return "", nil
	case keys.Account != "": // from the service that made the session
		return keys.Account, nil
	}
	// Each session has keys of its own, so a result that does not depend on them is cached separately.
	if until, ok := b.noCallerIdentity.Load(be.Revision()); ok {
		if until, ok := until.(time.Time); ok && b.now().Before(until) {
			return "", nil
		}
		b.noCallerIdentity.Delete(be.Revision())
	}
	return b.accounts.Get(ctx, bucketKey{backend: be.Revision(), identity: b.identity(keys)}, func(ctx context.Context) (string, error) {
		return b.askAccount(ctx, be, keys)
	})
}

func (b *Buckets) askAccount(ctx context.Context, be Backend, keys credentials.Keys) (string, error) {
	client, err := b.clients.STS(ctx, be, keys)
	if err != nil {
		return "", err
	}
	bound := stsBound
	if be.STS != nil {
		bound = declaredSTSBound
	}
	asking, cancel := context.WithTimeout(ctx, bound)
	defer cancel()
	out, err := client.GetCallerIdentity(asking, &sts.GetCallerIdentityInput{})
	if err == nil && credentials.IsAccount(aws.ToString(out.Account)) {
		return *out.Account, nil
	}
	if err != nil {
		err = Classify(err, "get the caller's account from STS of "+be.String())
		if ctx.Err() != nil {
			return "", err
		}
		unanswered := fault.Is(err, fault.Unavailable) || fault.Is(err, fault.Timeout) || fault.Is(err, fault.Unknown)
		if be.STS != nil && unanswered {
			return "", fault.Errorf(fault.Unavailable, "%w; the bucket's owner cannot be checked without it, unless expectedBucketOwner is set on the backend",
				err)
		}
		if fault.Is(err, fault.Unauthenticated) {
			return "", err // S3 would refuse the keys, too
		}
		if fault.Is(err, fault.Precondition) || fault.Is(err, fault.Unsupported) {
			b.noCallerIdentity.Store(be.Revision(), b.now().Add(noAccountTTL))
		}
	}
	if err == nil {
		err = errors.New("STS returned no account")
	}
	if _, logged := b.accountLogged.LoadOrStore(be.Name, struct{}{}); logged {
		return "", nil
	}
	klog.FromContext(ctx).Info("Bucket owner is not checked, caller's account unknown",
		"backend", be.Name, "reason", err)
	return "", nil
}
