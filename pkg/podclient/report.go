package podclient

import (
	"context"
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/podvolume"
)

// State is the state of a volume's client.
type State string

// The states of clients.
const (
	Unknown      State = "unknown"      // the driver has just started and has not looked at it yet
	Waiting      State = "waiting"      // no client has connected
	Starting     State = "starting"     // it has the descriptor and has not answered yet
	Serving      State = "serving"      // it answers
	Unresponsive State = "unresponsive" // it answered before and does not now
	Exited       State = "exited"       // it has exited, and no other one has connected
	Stopped      State = "stopped"      // the volume is being unpublished
)

func states() []State {
	return []State{Unknown, Waiting, Starting, Serving, Unresponsive, Exited, Stopped}
}

// Reasons of failures.
const (
	ReasonExited       = "exited"       // the client has exited
	ReasonUnresponsive = "unresponsive" // the client does not answer, or its connection was aborted for that
	ReasonRefused      = "refused"      // a program that connected did not get the descriptor
	ReasonSocket       = "socket"       // the driver cannot listen
	ReasonReconcile    = "reconcile"    // the driver could not show the client's file system
)

// Failure is something that went wrong.
type Failure struct {
	Reason  string // one of Reason…
	Message string
	Time    time.Time
	// Next is when the driver tries again or gives the client up; zero: the client has to connect again.
	Next time.Time
}

// Progress is what the driver remembers of a volume's clients since it started.
type Progress struct {
	State     State
	Since     time.Time // of State
	Handovers int       // descriptors that were passed
	// Failure is the last one; nil: none. It stays when the client serves again.
	Failure *Failure
}

// Report is a volume and the state of its client.
type Report struct {
	podvolume.Volume
	Progress
}

// current returns what the driver remembers. The failure is not changed any more.
func (r *reconciler) current() Progress {
	r.progressMu.Lock()
	defer r.progressMu.Unlock()
	return r.progress
}

// set sets the state. A volume that is being unpublished stays so.
func (r *reconciler) set(s State) {
	r.progressMu.Lock()
	defer r.progressMu.Unlock()
	if r.progress.State != s && r.progress.State != Stopped {
		r.progress.State, r.progress.Since = s, time.Now()
	}
}

// fail remembers a failure. The time of one that continues stays.
func (r *reconciler) fail(reason string, next time.Time, format string, args ...any) {
	f := &Failure{Reason: reason, Message: fmt.Sprintf(format, args...), Time: time.Now(), Next: next}
	r.progressMu.Lock()
	defer r.progressMu.Unlock()
	if old := r.progress.Failure; old != nil && old.Reason == f.Reason && old.Message == f.Message && old.Time.After(r.progress.Since) {
		f.Time = old.Time
	}
	r.progress.Failure = f
}

// handedOver counts a descriptor that was passed.
func (r *reconciler) handedOver() {
	r.s.metrics.handovers.WithLabelValues(resultPassed).Inc()
	r.set(Starting)
	r.progressMu.Lock()
	defer r.progressMu.Unlock()
	r.progress.Handovers++
}

// exited records that the current client has exited, once for each.
func (r *reconciler) exited(aborted bool) {
	switch r.current().State {
	case Unknown: // an earlier driver saw it
		r.set(Exited)
		return
	case Waiting, Exited, Stopped: // Waiting: the program did not take the descriptor
		return
	case Starting, Serving, Unresponsive:
	}
	r.set(Exited)
	reason := exitExit
	switch {
	case !aborted:
		what := "the client has exited"
		if !r.serving {
			what = "the client has exited before it answered"
		}
		r.fail(ReasonExited, time.Time{}, "%s; its container's log has the reason", what)
	case r.serving:
		reason = exitHang
	default:
		reason = exitStart
	}
	r.s.metrics.exits.WithLabelValues(reason).Inc()
}

// Reports returns all published volumes with the states of their clients. It waits for no client.
func (s *Server) Reports(ctx context.Context) ([]Report, error) {
	volumes, err := s.records.all(ctx)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	all := make([]Report, 0, len(volumes))
	for _, v := range volumes {
		p := Progress{State: Unknown}
		if r := s.active[idOf(v.Target)]; r != nil {
			p = r.current()
		}
		all = append(all, Report{v, p})
	}
	return all, nil
}

// Health returns the adverse conditions of a volume, at one target or ("") at all. It is fault.NotFound if the volume is not published
// there.
func (s *Server) Health(ctx context.Context, volumeID, target string) (found []mount.Condition, err error) {
	if target != "" {
		target = s.Resolve(target)
	}
	all, err := s.Reports(ctx)
	if err != nil {
		return nil, err
	}
	published := false
	for _, r := range all {
		if r.VolumeID != volumeID || target != "" && r.Target != target {
			continue
		}
		published = true
		if c := r.condition(); c.Reason != "" {
			found = append(found, c)
		}
	}
	if !published {
		return nil, fault.Errorf(fault.NotFound, "volume %s is not published on this node", volumeID)
	}
	return found, nil
}

// condition returns what is wrong with a volume; the zero value: nothing.
func (r Report) condition() mount.Condition {
	c := mount.Condition{Inaccessible: true, Reason: mount.ReasonNoClient}
	switch r.State {
	case Serving, Unknown:
		return mount.Condition{}
	case Waiting:
		c.Message = fmt.Sprintf("no program of the pod has connected to the socket %s in the emptyDir volume %s", r.Socket, r.EmptyDir)
	case Starting:
		c.Message = "the client in the pod has the descriptor and has not answered yet"
	case Unresponsive:
		c.Reason, c.Message = mount.ReasonUnresponsive, "the client in the pod does not answer"
	case Exited:
		c.Reason, c.Message = mount.ReasonStale, "the client in the pod has exited"
	case Stopped:
		c.Message = "the volume is being unpublished"
	}
	if f := r.Failure; f != nil && r.State != Unresponsive && r.State != Stopped {
		c.Message += "; last failure: " + f.Message
	}
	return c
}

// The values of labels.
const (
	resultPassed  = "passed"
	resultRefused = "refused"

	exitExit  = "exit"
	exitHang  = "hang"
	exitStart = "start"
)

type metrics struct {
	handovers *prometheus.CounterVec // result
	exits     *prometheus.CounterVec // reason
}

func newMetrics() metrics {
	m := metrics{
		prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "s3csi_pod_client_handovers_total",
			Help: "Programs of pods that asked for the FUSE descriptor of a volume, by result: passed, refused (also if it could not be passed).",
		}, []string{"result"}),
		prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "s3csi_pod_client_exits_total",
			Help: "Clients in pods that exited, by reason: exit, hang (aborted: it did not answer for --hang-timeout), start (aborted: no first answer within --mount-timeout).",
		}, []string{"reason"}),
	}
	for _, result := range []string{resultPassed, resultRefused} {
		m.handovers.WithLabelValues(result)
	}
	for _, reason := range []string{exitExit, exitHang, exitStart} {
		m.exits.WithLabelValues(reason)
	}
	return m
}

// Collectors returns the metrics of clients in pods.
func (s *Server) Collectors() []prometheus.Collector {
	return []prometheus.Collector{s.metrics.handovers, s.metrics.exits, gauge{s}}
}

// SampleCollectors returns the metrics for the page that documents them.
func SampleCollectors() []prometheus.Collector { return (&Server{metrics: newMetrics()}).Collectors() }

// gauge shows how many clients have each state.
type gauge struct{ s *Server }

func clientsDesc() *prometheus.Desc {
	return prometheus.NewDesc("s3csi_pod_clients",
		"Volumes on this node with a client in the user's own pod, by the state of the client: unknown, waiting, starting, serving, unresponsive, exited, stopped.", []string{"state"}, nil)
}

// Describe implements prometheus.Collector.
func (g gauge) Describe(ch chan<- *prometheus.Desc) { ch <- clientsDesc() }

// Collect implements prometheus.Collector.
func (g gauge) Collect(ch chan<- prometheus.Metric) {
	count := map[State]int{}
	g.s.mu.Lock()
	for _, r := range g.s.active {
		count[r.current().State]++
	}
	g.s.mu.Unlock()
	for _, state := range states() {
		ch <- prometheus.MustNewConstMetric(clientsDesc(), prometheus.GaugeValue, float64(count[state]), string(state))
	}
}
