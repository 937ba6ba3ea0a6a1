package provision

import (
	"context"
	"fmt"
	"strings"
	"sync"

	"github.com/aws/aws-sdk-go-v2/service/s3"
	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

const (
	// maxPasses is how often a prefix is gone through. Two are usual: the second one finds nothing. More mean that somebody
	// still writes there.
	maxPasses = 10
	// roundPages is how many pages of versions are read before they are deleted. Unlike a continuation token, a marker names a
	// version, and not every service can go on from one that is not there any more.
	roundPages = 8
	// shownErrors is how many of a deletion's refusals its error tells.
	shownErrors = 3
)

// eraser removes everything below one prefix of one bucket.
type eraser struct {
	p        *Provisioner
	pl       place
	prefix   string // "" is the whole bucket; otherwise it ends in "/"
	versions bool   // versions and delete markers too
	progress *progress
	// still makes sure, before each page and each upload, that the place is still the one to be erased; nil: it cannot be another.
	still func(context.Context) error

	throttle *throttle
	mu       sync.Mutex
	single   bool // the service has no multi-delete
	refused  refusals
}

// refusals are the keys that a pass could not delete.
type refusals struct {
	count  int
	first  []string
	denied bool
}

func (r *refusals) add(what, code, message string) {
	r.count++
	r.denied = r.denied || code == "AccessDenied"
	if len(r.first) < shownErrors {
		r.first = append(r.first, fmt.Sprintf("%q: %s %s", what, code, strings.TrimSpace(message)))
	}
}

// erase returns nil when a listing showed that nothing is left.
func (e *eraser) erase(ctx context.Context) error {
	e.throttle = e.p.throttle(e.pl.be.Name)
	log := klog.FromContext(ctx)
	for pass := 1; ; pass++ {
		e.refused = refusals{}
		e.progress.refused.Store(0)
		aborted, err := e.abortUploads(ctx)
		if err != nil {
			return err
		}
		found, removed, err := e.removeObjects(ctx)
		if err != nil {
			return err
		}
		if aborted == 0 && found == 0 {
			return nil
		}
		log.V(2).Info("Went through a volume that is being deleted", "pass", pass, "found", found, "removed", removed, "uploads", aborted, "refused", e.refused.count)
		switch {
		case e.refused.count > 0 && removed == 0:
			kind := fault.Busy // a directory that a pod still writes to, for example
			if e.refused.denied {
				kind = fault.Denied
			}
			return fault.Errorf(kind, "%s of %s could not be removed from %s: %s", count(e.refused.count, "object"), e.pl.info.Name+"/"+e.prefix, e.pl.be, strings.Join(e.refused.first, "; "))
		case pass == maxPasses:
			return fault.Errorf(fault.Busy, "after %d passes there is still something below %q in %s: something still writes there, or the service does not delete what it says it deletes", pass, e.prefix, e.pl)
		}
	}
}

// abortUploads aborts unfinished uploads: first of all, so that none can be completed afterwards.
func (e *eraser) abortUploads(ctx context.Context) (aborted int, err error) {
	err = e.p.uploadsBelow(ctx, e.pl, e.prefix, func(key, id string) error {
		if err := below(e.prefix, key); err != nil {
			return err
		}
		if e.still != nil {
			if err := e.still(ctx); err != nil {
				return err
			}
		}
		err := e.send(ctx, func(ctx context.Context) error {
			_, err := e.pl.client.AbortMultipartUpload(ctx, &s3.AbortMultipartUploadInput{Bucket: e.pl.bucket(), Key: &key, UploadId: &id}, once)
			if backend.IsNotFound(err) && !backend.IsNoSuchBucket(err) {
				return nil
			}
			return err
		})
		if err == nil {
			aborted++
			e.progress.uploads.Add(1)
		}
		return err
	})
	return aborted, backend.Classify(err, "aborting unfinished uploads below "+e.pl.info.Name+"/"+e.prefix)
}

// removeObjects goes through the listing once and deletes what it finds.
func (e *eraser) removeObjects(ctx context.Context) (found, removed int, err error) {
	before := e.progress.objects.Load()
	if e.versions {
		found, err = e.removeVersions(ctx)
		if backend.IsNotImplemented(err) {
			e.versions = false
		}
	}
	if !e.versions {
		found, err = e.removeCurrent(ctx)
	}
	return found, int(e.progress.objects.Load() - before), backend.Classify(err, "deleting what is below "+e.pl.info.Name+"/"+e.prefix)
}

// removeCurrent deletes while it lists.
func (e *eraser) removeCurrent(ctx context.Context) (found int, err error) {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(e.p.workers) // Go waits for a free one, so that the listing never runs far ahead
	next, more := currentObjects(e.pl, e.prefix, 0), true
	for more && err == nil {
		var page []object
		if page, more, err = e.page(ctx, next); err == nil && len(page) > 0 {
			found += len(page)
			g.Go(func() error { return e.remove(ctx, page) })
		}
	}
	// The workers' error comes first: the listing may have ended only because of it.
	if workErr := g.Wait(); workErr != nil {
		return found, workErr
	}
	return found, err
}

// removeVersions reads some pages, deletes them, and begins anew, until nothing is left or nothing more can be deleted.
func (e *eraser) removeVersions(ctx context.Context) (found int, err error) {
	next, more := allVersions(e.pl, e.prefix, 0), true
	var last object // the first of the last round
	for more {
		var round [][]object
		for more && len(round) < roundPages {
			var page []object
			if page, more, err = e.page(ctx, next); err != nil {
				return found, err
			}
			if len(page) > 0 {
				round = append(round, page)
				found += len(page)
			}
		}
		if len(round) == 0 {
			return found, nil
		}
		refused := e.refused.count
		g, gctx := errgroup.WithContext(ctx)
		g.SetLimit(e.p.workers)
		for _, page := range round {
			g.Go(func() error { return e.remove(gctx, page) })
		}
		if err := g.Wait(); err != nil {
			return found, err
		}
		// Where all of it is gone, what comes next is at the beginning.
		if first := round[0][0]; more && e.refused.count == refused && first != last {
			next, last = allVersions(e.pl, e.prefix, 0), first
		}
	}
	return found, nil
}

// page reads a page and makes sure that it may be deleted.
func (e *eraser) page(ctx context.Context, next pager) (page []object, more bool, err error) {
	err = e.send(ctx, func(ctx context.Context) error {
		page, more, err = next(ctx)
		return err
	})
	if err != nil {
		return nil, false, err
	}
	for _, o := range page {
		if err := below(e.prefix, o.key); err != nil {
			return nil, false, err
		}
	}
	return page, more, nil
}
