package mount

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
)

// awaitReady waits until a directory read through the mount answers or the client ends; then the error has its last words.
func (m *Manager) awaitReady(ctx context.Context, rec record, peer *helper.Peer, status helper.Status) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	read, ended := make(chan error, 1), make(chan error, 1)
	go func() { read <- m.Namespace.ReadRoot(host.For(ctx, account(rec.Source)), m.store.sourceDir(rec.Name)) }()
	go func() {
		for status.State == helper.StateRunning {
			next, err := peer.Status(ctx, status.Revision)
			if ctx.Err() != nil {
				return // the read is over too, and says so
			}
			if err != nil {
				ended <- fault.Errorf(fault.Unavailable, "client %s: its helper is gone: %w", rec.Client, err)
				return
			}
			status = next
		}
		ended <- fault.Errorf(fault.Unavailable, "client %s ended before the mount answered, with %s", rec.Client, lastWords(status))
	}()
	select {
	case err := <-ended:
		return err
	case err := <-read:
		if err == nil {
			return nil
		}
		// A client that dies makes the read fail: its own words say more, and come as soon as its helper has written them
		// down. A client that lives and cannot list its bucket is told by the read alone.
		patience := 500 * time.Millisecond
		if errors.Is(err, unix.ENOTCONN) || errors.Is(err, unix.ECONNABORTED) {
			patience = killBound
		}
		select {
		case why := <-ended:
			return why
		case <-time.After(patience):
		case <-ctx.Done():
		}
		if ctx.Err() != nil {
			err = fault.Errorf(fault.Timeout, "client %s did not answer within %s", rec.Client, m.MountTimeout)
		}
		return fmt.Errorf("reading the root of the new mount: %w%s", err, m.tail(ctx, rec))
	}
}

// tail is what a living client said so far.
func (m *Manager) tail(ctx context.Context, rec record) string {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	status, err := m.peer(rec.Name).Hello(ctx)
	if err != nil || len(status.Tail) == 0 {
		return ""
	}
	return "; client " + rec.Client + " said: " + strings.Join(status.Tail, " | ")
}

// lastWords says how a client ended.
func lastWords(s helper.Status) string {
	how := fmt.Sprintf("exit status %d", s.ExitCode)
	if s.Signal != "" {
		how = "signal " + s.Signal
	}
	if len(s.Tail) == 0 {
		return how + " and not a word"
	}
	return how + ": " + strings.Join(s.Tail, " | ")
}
