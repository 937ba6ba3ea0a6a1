package drain

import (
	"fmt"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
)

// InProgress returns the error for a mount that is still draining, with what is left to store. The drain goes on.
func InProgress(m state.Mount, err error) error {
	return fault.Errorf(fault.Busy, "draining: %w (for %s; mount %s, client %s); the drain goes on, and a retry waits for it",
		err, time.Since(m.Ending).Round(time.Second), m.Name, m.Client)
}

// WithQueue adds what a client has left to store to an error; nil: unknown.
func WithQueue(q *client.Queue, err error) error {
	if q == nil {
		return fmt.Errorf("the client is still storing data: %w", err)
	}
	return fmt.Errorf("%s: %w", formatQueue(*q), err)
}

// formatQueue formats a queue: "3 uploads, 1.2 GiB".
func formatQueue(q client.Queue) string {
	const units = "KMGTPE"
	size, unit := float64(q.Bytes), ""
	for i := 0; size >= 1024 && i < len(units); i++ {
		size, unit = size/1024, units[i:i+1]+"i"
	}
	plural := "s"
	if q.Uploads == 1 {
		plural = ""
	}
	if unit == "" {
		return fmt.Sprintf("%d upload%s, %d B", q.Uploads, plural, q.Bytes)
	}
	return fmt.Sprintf("%d upload%s, %.1f %sB", q.Uploads, plural, size, unit)
}
