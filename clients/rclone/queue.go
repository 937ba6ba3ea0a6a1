package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/rclone/rclone/fs/rc"
	"github.com/rclone/rclone/vfs/vfscache/writeback"
)

// queueStatus is what was written and is not stored yet.
type queueStatus struct {
	Uploads int   `json:"uploads"` // files
	Bytes   int64 `json:"bytes"`
}

// uploads reads rclone's queue of uploads. The VFS keeps it to itself except in its remote-control calls, which are
// functions like others here: nothing listens.
type uploads struct {
	queue, expiry rc.Func
}

func newUploads() (*uploads, error) {
	u := &uploads{}
	for path, fn := range map[string]*rc.Func{"vfs/queue": &u.queue, "vfs/queue-set-expiry": &u.expiry} {
		call := rc.Calls.Get(path)
		if call == nil {
			return nil, fmt.Errorf("rclone has no call %s", path)
		}
		*fn = call.Fn
	}
	return u, nil
}

func (u *uploads) items(ctx context.Context) ([]writeback.QueueInfo, error) {
	out, err := u.queue(ctx, rc.Params{}) // of the only VFS there is
	if err != nil {
		return nil, fmt.Errorf("reading the upload queue: %w", err)
	}
	if out == nil {
		return nil, nil // no cache, no queue
	}
	items, ok := out["queue"].([]writeback.QueueInfo)
	if !ok {
		return nil, fmt.Errorf("reading the upload queue: unexpected type %T", out["queue"])
	}
	return items, nil
}

// hurry makes uploads that wait for longer than the limit wait no longer than that. rclone's own delay after failures
// grows to five minutes, and before the first attempt it is --write-back.
func (u *uploads) hurry(ctx context.Context, items []writeback.QueueInfo, limit float64) error {
	for _, item := range items {
		if item.Uploading || item.Expiry <= limit {
			continue
		}
		// An upload that ended meanwhile is not found, and that is fine.
		if _, err := u.expiry(ctx, rc.Params{"id": int64(item.ID), "expiry": limit}); err != nil && !errors.Is(err, writeback.ErrorIDNotFound) {
			return fmt.Errorf("hurrying the upload of %q: %w", item.Name, err)
		}
	}
	return nil
}

func summary(items []writeback.QueueInfo) queueStatus {
	s := queueStatus{Uploads: len(items)}
	for _, item := range items {
		s.Bytes += item.Size
	}
	return s
}
