//go:build !lane || ordinary

package credentials

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/s3-csi/s3-csi-driver/tests/internal/faultproxy"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
	"github.com/s3-csi/s3-csi-driver/tests/internal/s3server"
)

// never is longer than any test: the token service answers when its behaviour is set again.
const never = time.Hour

// clients are all clients of the driver.
var clients = []string{rclone, mountpoint}

// publishing begins a publication.
func (e *env) publishing(v *csi.Volume, target string, from source) <-chan error {
	done := make(chan error, 1)
	go func() { done <- e.tryPublish(v, target, from) }()
	return done
}

// waitingClient returns the only client of that name once it has asked its helper for credentials. The publication must not end before.
func (e *env) waitingClient(client string, published <-chan error) rig.Process {
	e.t.Helper()
	var found rig.Process
	e.await(30*time.Second, "the client to run and to ask for its session", func() bool {
		select {
		case err := <-published:
			e.t.Fatalf("the publication has ended: %v", err)
		default:
		}
		running := e.Running(programs[client])
		if len(running) == 1 {
			found = running[0]
		}
		return len(running) == 1 && asksLoopback(found.PID)
	})
	return found
}

// asksLoopback reports whether a process has a connection to a listener on loopback of its own user, the helper.
func asksLoopback(pid int) bool {
	var own = map[string]bool{} // inodes of its sockets
	descriptors, _ := filepath.Glob(filepath.Join("/proc", strconv.Itoa(pid), "fd", "*"))
	for _, fd := range descriptors {
		link, _ := os.Readlink(fd)
		own[strings.TrimSuffix(strings.TrimPrefix(link, "socket:["), "]")] = true
	}
	table, _ := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "net", "tcp"))
	user := func(uid string) map[string]bool { // what it listens at
		at := map[string]bool{}
		for line := range strings.Lines(string(table)) {
			if f := strings.Fields(line); len(f) > 9 && f[3] == "0A" && f[7] == uid {
				at[f[1]] = true
			}
		}
		return at
	}
	for line := range strings.Lines(string(table)) { // proc_pid_net(5): address, remote address, state (01 is established), ... uid, ..., inode
		if f := strings.Fields(line); len(f) > 9 && own[f[9]] && f[3] == "01" && strings.HasPrefix(f[2], "0100007F:") && user(f[7])[f[2]] {
			return true
		}
	}
	return false
}

// servesAndEnds fails the test unless a publication shows the content of its file, and nothing is left after its end.
func (e *env) servesAndEnds(v *csi.Volume, target string) {
	e.t.Helper()
	if b, err := os.ReadFile(filepath.Join(target, "file")); err != nil || string(b) != "content" {
		e.t.Errorf("reading: %q, %v", b, err)
	}
	e.unpublish(v, target)
	e.NothingLeft(e.t)
}

// clientRequests counts the requests to S3 that clients make from now on.
func (e *env) clientRequests() func() int32 {
	var n atomic.Int32
	e.proxy.Set(faultproxy.Faults{Match: func(r *http.Request) bool {
		if agent := r.UserAgent(); strings.Contains(agent, "rclone") || strings.Contains(agent, "mountpoint-s3") {
			n.Add(1)
		}
		return false
	}})
	return n.Load
}

// The client of a mount runs and waits for its session while the token service has not answered yet, and serves with the session when it
// comes, however long that takes.
func TestClientsStartBesideTheirSession(t *testing.T) {
	e := start(t, "--hang-timeout=3s")
	for _, client := range clients {
		t.Run(client, func(t *testing.T) {
			e.t = t
			name := "beside-" + client
			e.Put(t, bucket, name+"/file", "content")
			v, target := volume(name, client), e.Target(name)
			e.sts(s3server.STS{Delay: never})
			published := e.publishing(v, target, e.workload(true))
			waiting := e.waitingClient(client, published)
			time.Sleep(6 * time.Second) // longer than SDKs usually wait, and than clients may be unresponsive: it is what is tried, not waited for
			if now := e.Running(programs[client]); len(now) != 1 || now[0].PID != waiting.PID {
				t.Errorf("the client %v did not wait: %v", waiting, now)
			}
			asked := e.clientRequests()
			e.sts(s3server.STS{})
			if err := <-published; err != nil {
				t.Fatal(err)
			}
			if asked() == 0 {
				t.Error("no request to S3 is known to be the client's")
			}
			if now := e.process(programs[client]); now != waiting.PID {
				t.Errorf("client %d serves, %d waited for the session", now, waiting.PID)
			}
			e.servesAndEnds(v, target)
		})
	}
	e.t = t
}

// If the session of a client that was started is refused, or what it may do is, the publication fails for that reason and nothing is
// left. No client gets such a session: one that did would list the volume.
func TestRefusedSessionsUndoTheStart(t *testing.T) {
	e := start(t)
	bob, err := e.AddUser(t.Context(), "bob", everything)
	if err != nil {
		t.Fatal(err)
	}
	e.Rig.S3.Keys = e.user
	nobody, err := e.SetRole(t.Context(), s3server.Role{Name: "nothing", Policy: `{"Version":"2012-10-17","Statement":[]}`,
		Trust: s3server.Trust{Users: []string{"bob"}}})
	if err != nil {
		t.Fatal(err)
	}
	powerless := source{"a role that may do nothing", func(r *csi.NodePublishVolumeRequest) {
		r.Secrets = map[string]string{"accessKeyID": bob.AccessKeyID, "secretAccessKey": bob.SecretAccessKey, "roleARN": nobody}
	}}
	for _, client := range clients {
		for _, tc := range []struct {
			name   string
			from   source
			answer s3server.STS
			code   codes.Code
		}{
			{"no session", e.workload(true), s3server.STS{Fault: s3server.FaultRefuse}, codes.PermissionDenied},
			{"no access", powerless, s3server.STS{}, codes.PermissionDenied},
			{"too much access", e.own(), s3server.STS{IgnorePolicies: true}, codes.FailedPrecondition},
		} {
			t.Run(client+", "+tc.name, func(t *testing.T) {
				e.t = t
				name := "refused-" + strings.ReplaceAll(tc.name, " ", "-") + "-" + client
				e.Put(t, bucket, name+"/file", "content")
				v, target := volume(name, client), e.Target(name)
				tc.answer.Delay = never
				e.sts(tc.answer)
				published := e.publishing(v, target, tc.from)
				e.waitingClient(client, published)
				asked := e.clientRequests()
				tc.answer.Delay = 0
				e.sts(tc.answer)
				if err := <-published; status.Code(err) != tc.code {
					t.Errorf("%v, want %s", err, tc.code)
				}
				e.NothingLeft(t)
				if n := asked(); n != 0 {
					t.Errorf("the client made %d requests to S3", n)
				}
			})
		}
	}
	e.t = t
	e.sts(s3server.STS{})
}

// A token service that does not answer within the time of the publication is what the error is about, not the client that waited for
// it; and a client that ends by itself meanwhile is what it is about, too.
func TestUnfinishedStartsAreExplained(t *testing.T) {
	e := start(t, "--mount-timeout=8s")
	e.sts(s3server.STS{Delay: never})
	for _, client := range clients {
		t.Run(client, func(t *testing.T) {
			e.t = t
			name := "unanswered-" + client
			v, target := volume(name, client), e.Target(name)
			published := e.publishing(v, target, e.workload(true))
			e.waitingClient(client, published)
			err := <-published
			if code := status.Code(err); code != codes.DeadlineExceeded && code != codes.Unavailable || !strings.Contains(fmt.Sprint(err), e.role) {
				t.Errorf("the error does not name the session's role: %v", err)
			}
			e.NothingLeft(t)

			published = e.publishing(v, target, e.workload(true))
			rigtest.Kill(t, e.waitingClient(client, published))
			if err := <-published; status.Code(err) != codes.Unavailable || !strings.Contains(fmt.Sprint(err), "SIGKILL") {
				t.Errorf("a killed client: %v", err)
			}
			e.NothingLeft(t)
		})
	}
	e.t = t
	e.sts(s3server.STS{})
}

// A driver that is killed meanwhile exits: it waits for no answer of a client without a session. The next one removes what it has left.
func TestAKilledDriverLeavesClientsWithoutASession(t *testing.T) {
	e := start(t)
	for _, client := range clients {
		t.Run(client, func(t *testing.T) {
			e.t = t
			name := "killed-" + client
			e.Put(t, bucket, name+"/file", "content")
			v, target := volume(name, client), e.Target(name)
			e.sts(s3server.STS{Delay: never})
			published := e.publishing(v, target, e.workload(true))
			e.waitingClient(client, published)
			exited := make(chan struct{})
			go func() {
				e.Kill()
				close(exited)
			}()
			select {
			case <-exited:
			case <-time.After(30 * time.Second):
				t.Fatal("the driver does not exit")
			}
			t.Logf("the publication whose driver exited: %v", <-published)
			e.sts(s3server.STS{})
			e.drive()
			target = e.publish(v, name, e.workload(true))
			e.servesAndEnds(v, target)
		})
	}
	e.t = t
}

// A client that was started for a region in which its bucket turns out not to be is replaced before it gets the session, by one for the
// right region. The next one is right at once.
func TestClientsForAnotherRegionAreReplaced(t *testing.T) {
	e := start(t)
	for i, client := range clients {
		t.Run(client, func(t *testing.T) {
			e.t = t
			name, elsewhere := "moved-"+client, fmt.Sprintf("eu-elsewhere-%d", i) // what is learnt is of a volume's region
			e.Put(t, bucket, name+"/file", "content")
			v, target := volume(name, client, "region", elsewhere), e.Target(name)
			regionOf := func(pid int) string {
				argv, _ := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "cmdline"))
				for arg := range strings.SplitSeq(string(argv), "\x00") {
					if region, ok := strings.CutPrefix(arg, "--region="); ok {
						return region
					}
				}
				return ""
			}
			for i, guess := range []string{elsewhere, e.Region()} {
				e.sts(s3server.STS{Delay: never})
				published := e.publishing(v, target, e.workload(true))
				waiting := e.waitingClient(client, published)
				if got := regionOf(waiting.PID); got != guess {
					t.Errorf("client %d was started for %s, want %s", i, got, guess)
				}
				e.sts(s3server.STS{})
				if err := <-published; err != nil {
					t.Fatal(err)
				}
				if now := e.process(programs[client]); regionOf(now) != e.Region() || (now == waiting.PID) != (i == 1) {
					t.Errorf("client %d serves with region %s, %d waited with %s", now, regionOf(now), waiting.PID, guess)
				}
				e.servesAndEnds(v, target)
			}
		})
	}
	e.t = t
}
