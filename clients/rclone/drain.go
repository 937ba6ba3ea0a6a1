package main

import (
	"context"
	"os"
	"time"

	"github.com/rclone/rclone/fs"
)

const (
	pollQueue = 250 * time.Millisecond
	pollDrain = 50 * time.Millisecond
	// maxRetryDelay bounds the time between two attempts to upload a file, in seconds, so that an outage of S3 is not
	// followed by another of our own.
	maxRetryDelay = 30.0
	// againEvery is how often a VFS that has given up on a file is replaced.
	againEvery = 10 * time.Second
	// sayEvery is how often the log says what an unmounted file system waits for.
	sayEvery = 30 * time.Second
)

// drainer watches over what was written until it is stored.
type drainer struct {
	queue  *uploads
	cache  *cache
	guard  *guard
	report *reporter
	// forget makes the VFS read its directories again.
	forget func()
	// again replaces the VFS by a new one, which takes up what it finds in the cache.
	again func(context.Context) error
}

// whileMounted reports and hurries the queue until the file system is unmounted. A signal only starts waiting uploads.
func (d *drainer) whileMounted(ctx context.Context, unmounted <-chan struct{}, signals <-chan os.Signal) {
	tick := time.NewTicker(pollQueue)
	defer tick.Stop()
	for {
		limit := maxRetryDelay
		select {
		case <-unmounted:
			return
		case s := <-signals:
			fs.Logf(nil, "%v does not end the program: unmount the file system, and it ends when everything is stored", s)
			limit = 0
		case <-d.guard.unsent.changed:
		case <-tick.C:
		}
		if queued := d.step(ctx, limit); queued != nil && d.guard.aside.settled(queued) {
			d.forget()
		}
	}
}

// drain waits until everything that was written is stored, however long that takes.
func (d *drainer) drain(ctx context.Context, signals <-chan os.Signal) error {
	tick := time.NewTicker(pollDrain)
	defer tick.Stop()
	start, said, renewed := time.Now(), time.Now(), time.Now()
	hurried := map[uint64]bool{}
	for {
		waiting, err := d.queue.items(ctx)
		if err != nil {
			return err // there is no VFS any more: cannot happen
		}
		// What waits for --write-back starts now. After a failure there is a delay, or S3 would be hammered.
		for i, item := range waiting {
			if item.Tries == 0 && !hurried[uint64(item.ID)] {
				hurried[uint64(item.ID)] = true
				if err := d.queue.hurry(ctx, waiting[i:i+1], 0); err != nil {
					fs.Errorf(nil, "%v", err)
				}
			}
		}
		names := d.step(ctx, maxRetryDelay)
		if len(names) == 0 {
			left, err := d.cache.unsent()
			if err == nil && len(left) == 0 {
				fs.Infof(nil, "everything is stored, %v after the end of the file system", since(start))
				return nil
			}
			if err != nil {
				fs.Errorf(nil, "looking for unsent data in the cache: %v", err)
			}
			// Left by a process that was killed, and not to be completed when this one started. A new VFS tries again.
			if err == nil && time.Since(renewed) >= againEvery {
				fs.Logf(nil, "%d files in the cache are not stored and not in the queue: trying again", len(left))
				if err := d.again(ctx); err != nil {
					return err
				}
				renewed, hurried = time.Now(), map[uint64]bool{}
			}
		}
		if time.Since(said) >= sayEvery {
			said = time.Now()
			fs.Logf(nil, "unmounted %v ago, %d files are still to be stored", since(start), len(names))
		}
		select {
		case s := <-signals:
			fs.Logf(nil, "%v does not end the program: %d files are still to be stored", s, len(names))
		case <-tick.C:
		}
	}
}

// step reports the queue and the conflicts, keeps the queue's delays short, and returns the names in it.
func (d *drainer) step(ctx context.Context, limit float64) map[string]bool {
	items, err := d.queue.items(ctx)
	if err != nil {
		fs.Errorf(nil, "%v", err)
		return nil
	}
	d.guard.unsent.observe(items)
	d.report.conflictCount(d.guard.conflicts.Load())
	d.report.queue(time.Now(), summary(items))
	if err := d.queue.hurry(ctx, items, limit); err != nil {
		fs.Errorf(nil, "%v", err)
	}
	names := make(map[string]bool, len(items))
	for _, item := range items {
		names[item.Name] = true
	}
	return names
}
