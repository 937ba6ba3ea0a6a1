package mount

import (
	"context"
	"path/filepath"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/helper"
)

// conflicts counts the files that clients have put aside because another writer had changed their objects.
type conflicts struct {
	files *prometheus.CounterVec // client

	mu sync.Mutex
	of map[string]int // by mount, as its helper counts
}

func newConflicts() *conflicts {
	return &conflicts{
		files: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "s3csi_mount_conflicts_total", Help: "Files that a client did not store because another writer had replaced or removed the object meanwhile; the local copies are put aside on the node.",
		}, []string{"client"}),
		of: map[string]int{},
	}
}

// seen notes what a helper has counted, and returns how many of these are new. Conflicts from before this driver are new to it:
// it may have been down when they happened.
func (c *conflicts) seen(name, client string, files int) (more int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	before := c.of[name]
	if files < before { // another helper
		before = 0
	}
	c.of[name] = files
	c.files.WithLabelValues(client).Add(float64(files - before))
	return files - before
}

func (c *conflicts) same(name string, files int) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.of[name] == files
}

func (c *conflicts) forget(name string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.of, name)
}

// observeConflicts takes note of new conflicts.
func (m *Manager) observeConflicts(ctx context.Context, name string, status helper.Status) {
	if m.metrics.conflicts.same(name, status.Conflicts) {
		return
	}
	rec, err := m.recordOf(ctx, name)
	if err != nil || rec.Client == "" {
		return
	}
	cl, err := m.clientOf(rec.Client)
	if err != nil {
		return
	}
	if more := m.metrics.conflicts.seen(name, rec.Client, status.Conflicts); more > 0 {
		klog.FromContext(ctx).Error(nil, "Conflict, local copies put aside", "mount", name, "volume", rec.VolumeID, "client", rec.Client,
			"bucket", rec.Spec.Bucket, "prefix", rec.Spec.Prefix, "files", more, "directory", filepath.Join(m.store.cacheDir(name), cl.Aside))
	}
}
