package podclient

import (
	"context"
	"fmt"
	"path/filepath"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/status"
)

// The states of clients that mounts do not have. The others are status.Unknown, status.Starting and status.Unresponsive.
const (
	Waiting status.State = "waiting" // no client has connected
	Serving status.State = "serving" // it answers
	Exited  status.State = "exited"  // it has exited, and no other one has connected
	Stopped status.State = "stopped" // the volume is being unpublished
)

func states() []status.State {
	return []status.State{status.Unknown, Waiting, status.Starting, Serving, status.Unresponsive, Exited, Stopped}
}

// The reasons of failures that mounts do not have. The others are status.ReasonExited, status.ReasonUnresponsive and status.ReasonReconcile.
const (
	ReasonRefused = "refused" // a program that connected did not get the descriptor
	ReasonSocket  = "socket"  // the driver cannot listen
)

// progress is what the driver remembers of a volume's clients since it started.
type progress struct {
	state       status.State
	since       time.Time // of state
	handovers   int
	lastFailure *status.Problem // is not changed any more
}

func (r *reconciler) currentProgress() progress {
	r.progressMu.Lock()
	defer r.progressMu.Unlock()
	return r.progress
}

// setState sets the state. A volume that is being unpublished stays so.
func (r *reconciler) setState(s status.State) {
	r.progressMu.Lock()
	defer r.progressMu.Unlock()
	if r.progress.state != s && r.progress.state != Stopped {
		r.progress.state, r.progress.since = s, time.Now().UTC()
	}
}

// recordFailure remembers a failure. next is when the driver tries again or gives the client up; zero: the client has to connect again.
// The time of a failure that continues stays.
func (r *reconciler) recordFailure(reason string, next time.Time, message string) {
	f := &status.Problem{Reason: reason, Message: message, Since: time.Now().UTC(), NextTry: next.UTC()}
	r.progressMu.Lock()
	defer r.progressMu.Unlock()
	if old := r.progress.lastFailure; old != nil && old.Reason == reason && old.Message == message && old.Since.After(r.progress.since) {
		f.Since = old.Since
	}
	r.progress.lastFailure = f
}

// recordHandover counts a descriptor that was passed.
func (r *reconciler) recordHandover() {
	r.s.metrics.handovers.WithLabelValues(resultPassed).Inc()
	r.setState(status.Starting)
	r.progressMu.Lock()
	defer r.progressMu.Unlock()
	r.progress.handovers++
}

// recordExit records that the current client has exited, once for each.
func (r *reconciler) recordExit(aborted bool) {
	switch r.currentProgress().state {
	case status.Unknown: // an earlier driver saw it
		r.setState(Exited)
		return
	case Waiting, Exited, Stopped: // Waiting: the program did not take the descriptor
		return
	default:
	}
	r.setState(Exited)
	reason := exitExit
	switch {
	case !aborted:
		what := "the client has exited"
		if !r.serving {
			what = "the client has exited before it answered"
		}
		r.recordFailure(status.ReasonExited, time.Time{}, what+"; its container's log has the reason")
	case r.serving:
		reason = exitHang
	default:
		reason = exitStart
	}
	r.s.metrics.exits.WithLabelValues(reason).Inc()
}

// Reports returns all published volumes with the states of their clients. It waits for no client.
func (s *Server) Reports(ctx context.Context) ([]status.PodClient, error) {
	volumes, err := s.records.all(ctx)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	all := make([]status.PodClient, 0, len(volumes))
	for _, v := range volumes {
		p := progress{state: status.Unknown}
		if r := s.active[idOf(v.Target)]; r != nil {
			p = r.currentProgress()
		}
		_, uid, _ := v.Pod()
		all = append(all, status.PodClient{
			VolumeID: v.VolumeID, Target: v.Target, ReadOnly: v.ReadOnly, EmptyDir: v.EmptyDir, Socket: v.Socket,
			Pod: status.Pod{Namespace: v.PodNamespace, Name: v.PodName, UID: uid}, Volume: filepath.Base(filepath.Dir(v.Target)),
			State: p.state, Since: p.since, Handovers: p.handovers, LastFailure: p.lastFailure,
		})
	}
	return all, nil
}

// Health returns the adverse conditions of a volume, at one target or ("") at all. It is fault.NotFound if the volume is not published
// there.
func (s *Server) Health(ctx context.Context, volumeID, target string) (found []mount.Condition, err error) {
	if target != "" {
		target = s.opts.Resolve(target)
	}
	all, err := s.Reports(ctx)
	if err != nil {
		return nil, err
	}
	published := false
	for _, c := range all {
		if c.VolumeID == volumeID && (target == "" || c.Target == target) {
			published = true
			found = append(found, conditions(c)...)
		}
	}
	if !published {
		return nil, fault.Errorf(fault.NotFound, "volume %s is not published on this node", volumeID)
	}
	return found, nil
}

// conditions returns what is wrong with a volume.
func conditions(p status.PodClient) []mount.Condition {
	c := mount.Condition{Inaccessible: true, Reason: mount.ReasonNoClient}
	switch p.State {
	case Waiting:
		c.Message = fmt.Sprintf("no program of the pod has connected to the socket %s in the emptyDir volume %s", p.Socket, p.EmptyDir)
	case status.Starting:
		c.Message = "the client in the pod has the descriptor and has not answered yet"
	case status.Unresponsive:
		c.Reason, c.Message = mount.ReasonUnresponsive, "the client in the pod does not answer"
	case Exited:
		c.Reason, c.Message = mount.ReasonStale, "the client in the pod has exited"
	case Stopped:
		c.Message = "the volume is being unpublished"
	default:
		return nil
	}
	if f := p.LastFailure; f != nil && p.State != status.Unresponsive && p.State != Stopped {
		c.Message += "; last failure: " + f.Message
	}
	return []mount.Condition{c}
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
			Help: "Clients in pods that exited, by reason: exit, hang (aborted: it did not answer for --hang-timeout), " +
				"start (aborted: no first answer within --mount-timeout).",
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
	return prometheus.NewDesc("s3csi_pod_clients", "Volumes on this node with a client in the user's own pod, by the state of the client: "+
		"unknown, waiting, starting, serving, unresponsive, exited, stopped.", []string{"state"}, nil)
}

// Describe implements prometheus.Collector.
func (g gauge) Describe(ch chan<- *prometheus.Desc) { ch <- clientsDesc() }

// Collect implements prometheus.Collector.
func (g gauge) Collect(ch chan<- prometheus.Metric) {
	count := map[status.State]int{}
	g.s.mu.Lock()
	for _, r := range g.s.active {
		count[r.currentProgress().state]++
	}
	g.s.mu.Unlock()
	for _, state := range states() {
		ch <- prometheus.MustNewConstMetric(clientsDesc(), prometheus.GaugeValue, float64(count[state]), string(state))
	}
}
