package status

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/tracker"
	"github.com/s3-csi/s3-csi-driver/pkg/table"
)

// Mounts are the records of mounts; *state.Store implements it.
type Mounts interface {
	Mounts(ctx context.Context) ([]state.Mount, error)
}

// Publications are the records of targets; state.Publications implements it.
type Publications interface {
	All(ctx context.Context) ([]state.Publication, error)
}

// Tracked is what the driver remembers of mounts; *tracker.Tracker implements it.
type Tracked interface {
	Report(name string) tracker.Report
}

// PodClients has the volumes whose client runs in the user's own pod; *podclient.Server implements it.
type PodClients interface {
	Reports(ctx context.Context) ([]PodClient, error)
}

// Collector makes documents.
type Collector struct {
	Driver       Driver
	Launcher     string
	Notes        func() []string
	Mounts       Mounts
	Publications Publications
	Tracked      Tracked
	PodClients   PodClients
	CacheDir     string // --cache-dir, and CacheFree returns how many bytes clients can still write to it
	CacheFree    func(ctx context.Context) (uint64, error)
	// Memory returns the resident memory of a process with that uid.
	Memory func(pid int, uid uint32) (uint64, error)
	// MemoryLimit returns the memory limit of a mount; 0: none that is enforced.
	MemoryLimit func(m state.Mount) uint64
	// Remedy returns what to do about a session that cannot be renewed.
	Remedy func(m state.Mount) string
	Now    func() time.Time
}

// lowCache is the space in the cache directory below which a note reports it.
const lowCache = 64 << 20

// Collect returns what runs now.
func (c *Collector) Collect(ctx context.Context) (Document, error) {
	d := Document{Version: Version, Driver: c.Driver, Time: c.Now().UTC(), Launcher: c.Launcher, Notes: c.Notes(), Mounts: []Mount{}}
	if free, err := c.CacheFree(ctx); err == nil && free < lowCache {
		d.Notes = append(d.Notes, fmt.Sprintf("the file system of --cache-dir (%s) is full, %s are free: what pods write can fail; "+
			"free space on the node", c.CacheDir, table.Bytes(free)))
	}
	// Publications first: the mount of each was recorded before it.
	pubs, err := c.Publications.All(ctx)
	if err != nil {
		return d, err
	}
	mounts, err := c.Mounts.Mounts(ctx)
	if err != nil {
		return d, err
	}
	if d.PodClients, err = c.PodClients.Reports(ctx); err != nil {
		return d, err
	}
	slices.SortFunc(d.PodClients, func(a, b PodClient) int {
		return cmp.Or(cmp.Compare(a.Pod.String(), b.Pod.String()), cmp.Compare(a.Target, b.Target))
	})
	of := map[string][]Publication{}
	for _, p := range pubs {
		of[p.Mount] = append(of[p.Mount], publication(p))
	}
	for _, m := range mounts {
		d.Mounts = append(d.Mounts, c.mount(m, of[m.Name], d.Time))
		delete(of, m.Name)
	}
	for name, pubs := range of {
		d.Mounts = append(d.Mounts, missing(name, pubs))
	}
	for _, m := range d.Mounts {
		slices.SortFunc(m.Publications, func(a, b Publication) int { return cmp.Compare(a.Target, b.Target) })
	}
	slices.SortFunc(d.Mounts, func(a, b Mount) int {
		return cmp.Or(cmp.Compare(a.VolumeID, b.VolumeID), cmp.Compare(a.Name, b.Name))
	})
	return d, nil
}

// missing is the mount of publications that has no record.
func missing(name string, pubs []Publication) Mount {
	return Mount{
		Name: name, State: Failed, VolumeID: pubs[0].VolumeID, Publications: pubs,
		Problems: []Problem{{Reason: ReasonMissing, Message: "the mount is gone; republish the volume to restore it"}},
	}
}

func (c *Collector) mount(m state.Mount, pubs []Publication, now time.Time) Mount {
	r := c.Tracked.Report(m.Name)
	shown := Mount{
		Name: m.Name, State: stateOf(m, r), Since: utc(r.Since), Created: m.Created.UTC(), Superseded: m.Superseded, VolumeID: m.VolumeID,
		Backend: m.Spec.Backend, Bucket: m.Spec.Bucket, Prefix: m.Spec.Prefix, ReadOnly: m.Spec.ReadOnly,
		Client: Client{Name: m.Client, UID: m.UID}, Publications: append([]Publication{}, pubs...),
		Session: Session{State: r.SessionState, Source: m.Spec.Source, RoleARN: m.Spec.RoleARN},
	}
	if len(m.Command.Argv) > 0 {
		shown.Client.Program = m.Command.Argv[0]
	}
	if m.Lingers() {
		shown.LingersUntil = utc(m.Linger.Until)
	}
	c.helper(&shown, m, r, now)
	shown.Problems = c.problems(m, r, now)
	if shown.State == Failed && r.State == tracker.Healthy {
		shown.Problems = append(shown.Problems, Problem{Reason: ReasonExited, Message: "client " + m.Client + " and its helper have exited"})
	}
	return shown
}

// helper adds what the mount's helper reported.
func (c *Collector) helper(shown *Mount, m state.Mount, r tracker.Report, now time.Time) {
	h := r.Helper
	if h == nil {
		return
	}
	shown.Client.Version, shown.Client.PID, shown.Client.Starts, shown.Conflicts = h.Version, h.ClientPID, h.Starts, h.Conflicts
	shown.Client.Output, shown.requests = h.Tail, h.Requests
	if h.Unstored != nil {
		shown.Unstored = h.Unstored.Files
	}
	if h.Queue != nil {
		shown.Uploads = &Uploads{Files: h.Queue.Uploads, Bytes: h.Queue.Bytes}
	}
	if s := h.Session; s != nil {
		shown.Session.Expires, shown.Session.Renewals = utc(s.Expires), s.Renewals
		if s.Expires.After(now) {
			shown.Session.RemainingSeconds = int64(s.Expires.Sub(now) / time.Second)
		}
	}
	used, known := uint64(0), false
	for _, pid := range []int{h.PID, h.ClientPID} {
		if n, err := c.Memory(pid, m.UID); err == nil { // else it has exited
			used, known = used+n, true
		}
	}
	if !known && shown.State == Healthy {
		// Both have exited since the helper reported. The next reconcile pass, or the next republish, notices that.
		shown.State, shown.Since = Failed, time.Time{}
	}
	if known {
		shown.Memory = &Memory{UsedBytes: used, LimitBytes: c.MemoryLimit(m)}
	}
}

func stateOf(m state.Mount, r tracker.Report) State {
	switch {
	case m.Phase == state.Starting:
		return Starting
	case r.State != "":
		return State(r.State)
	case m.Phase == state.Ending:
		return Draining
	case m.Lingers():
		return Lingering
	}
	return Unknown
}

func (c *Collector) problems(m state.Mount, r tracker.Report, now time.Time) (all []Problem) {
	next := utc(r.NextTry)
	switch {
	case r.State == tracker.Failed:
		p := Problem{Reason: cmp.Or(r.Exit.Reason, ReasonExited), Message: "client " + m.Client + " has exited", Since: utc(r.Since), NextTry: next}
		for _, more := range []string{cmp.Or(r.Exit.Detail, exitOf(r.Helper)), r.Problem} {
			if more != "" && !strings.Contains(p.Message, more) {
				p.Message += ": " + more
			}
		}
		all = append(all, p)
	case r.Problem != "":
		all = append(all, Problem{Reason: ReasonReconcile, Message: r.Problem, NextTry: next})
	}
	if r.State == tracker.Unresponsive {
		all = append(all, Problem{Reason: ReasonUnresponsive, Message: "client " + m.Client + " does not answer", Since: utc(r.Since)})
	}
	if r.Helper == nil {
		return all
	}
	if s := r.Helper.Session; s != nil && (s.Error != "" || r.SessionState == tracker.SessionExpired) {
		p := Problem{Reason: ReasonSession, Message: cmp.Or(s.Error, "the session has expired") + "; " + c.Remedy(m), Since: utc(s.FailedSince)}
		if s.Next.After(now) {
			p.NextTry = utc(s.Next)
		}
		all = append(all, p)
	}
	if n := r.Helper.Conflicts; n > 0 {
		all = append(all, Problem{Reason: ReasonConflicts, Message: "another writer had changed objects before changed files were uploaded; " +
			"the local copies are in the mount's cache directory"})
	}
	if u := r.Helper.Unstored; u != nil {
		all = append(all, Problem{Reason: ReasonUnstored, Message: fmt.Sprintf("%q could not be stored after it was closed: %s", u.Name, u.Reason)})
	}
	return all
}

// exitOf returns how the last client exited, as its helper reported it; "": unknown.
func exitOf(h *helper.Status) string {
	switch {
	case h == nil || h.State != helper.StateExited:
		return ""
	case h.Signal != "":
		return "signal " + h.Signal
	}
	return fmt.Sprintf("exit status %d", h.ExitCode)
}

func publication(p state.Publication) Publication {
	uid, volume := mount.KubeletTarget(p.Target)
	if mount.IsInlineHandle(p.VolumeID) {
		volume = "" // the pod's name of it
	}
	return Publication{
		VolumeID: p.VolumeID, Target: p.Target, ReadOnly: p.ReadOnly, PersistentVolume: volume,
		Pod: Pod{Namespace: p.Pod.Namespace, Name: p.Pod.Name, UID: uid},
	}
}

func utc(t time.Time) time.Time {
	if t.IsZero() {
		return time.Time{}
	}
	return t.UTC()
}
