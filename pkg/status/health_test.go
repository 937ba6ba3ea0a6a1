package status

import (
	"context"
	"errors"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/tracker"
)

// world is a node with the volume v, published at /t by the mount m.
type world struct {
	pubs      []state.Publication
	mounts    []state.Mount
	health    mount.Health
	healthErr error
	target    error
	answer    error
	observed  tracker.State
	session   *helper.SessionStatus
	down      map[string]error // backends
}

func newWorld() *world {
	m := state.Mount{Name: "m", VolumeID: "v", Client: "rclone", Spec: mount.Spec{Backend: "lab"}}
	return &world{
		pubs: []state.Publication{{Target: "/t", VolumeID: "v", Mount: "m"}, {Target: "/other", VolumeID: "w", Mount: "n"}}, mounts: []state.Mount{m},
		health: mount.Healthy, observed: tracker.Healthy, down: map[string]error{},
	}
}

func (w *world) All(context.Context) ([]state.Publication, error)       { return w.pubs, nil }
func (w *world) Mounts(context.Context) ([]state.Mount, error)          { return w.mounts, nil }
func (w *world) CheckTarget(context.Context, state.Mount, string) error { return w.target }
func (w *world) Health(context.Context, state.Mount) (mount.Health, error) {
	return w.health, w.healthErr
}
func (w *world) Ask(context.Context, state.Mount, string) error { return w.answer }

func (w *world) Report(string) tracker.Report {
	r := tracker.Report{State: w.observed, Helper: &helper.Status{Session: w.session}}
	if s := w.session; s != nil && (s.Over || !now.Before(s.Expires)) {
		r.SessionState = tracker.SessionExpired
	}
	return r
}
func (w *world) Declared() []backend.Backend {
	return []backend.Backend{{Name: "lab"}, {Name: "other"}}
}
func (w *world) Reach(_ context.Context, be backend.Backend) error { return w.down[be.Name] }

func (w *world) reporter() *Reporter {
	c := &Collector{Mounts: w, Publications: w, Tracked: w, Remedy: func(state.Mount) string { return "do something" }, Now: func() time.Time { return now }}
	return &Reporter{Collector: c, Health: w.Health, CheckTarget: w.CheckTarget, Ask: w.Ask, Declared: w.Declared, Reach: w.Reach}
}

func texts(list []mount.Condition) (all []string) {
	for _, c := range list {
		status := "degraded "
		if c.Inaccessible {
			status = "inaccessible "
		}
		all = append(all, status+c.Reason)
	}
	return all
}

func TestConditions_HaveReasons(t *testing.T) {
	for name, tt := range map[string]struct {
		change func(*world)
		want   []string
	}{
		"healthy":                {func(*world) {}, nil},
		"an older configuration": {func(w *world) { w.health = mount.Outdated }, nil},
		"not looked at yet":      {func(w *world) { w.observed = "" }, nil},
		"exited":                 {func(w *world) { w.observed = tracker.Failed }, []string{"inaccessible StaleMount"}},
		"exited just now":        {func(w *world) { w.health = mount.Down }, []string{"inaccessible StaleMount"}},
		"cannot be probed":       {func(w *world) { w.healthErr = errors.New("x") }, []string{"inaccessible StaleMount"}},
		"stale target":           {func(w *world) { w.target = errors.New("x") }, []string{"inaccessible StaleMount"}},
		"record lost":            {func(w *world) { w.mounts = nil }, []string{"inaccessible StaleMount"}},
		"unresponsive":           {func(w *world) { w.observed = tracker.Unresponsive }, []string{"inaccessible ClientUnresponsive"}},
		"does not answer":        {func(w *world) { w.answer = context.DeadlineExceeded }, []string{"inaccessible ClientUnresponsive"}},
		"answers with an error":  {func(w *world) { w.answer = errors.New("x") }, []string{"inaccessible StaleMount"}},
		"unresponsive just now":  {func(w *world) { w.healthErr = fault.Errorf(fault.Timeout, "x") }, []string{"inaccessible ClientUnresponsive"}},
		"without a helper":       {func(w *world) { w.health = mount.Orphaned }, []string{"degraded HelperExited"}},
		"draining":               {func(w *world) { w.observed, w.health = tracker.Draining, mount.Down }, []string{"degraded Draining"}},
		"draining, no record":    {func(w *world) { w.observed, w.pubs = tracker.Draining, nil }, []string{"degraded Draining"}},
		"lingering":              {func(w *world) { w.observed, w.pubs = tracker.Lingering, nil }, nil},
		"session valid":          {func(w *world) { w.session = &helper.SessionStatus{Expires: now.Add(time.Second)} }, nil},
		"expired":                {func(w *world) { w.session = &helper.SessionStatus{Expires: now} }, []string{"inaccessible CredentialsExpired"}},
		"over":                   {func(w *world) { w.session = &helper.SessionStatus{Over: true} }, []string{"inaccessible CredentialsExpired"}},
		"refused, still valid": {func(w *world) {
			w.session = &helper.SessionStatus{Expires: now.Add(time.Second), Error: "x", Kind: "denied"}
		}, []string{"degraded CredentialsRefused"}},
		"refused and over": {func(w *world) { w.session = &helper.SessionStatus{Over: true, Error: "x", Kind: "unauthenticated"} },
			[]string{"inaccessible CredentialsExpired", "inaccessible CredentialsRefused"}},
		"token service away": {func(w *world) {
			w.session = &helper.SessionStatus{Expires: now.Add(time.Second), Error: "x", Kind: "unavailable"}
		}, []string{"degraded BackendUnreachable"}},
		"backend away":      {func(w *world) { w.down["lab"] = errors.New("x") }, []string{"inaccessible BackendUnreachable"}},
		"another backend":   {func(w *world) { w.down["other"] = errors.New("x") }, nil},
		"backend forgotten": {func(w *world) { w.mounts[0].Spec.Backend = "gone" }, nil},
		"two at a time": {func(w *world) { w.observed, w.down["lab"] = tracker.Failed, errors.New("x") },
			[]string{"inaccessible BackendUnreachable", "inaccessible StaleMount"}},
	} {
		w := newWorld()
		tt.change(w)
		got, err := w.reporter().Volume(t.Context(), "v", "")
		if err != nil || !slices.Equal(texts(got), tt.want) {
			t.Errorf("%s: %q, %v; want %q", name, texts(got), err, tt.want)
		}
	}
}

func TestConditions_UnknownVolumeIsNotFound(t *testing.T) {
	for volumeID, target := range map[string]string{"x": "", "v": "/other", "w": "/t"} {
		if got, err := newWorld().reporter().Volume(t.Context(), volumeID, target); !fault.Is(err, fault.NotFound) {
			t.Errorf("%s at %q: %v, %v", volumeID, target, got, err)
		}
	}
	if got, err := newWorld().reporter().Volume(t.Context(), "v", "/t"); err != nil || len(got) > 0 {
		t.Errorf("%v, %v", got, err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := newWorld().reporter().Volume(ended, "v", ""); !fault.Is(err, fault.Timeout) {
		t.Errorf("after the request's end: %v", err)
	}
}

func TestConditions_BackendsAreOne(t *testing.T) {
	w := newWorld()
	if got, err := w.reporter().Storage(t.Context()); err != nil || len(got) > 0 {
		t.Errorf("%v, %v", got, err)
	}
	w.down = map[string]error{"lab": errors.New("lab is away"), "other": errors.New("other is away")}
	got, err := w.reporter().Storage(t.Context())
	if err != nil || !reflect.DeepEqual(texts(got), []string{"inaccessible BackendUnreachable"}) {
		t.Fatalf("%v, %v", got, err)
	}
	for name := range w.down {
		if !strings.Contains(got[0].Message, name) {
			t.Errorf("%s is not in %q", name, got[0].Message)
		}
	}
}
