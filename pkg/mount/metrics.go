package mount

import (
	"sync"

	"github.com/prometheus/client_golang/prometheus"
)

// Why a client was started again.
const (
	reasonCrash  = "crash"   // it ended by itself
	reasonOOM    = "oom"     // the kernel killed it for want of memory
	reasonHang   = "hang"    // it answered nothing any more and was killed
	reasonHelper = "helper"  // its helper ended
	reasonSource = "source"  // somebody unmounted the source
	reasonConfig = "backend" // its backend is another now
	reasonSecret = "secret"  // it works with a secret's keys that were changed since
)

// What state a mount is in, for operators.
const (
	stateServing  = "serving"
	stateDead     = "dead"
	stateHung     = "hung"
	stateDraining = "draining"
)

// metrics is what a manager counts.
type metrics struct {
	reconcile prometheus.Histogram
	restarts  *prometheus.CounterVec // client, reason
	failures  *prometheus.CounterVec // client, reason
	heals     *prometheus.CounterVec // place, result
	lost      *prometheus.CounterVec // client
	overdue   prometheus.GaugeFunc
	states    *states
	sessions  *sessions
	conflicts *conflicts
}

func newMetrics(overdue func() int) *metrics {
	return &metrics{
		reconcile: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "s3csi_reconcile_duration_seconds", Help: "How long a look at all mounts took, with what it mended.",
			Buckets: []float64{.005, .02, .1, .5, 2, 10, 30, 60, 120},
		}),
		restarts: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "s3csi_mount_restarts_total", Help: "Clients that were started in the place of one that died or was given up, by the reason: crash, oom (killed for want of memory), hang, helper (its helper ended), source (somebody unmounted it), backend (the backend is another now), secret (it held on to keys that its secret does not have any more).",
		}, []string{"client", "reason"}),
		failures: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "s3csi_mount_restart_failures_total", Help: "Tries to start a client again that failed; they are repeated, less and less often.",
		}, []string{"client", "reason"}),
		heals: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "s3csi_mount_heals_total", Help: "Dead bind mounts that a living one was to be put in the place of: on the host (targets and subpaths), in containers; detached: dead copies in namespaces that are nobody's who uses the volume.",
		}, []string{"place", "result"}),
		lost: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "s3csi_mount_unflushed_total", Help: "Clients that were given up while they may have held data that was written and not yet stored. Closed files of clients with a cache on disk are not among it.",
		}, []string{"client"}),
		overdue: prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "s3csi_overdue_calls", Help: "System calls that wait for a file system that does not answer, and that nobody waits for any more.",
		}, func() float64 { return float64(overdue()) }),
		states:    &states{of: map[string]state{}},
		sessions:  newSessions(),
		conflicts: newConflicts(),
	}
}

// collectors are what a registry takes.
func (m *metrics) collectors() []prometheus.Collector {
	return []prometheus.Collector{m.reconcile, m.restarts, m.failures, m.heals, m.lost, m.overdue, m.states, m.sessions, m.sessions.renewals, m.sessions.failures, m.conflicts.files}
}

// state is what is known of one mount.
type state struct{ client, state string }

// states counts mounts by client and state.
type states struct {
	mu sync.Mutex
	of map[string]state
}

func (s *states) set(name, client, now string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.of[name] = state{client, now}
}

func (s *states) drop(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.of, name)
}

const mountsMetric = "s3csi_mounts"

func mountsDesc() *prometheus.Desc {
	return prometheus.NewDesc(mountsMetric, "Mounts on this node by client and state: serving, dead (its client has died and could not be started again yet), hung (its client does not answer), draining (no publication is left, and its client stores what it has).",
		[]string{"client", "state"}, nil)
}

// Describe implements prometheus.Collector.
func (s *states) Describe(ch chan<- *prometheus.Desc) { ch <- mountsDesc() }

// Collect implements prometheus.Collector.
func (s *states) Collect(ch chan<- prometheus.Metric) {
	s.mu.Lock()
	defer s.mu.Unlock()
	count := map[state]int{}
	for _, st := range s.of {
		count[st]++
	}
	desc := mountsDesc()
	for st, n := range count {
		ch <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, float64(n), st.client, st.state)
	}
}
