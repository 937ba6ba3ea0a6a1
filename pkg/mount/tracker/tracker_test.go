package tracker

import (
	"errors"
	"maps"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/s3-csi/s3-csi-driver/pkg/helper"
)

func TestRestartPause_GrowsAndEnds(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	tr := New(nil)
	tr.now = func() time.Time { return now }
	wants := func(when string, want time.Duration) {
		t.Helper()
		if got := tr.Mount("m").RestartPause(); got != want {
			t.Errorf("%s: %s, want %s", when, got, want)
		}
	}
	wants("the first restart", 0)
	for _, seconds := range []int{1, 2, 4, 8, 16, 32, 64, 120, 120} {
		want := time.Duration(seconds) * time.Second
		tr.Mount("m").RestartDone(nil)
		wants("an exit at once", want)
		now = now.Add(want)
		wants("after the pause", 0)
	}
	tr.Mount("m").RestartDone(errors.New("it does not start"))
	now = now.Add(stable)
	tr.Mount("m").RestartDone(nil)
	wants("after a stable run", firstPause)
	tr.Forget("m")
	wants("forgotten", 0)
}

// A restart that failed does not hide why the client before it exited.
func TestExited_ReportsTheFirstCause(t *testing.T) {
	m := New(nil).Mount("m")
	crash, oom := Cause{ReasonCrash, "signal"}, Cause{ReasonOOM, "memory"}
	for i, step := range []struct {
		now, want Cause
		restarted bool
	}{{oom, oom, false}, {crash, oom, false}, {crash, oom, true}, {crash, crash, false}, {oom, oom, false}, {crash, oom, true}, {crash, crash, true}} {
		if got := m.Exited(step.now); got != step.want {
			t.Errorf("step %d: %+v", i, got)
		}
		if step.restarted {
			m.RestartDone(nil)
		} else {
			m.RestartDone(errors.New("it does not start"))
		}
	}
}

// A probe of a client that was replaced meanwhile says nothing about the one that runs.
func TestProbe_IsOfOneClient(t *testing.T) {
	tr := New(nil)
	m := tr.Mount("m")
	if !m.BeginProbe() || m.BeginProbe() {
		t.Fatal("one probe at a time")
	}
	m.EndProbe(false)
	m.Killed()
	m.BeginProbe()
	m.Restarted()
	if silent := m.EndProbe(false); silent != 0 || m.WasKilled() {
		t.Errorf("silent for %s, killed %t", silent, m.WasKilled())
	}
	m.BeginProbe()
	if silent := m.EndProbe(false); silent != 0 {
		t.Errorf("the first probe of the new client: silent for %s", silent)
	}
	m.BeginProbe()
	tr.Forget("m")
	m.EndProbe(false)
	if len(tr.mounts) > 0 {
		t.Errorf("left: %v", tr.mounts)
	}
}

// Conflicts from before this process, and those of a helper that counts from zero, are counted once.
func TestConflicts_AreCountedOnce(t *testing.T) {
	m := New(nil).Mount("m")
	for i, step := range []struct{ files, added int }{{2, 2}, {2, 0}, {3, 1}, {1, 1}} {
		if changed := m.ConflictsChanged(step.files); changed != (step.added > 0) {
			t.Errorf("step %d: changed %t", i, changed)
		}
		if added := m.Conflicts("rclone", step.files); added != step.added {
			t.Errorf("step %d: %d, want %d", i, added, step.added)
		}
	}
}

func TestMetricsOfSessions(t *testing.T) {
	tr := New(func() int { return 0 })
	now := time.Now()
	tr.now = func() time.Time { return now }
	registry := prometheus.NewRegistry()
	registry.MustRegister(gauges{tr}, tr.Metrics.renewals, tr.Metrics.renewalFailures)
	shows := func(renewals, failures float64, state string) {
		t.Helper()
		families, err := registry.Gather()
		if err != nil {
			t.Fatal(err)
		}
		got := map[string]float64{}
		for _, f := range families {
			for _, metric := range f.GetMetric() {
				name := f.GetName()
				for _, label := range metric.GetLabel() {
					name += " " + label.GetValue()
				}
				got[name] = metric.GetCounter().GetValue() + metric.GetGauge().GetValue()
			}
		}
		want := map[string]float64{"s3csi_mount_session_renewals_total rclone": renewals, "s3csi_mount_session_failures_total rclone": failures}
		if state != "" {
			want["s3csi_mount_sessions rclone "+state] = 1
		}
		if !maps.Equal(got, want) {
			t.Errorf("%v, want %v", got, want)
		}
	}
	say := func(status helper.SessionStatus, trouble bool) {
		t.Helper()
		if !tr.Mount("a").SessionChanged(status) {
			t.Errorf("%+v is nothing new", status)
		}
		if _, changed := tr.Mount("a").Session("rclone", status); changed != trouble {
			t.Errorf("%+v: said: %t", status, changed)
		}
	}
	valid := helper.SessionStatus{Expires: now.Add(time.Hour), OrderDigest: "x", Renewals: 5}
	say(valid, false)
	shows(0, 0, SessionValid) // what was before is not counted
	failing := valid
	failing.Error, failing.Kind, failing.Failures = "no", "denied", 1
	say(failing, true)
	failing.Failures, failing.Renewals = 3, 6
	say(failing, false) // the same trouble is said once
	shows(1, 3, SessionFailing)
	now = now.Add(time.Hour)
	shows(1, 3, SessionExpired)
	failing.Over = true
	say(failing, true)
	fresh := helper.SessionStatus{Renewals: 1} // another helper
	say(fresh, true)
	shows(2, 3, SessionStatic)
	tr.Forget("a")
	shows(2, 3, "") // a mount that is gone has no session
}

func TestReportsShowTheReasonAndTheNextTry(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	tr := New(nil)
	tr.now = func() time.Time { return now }
	if r := tr.Report("m"); r.State != "" || r.Helper != nil {
		t.Errorf("unknown: %+v", r)
	}
	if len(tr.mounts) > 0 {
		t.Error("a report made an entry")
	}
	m := tr.Mount("m")
	m.Set("rclone", Healthy)
	began := now
	now = now.Add(time.Minute)
	m.Set("rclone", Healthy)
	if r := tr.Report("m"); r.State != Healthy || !r.Since.Equal(began) || r.Problem != "" || !r.NextTry.IsZero() {
		t.Errorf("healthy: %+v", r)
	}
	tr.PassDue(now.Add(30 * time.Second))
	m.Reconciled(errors.New("cannot heal"), 0)
	if r := tr.Report("m"); r.Problem != "cannot heal" || !r.NextTry.Equal(now.Add(30*time.Second)) {
		t.Errorf("an error: %+v", r)
	}
	m.Exited(Cause{ReasonOOM, "OOM-killed"})
	m.Set("rclone", Failed)
	m.RestartDone(errors.New("no credentials"))
	m.RestartDone(errors.New("no credentials"))
	m.Reconciled(nil, 0)
	r := tr.Report("m")
	if r.State != Failed || !r.Since.Equal(now) || r.Exit.Reason != ReasonOOM || r.Problem != "no credentials" || !r.NextTry.Equal(now.Add(2*time.Second)) {
		t.Errorf("failed: %+v", r)
	}
	m.Reconciled(errors.New("again"), time.Second)
	if r := tr.Report("m"); r.Problem != "again" || !r.NextTry.Equal(now.Add(time.Second)) {
		t.Errorf("failed again: %+v", r)
	}
	m.RestartDone(nil)
	m.Reconciled(nil, 0)
	m.Set("rclone", Healthy)
	if r := tr.Report("m"); r.Exit != (Cause{}) || r.Problem != "" || !r.NextTry.IsZero() {
		t.Errorf("restarted: %+v", r)
	}
	m.Reported(helper.Status{Session: &helper.SessionStatus{Expires: now.Add(-time.Second)}})
	if r := tr.Report("m"); r.SessionState != SessionExpired {
		t.Errorf("session: %+v", r)
	}
}
