package backend

import (
	"context"
	"crypto/rand"
	"errors"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// proofTTL is long because services rarely stop enforcing policies.
const proofTTL = time.Hour

// neighbour is appended to a prefix to get a different prefix with the same beginning. No volume's name ends like this.
const neighbour = "-s3-csi-scope-check/"

func keepProof(_ struct{}, err error) time.Duration {
	if err == nil {
		return proofTTL
	}
	return keepShortly(struct{}{}, err)
}

// ProveScope checks that a session for one prefix of a bucket cannot list the bucket's root, list a neighbour prefix with the same
// beginning, or read an object outside. For a session for a whole bucket it checks that the driver's records are refused. For
// what the session can do see CheckAccess.
//
// Directory buckets are not checked, because their sessions are for the whole bucket.
//
// The answer is cached per revision of the backend, bucket and class, which names the identity that sessions are made from
// (credentials.Order.Class). region and owner are those of CheckAccess's answer.
//
// Precondition: the service does not enforce session policies.
func (b *Buckets) ProveScope(ctx context.Context, be Backend, keys credentials.Keys, class, bucket, prefix, region, owner string) error {
	if be.AWS() && strings.HasSuffix(bucket, directorySuffix) {
		return nil // policies of its sessions cannot name parts of the bucket
	}
	key := bucketKey{be.Revision(), bucket, class, owner}
	if prefix == "" {
		key.identity += " whole" // another policy
	}
	_, err := b.proofs.Get(ctx, key, func(ctx context.Context) (struct{}, error) {
		info := BucketInfo{Name: bucket, Region: region, Owner: owner}
		if region == "" {
			info.Region = be.StartRegion()
		}
		return struct{}{}, b.proveScope(ctx, be, keys, prefix, info)
	})
	return err
}

func (b *Buckets) proveScope(ctx context.Context, be Backend, keys credentials.Keys, prefix string, info BucketInfo) error {
	lists := []string{"", strings.TrimSuffix(prefix, "/") + neighbour}
	object := accessProbe + rand.Text()
	if prefix == "" {
		lists, object = []string{volume.RecordPrefix + "/"}, volume.RecordPrefix+"/"+object
	}
	client, err := b.clients.Bucket(ctx, be, keys, info)
	if err != nil {
		return err
	}
	all := make([]error, len(lists)+1)
	var wg sync.WaitGroup
	for i, list := range lists {
		wg.Go(func() {
			_, err := client.ListObjectsV2(ctx, &s3.ListObjectsV2Input{Bucket: &info.Name, Prefix: optional(list), MaxKeys: aws.Int32(1)})
			all[i] = refused(be, err, "list "+info.Name+"/"+list)
		})
	}
	wg.Go(func() {
		_, err := client.HeadObject(ctx, &s3.HeadObjectInput{Bucket: &info.Name, Key: &object})
		all[len(lists)] = refused(be, err, "look at objects like "+info.Name+"/"+object)
	})
	wg.Wait()
	// A session that exceeds its scope matters more than a service that did not answer.
	for _, err := range all {
		if fault.Is(err, fault.Precondition) {
			return err
		}
	}
	return first(all)
}

func first(all []error) error {
	for _, err := range all {
		if err != nil {
			return err
		}
	}
	return nil
}

// refused interprets the answer to a request that must be refused.
func refused(be Backend, err error, what string) error {
	if err == nil || IsNotFound(err) && !IsNoSuchBucket(err) {
		return fault.Errorf(fault.Precondition, "%s does not enforce session policies: a session for one volume can also %s; "+
			"set scope: off on the backend in the driver's config file, and give each volume a secret of its own", be, what)
	}
	if a, _ := answered(err); a.status == http.StatusForbidden {
		if _, other := meaningOf(a.code); !other {
			return nil
		}
	}
	if f := (*fault.Error)(nil); errors.As(err, &f) {
		return err
	}
	return Classify(err, "check that "+be.String()+" enforces session policies ("+what+")")
}
