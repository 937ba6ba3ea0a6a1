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
	// accountTTL is long because a key never changes its account.
	accountTTL = time.Hour
	// noAccountTTL is long because networks without a way to STS stay so, and each question costs stsBound.
	noAccountTTL = 10 * time.Minute
	// stsBound is what finding the account may take of an RPC's time.
	stsBound = 3 * time.Second
)

// account is a caller's account id; "" where it cannot be known.
type account struct{ id string }

func keepAccount(a account, err error) time.Duration {
	switch {
	case err != nil:
		return keepShortly(a, err)
	case a.id == "":
		return noAccountTTL
	}
	return accountTTL
}

// expectedOwner is the account that must own a bucket: as given, as configured, or the caller's own. "" sends no
// expectation.
//
// The caller's own account is asked for on AWS and where the backend declares an STS. A service whose STS refuses the question
// has no answer (MinIO's does not know it), and so has AWS where its STS cannot be reached: private networks often have a
// way to S3 only. Only an STS that the operator declared and that does not answer is an error, because an outage
// must not take the check away silently.
func (b *Buckets) expectedOwner(ctx context.Context, be Backend, keys credentials.Keys, given string) (string, error) {
	switch {
	case given != "":
		return given, nil
	case be.ExpectedBucketOwner != "":
		return be.ExpectedBucketOwner, nil
	case !be.AWS() && be.STS == nil:
		return "", nil
	case keys.Account != "": // whoever made the session told it
		return keys.Account, nil
	}
	// Each session has keys of its own, so that what does not depend on them is not asked anew for each.
	if until, ok := b.mute.Load(be.Revision()); ok {
		if until, ok := until.(time.Time); ok && b.now().Before(until) {
			return "", nil
		}
		b.mute.Delete(be.Revision())
	}
	a, err := b.accounts.do(ctx, bucketKey{backend: be.Revision(), identity: b.identity(keys)}, func(ctx context.Context) (account, error) {
		return b.askAccount(ctx, be, keys)
	})
	return a.id, err
}

func (b *Buckets) askAccount(ctx context.Context, be Backend, keys credentials.Keys) (account, error) {
	client, err := b.clients.sts(ctx, be, keys)
	if err != nil {
		return account{}, err
	}
	asking, cancel := context.WithTimeout(ctx, stsBound)
	defer cancel()
	out, err := client.GetCallerIdentity(asking, &sts.GetCallerIdentityInput{})
	if err == nil && accountID.MatchString(aws.ToString(out.Account)) {
		return account{*out.Account}, nil
	}
	if err != nil {
		if ctx.Err() != nil {
			return account{}, Classify(err, "asking STS of "+be.String()+" for the caller's account")
		}
		err = Classify(err, "asking STS of "+be.String()+" for the caller's account")
		unanswered := fault.Is(err, fault.Unavailable) || fault.Is(err, fault.Timeout) || fault.Is(err, fault.Unknown)
		if be.STS != nil && unanswered {
			return account{}, fault.Errorf(fault.Unavailable, "%w; without it the bucket's owner cannot be checked: set expectedBucketOwner on the backend to need no STS", err)
		}
		if fault.Is(err, fault.Unauthenticated) {
			return account{}, err // S3 would say the same, in worse words
		}
		if fault.Is(err, fault.Precondition) || fault.Is(err, fault.Unsupported) {
			b.mute.Store(be.Revision(), b.now().Add(noAccountTTL))
		}
	}
	if err == nil {
		err = errors.New("STS named no account")
	}
	if _, said := b.told.LoadOrStore(be.Name, true); said {
		return account{}, nil
	}
	klog.FromContext(ctx).Info("The caller's account is not known; buckets are used whoever owns them. Set expectedBucketOwner on the backend to have it checked.",
		"backend", be.Name, "reason", err)
	return account{}, nil
}
