package tracker

import (
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/helper"
)

// Report is what is remembered of a mount, for people.
type Report struct {
	State State     // "": unknown; Unresponsive also while it is not yet for --hang-timeout
	Since time.Time // of State; zero: unknown
	// Helper is the last status of the mount's helper; nil: it has not answered since this process started.
	Helper *helper.Status
	// SessionState is the state of the session in Helper, one of the constants Session…; "": unknown, or there is none.
	SessionState string
	Exit         Cause  // why the client must be restarted, until it has been; zero: it need not
	Problem      string // the error of the last reconciliation or restart; "": none
	// NextTry is when the driver works on the mount next; zero: unknown, or nothing is wrong.
	NextTry time.Time
}

// problem is the error of a reconciliation.
type problem struct {
	text string    // "": none
	next time.Time // when it is tried again; zero: in the next pass
}

// PassDue notes when the next reconcile pass is due.
func (t *Tracker) PassDue(at time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.pass = at
}

// Reconciled notes the error of a reconciliation, or nil, and after how long the next one follows, 0: in the next pass.
func (m *Mount) Reconciled(err error, again time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.problem = problem{}
	if err != nil {
		m.problem.text = err.Error()
	}
	if again > 0 {
		m.problem.next = m.t.now().Add(again)
	}
}

// Reported notes the status of the mount's helper.
func (m *Mount) Reported(status helper.Status) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.helper = &status
}

// Reported notes the status of the helper of a mount. It makes no entry.
func (t *Tracker) Reported(name string, status helper.Status) {
	if m := t.known(name); m != nil {
		m.Reported(status)
	}
}

// known returns the entry of a mount, nil if there is none.
func (t *Tracker) known(name string) *Mount {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.mounts[name]
}

// Report returns what is remembered of a mount. It makes no entry.
func (t *Tracker) Report(name string) Report {
	t.mu.Lock()
	m, pass := t.mounts[name], t.pass
	t.mu.Unlock()
	if m == nil {
		return Report{}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	r := Report{State: m.observed(), Since: m.since, Helper: m.helper, Exit: m.backoff.cause, Problem: m.problem.text}
	if r.State == Unresponsive && m.state != Unresponsive {
		r.Since = m.hang.silent
	}
	if m.helper != nil && m.helper.Session != nil && (m.session == nil || !m.forgot()) {
		r.SessionState = stateOf(*m.helper.Session, m.t.now())
	}
	if r.State != Failed && r.Problem == "" {
		return r
	}
	if r.State == Failed && r.Problem == "" {
		r.Problem = m.backoff.err
	}
	now := m.t.now()
	switch pause := m.restartPause(); {
	case m.problem.next.After(now):
		r.NextTry = m.problem.next
	case r.State == Failed && pause > 0:
		r.NextTry = now.Add(pause)
	case pass.After(now):
		r.NextTry = pass
	}
	return r
}
