package mount

import (
	"context"
	"reflect"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/helper"
)

// What state a mount's session is in, for operators.
const (
	sessionValid   = "valid"
	sessionFailing = "failing" // it lasts yet, and the next one could not be made
	sessionExpired = "expired" // the client has none
	sessionStatic  = "static"  // keys that do not end, and that nothing is made from
)

// sessions shows how mounts' sessions are doing, by what their helpers say.
type sessions struct {
	renewals *prometheus.CounterVec // client
	failures *prometheus.CounterVec // client

	mu  sync.Mutex
	now func() time.Time
	of  map[string]seenSession // by mount
}

type seenSession struct {
	client string
	status helper.SessionStatus
	said   string // the trouble that was logged; "": there is none
}

func newSessions() *sessions {
	return &sessions{
		renewals: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "s3csi_mount_session_renewals_total", Help: "Sessions that mounts' helpers have made, each ahead of the end of the one before it.",
		}, []string{"client"}),
		failures: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "s3csi_mount_session_failures_total", Help: "Tries of mounts' helpers to make a session that failed; they are repeated as long as the mount is there.",
		}, []string{"client"}),
		now: time.Now, of: map[string]seenSession{},
	}
}

// seen notes what a helper says of its session, and gives what is to be logged of it: a trouble that is new, or, with an empty
// one, that it is over.
func (s *sessions) seen(name, client string, status *helper.SessionStatus) (trouble string, changed bool) {
	if status == nil {
		return "", false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	old, known := s.of[name]
	if known {
		count(s.renewals, client, old.status.Renewals, status.Renewals)
		count(s.failures, client, old.status.Failures, status.Failures)
	} else { // what was before this driver is not its to count
		count(s.renewals, client, status.Renewals, status.Renewals)
		count(s.failures, client, status.Failures, status.Failures)
	}
	trouble = status.Kind + status.Error
	if status.Over {
		trouble += " over"
	}
	s.of[name] = seenSession{client, *status, trouble}
	return trouble, trouble != old.said
}

// count adds what a helper has counted since it was last asked. One that was started anew has begun at zero.
func count(c *prometheus.CounterVec, client string, before, now int) {
	if now < before {
		before = 0
	}
	c.WithLabelValues(client).Add(float64(now - before))
}

// same tells whether nothing is new: helpers have much else to say.
func (s *sessions) same(name string, status helper.SessionStatus) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	old, known := s.of[name]
	status.Salt, old.status.Salt = nil, nil
	return known && reflect.DeepEqual(old.status, status)
}

func (s *sessions) forget(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.of, name)
}

const sessionsMetric = "s3csi_mount_sessions"

func sessionsDesc() *prometheus.Desc {
	return prometheus.NewDesc(sessionsMetric, "Sessions of mounts on this node by client and state: valid, failing (valid yet, and no other could be made), expired (its client has none), static (keys that do not end).",
		[]string{"client", "state"}, nil)
}

// Describe implements prometheus.Collector.
func (s *sessions) Describe(ch chan<- *prometheus.Desc) { ch <- sessionsDesc() }

// Collect implements prometheus.Collector.
func (s *sessions) Collect(ch chan<- prometheus.Metric) {
	s.mu.Lock()
	defer s.mu.Unlock()
	number := map[state]int{}
	for _, seen := range s.of {
		number[state{seen.client, s.stateOf(seen.status)}]++
	}
	desc := sessionsDesc()
	for st, n := range number {
		ch <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, float64(n), st.client, st.state)
	}
}

func (s *sessions) stateOf(status helper.SessionStatus) string {
	switch {
	case status.Over, !status.Expires.IsZero() && !s.now().Before(status.Expires):
		return sessionExpired
	case status.Error != "":
		return sessionFailing
	case status.Expires.IsZero() && status.OrderDigest == "":
		return sessionStatic
	}
	return sessionValid
}

// observe takes note of what a helper says of its client's conflicts and of its session. It logs failures of the session once
// when they begin, and when they are over.
func (m *Manager) observe(ctx context.Context, name string, status helper.Status) {
	m.observeConflicts(ctx, name, status)
	session := status.Session
	if session == nil || m.sessions.same(name, *session) {
		return
	}
	rec, err := m.recordOf(ctx, name)
	if err != nil || rec.Client == "" {
		return
	}
	trouble, changed := m.sessions.seen(name, rec.Client, session)
	if !changed {
		return
	}
	log := klog.FromContext(ctx).WithValues("mount", name, "volume", rec.VolumeID, "client", rec.Client, "bucket", rec.Spec.Bucket, "prefix", rec.Spec.Prefix,
		"source", rec.Spec.Source, "role", rec.Spec.RoleARN)
	switch {
	case trouble == "":
		log.Info("The mount's session is renewed again", "expires", stamp(session.Expires))
	case session.Over:
		log.Error(session.Fault(), "The mount's session is over: its client can do nothing until another is made", "expired", stamp(session.Expires), "since", stamp(session.FailedSince), "remedy", remedy(rec))
	default:
		log.Error(session.Fault(), "The mount's session cannot be renewed; it is tried again", "expires", stamp(session.Expires), "since", stamp(session.FailedSince), "remedy", remedy(rec))
	}
}
