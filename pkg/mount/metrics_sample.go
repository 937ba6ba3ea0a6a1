package mount

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/s3-csi/s3-csi-driver/pkg/helper"
)

// SampleMetrics are the collectors of a manager that has one of everything to tell, for the page that describes them: a
// vector without values shows nothing.
func SampleMetrics() []prometheus.Collector {
	m := newMetrics(func() int { return 0 })
	const client = "rclone"
	m.restarts.WithLabelValues(client, reasonCrash)
	m.failures.WithLabelValues(client, reasonCrash)
	m.heals.WithLabelValues("host", "replaced")
	m.lost.WithLabelValues(client)
	m.states.set("", client, stateServing)
	m.sessions.seen("", client, &helper.SessionStatus{})
	m.conflicts.seen("", client, 0)
	return m.collectors()
}
