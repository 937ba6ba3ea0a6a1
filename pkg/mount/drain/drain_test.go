package drain

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/mounttest"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/mounttest/parts"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/mounttest/runnertest"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/runner"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
	"github.com/s3-csi/s3-csi-driver/pkg/proc"
)

func newDrainer(t *testing.T, l runner.Launcher, hangTimeout time.Duration) (*Drainer, *parts.Parts) {
	t.Helper()
	r, p := runnertest.New(t, l, mounttest.S3{}, hangTimeout)
	return New(r, hangTimeout/8), p
}

// A drain can take longer than the credentials that the client was started with are valid.
func TestAwaitExit_RefreshesCredentials(t *testing.T) {
	d, p := newDrainer(t, &mounttest.UIDs{}, 0)
	d.refreshEvery = time.Hour
	m := p.Mount("a", "1", "rclone", nil)
	h := &mounttest.Helper{Status: &helper.Status{Protocol: 1, Revision: 7, State: helper.StateRunning, Ending: true}}
	h.Serve(t, p.Store.Socket(m.Name))
	wait := func(ctx context.Context) {
		t.Helper()
		if how, err := d.awaitExit(ctx, m); !fault.Is(err, fault.Busy) {
			t.Errorf("%q, %v", how, err)
		}
	}
	wait(mounttest.Until(t, func() bool { return h.WasAsked("status") }))
	if h.WasAsked("credentials") {
		t.Error("it gets new credentials at once")
	}
	d.refreshEvery = time.Nanosecond
	wait(mounttest.Until(t, func() bool { return h.WasAsked("credentials") }))
	if !h.WasAsked("credentials") {
		t.Errorf("its helper was asked only: %v", h.Asked)
	}
}

// A client that cannot store its files with the former settings of its backend, such as the password of a proxy, is started again with the
// current ones, if it keeps the files on disk.
func TestAwaitExit_NoticesChangedSettings(t *testing.T) {
	for name, tc := range map[string]struct {
		client string
		change func(*state.Mount)
		want   bool
	}{
		"changed":          {"rclone", func(m *state.Mount) { m.Backend = "a former digest" }, true},
		"not changed":      {"rclone", nil, false},
		"nothing to store": {"rclone", func(m *state.Mount) { m.Backend, m.Spec.ReadOnly = "a former digest", true }, false},
		"record lost":      {"rclone", func(m *state.Mount) { m.Backend = "" }, false},
		"no files on disk": {"mountpoint-s3", func(m *state.Mount) { m.Backend = "a former digest" }, false},
	} {
		t.Run(name, func(t *testing.T) {
			d, p := newDrainer(t, &mounttest.UIDs{}, 0)
			m := p.Mount("a", "1", tc.client, tc.change)
			h := &mounttest.Helper{Status: &helper.Status{Protocol: 1, Revision: 7, State: helper.StateRunning, Ending: true}}
			h.Serve(t, p.Store.Socket(m.Name))
			statuses := func() (n int) {
				h.Mu.Lock()
				defer h.Mu.Unlock()
				for _, op := range h.Asked {
					if op == "status" {
						n++
					}
				}
				return n
			}
			drainUntil := func(happened func() bool) {
				t.Helper()
				if err := d.drain(mounttest.Until(t, happened), m, Options{}); err == nil {
					t.Error("drained")
				}
			}
			drainUntil(func() bool { return h.WasAsked("status") })
			if h.WasAsked("kill") {
				t.Fatal("it was killed at once")
			}
			d.refreshEvery = time.Nanosecond
			before := statuses()
			drainUntil(func() bool { return h.WasAsked("kill") || statuses() >= before+2 }) // it is checked between the two
			if killed := h.WasAsked("kill"); killed != tc.want {
				t.Errorf("killed: %t", killed)
			}
		})
	}
}

func TestAwaitExit_UnresponsiveHelperDoesNotBlock(t *testing.T) {
	d, p := newDrainer(t, &mounttest.UIDs{}, 100*time.Millisecond)
	m := p.Mount("a", "1", "rclone", nil)
	(&mounttest.Helper{}).Serve(t, p.Store.Socket(m.Name))
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if how, err := d.awaitExit(ctx, m); how != runner.ExitUnknown || err != nil {
		t.Errorf("%q, %v", how, err)
	}
}

// A client without a helper may store its data for as long as its credentials are valid, however long its mount has been draining.
func TestAwaitExit_OrphanMayUseItsCredentials(t *testing.T) {
	l := &mounttest.UIDs{Live: map[uint32]bool{parts.UID: true}}
	d, p := newDrainer(t, l, 0)
	m := p.Mount("a", "1", "mountpoint-s3", func(m *state.Mount) {
		m.Phase, m.Ending = state.Ending, time.Now().Add(-2*orphanBound)
	})
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := d.awaitExit(ctx, m); !fault.Is(err, fault.Busy) || len(l.Killed) > 0 {
		t.Errorf("killed: %v, %v", l.Killed, err)
	}
	d.orphanBound = 0
	if _, err := d.awaitExit(t.Context(), m); err != nil || len(l.Killed) != 1 {
		t.Errorf("killed: %v, %v", l.Killed, err)
	}
}

// The text that kubelet shows in an event while a pod waits for its uploads.
func TestQueueTexts(t *testing.T) {
	for want, q := range map[string]client.Queue{
		"1 upload, 17 B": {Uploads: 1, Bytes: 17}, "3 uploads, 1.2 GiB": {Uploads: 3, Bytes: 1288490189}, "2 uploads, 1.0 KiB": {Uploads: 2, Bytes: 1024},
	} {
		if got := formatQueue(q); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	synctest.Test(t, func(t *testing.T) {
		m := state.Mount{Name: "m", VolumeID: "v", Client: "rclone", Ending: time.Now()}
		time.Sleep(90 * time.Second)
		want := "draining: 3 uploads, 1.2 GiB: context deadline exceeded (for 1m30s; volume v, mount m, client rclone); the drain continues, and a retry waits for it"
		if err := InProgress(m, WithQueue(&client.Queue{Uploads: 3, Bytes: 1288490189}, context.DeadlineExceeded)); err.Error() != want ||
			!fault.Is(err, fault.Busy) {
			t.Errorf("%v", err)
		}
	})
}

// What a client said last about its uploads is their problem.
func TestTheLastOutputIsPartOfTheError(t *testing.T) {
	ended := errors.New("ended")
	for want, tail := range map[string][]string{
		"ended": {"s3-csi-ready", "15:19:37 NOTICE: Draining: duration=30s files=1"},
		"ended; last output of the client: ERROR : file: AccessDenied": {"ERROR : other: timeout", "ERROR : file: AccessDenied",
			"15:19:37 NOTICE: Draining: duration=30s files=1"},
	} {
		if err := withOutput(helper.Status{Tail: tail}, ended); err.Error() != want || !errors.Is(err, ended) {
			t.Errorf("%q: %v", tail, err)
		}
	}
}

// An unmount that waits for requests of the file system names the uploads that they wait for.
func TestUploadsInFlightAreNamed(t *testing.T) {
	d, p := newDrainer(t, &mounttest.UIDs{}, time.Minute)
	m := p.Mount("a", "1", "mountpoint-s3", nil)
	busy := errors.New("requests are in flight")
	if err := d.withUploads(t.Context(), m, busy); !errors.Is(err, busy) {
		t.Errorf("without a helper: %v", err)
	}
	h := &mounttest.Helper{Status: &helper.Status{Protocol: 1, State: helper.StateRunning, Queue: &client.Queue{Uploads: 3, Bytes: 2 << 20}}}
	h.Serve(t, p.Store.Socket(m.Name))
	if err := d.withUploads(t.Context(), m, busy); !errors.Is(err, busy) || !strings.Contains(err.Error(), "3 uploads, 2.0 MiB") {
		t.Errorf("%v", err)
	}
}

// searches is a launcher that counts the searches for processes, of which a mount has one.
type searches struct {
	mounttest.UIDs
	pid   int
	count int
}

func (l *searches) Alive(context.Context, uint32) (bool, error) {
	l.count++
	status, err := proc.ReadStatus(l.pid)
	return err == nil && status.Running(), nil
}

// Searching for processes is expensive on a node with many mounts, so a drain first waits for the helper that it told to exit.
func TestStopHelper_WaitsBeforeItSearches(t *testing.T) {
	l := &searches{}
	d, p := newDrainer(t, l, 0)
	m := p.Mount("a", "1", "rclone", nil)
	process, exit := mounttest.Process(t, m.UID)
	l.pid = process.Process.Pid
	h := &mounttest.Helper{Status: &helper.Status{Protocol: 1, State: helper.StateExited, PID: l.pid}}
	h.Serve(t, p.Store.Socket(m.Name))
	quit := mounttest.Until(t, func() bool { return h.WasAsked("quit") })
	context.AfterFunc(quit, func() {
		time.Sleep(5 * exitPause)
		exit()
	})
	if err := d.stopHelper(t.Context(), m); err != nil {
		t.Error(err)
	}
	if l.count != 1 || len(l.Killed) > 0 {
		t.Errorf("%d searches, killed: %v", l.count, l.Killed)
	}
	if err := process.Wait(); err != nil {
		t.Error(err)
	}
}

// The data of files that a client could not store after they were closed is lost: the caller learns it, but the mount still ends.
func TestUnstoredFiles_FailTheFirstStopOnly(t *testing.T) {
	d, p := newDrainer(t, &mounttest.UIDs{}, time.Minute)
	m := p.Mount("a", "1", "mountpoint-s3", func(m *state.Mount) { m.Phase, m.Ending = state.Ending, time.Now() })
	h := &mounttest.Helper{Status: &helper.Status{
		Protocol: 1, Revision: 7, State: helper.StateExited, Ending: true, Unstored: &client.Unstored{Files: 2, Name: "v/report.csv", Reason: "AccessDenied: no"},
	}}
	h.Serve(t, p.Store.Socket(m.Name))
	err := d.Stop(t.Context(), m, Options{})
	if !fault.Is(err, fault.Precondition) || !strings.Contains(err.Error(), "v/report.csv") || !strings.Contains(err.Error(), "AccessDenied") ||
		h.WasAsked("quit") {
		t.Fatalf("%v; asked: %v", err, h.Asked)
	}
	m, ok, err := p.Store.Mount(t.Context(), m.Name)
	if err != nil || !ok || !m.UnstoredReported {
		t.Fatalf("%+v, %v", m, err)
	}
	if err := d.Stop(t.Context(), m, Options{}); err != nil || !h.WasAsked("quit") {
		t.Errorf("%v; asked: %v", err, h.Asked)
	}
	if _, ok, _ := p.Store.Mount(t.Context(), m.Name); ok {
		t.Error("the mount's record is there")
	}
}

// flushed is the error of a flush of a client with this status.
func flushed(t *testing.T, clientName string, status *helper.Status, change func(*state.Mount)) error {
	t.Helper()
	d, p := newDrainer(t, &mounttest.UIDs{}, time.Minute)
	d.reportBound, d.checkEvery = 100*time.Millisecond, 100*time.Millisecond
	m := p.Mount("a", "1", clientName, change)
	if status != nil {
		status.Protocol, status.Revision = 1, 7
		(&mounttest.Helper{Status: status}).Serve(t, p.Store.Socket(m.Name))
	}
	return d.Flush(t.Context(), m)
}

func TestFlush_KnowsWhetherEverythingIsStored(t *testing.T) {
	running := helper.StateRunning
	for what, tc := range map[string]struct {
		client string
		status *helper.Status
		reason string // "": everything is stored
	}{
		"after a flush":      {"rclone", &helper.Status{State: running, Flush: helper.FlushStatus{Asked: 1, Done: 1}}, ""},
		"unsent files":       {"rclone", &helper.Status{State: running, Flush: helper.FlushStatus{Asked: 1, Done: 1, Unsent: 2}}, "2 changed files"},
		"no end of a flush":  {"rclone", &helper.Status{State: running, Flush: helper.FlushStatus{Asked: 1}}, "does not report"},
		"an exited client":   {"rclone", &helper.Status{State: helper.StateExited}, "has exited"},
		"no helper":          {"rclone", nil, ""},
		"no pending uploads": {"mountpoint-s3", &helper.Status{State: running, Queue: &client.Queue{}}, ""},
		"no report":          {"mountpoint-s3", &helper.Status{State: running}, "does not report uploads"},
		"unstored files":     {"mountpoint-s3", &helper.Status{State: running, Queue: &client.Queue{}, Unstored: &client.Unstored{Files: 1}}, "could not be stored"},
	} {
		t.Run(what, func(t *testing.T) {
			err := flushed(t, tc.client, tc.status, nil)
			var unknown *NotFlushedError
			if stored := tc.reason == "" && tc.status != nil; stored != (err == nil) {
				t.Fatalf("%v", err)
			}
			if err != nil && (!errors.As(err, &unknown) || !strings.Contains(unknown.Reason, tc.reason)) {
				t.Errorf("%v, want %q", err, tc.reason)
			}
		})
	}
	if err := flushed(t, "mountpoint-s3", nil, func(m *state.Mount) { m.Spec.ReadOnly = true }); err != nil {
		t.Errorf("a read-only mount: %v", err)
	}
}

// Without its record, a mount is stopped by its uid. If its client exited abnormally, its cache is kept.
func TestStopUnrecorded_KeepsTheCacheOfACrashedClient(t *testing.T) {
	for how, status := range map[string]*helper.Status{
		"clean": {Protocol: 1, Revision: 7, State: helper.StateExited}, "crashed": {Protocol: 1, Revision: 7, State: helper.StateExited, ExitCode: 1},
	} {
		l := &mounttest.UIDs{}
		d, p := newDrainer(t, l, 0)
		m := p.Mount("a", "1", "rclone", nil)
		(&mounttest.Helper{Status: status}).Serve(t, p.Store.Socket(m.Name))
		err := d.StopUnrecorded(t.Context(), state.Mount{Name: m.Name, Key: m.Key, UID: m.UID})
		exists, cerr := p.Store.CacheExists(t.Context(), m.Name)
		if crashed := how == "crashed"; crashed != fault.Is(err, fault.Precondition) || crashed != exists || cerr != nil {
			t.Errorf("%s: the cache exists: %t, %v, %v", how, exists, err, cerr)
		}
	}
}
