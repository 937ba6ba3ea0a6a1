package status

import (
	"context"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/tracker"
)

const (
	probeBound = 3 * time.Second  // the timeout for the probe of one mount
	reachBound = 10 * time.Second // the timeout for the request to one backend
)

// Reporter reports the conditions of volumes and backends, for the volume health of the CSI specification: the problems that a document has,
// and what probes find now. It changes nothing. All methods may be called concurrently.
type Reporter struct {
	Collector *Collector
	// Health returns the health of a mount, CheckTarget an error if a target does not show it, and Ask one if its client does not answer
	// through a target. An error of Ask that is fault.Timeout, or of a context, means that the client is unresponsive.
	Health      func(ctx context.Context, m state.Mount) (mount.Health, error)
	CheckTarget func(ctx context.Context, m state.Mount, target string) error
	Ask         func(ctx context.Context, m state.Mount, target string) error
	// Declared returns the configured S3 services, and Reach an error unless one answers a request, with whatever credentials.
	Declared func() []backend.Backend
	Reach    func(ctx context.Context, be backend.Backend) error
}

// Volume returns the adverse conditions of a volume, at one target or ("") at all, sorted. NotFound: the volume is neither published there nor
// has a mount that ends.
func (r *Reporter) Volume(ctx context.Context, volumeID, target string) ([]mount.Condition, error) {
	pubs, err := r.Collector.Publications.All(ctx)
	if err != nil {
		return nil, err
	}
	pubs = slices.DeleteFunc(slices.Clone(pubs), func(p state.Publication) bool {
		return p.VolumeID != volumeID || target != "" && p.Target != target
	})
	mounts, err := r.Collector.Mounts.Mounts(ctx)
	if err != nil {
		return nil, err
	}
	var all conditions
	known := len(pubs) > 0
	unreachable := map[string]error{}
	for _, m := range mounts {
		of := slices.DeleteFunc(slices.Clone(pubs), func(p state.Publication) bool { return p.Mount != m.Name })
		// A mount without a publication finishes its uploads, or lingers.
		if len(of) == 0 && (m.VolumeID != volumeID || target != "" && len(pubs) == 0) {
			continue
		}
		known = true
		r.mount(ctx, &all, m, of)
		if _, asked := unreachable[m.Spec.Backend]; !asked && len(of) > 0 {
			unreachable[m.Spec.Backend] = r.reachNamed(ctx, m.Spec.Backend)
		}
	}
	if !known {
		return nil, fault.Errorf(fault.NotFound, "volume %s is not on this node", volumeID)
	}
	for _, p := range pubs {
		if !slices.ContainsFunc(mounts, func(m state.Mount) bool { return m.Name == p.Mount }) {
			all.inaccessible(mount.ReasonStale, "the mount at "+p.Target+" is gone; republish the volume to restore it")
		}
	}
	for _, err := range unreachable {
		if err != nil {
			all.inaccessible(mount.ReasonBackendUnreachable, err.Error())
		}
	}
	if err := ctx.Err(); err != nil { // what was seen then is about the deadline
		return nil, fault.Errorf(fault.Timeout, "looking at volume %s: %w", volumeID, err)
	}
	return all.sorted(), nil
}

// mount adds the conditions of one mount with these publications.
func (r *Reporter) mount(ctx context.Context, all *conditions, m state.Mount, pubs []state.Publication) {
	report := r.Collector.Tracked.Report(m.Name)
	if report.State == tracker.Draining {
		all.add(mount.Condition{Reason: mount.ReasonDraining, Message: "uploads are still in progress after the last pod; a new publication waits for them"})
		return
	}
	if len(pubs) == 0 {
		return
	}
	for _, p := range r.Collector.problems(m, report, r.Collector.Now()) {
		all.addProblem(p, report)
	}
	if report.State != tracker.Unresponsive && report.State != tracker.Failed {
		r.probe(ctx, all, m, pubs)
	}
}

// probe adds what the mount shows now: the driver notices the end of a client at once, but not every change of a target.
func (r *Reporter) probe(ctx context.Context, all *conditions, m state.Mount, pubs []state.Publication) {
	ctx, cancel := context.WithTimeout(ctx, probeBound)
	defer cancel()
	failed := func(err error, what string) {
		if ctx.Err() != nil || fault.Is(err, fault.Timeout) {
			all.inaccessible(mount.ReasonUnresponsive, "client "+m.Client+" does not answer: "+err.Error())
		} else {
			all.inaccessible(mount.ReasonStale, what+err.Error())
		}
	}
	health, err := r.Health(ctx, m)
	switch {
	case err != nil:
		failed(err, "")
		return
	case health == mount.Down:
		all.inaccessible(mount.ReasonStale, "client "+m.Client+" has exited")
		return
	case health == mount.Orphaned:
		all.add(mount.Condition{Reason: mount.ReasonHelperExited, Message: "the helper has exited, so credentials are not renewed"})
	}
	for _, p := range pubs {
		if err := r.CheckTarget(ctx, m, p.Target); err != nil {
			all.inaccessible(mount.ReasonStale, "the mount at "+p.Target+" is stale: "+err.Error())
			return
		}
	}
	// One target is enough: all lead to the same client.
	if err := r.Ask(ctx, m, pubs[0].Target); err != nil {
		failed(err, "the mount at "+pubs[0].Target+" is stale: ")
	}
}

// Storage returns a condition if backends cannot be reached from this node.
func (r *Reporter) Storage(ctx context.Context) ([]mount.Condition, error) {
	var (
		mu       sync.Mutex
		all      conditions
		requests sync.WaitGroup
	)
	for _, be := range r.Declared() {
		requests.Go(func() {
			if err := r.reach(ctx, be); err != nil {
				mu.Lock()
				defer mu.Unlock()
				all.inaccessible(mount.ReasonBackendUnreachable, err.Error())
			}
		})
	}
	requests.Wait()
	if err := ctx.Err(); err != nil {
		return nil, fault.Errorf(fault.Timeout, "looking at the backends: %w", err)
	}
	return all.sorted(), nil
}

// reachNamed is reach for a name; a backend that is not configured any more is not asked.
func (r *Reporter) reachNamed(ctx context.Context, name string) error {
	declared := r.Declared()
	if i := slices.IndexFunc(declared, func(be backend.Backend) bool { return be.Name == name }); i >= 0 {
		return r.reach(ctx, declared[i])
	}
	return nil
}

func (r *Reporter) reach(ctx context.Context, be backend.Backend) error {
	ctx, cancel := context.WithTimeout(ctx, reachBound)
	defer cancel()
	return r.Reach(ctx, be)
}

// conditions are those of one volume. The CSI specification allows each pair of status and reason once, so their messages are joined.
type conditions []mount.Condition

func (s *conditions) inaccessible(reason, message string) {
	s.add(mount.Condition{Inaccessible: true, Reason: reason, Message: message})
}

func (s *conditions) add(new mount.Condition) {
	for i := range *s {
		if c := &(*s)[i]; c.Reason == new.Reason && c.Inaccessible == new.Inaccessible {
			if !strings.Contains(c.Message, new.Message) {
				c.Message += "; " + new.Message
			}
			return
		}
	}
	*s = append(*s, new)
}

// addProblem adds the conditions that a problem of a mount is.
func (s *conditions) addProblem(p Problem, r tracker.Report) {
	switch p.Reason {
	case ReasonReconcile, ReasonConflicts, ReasonUnstored: // the volume can be used
	case ReasonUnresponsive:
		s.inaccessible(mount.ReasonUnresponsive, p.Message)
	case ReasonSession:
		expired := r.SessionState == tracker.SessionExpired
		if expired {
			s.inaccessible(mount.ReasonCredentialsExpired, p.Message)
		}
		err := r.Helper.Session.Fault()
		switch fault.KindOf(err) {
		case fault.Unavailable, fault.Timeout, fault.Busy:
			s.add(mount.Condition{Inaccessible: expired, Reason: mount.ReasonBackendUnreachable, Message: p.Message})
		default:
			if err != nil {
				s.add(mount.Condition{Inaccessible: expired, Reason: mount.ReasonCredentialsRefused, Message: p.Message})
			}
		}
	default: // the client has exited
		s.inaccessible(mount.ReasonStale, p.Message)
	}
}

// sorted returns the conditions, those of an inaccessible volume first.
func (s conditions) sorted() []mount.Condition {
	slices.SortFunc(s, func(a, b mount.Condition) int {
		if a.Inaccessible != b.Inaccessible {
			return map[bool]int{true: -1, false: 1}[a.Inaccessible]
		}
		return strings.Compare(a.Reason, b.Reason)
	})
	return s
}
