package controller

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
	"github.com/s3-csi/s3-csi-driver/tests/internal/faultproxy"
)

// lifecycle creates, fills, snapshots, restores and deletes.
func (p *process) lifecycle(e *env) {
	e.t.Helper()
	id := p.create("v")
	e.put(id.Prefix+"a", id.Prefix+"d/b c+ü")
	snapshot := p.snapshot("s", id)
	copied := p.restored("w", volume.Content{Snapshot: snapshot.ID})
	e.same("content", e.keysBelow("w/"), []string{"w/a", "w/d/b c+ü"})
	p.delete(copied)
	p.delete(id)
	p.deleteSnapshot(snapshot.ID)
	e.same("left", append(e.keysBelow("v/"), e.keysBelow("w/")...), nil)
}

func TestGoogle_VolumesAndSnapshotsWork(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		e.behind(faultproxy.Google).process(settings("singleController: true")).lifecycle(e)
	})
}

// encrypted refuses what would be stored without an encryption header, as bucket policies do.
func encrypted(w http.ResponseWriter, r *http.Request, forward http.Handler) {
	q := r.URL.Query()
	stores := r.Method == http.MethodPut && strings.Count(r.URL.Path, "/") > 1 && !q.Has("partNumber") || r.Method == http.MethodPost && q.Has("uploads")
	if stores && r.Header.Get("X-Amz-Server-Side-Encryption") != "AES256" {
		faultproxy.Refuse(w, r, http.StatusForbidden, "AccessDenied", "explicit deny in a resource-based policy")
		return
	}
	forward.ServeHTTP(w, r)
}

func TestEncryption_ThatAPolicyDemandsIsInAllThatTheControllerStores(t *testing.T) {
	one(t, func(t *testing.T, e *env) {
		behind := e.behind(encrypted)
		behind.process(settings("sse: {algorithm: AES256}")).lifecycle(e)

		p := behind.process()
		e.want(p.tryCreate("x"), fault.Denied)
		own, err := volume.ParseMountOptions([]string{"sse=AES256"}, "options")
		if err != nil {
			t.Fatal(err)
		}
		id, err := p.Create(e.ctx(), provision.CreateRequest{Name: "x", Parameters: e.params("x"), Options: own, Keys: e.keys})
		if err != nil {
			t.Fatalf("with the volume's own option: %v", err)
		}
		e.put(id.Prefix + "a")
		clone := provision.CreateRequest{Name: "y", Parameters: e.params("y"), Options: own, Keys: e.keys}
		clone.Parameters.Content = volume.Content{Volume: id}
		copied, err := p.Create(e.ctx(), clone)
		for fault.Is(err, fault.Busy) {
			time.Sleep(20 * time.Millisecond)
			copied, err = p.Create(e.ctx(), clone)
		}
		if err != nil {
			t.Fatalf("a copy: %v", err)
		}
		p.delete(copied)
		p.grown(id, 1<<30)
		behind.process().delete(id) // which knows it from the record alone
		e.state("x", "deleted")
	})
}

func TestRequesterPays_IsInAllRequestsOfTheController(t *testing.T) {
	one(t, func(t *testing.T, e *env) {
		behind := e.behind(func(w http.ResponseWriter, r *http.Request, forward http.Handler) {
			if r.Header.Get("X-Amz-Request-Payer") != "requester" {
				faultproxy.Refuse(w, r, http.StatusForbidden, "AccessDenied", "Access Denied")
				return
			}
			forward.ServeHTTP(w, r)
		})
		behind.process(settings("requesterPays: true")).lifecycle(e)
		e.want(behind.process().tryCreate("x"), fault.Denied)
	})
}

func TestBucketNames_OfOtherServicesCanHaveVolumes(t *testing.T) {
	one(t, func(t *testing.T, e *env) {
		e.want(e.in("My_bucket-an").process().tryCreate("v"), fault.Invalid, "bucketNames: relaxed")
		// This service has the rules of AWS, too.
		if err := e.in("My_bucket-an").process(settings("bucketNames: relaxed")).tryCreate("v"); backend.ErrorCode(err) != "InvalidBucketName" {
			t.Errorf("the driver refuses the name: %v", err)
		}
	})
}

func TestBucketTags_ThatAServiceLacksNameTheSetting(t *testing.T) {
	one(t, func(t *testing.T, e *env) {
		p := e.process()
		for _, status := range []int{http.StatusNotImplemented, http.StatusBadRequest} {
			p.refuse(status, "NotImplemented", "GetBucketTagging")
			e.want(p.tryCreate("v", "bucketName", ""), fault.Precondition, "set bucketName")
		}
	})
}
