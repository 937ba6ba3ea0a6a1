package tracker

import (
	"context"
	"strings"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
)

// repeatAfter is how often an error that stays the same is logged.
const repeatAfter = 10 * time.Minute

// logDeduper keeps errors that recur with every reconcile pass from filling the log.
type logDeduper struct {
	mu     sync.Mutex
	logged map[string]logged // by subject
}

type logged struct {
	text string
	when time.Time
}

// LogError logs an error about a subject, unless the same error was logged less than ten minutes ago. Numbers do not count:
// durations and sizes differ each time.
func (t *Tracker) LogError(ctx context.Context, subject string, err error, message string, kv ...any) {
	if t.log.isNew(subject, err.Error(), time.Now()) {
		klog.FromContext(ctx).Error(err, message, kv...)
	}
}

func (d *logDeduper) isNew(subject, text string, now time.Time) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	for s, l := range d.logged {
		if now.Sub(l.when) >= repeatAfter {
			delete(d.logged, s)
		}
	}
	text = strings.Map(func(r rune) rune {
		if r >= '0' && r <= '9' {
			return -1
		}
		return r
	}, text)
	if d.logged[subject].text == text {
		return false
	}
	if d.logged == nil {
		d.logged = map[string]logged{}
	}
	d.logged[subject] = logged{text, now}
	return true
}

// LogConflicts counts and logs the conflicts that a mount's helper reports and that are new: files which another writer had replaced
// meanwhile. quarantine is the directory of their local copies.
func (t *Tracker) LogConflicts(ctx context.Context, m state.Mount, files int, quarantine string) {
	entry := t.Mount(m.Name)
	if !entry.ConflictsChanged(files) {
		return
	}
	if added := entry.Conflicts(m.Client, files); added > 0 {
		klog.FromContext(ctx).Error(nil, "Write conflict, local copies quarantined", "mount", m.Name, "volume", m.VolumeID, "client", m.Client,
			"bucket", m.Spec.Bucket, "prefix", m.Spec.Prefix, "files", added, "directory", quarantine)
	}
}
