package tracker

import (
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

type metrics struct {
	reconcile       prometheus.Histogram
	restarts        *prometheus.CounterVec // client, reason
	restartFailures *prometheus.CounterVec // client, reason
	heals           *prometheus.CounterVec // place, result
	unflushed       *prometheus.CounterVec // client
	overdue         prometheus.GaugeFunc
	renewals        *prometheus.CounterVec // client
	renewalFailures *prometheus.CounterVec // client
	conflicts       *prometheus.CounterVec // client
	unstored        *prometheus.CounterVec // client
	lingerHits      *prometheus.CounterVec // client
	lingerEnds      *prometheus.CounterVec // client, reason
	spares          prometheus.Gauge
	spareRequests   *prometheus.CounterVec // result
}

func newMetrics(overdue func() int) metrics {
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
	}
	return metrics{
		reconcile: prometheus.NewHistogram(prometheus.HistogramOpts{
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
		unflushed: counter("s3csi_mount_unflushed_total", "Clients killed while they may have held unflushed data of open files.", "client"),
		overdue: prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "s3csi_overdue_calls", Help: "System calls still blocked by an unresponsive file system after their callers timed out.",
		}, func() float64 { return float64(overdue()) }),
		renewals:        counter("s3csi_mount_session_renewals_total", "Renewed sessions of mounts.", "client"),
		renewalFailures: counter("s3csi_mount_session_failures_total", "Failed session renewals of mounts, which are retried.", "client"),
		conflicts: counter("s3csi_mount_conflicts_total",
			"Files not uploaded because another writer had changed the object; the local copies are quarantined on the node.", "client"),
		unstored: counter("s3csi_mount_unstored_total",
			"Files whose data was lost because the client could not store it after they were closed; counted when the mount ends.", "client"),
		lingerHits: counter("s3csi_linger_hits_total", "Publications that used a lingering mount.", "client"),
		lingerEnds: counter("s3csi_linger_ends_total",
			"Lingering mounts that ended, by reason: time, mounts, memory, backend, session, client, volume, overlap.",
			"client", "reason"),
		spares: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "s3csi_spare_helpers", Help: "Helpers on this node that were started ahead of need and that no mount uses yet.",
		}),
		spareRequests: counter("s3csi_spare_helper_requests_total",
			"New mounts that could use a spare helper, by result: taken, missing (there was none), failed (it did not answer; another helper was started).", "result"),
	}
}

// Collectors returns the metrics of mounts.
func (t *Tracker) Collectors() []prometheus.Collector {
	m := &t.metrics
	return []prometheus.Collector{
		m.reconcile, m.restarts, m.restartFailures, m.heals, m.unflushed, m.overdue, m.renewals, m.renewalFailures, m.conflicts, m.unstored, m.lingerHits,
		m.lingerEnds,
		m.spares, m.spareRequests,
		gauges{t},
	}
}

// SampleCollectors returns the metrics of mounts with one value each, for the page that documents them: a vector without values
// shows nothing.
func SampleCollectors() []prometheus.Collector {
	t := New(func() int { return 0 })
	const client = "rclone"
	t.CountRestart(client, ReasonCrash, true)
	t.CountRestart(client, ReasonCrash, false)
	t.CountHeals("host", "replaced", 1)
	t.CountUnflushed(client)
	m := t.Mount("")
	m.Set(client, Healthy)
	m.Session(client, helper.SessionStatus{})
	m.Conflicts(client, 0)
	t.CountUnstored(client, 0)
	t.CountLingerHit(client)
	t.CountLingerEnd(client, EndedTime)
	t.CountSpare(SpareTaken)
	t.Mount("lingering").Linger(client, Linger{Memory: 1})
	return t.Collectors()
}

// CountUnstored counts files that a client could not store after they were closed.
func (t *Tracker) CountUnstored(client string, files int) {
	t.metrics.unstored.WithLabelValues(client).Add(float64(files))
}

// The results of requests for spare helpers.
const (
	SpareTaken   = "taken"
	SpareMissing = "missing"
	SpareFailed  = "failed"
)

// CountSpare counts a new mount that could use a spare helper.
func (t *Tracker) CountSpare(result string) { t.metrics.spareRequests.WithLabelValues(result).Inc() }

// SetSpares sets the number of spare helpers.
func (t *Tracker) SetSpares(n int) { t.metrics.spares.Set(float64(n)) }

// CountReconcile counts a reconcile pass.
func (t *Tracker) CountReconcile(took time.Duration) { t.metrics.reconcile.Observe(took.Seconds()) }

// CountRestart counts a restart of a client.
func (t *Tracker) CountRestart(client, reason string, succeeded bool) {
	if succeeded {
		t.metrics.restarts.WithLabelValues(client, reason).Inc()
	} else {
		t.metrics.restartFailures.WithLabelValues(client, reason).Inc()
	}
}

// CountHeals counts stale bind mounts.
func (t *Tracker) CountHeals(place, result string, n int) {
	t.metrics.heals.WithLabelValues(place, result).Add(float64(n))
}

// CountUnflushed counts a client that was killed while it may have held unstored data.
func (t *Tracker) CountUnflushed(client string) { t.metrics.unflushed.WithLabelValues(client).Inc() }

// Session records the session status that a helper reports. It returns the problem to log, "" if there is none any more, and whether
// that has changed.
func (m *Mount) Session(client string, status helper.SessionStatus) (problem string, changed bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	var old session
	if m.session != nil {
		old = *m.session
		addDelta(m.t.metrics.renewals.WithLabelValues(client), old.status.Renewals, status.Renewals)
		addDelta(m.t.metrics.renewalFailures.WithLabelValues(client), old.status.Failures, status.Failures)
	} else { // what happened before this process started is not counted
		m.t.metrics.renewals.WithLabelValues(client)
		m.t.metrics.renewalFailures.WithLabelValues(client)
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

type gauges struct{ t *Tracker }

func mountsDesc() *prometheus.Desc {
	return prometheus.NewDesc("s3csi_mounts",
		"Mounts on this node by client and state: healthy, failed, unresponsive, draining, lingering.",
		[]string{"client", "state"}, nil)
}

func sessionsDesc() *prometheus.Desc {
	return prometheus.NewDesc("s3csi_mount_sessions",
		"Sessions of mounts on this node by client and state: valid, failing (valid, but it could not be renewed), expired, static (keys that do not expire).",
		[]string{"client", "state"}, nil)
}

func lingerMemoryDesc() *prometheus.Desc {
	return prometheus.NewDesc("s3csi_linger_memory_bytes", "Resident memory of the clients and helpers of lingering mounts, in bytes.", []string{"client"}, nil)
}

// Describe implements prometheus.Collector.
func (g gauges) Describe(ch chan<- *prometheus.Desc) {
	ch <- mountsDesc()
	ch <- sessionsDesc()
	ch <- lingerMemoryDesc()
}

// Collect implements prometheus.Collector.
func (g gauges) Collect(ch chan<- prometheus.Metric) {
	type key struct{ client, state string }
	mounts, sessions := map[key]int{}, map[key]int{}
	memory := map[string]uint64{}
	now := g.t.now()
	g.t.each(func(m *Mount) {
		if m.state != "" {
			mounts[key{m.client, string(m.state)}]++
		}
		if m.linger != nil {
			memory[m.client] += m.linger.Memory
		}
		if m.session != nil && !m.forgot() {
			sessions[key{m.client, stateOf(m.session.status, now)}]++
		}
	})
	for desc, counts := range map[*prometheus.Desc]map[key]int{mountsDesc(): mounts, sessionsDesc(): sessions} {
		for k, n := range counts {
			ch <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, float64(n), k.client, k.state)
		}
	}
	for client, bytes := range memory {
		ch <- prometheus.MustNewConstMetric(lingerMemoryDesc(), prometheus.GaugeValue, float64(bytes), client)
	}
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
