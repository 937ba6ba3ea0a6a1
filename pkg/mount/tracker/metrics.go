package tracker

import (
	"errors"
	"reflect"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/s3-csi/s3-csi-driver/pkg/helper"
)

// The states of a mount's session, as operators see them.
const (
	SessionValid   = "valid"
	SessionFailing = "failing" // valid, but it could not be renewed
	SessionExpired = "expired"
	SessionStatic  = "static" // keys that do not expire
)

// Metrics are the metrics of mounts that are not read from their entries.
type Metrics struct {
	Reconcile       prometheus.Histogram
	restarts        *prometheus.CounterVec // client, reason
	restartFailures *prometheus.CounterVec // client, reason
	heals           *prometheus.CounterVec // place, result
	Unflushed       *prometheus.CounterVec // client
	overdue         prometheus.GaugeFunc
	renewals        *prometheus.CounterVec // client
	renewalFailures *prometheus.CounterVec // client
	conflicts       *prometheus.CounterVec // client
	Unstored        *prometheus.CounterVec // client
	LingerHits      *prometheus.CounterVec // client
	LingerEnds      *prometheus.CounterVec // client, reason
	Spares          prometheus.Gauge
	SpareRequests   *prometheus.CounterVec // result
}

func newMetrics(overdue func() int) Metrics {
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
	}
	return Metrics{
		Reconcile: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "s3csi_reconcile_duration_seconds", Help: "Duration of a full reconcile pass, in seconds.",
			Buckets: []float64{.005, .02, .1, .5, 2, 10, 30, 60, 120},
		}),
		restarts: counter("s3csi_mount_restarts_total",
			"Clients restarted or replaced, by reason: crash, oom (OOM-killed), hang (unresponsive), helper (helper exited), source (unmounted by another process), "+
				"backend (configuration changed), secret (used revoked keys).",
			"client", "reason"),
		restartFailures: counter("s3csi_mount_restart_failures_total", "Failed client restarts, which are retried with backoff.", "client", "reason"),
		heals: counter("s3csi_mount_heals_total",
			"Stale bind mounts by place (host: targets and subpaths; container; elsewhere: namespaces that do not use the volume) and result (replaced, detached, "+
				"failed).",
			"place", "result"),
		Unflushed: counter("s3csi_mount_unflushed_total", "Clients killed while they may have held unflushed data of open files.", "client"),
		overdue: prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "s3csi_overdue_calls", Help: "System calls still blocked by an unresponsive file system after their callers timed out.",
		}, func() float64 { return float64(overdue()) }),
		renewals:        counter("s3csi_mount_session_renewals_total", "Renewed sessions of mounts.", "client"),
		renewalFailures: counter("s3csi_mount_session_failures_total", "Failed session renewals of mounts, which are retried.", "client"),
		conflicts: counter("s3csi_mount_conflicts_total",
			"Files not uploaded because another writer had changed the object; the local copies are quarantined on the node.", "client"),
		Unstored: counter("s3csi_mount_unstored_total",
			"Files whose data was lost because the client could not store it after they were closed; counted when the mount ends.", "client"),
		LingerHits: counter("s3csi_linger_hits_total", "Publications that used a lingering mount.", "client"),
		LingerEnds: counter("s3csi_linger_ends_total",
			"Lingering mounts that ended, by reason: time, mounts, memory, backend, session, client, volume, overlap.",
			"client", "reason"),
		Spares: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "s3csi_spare_helpers", Help: "Helpers on this node that were started ahead of need and that no mount uses yet.",
		}),
		SpareRequests: counter("s3csi_spare_helper_requests_total",
			"New mounts that could use a spare helper, by result: taken, missing (there was none), failed (it did not answer; another helper was started).", "result"),
	}
}

// Collectors returns the metrics of mounts.
func (t *Tracker) Collectors() []prometheus.Collector {
	m := &t.Metrics
	return []prometheus.Collector{
		m.Reconcile, m.restarts, m.restartFailures, m.heals, m.Unflushed, m.overdue, m.renewals, m.renewalFailures, m.conflicts, m.Unstored, m.LingerHits,
		m.LingerEnds,
		m.Spares, m.SpareRequests,
		gauges{t},
	}
}

// SampleCollectors returns the metrics of mounts with one value each, for the page that documents them: a vector without values
// shows nothing.
func SampleCollectors() []prometheus.Collector {
	t := New(func() int { return 0 })
	const client = "rclone"
	t.CountRestart(client, ReasonCrash, nil)
	t.CountRestart(client, ReasonCrash, errors.New("sample"))
	t.CountHeals("host", "replaced", 1)
	t.Metrics.Unflushed.WithLabelValues(client)
	m := t.Mount("")
	m.Set(client, Healthy)
	m.Session(client, helper.SessionStatus{})
	m.Conflicts(client, 0)
	t.Metrics.Unstored.WithLabelValues(client)
	t.Metrics.LingerHits.WithLabelValues(client)
	t.Metrics.LingerEnds.WithLabelValues(client, EndedTime)
	t.Metrics.SpareRequests.WithLabelValues(SpareTaken)
	t.Mount("lingering").Linger(client, Linger{Memory: 1})
	return t.Collectors()
}

// The results of requests for spare helpers.
const (
	SpareTaken   = "taken"
	SpareMissing = "missing"
	SpareFailed  = "failed"
)

// CountRestart counts a restart of a client, with its error or nil.
func (t *Tracker) CountRestart(client, reason string, err error) {
	counter := t.Metrics.restarts
	if err != nil {
		counter = t.Metrics.restartFailures
	}
	counter.WithLabelValues(client, reason).Inc()
}

// CountHeals counts stale bind mounts.
func (t *Tracker) CountHeals(place, result string, n int) {
	t.Metrics.heals.WithLabelValues(place, result).Add(float64(n))
}

// Session records the session status that a helper reports. It returns the problem to log, "" if there is none any more, and whether
// that has changed.
func (m *Mount) Session(client string, status helper.SessionStatus) (problem string, changed bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	var old session
	if m.session != nil {
		old = *m.session
		addDelta(m.t.Metrics.renewals.WithLabelValues(client), old.status.Renewals, status.Renewals)
		addDelta(m.t.Metrics.renewalFailures.WithLabelValues(client), old.status.Failures, status.Failures)
	} else { // what happened before this process started is not counted
		m.t.Metrics.renewals.WithLabelValues(client)
		m.t.Metrics.renewalFailures.WithLabelValues(client)
	}
	problem = status.Kind + status.Error
	if status.Over {
		problem += " over"
	}
	m.client, m.session = client, &session{status, problem}
	return problem, problem != old.problem
}

// SessionChanged reports whether a helper's session status differs from the recorded one.
func (m *Mount) SessionChanged(status helper.SessionStatus) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.session == nil {
		return true
	}
	old := m.session.status
	status.Salt, old.Salt = nil, nil
	status.Next, old.Next = time.Time{}, time.Time{}
	return !reflect.DeepEqual(old, status)
}

// addDelta adds the increase of a helper's counter since its last status. The counters of a new helper start at zero.
func addDelta(c prometheus.Counter, before, now int) {
	if now < before {
		before = 0
	}
	c.Add(float64(now - before))
}

// gauges are the metrics that are read from the entries of mounts.
type gauges struct{ t *Tracker }

func newGauges() (mounts, sessions, memory *prometheus.GaugeVec) {
	gauge := func(name, help string, labels ...string) *prometheus.GaugeVec {
		return prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: name, Help: help}, labels)
	}
	mounts = gauge("s3csi_mounts", "Mounts on this node by client and state: healthy, failed, unresponsive, draining, lingering.", "client", "state")
	sessions = gauge("s3csi_mount_sessions",
		"Sessions of mounts on this node by client and state: valid, failing (valid, but it could not be renewed), expired, static (keys that do not expire).",
		"client", "state")
	memory = gauge("s3csi_linger_memory_bytes", "Resident memory of the clients and helpers of lingering mounts, in bytes.", "client")
	return mounts, sessions, memory
}

// Describe implements prometheus.Collector.
func (g gauges) Describe(ch chan<- *prometheus.Desc) {
	mounts, sessions, memory := newGauges()
	mounts.Describe(ch)
	sessions.Describe(ch)
	memory.Describe(ch)
}

// Collect implements prometheus.Collector.
func (g gauges) Collect(ch chan<- prometheus.Metric) {
	mounts, sessions, memory := newGauges()
	now := g.t.now()
	g.t.each(func(m *Mount) {
		if m.state != "" {
			mounts.WithLabelValues(m.client, string(m.state)).Inc()
		}
		if m.linger != nil {
			memory.WithLabelValues(m.client).Add(float64(m.linger.Memory))
		}
		if m.session != nil && !m.forgot() {
			sessions.WithLabelValues(m.client, stateOf(m.session.status, now)).Inc()
		}
	})
	mounts.Collect(ch)
	sessions.Collect(ch)
	memory.Collect(ch)
}

// forgot reports whether the mount lingers without a session. Call it under the entry's lock.
func (m *Mount) forgot() bool {
	return m.linger != nil && m.session.status.OrderDigest == "" && m.session.status.KeysDigest == ""
}

func stateOf(s helper.SessionStatus, now time.Time) string {
	switch {
	case s.Over, !s.Expires.IsZero() && !now.Before(s.Expires):
		return SessionExpired
	case s.Error != "":
		return SessionFailing
	case s.Expires.IsZero() && s.OrderDigest == "":
		return SessionStatic
	}
	return SessionValid
}
