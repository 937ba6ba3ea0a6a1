package runner

import (
	"context"
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/mounttest"
)

// When credentials are refused, the start of the client is cancelled. Whatever fails then is explained by the refusal.
func TestTrial_RefusalExplainsWhatItCancels(t *testing.T) {
	r, p := newRunner(t, &mounttest.UIDs{}, mounttest.S3{Access: fault.Errorf(fault.Unauthenticated, "no")})
	m, _ := p.Secret("a", "mountpoint-s3")
	for range 1000 {
		grant, err := p.Creds.Plan(t.Context(), mount.Request{Keys: credentials.Keys{AccessKeyID: "x", SecretAccessKey: "y"}}, m.Spec)
		if err != nil {
			t.Fatal(err)
		}
		trial, up := r.beginTrial(t.Context(), StartParams{Grant: grant, Spec: m.Spec}, p.Backend())
		<-up.Done()
		if err := trial.explain(t.Context(), context.Cause(up)); !fault.Is(err, fault.Unauthenticated) {
			t.Fatalf("kind %s: %v", fault.KindOf(err), err)
		}
		trial.end()
	}
}
