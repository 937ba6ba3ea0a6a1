package drain

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/tracker"
)

const (
	// reportBound is how long a client without pending uploads may take to report that it has none.
	reportBound = 10 * time.Second
	// copiesBound bounds the wait for copies of a mount that a new mount namespace has for a moment.
	copiesBound = time.Second
)

// NotFlushedError is the reason why it is not known that the client of a mount has stored everything.
type NotFlushedError struct{ Reason string }

func (e *NotFlushedError) Error() string { return "not known to have stored everything: " + e.Reason }

func notFlushed(format string, args ...any) error {
	return &NotFlushedError{fmt.Sprintf(format, args...)}
}

// Flush returns when everything that was written and closed in a mount without publications is stored, and leaves its client running. If
// that cannot be known, the error is a NotFlushedError: the mount has to be stopped. It can be interrupted anywhere and repeated.
//
// A client is asked once the kernel has no request left for it. One with client.Client.Flushed is asked for a flush. The others answer
// the kernel's last request for a file when it is stored, and report no upload then. A copy of the mount elsewhere may have open files,
// which only the end of the connection closes.
func (d *Drainer) Flush(ctx context.Context, m state.Mount) error {
	cl, err := d.clients.Of(m.Client)
	if err != nil {
		return err
	}
	if !m.Spec.ReadOnly && cl.Queue == nil {
		return notFlushed("client %s does not report its uploads", m.Client)
	}
	d.tracker.Mount(m.Name).Set(m.Client, tracker.Draining)
	if err := d.sources.WaitIdle(ctx, m); err != nil {
		return InProgress(m, d.withUploads(ctx, m, err))
	}
	where, err := d.sources.ShownElsewhere(ctx, m, copiesBound)
	if err != nil {
		return err
	}
	if where != "" {
		return notFlushed("it is also mounted at %s", where)
	}
	switch {
	case cl.Flushed != nil:
	case m.Spec.ReadOnly:
		return nil
	default:
		return d.awaitReport(ctx, m, func(s helper.Status) (bool, error) {
			switch {
			case s.Queue == nil:
				return false, notFlushed("its client program does not report uploads")
			case s.Unstored != nil && !m.UnstoredReported:
				return false, notFlushed("closed files could not be stored")
			}
			return s.Queue.Uploads == 0, nil
		})
	}
	asked, err := d.peer(m.Name).Flush(ctx)
	switch {
	case fault.Is(err, fault.Unsupported), fault.Is(err, fault.Precondition), errors.Is(err, helper.ErrGone):
		return notFlushed("%v", err)
	case err != nil:
		return InProgress(m, d.withUploads(ctx, m, err))
	}
	return d.awaitReport(ctx, m, func(s helper.Status) (bool, error) {
		switch {
		case s.Starts != asked.Starts:
			return false, notFlushed("its client was restarted")
		case s.Flush.Done < asked.Flush.Asked:
			return false, nil
		case s.Flush.Unsent > 0:
			return false, notFlushed("%d changed files are in no upload queue", s.Flush.Unsent)
		}
		return true, nil
	})
}

// awaitReport waits until the status of a mount's helper shows that its client has stored everything.
func (d *Drainer) awaitReport(ctx context.Context, m state.Mount, stored func(helper.Status) (bool, error)) error {
	entry := d.tracker.Mount(m.Name)
	var last helper.Status
	empty := time.Now() // since when no upload is pending
	for {
		d.refreshIfDue(ctx, m)
		status, err := d.nextStatus(ctx, m, last.Revision, min(d.checkEvery, d.reportBound))
		switch {
		case err == nil && status.State != helper.StateRunning:
			return notFlushed("its client has exited")
		case err == nil:
			last = status
			entry.Drain.Queued(status.Queue)
			if done, err := stored(status); done || err != nil {
				return err
			}
		case errors.Is(err, helper.ErrGone):
			return notFlushed("its helper has exited")
		case ctx.Err() != nil, !errors.Is(err, errUnchanged):
			return waitEnded(ctx, m, last, err)
		}
		pending := last.Queue != nil && last.Queue.Uploads > 0
		if pending {
			empty = time.Now()
		}
		switch {
		case time.Since(empty) >= d.reportBound:
			return notFlushed("its client does not report that it has stored everything")
		case pending && d.hangAfter != 0 && !d.makesProgress(m, last):
			return notFlushed("its client makes no progress")
		}
	}
}
