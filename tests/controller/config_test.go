package controller

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision"
	"github.com/s3-csi/s3-csi-driver/tests/s3server"
)

// An operator moves a backend to another endpoint while the controller runs. What the controller knows of a bucket at the old
// one is wrong for its namesake at the new one.
func TestABackendThatMovesIsUsedWhereItIsNow(t *testing.T) {
	each(t, func(t *testing.T, old *env) {
		gateway, err := s3server.StartProcess(t.Context(), s3server.Options{Dir: t.TempDir()})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = gateway.Stop() })
		moved := newEnv(t, target{name: "moved", endpoint: gateway.Endpoint(), region: gateway.Region(), keys: gateway.Keys(), root: gateway.Keys()})
		moved.bucket = old.bucket
		moved.makeBucket(moved.bucket)

		path := filepath.Join(t.TempDir(), "config.yaml")
		write := func(e *env) {
			t.Helper()
			text := fmt.Sprintf("backends:\n  lab:\n    endpoint: %s\n    region: %s\n    addressing: path\n    controllerCredentials: secret\n", e.endpoint, e.region)
			if err := os.WriteFile(path+".new", []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
			if err := os.Rename(path+".new", path); err != nil {
				t.Fatal(err)
			}
		}
		write(old)
		config, err := backend.NewLive(path, "", "", backend.WithInterval(5*time.Millisecond))
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- config.Run(ctx) }()
		defer func() {
			cancel()
			if err := <-ended; err != nil {
				t.Errorf("reading the config file ended with %v", err)
			}
		}()
		p := old.process(func(o *processOptions) { o.config = config })

		id := p.create("v", "prefix", "base")
		old.put(id.Prefix + "data")
		changed := config.Changed()
		write(moved)
		<-changed

		err = p.Lookup(moved.ctx(), provision.LookupRequest{ID: id, Keys: moved.keys})
		moved.want(err, fault.NotFound)
		again, err := p.Create(moved.ctx(), moved.createRequest("v", "prefix", "base"))
		if err != nil || again != id {
			t.Fatalf("%s, %v", again, err)
		}
		moved.put(id.Prefix + "data")
		if err := p.Delete(moved.ctx(), provision.DeleteRequest{ID: id, Keys: moved.keys}); err != nil {
			t.Fatal(err)
		}
		if left := moved.keysBelow(id.Prefix); len(left) > 0 {
			t.Errorf("left at the new place: %q", left)
		}
		if left := old.keysBelow(id.Prefix); len(left) != 1 {
			t.Errorf("at the old place there is %q", left)
		}

		// Back again, the volume is what it was.
		changed = config.Changed()
		write(old)
		<-changed
		if err := p.Lookup(old.ctx(), provision.LookupRequest{ID: id, Keys: old.keys}); err != nil {
			t.Error(err)
		}
		p.delete(id)
	})
}
