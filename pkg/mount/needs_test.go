package mount

import (
	"context"
	"fmt"
	"os"
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/launcher"
)

// units is a launcher that keeps what it was asked to start.
type units struct {
	uids
	started []launcher.Unit
}

func (l *units) Start(_ context.Context, u launcher.Unit) error {
	l.started = append(l.started, u)
	return nil
}

// The helper of a mount with its pod's own credentials asks EKS Pod Identity's agent; that of any other mount does not.
func TestHelpersMayReachWhatTheirCredentialsComeFrom(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root: state directories belong to mounts' own users")
	}
	for source, want := range map[string]string{credentials.SourceWorkload: "[169.254.170.23]", credentials.SourceSecret: "[]", credentials.SourceDriver: "[]"} {
		l := &units{}
		m := newTestManager(t, l, s3{})
		rec := mountOf(t, m, "a", "1", "rclone")
		rec.Spec.Source = source
		if err := m.launchHelper(t.Context(), rec, backend.Backend{Name: "default"}); err != nil {
			t.Fatal(err)
		}
		if len(l.started) != 1 || fmt.Sprint(l.started[0].Needs) != want {
			t.Errorf("%s: %+v, want the needs %s", source, l.started, want)
		}
	}
}
