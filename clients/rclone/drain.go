package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/rclone/rclone/fs"
	"github.com/rclone/rclone/fs/rc"
	"github.com/rclone/rclone/vfs/vfscache/writeback"
)

const (
	pollQueue = 250 * time.Millisecond
	pollDrain = 50 * time.Millisecond
	// maxRetryDelay limits the delay before the next attempt to upload a file, in seconds. rclone's own limit is five minutes.
	maxRetryDelay = 30.0
	// renewVFSInterval is the interval at which a VFS that has given up on files is replaced.
	renewVFSInterval = 10 * time.Second
	// logInterval is the interval between log lines about the progress of a drain.
	logInterval = 30 * time.Second
)

// drainer waits until all changes are uploaded.
type drainer struct {
	queue  *uploads
	cache  *cache
	guard  *guard
	report *reporter
	// renewVFS replaces the VFS with a new one, which uploads what it finds in the cache.
	renewVFS func(context.Context) error
}

// whileMounted reports the queue and limits its delays until the file system is unmounted. A signal starts a flush: the waiting uploads
// start, and when the queue is empty, that is reported. Directories are listed again then: nothing uses the file system for a while.
func (d *drainer) whileMounted(ctx context.Context, unmounted <-chan struct{}, signals <-chan os.Signal) {
	tick := time.NewTicker(pollQueue)
	defer tick.Stop()
	flushing := false
	for {
		limit := maxRetryDelay
		select {
		case <-unmounted:
			return
		case s := <-signals:
			fs.Infof(nil, "Flushing: signal=%v", s)
			limit, flushing = 0, true
			tick.Reset(pollDrain)
		case <-d.guard.unsent.changed:
		case <-tick.C:
		}
		if flushing {
			d.begin(ctx)
		}
		var queued map[string]bool
		if d.guard.quarantined.settled(func() map[string]bool {
			queued = d.step(ctx, limit)
			return queued
		}) {
			d.guard.dirs.expire()
		}
		if flushing && queued != nil && len(queued) == 0 && d.flushed() {
			flushing = false
			tick.Reset(pollQueue)
		}
	}
}

// begin begins the uploads that have not been tried yet.
func (d *drainer) begin(ctx context.Context) {
	items, err := d.queue.items(ctx)
	if err != nil {
		return // step reports it
	}
	untried := slices.DeleteFunc(items, func(item writeback.QueueInfo) bool { return item.Tries > 0 })
	if err := d.queue.limitDelays(ctx, untried, 0); err != nil {
		fs.Errorf(nil, "Upload queue error: %v", err)
	}
}

// flushed reports that the queue is empty, with the number of changed files that are not in it.
func (d *drainer) flushed() bool {
	left, err := d.cache.unsent()
	if err != nil {
		fs.Errorf(nil, "Cannot read cache: %v", err)
		return false
	}
	d.guard.dirs.expire()
	return d.report.flushed(len(left))
}

// drain waits until all changes are uploaded, without a time limit.
func (d *drainer) drain(ctx context.Context, signals <-chan os.Signal) error {
	tick := time.NewTicker(pollDrain)
	defer tick.Stop()
	start, logged, renewed := time.Now(), time.Now(), time.Now()
	started := map[uint64]bool{}
	for {
		waiting, err := d.queue.items(ctx)
		if err != nil {
			return err // cannot happen: there is always a VFS
		}
		// Uploads that wait for --write-back start now. After a failure there is still a delay.
		for i, item := range waiting {
			if item.Tries == 0 && !started[uint64(item.ID)] {
				started[uint64(item.ID)] = true
				if err := d.queue.limitDelays(ctx, waiting[i:i+1], 0); err != nil {
					fs.Errorf(nil, "Upload queue error: %v", err)
				}
			}
		}
		names := d.step(ctx, maxRetryDelay)
		if len(names) == 0 {
			left, err := d.cache.unsent()
			if err == nil && len(left) == 0 {
				fs.Infof(nil, "Drain complete: duration=%v", since(start))
				return nil
			}
			if err != nil {
				fs.Errorf(nil, "Cannot read cache: %v", err)
			}
			// A killed process left files that could not be read from S3 when this process started. A new VFS tries again.
			if err == nil && time.Since(renewed) >= renewVFSInterval {
				fs.Logf(nil, "Retrying files that are not in the upload queue: files=%d", len(left))
				if err := d.renewVFS(ctx); err != nil {
					return err
				}
				renewed, started = time.Now(), map[uint64]bool{}
			}
		}
		if time.Since(logged) >= logInterval {
			logged = time.Now()
			fs.Logf(nil, "Draining: duration=%v files=%d", since(start), len(names))
		}
		select {
		case s := <-signals:
			fs.Logf(nil, "Signal ignored while draining: signal=%v files=%d", s, len(names))
		case <-tick.C:
		}
	}
}

// step reports the queue and the conflicts, limits the queue's delays, and returns the names in it. The names are nil if the queue
// cannot be read.
func (d *drainer) step(ctx context.Context, limit float64) map[string]bool {
	items, err := d.queue.items(ctx)
	if err != nil {
		fs.Errorf(nil, "Upload queue error: %v", err)
		return nil
	}
	d.guard.unsent.observe(items)
	d.report.conflictCount(d.guard.conflicts.Load())
	d.report.queue(time.Now(), summary(items))
	if err := d.queue.limitDelays(ctx, items, limit); err != nil {
		fs.Errorf(nil, "Upload queue error: %v", err)
	}
	names := make(map[string]bool, len(items))
	for _, item := range items {
		names[item.Name] = true
	}
	return names
}

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

// limitDelays limits the remaining delay of waiting uploads, in seconds. rclone's own delay is --write-back before the first attempt, and
// up to five minutes after failures.
func (u *uploads) limitDelays(ctx context.Context, items []writeback.QueueInfo, limit float64) error {
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
