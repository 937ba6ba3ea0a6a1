//go:build !lane || ordinary

package credentials

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
)

// keyOf is another key of alice's.
func (e *env) keyOf() credentials.Keys {
	e.t.Helper()
	keys, err := e.AddKey(e.t.Context(), "alice")
	if err != nil {
		e.t.Fatal(err)
	}
	return keys
}

func (e *env) removeKey(k credentials.Keys) {
	e.t.Helper()
	if err := e.RemoveKey(e.t.Context(), "alice", k.AccessKeyID); err != nil {
		e.t.Fatal(err)
	}
}

// A changed secret is taken over by the mount that has it, and the old key is of no use to it any more.
func TestASecretIsRotatedUnderWork(t *testing.T) {
	for _, client := range []string{rclone, mountpoint} {
		t.Run(client, func(t *testing.T) {
			e := start(t)
			e.prepare("rotated")
			e.Put(t, bucket, "rotated/late", "x")
			v := volume("rotated", client, "sessionDuration", short.String())
			target := e.publish(v, "t", e.secretOf(e.user))
			w := e.work(target)
			next := e.keyOf()
			e.publish(v, "t", e.secretOf(next))
			e.removeKey(e.user)
			e.await(10*short, "renewals with the new key", e.more(2, ofMounts))
			e.publish(v, "t", e.secretOf(next))
			w.end(t)

			// Revoked before it was rotated: the session ends, and the next secret brings another.
			e.removeKey(next)
			e.await(10*short, "the session to be over", func() bool {
				return e.sessions(client, "expired", 1)
			})
			if err := e.tryPublish(v, target, e.secretOf(next)); status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "InvalidClientTokenId") {
				t.Errorf("publishing with a revoked key: %v, want UNAVAILABLE, and why", err)
			}
			third := e.keyOf()
			e.publish(v, "t", e.secretOf(third))
			e.await(30*time.Second, "the mount to read again", func() bool {
				b, err := os.ReadFile(filepath.Join(target, "late"))
				return err == nil && string(b) == "x"
			})
			e.unpublish(v, target)
			w.stored(t, e.Server, "rotated")
			e.NothingLeft(t)
		})
	}
}

// If two pods share the mount, both continue to work whichever gets the new secret first.
func TestASharedSecretIsRotatedUnderWork(t *testing.T) {
	for _, client := range []string{rclone, mountpoint} {
		t.Run(client, func(t *testing.T) {
			e := start(t)
			e.prepare("shared/pod-a")
			e.prepare("shared/pod-b")
			v := volume("shared", client, "sessionDuration", short.String())
			a, b := e.publish(v, "a", e.secretOf(e.user)), e.publish(v, "b", e.secretOf(e.user))
			wa, wb := e.work(filepath.Join(a, "pod-a")), e.work(filepath.Join(b, "pod-b"))
			next := e.keyOf()
			err := e.tryPublish(v, a, e.secretOf(next))
			// A client that holds back what was closed is given the new session once all have come with it.
			if client == rclone && status.Code(err) != codes.Unavailable || client != rclone && err != nil {
				t.Errorf("publishing the first with the new secret: %v", err)
			}
			e.await(10*short, "renewals", e.more(2, ofMounts))
			e.publish(v, "b", e.secretOf(next))
			e.publish(v, "a", e.secretOf(next))
			e.removeKey(e.user)
			e.await(10*short, "renewals with the new key", e.more(3, ofMounts))
			e.publish(v, "a", e.secretOf(next))
			e.publish(v, "b", e.secretOf(next))
			wa.end(t)
			wb.end(t)
			e.unpublish(v, a)
			e.unpublish(v, b)
			wa.stored(t, e.Server, "shared/pod-a")
			wb.stored(t, e.Server, "shared/pod-b")
			e.NothingLeft(t)
		})
	}
}
