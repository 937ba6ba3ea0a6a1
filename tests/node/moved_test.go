//go:build !lane || timed

package node

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/tests/internal/containers"
	"github.com/s3-csi/s3-csi-driver/tests/internal/faultproxy"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// A backend whose endpoint changes in the config file takes its volumes along: publications, and the containers on them,
// keep their places; a file that is open stays with the old endpoint until it is closed, where the client keeps nothing back.
func TestTimedMoveOfABackend(t *testing.T) {
	t.Parallel()
	containers.Need(t)
	e := newEnv(t)
	moved := rigtest.Proxy(t, e.Endpoint())
	config := filepath.Join(e.Dir, "config.yaml")
	at := func(endpoint string) {
		t.Helper()
		text := fmt.Sprintf("backends:\n  default:\n    endpoint: %s\n    region: %s\n    addressing: path\n", endpoint, e.Rig.S3.Region)
		if err := errors.Join(os.WriteFile(config+".new", []byte(text), 0o600), os.Rename(config+".new", config)); err != nil {
			t.Fatal(err)
		}
	}
	at(e.proxy.Endpoint())
	e.drive("--config=" + config)
	keys := secrets(e.user("someone"))
	type mounted struct {
		client, target string
		watch          *containers.Watch
		open           *os.File
	}
	var all []*mounted
	for i, client := range clients {
		name := "moved-" + client
		e.Put(t, bucket, name+"/file", "content")
		m := &mounted{client: client, target: e.podTarget(fmt.Sprintf("0b9c7f1e-53a4-4f0b-8d1c-7e2a90c4d61%d", i), "pv")}
		e.publishAt(static(name, client), m.target)
		pod := containers.Start(t, containers.Options{
			PodUID: fmt.Sprintf("0b9c7f1e-53a4-4f0b-8d1c-7e2a90c4d61%d", i), Mounts: []containers.Mount{{Source: m.target, Target: "/data"}},
			Own: map[string]string{"data/file": "its own"},
		})
		m.watch = pod.Watch("/data/file")
		var err error
		if m.open, err = os.Open(filepath.Join(m.target, "file")); err != nil {
			t.Fatal(err)
		}
		all = append(all, m)
	}
	secret := static("moved-secret", mountpoint)
	e.Put(t, bucket, "moved-secret/file", "content")
	kept := e.publish(secret, "kept", keys)

	at(moved.Endpoint())
	// At least: other tests' mount namespaces may have copies of the mounts.
	e.await(40*time.Second, "the mounts to be replaced", func() bool { return e.count("s3csi_mount_heals_total", "container", "replaced") >= 2 })
	if n := e.count("s3csi_mount_restarts_total", "backend"); n != 2 {
		t.Errorf("%v replaced mounts are counted", n)
	}
	e.await(10*time.Second, "requests at the new endpoint", func() bool { return moved.Requests() > 0 })
	for _, m := range all {
		if got, err := io.ReadAll(m.open); m.client == mountpoint && (err != nil || string(got) != "content") {
			t.Errorf("the file that was open reads %q, %v", got, err)
		}
		m.open.Close()
		// A read of the container that began at the former mount would wait there for the old endpoint.
		if _, ok := m.watch.Await(time.Now(), 10*time.Second, containers.Reads("content")); !ok {
			t.Errorf("the container of %s does not read the file before the old endpoint is gone", m.client)
		}
	}
	e.proxy.Set(faultproxy.Faults{Refuse: true}) // the old endpoint is gone
	for _, m := range all {
		e.awaitRead(5*time.Second, filepath.Join(m.target, "file"), "content")
		if _, ok := m.watch.Await(time.Now(), 10*time.Second, containers.Reads("content")); !ok {
			t.Errorf("the container of %s does not read the file", m.client)
		}
		if bad := m.watch.Unwanted("content"); len(bad) > 0 {
			t.Errorf("the container of %s saw %+v", m.client, bad[0])
		}
		if gap := m.watch.Gap(); gap > soon {
			t.Errorf("the container of %s waited for %s", m.client, gap)
		}
		m.watch.Stop()
		write(t, filepath.Join(m.target, "new"), "at the new endpoint")
	}
	// The keys of a secret come with the next publication.
	e.publish(secret, "kept", keys)
	if got := read(t, filepath.Join(kept, "file")); got != "content" {
		t.Errorf("read %q", got)
	}
	e.unpublish(secret, kept)
	for _, m := range all {
		rigtest.Unpublish(t, e, static("moved-"+m.client, m.client), m.target)
		if got := e.Object(t, bucket, "moved-"+m.client+"/new"); got != "at the new endpoint" {
			t.Errorf("the object is %q", got)
		}
	}
	e.await(30*time.Second, "the old mounts to end", func() bool { return len(e.Leftovers()) == 0 })
}
