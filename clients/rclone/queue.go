package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/rclone/rclone/fs/rc"
	"github.com/rclone/rclone/vfs/vfscache/writeback"
)

// queueStatus is the amount of data that is not uploaded yet.
type queueStatus struct {
	Uploads int   `json:"uploads"` // files
	Bytes   int64 `json:"bytes"`
}

// uploads reads rclone's upload queue. The VFS exposes it only by its remote-control calls, which are called directly here: there
// is no server.
type uploads struct {
	queue, expiry rc.Func
}

func newUploads() (*uploads, error) {
	u := &uploads{}
	for path, fn := range map[string]*rc.Func{"vfs/queue": &u.queue, "vfs/queue-set-expiry": &u.expiry} {
		call := rc.Calls.Get(path)
		if call == nil {
			return nil, fmt.Errorf("rclone has no remote-control call %s", path)
		}
		*fn = call.Fn
	}
	return u, nil
}

func (u *uploads) items(ctx context.Context) ([]writeback.QueueInfo, error) {
	out, err := u.queue(ctx, rc.Params{}) // of the only VFS
	if err != nil {
		return nil, fmt.Errorf("read the upload queue: %w", err)
	}
	if out == nil {
		return nil, nil // no cache, no queue
	}
	items, ok := out["queue"].([]writeback.QueueInfo)
	if !ok {
		return nil, fmt.Errorf("read the upload queue: unexpected type %T", out["queue"])
	}
	return items, nil
}

// hurry limits the remaining delay of waiting uploads, in seconds. rclone's own delay is --write-back before the first attempt, and
// up to five minutes after failures.
func (u *uploads) hurry(ctx context.Context, items []writeback.QueueInfo, limit float64) error {
	for _, item := range items {
		if item.Uploading || item.Expiry <= limit {
			continue
		}
		// An upload that has finished meanwhile is not found.
		if _, err := u.expiry(ctx, rc.Params{"id": int64(item.ID), "expiry": limit}); err != nil && !errors.Is(err, writeback.ErrorIDNotFound) {
			return fmt.Errorf("set the delay of the upload of %q: %w", item.Name, err)
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
