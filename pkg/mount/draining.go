package mount

import (
	"fmt"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// draining is the answer while a mount is on its way out: what is left, and for how long it has been going on.
func (m *Manager) draining(rec record, err error) error {
	return fault.Errorf(fault.Busy, "draining: %w (for %s; mount %s, client %s): it goes on, and a retry waits for it",
		err, time.Since(rec.Ending).Round(time.Second), rec.Name, rec.Client)
}

func describe(q *client.Queue, err error) error {
	if q == nil {
		return fmt.Errorf("the client is still writing: %w", err)
	}
	return fmt.Errorf("%s: %w", queue(*q), err)
}

// queue says what is left to store: "3 uploads, 1.2 GiB".
func queue(q client.Queue) string {
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
