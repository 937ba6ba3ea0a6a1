package erase

import (
	"context"
	"errors"
	"strings"

	"golang.org/x/sync/errgroup"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/throttle"
)

// Left is what listings found below a prefix.
type Left struct {
	Objects bool // or versions and delete markers, if the task has Versions
	Uploads bool // unfinished ones
}

// Empty reports whether nothing is left.
func (l Left) Empty() bool { return !l.Objects && !l.Uploads }

// Look returns what is below the task's prefix, and deletes nothing. Both listings run concurrently, so a prefix without objects
// and uploads takes one round trip. Like Erase it cannot see what another process writes at the same time.
func (e *Eraser) Look(ctx context.Context, t Task) (left Left, err error) {
	l := e.start(t)
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() (err error) {
		left.Objects, err = l.anyObject(ctx)
		return err
	})
	g.Go(func() (err error) {
		left.Uploads, err = l.anyUpload(ctx)
		return err
	})
	return left, g.Wait()
}

func (e *erasure) anyObject(ctx context.Context) (found bool, err error) {
	var empty bool
	list := func(is func(context.Context, buckets.Bucket, string) (bool, error)) error {
		return e.throttle.Send(ctx, throttle.Short, func(ctx context.Context) (err error) {
			empty, err = is(ctx, e.task.Bucket, e.task.Prefix)
			return err
		})
	}
	if e.task.Versions {
		err = list(buckets.IsUnused)
	}
	if !e.task.Versions || backend.IsNotImplemented(err) {
		err = list(buckets.IsEmpty)
		if err == nil && !empty && e.task.Except != "" {
			err = list(func(ctx context.Context, b buckets.Bucket, prefix string) (bool, error) {
				return buckets.IsEmptyExcept(ctx, b, prefix, e.task.Except)
			})
		}
	}
	return !empty, err
}

var errStop = errors.New("stop")

func (e *erasure) anyUpload(ctx context.Context) (found bool, err error) {
	err = e.throttle.Send(ctx, throttle.Short, func(ctx context.Context) error {
		err := e.uploads.UploadsBelow(ctx, e.task.Bucket, e.task.Prefix, func(key, _ string) error {
			if e.task.Except != "" && strings.HasPrefix(key, e.task.Except) {
				return nil
			}
			return errStop
		})
		if found = errors.Is(err, errStop); found {
			return nil
		}
		return err
	})
	return found, backend.Classify(err, "listing unfinished uploads below "+e.task.Bucket.Info.Name+"/"+e.task.Prefix)
}
