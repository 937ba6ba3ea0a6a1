// Package condition reports what is wrong with the volumes and backends of a node, for the volume health of the CSI specification. It
// changes nothing.
package condition

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/tracker"
)

const (
	// lookBound is the timeout for the look at one mount.
	lookBound = 3 * time.Second
	// reachBound is the timeout for the request to one backend.
	reachBound = 10 * time.Second
)

// Store has the records of mounts and publications; *state.Store implements it.
type Store interface {
	Mounts(ctx context.Context) ([]state.Mount, error)
}

// Publications are the records of targets; state.Publications implements it.
type Publications interface {
	All(ctx context.Context) ([]state.Publication, error)
}

// Mounts are the mounts of the node; package supervisor implements it.
type Mounts interface {
	Health(ctx context.Context, m state.Mount) (mount.Health, error)
}

// Targets checks bind mounts; package heal implements it.
type Targets interface {
	CheckTarget(ctx context.Context, m state.Mount, target string) error
}

// Asker asks the client of a mount through a target.
type Asker interface {
	// Ask returns nil if the client answers. The error is fault.Timeout, or of a context, if it does not.
	Ask(ctx context.Context, m state.Mount, target string) error
}

// Tracked is what the driver remembers of mounts; *tracker.Tracker implements it.
type Tracked interface {
	Observed(name string) (tracker.State, *helper.SessionStatus)
}

// Backends are the configured S3 services.
type Backends interface {
	Declared() []backend.Backend
	// Reach returns an error unless the service answers a request, with whatever credentials.
	Reach(ctx context.Context, be backend.Backend) error
}

// Reporter reports conditions. All methods may be called concurrently.
type Reporter struct {
	Store        Store
	Publications Publications
	Mounts       Mounts
	Targets      Targets
	Asker        Asker
	Tracked      Tracked
	Backends     Backends
	Now          func() time.Time
}

// Volume returns the adverse conditions of a volume, at one target or ("") at all, sorted. NotFound: the volume is neither published there nor
// has a mount that ends.
func (r *Reporter) Volume(ctx context.Context, volumeID, target string) ([]mount.Condition, error) {
	pubs, err := r.Publications.All(ctx)
	if err != nil {
		return nil, err
	}
	pubs = slices.DeleteFunc(slices.Clone(pubs), func(p state.Publication) bool {
		return p.VolumeID != volumeID || target != "" && p.Target != target
	})
	mounts, err := r.Store.Mounts(ctx)
	if err != nil {
		return nil, err
	}
	var all set
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
			unreachable[m.Spec.Backend] = r.reach(ctx, m.Spec.Backend)
		}
	}
	if !known {
		return nil, fault.Errorf(fault.NotFound, "volume %s is not on this node", volumeID)
	}
	for _, p := range pubs {
		if !slices.ContainsFunc(mounts, func(m state.Mount) bool { return m.Name == p.Mount }) {
			all.add(true, mount.ReasonStale, "the mount at "+p.Target+" is gone; republish the volume to restore it")
		}
	}
	for _, err := range unreachable {
		if err != nil {
			all.add(true, mount.ReasonBackendUnreachable, err.Error())
		}
	}
	if err := ctx.Err(); err != nil { // what was seen then is about the deadline
		return nil, fault.Errorf(fault.Timeout, "looking at volume %s: %w", volumeID, err)
	}
	return all.sorted(), nil
}

// mount adds the conditions of one mount with these publications.
func (r *Reporter) mount(ctx context.Context, all *set, m state.Mount, pubs []state.Publication) {
	observed, session := r.Tracked.Observed(m.Name)
	if observed == tracker.Draining {
		all.add(false, mount.ReasonDraining, "uploads are still in progress after the last pod; a new publication waits for them")
		return
	}
	if len(pubs) == 0 {
		return
	}
	switch observed {
	case tracker.Unresponsive:
		all.add(true, mount.ReasonUnresponsive, "client "+m.Client+" does not answer")
	case tracker.Failed:
		all.add(true, mount.ReasonStale, "client "+m.Client+" has exited and is not restarted yet")
	default:
		r.look(ctx, all, m, pubs)
	}
	if session != nil {
		r.session(all, *session)
	}
}

// look adds what the mount shows now: the driver notices the end of a client at once, but not every change of a target.
func (r *Reporter) look(ctx context.Context, all *set, m state.Mount, pubs []state.Publication) {
	ctx, cancel := context.WithTimeout(ctx, lookBound)
	defer cancel()
	health, err := r.Mounts.Health(ctx, m)
	switch {
	case err != nil && (ctx.Err() != nil || fault.Is(err, fault.Timeout)):
		all.add(true, mount.ReasonUnresponsive, "client "+m.Client+" does not answer: "+err.Error())
		return
	case err != nil:
		all.add(true, mount.ReasonStale, err.Error())
		return
	case health == mount.Down:
		all.add(true, mount.ReasonStale, "client "+m.Client+" has exited")
		return
	case health == mount.Orphaned:
		all.add(false, mount.ReasonHelperExited, "the helper has exited, so credentials are not renewed")
	}
	for _, p := range pubs {
		if err := r.Targets.CheckTarget(ctx, m, p.Target); err != nil {
			all.add(true, mount.ReasonStale, fmt.Sprintf("the mount at %s is stale: %v", p.Target, err))
			return
		}
	}
	// One target is enough: all lead to the same client.
	switch err := r.Asker.Ask(ctx, m, pubs[0].Target); {
	case err == nil:
	case ctx.Err() != nil || fault.Is(err, fault.Timeout):
		all.add(true, mount.ReasonUnresponsive, "client "+m.Client+" does not answer: "+err.Error())
	default:
		all.add(true, mount.ReasonStale, fmt.Sprintf("the mount at %s is stale: %v", pubs[0].Target, err))
	}
}

// session adds the conditions of a mount's session.
func (r *Reporter) session(all *set, s helper.SessionStatus) {
	over := s.Over || !s.Expires.IsZero() && !r.Now().Before(s.Expires)
	if over {
		all.add(true, mount.ReasonCredentialsExpired, "the session has expired")
	}
	err := s.Fault()
	if err == nil {
		return
	}
	switch fault.KindOf(err) {
	case fault.Unavailable, fault.Timeout, fault.Busy:
		all.add(over, mount.ReasonBackendUnreachable, "the session cannot be renewed: "+s.Error)
	default:
		all.add(over, mount.ReasonCredentialsRefused, "the session cannot be renewed: "+s.Error)
	}
}

// Storage returns a condition if backends cannot be reached from this node.
func (r *Reporter) Storage(ctx context.Context) ([]mount.Condition, error) {
	var (
		mu       sync.Mutex
		all      set
		requests sync.WaitGroup
	)
	for _, be := range r.Backends.Declared() {
		requests.Go(func() {
			if err := r.reachBackend(ctx, be); err != nil {
				mu.Lock()
				defer mu.Unlock()
				all.add(true, mount.ReasonBackendUnreachable, err.Error())
			}
		})
	}
	requests.Wait()
	if err := ctx.Err(); err != nil {
		return nil, fault.Errorf(fault.Timeout, "looking at the backends: %w", err)
	}
	return all.sorted(), nil
}

// reach is reachBackend for a name; a backend that is not configured any more is not asked.
func (r *Reporter) reach(ctx context.Context, name string) error {
	for _, be := range r.Backends.Declared() {
		if be.Name == name {
			return r.reachBackend(ctx, be)
		}
	}
	return nil
}

func (r *Reporter) reachBackend(ctx context.Context, be backend.Backend) error {
	ctx, cancel := context.WithTimeout(ctx, reachBound)
	defer cancel()
	return r.Backends.Reach(ctx, be)
}

// set is a set of conditions. The CSI specification allows each pair of status and reason once, so their messages are joined.
type set struct{ list []mount.Condition }

func (s *set) add(inaccessible bool, reason, message string) {
	for i := range s.list {
		if c := &s.list[i]; c.Reason == reason && c.Inaccessible == inaccessible {
			if !strings.Contains(c.Message, message) {
				c.Message += "; " + message
			}
			return
		}
	}
	s.list = append(s.list, mount.Condition{Inaccessible: inaccessible, Reason: reason, Message: message})
}

func (s *set) sorted() []mount.Condition {
	slices.SortFunc(s.list, func(a, b mount.Condition) int {
		if a.Inaccessible != b.Inaccessible {
			if a.Inaccessible {
				return -1
			}
			return 1
		}
		return strings.Compare(a.Reason, b.Reason)
	})
	return s.list
}
