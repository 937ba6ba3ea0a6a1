package monitor_test

import (
	"context"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/drain"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/heal"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/monitor"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/mounttest"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/mounttest/parts"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/mounttest/runnertest"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/supervisor"
)

// node is a monitor with its supervisor over mounts that are in order. replaced of them have a predecessor, as after a change of their
// backend's endpoint.
type node struct {
	*parts.Parts
	*monitor.Monitor
	helpers []*mounttest.Helper
}

func newNode(t *testing.T, mounts, replaced int) node {
	t.Helper()
	r, p := runnertest.New(t, &mounttest.UIDs{}, mounttest.S3{}, 0)
	s := supervisor.New(supervisor.Options{
		Runner: r, Drainer: drain.New(r, 0), Pins: p.Pins,
		Healer: &heal.Healer{Enabled: true, Namespace: p.Namespace, Store: p.Store, Pins: p.Pins, Tracker: p.Tracker},
	})
	n := node{Parts: p, Monitor: &monitor.Monitor{
		Namespace: p.Namespace, Fusectl: p.Fusectl, Store: p.Store, Pins: p.Pins, Tracker: p.Tracker, Clients: p.Clients, Peer: p.Peer, Mounts: s,
		KillUnresponsive: r.KillUnresponsive, KillOrphans: r.UIDs.KillOrphans, StaleAge: time.Hour,
		HangTimeout: time.Minute, CleanPrograms: func(context.Context, []string) error { return nil },
	}}
	for i := range mounts {
		m := p.Mount(string(rune('a'+i)), "2", "mountpoint-s3", func(m *state.Mount) {
			if i < replaced {
				m.Predecessors = []string{m.Key + "-1"}
			}
		})
		p.MountAt(m, p.Store.SourceDir(m.Name))
		p.Show(m)
		h := &mounttest.Helper{Status: &helper.Status{Protocol: 1, Revision: 7, State: helper.StateRunning}}
		h.Serve(t, p.Store.Socket(m.Name))
		n.helpers = append(n.helpers, h)
	}
	return n
}

// reads returns how often do reads the mount table, and how many records.
func (n node) reads(do func()) (tables, records int) {
	tables, records = n.Parts.Namespace.Reads(), n.Parts.Store.Reads()
	do()
	return n.Parts.Namespace.Reads() - tables, n.Parts.Store.Reads() - records
}

// A pass over mounts that are in order reads the mount table a fixed number of times, and the records of each mount and publication
// a fixed number of times. So do the first pass after a start of the driver, and a probe of all clients.
func TestPassReadsGrowLinearly(t *testing.T) {
	const few, many = 4, 20
	type cost struct{ tables, records int }
	costs := map[int]map[string]cost{}
	for _, mounts := range []int{few, many} {
		n := newNode(t, mounts, mounts/2)
		measure := func(what string, do func()) {
			t.Helper()
			tables, records := n.reads(do)
			if costs[mounts] == nil {
				costs[mounts] = map[string]cost{}
			}
			costs[mounts][what] = cost{tables, records}
		}
		pass := func() {
			t.Helper()
			if err := n.Pass(t.Context()); err != nil {
				t.Error(err)
			}
		}
		measure("first pass", pass)
		measure("pass", pass)
		measure("probe", func() { n.ProbeAll(t.Context()) })
		for i, h := range n.helpers {
			if given := len(h.Given()); given != 2 {
				t.Errorf("the helper of mount %d got credentials %d times in two passes", i, given)
			}
		}
	}
	for what, limit := range map[string]struct{ tables, recordsEach int }{
		"first pass": {5, 5}, // the snapshot, the search of other mount namespaces, the garbage collection
		"pass":       {3, 5}, // two publications' and two mounts' records, and a spare one for a predecessor's
		"probe":      {1, 0},
	} {
		small, large := costs[few][what], costs[many][what]
		if small.tables != large.tables || large.tables > limit.tables {
			t.Errorf("%s: the mount table is read %d times for %d mounts and %d times for %d, want at most %d", what, small.tables, few, large.tables, many,
				limit.tables)
		}
		if large.records > limit.recordsEach*many {
			t.Errorf("%s: %d records are read for %d mounts, want at most %d each", what, large.records, many, limit.recordsEach)
		}
	}
}
