package controller

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/tests/internal/s3server"
)

// lab is a server of one test alone, whose token service it can break.
type lab struct {
	*env
	server *s3server.Process
}

// newLab starts a server whose controller is a user that may do what policy says ("": nothing).
func newLab(t *testing.T, policy string) *lab {
	t.Helper()
	server, err := s3server.StartProcess(t.Context(), s3server.Options{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = server.Stop() })
	keys, err := server.AddUser(t.Context(), "controller", policy)
	if err != nil {
		t.Fatal(err)
	}
	canaries.add(keys)
	canaries.add(server.Keys())
	return &lab{server: server, env: newEnv(t, target{
		name: "versitygw", endpoint: server.Endpoint(), region: server.Region(), keys: keys, root: server.Keys(), sts: fmt.Sprintf(gatewaySTS, server.STS()),
	})}
}

// behave changes the token service.
func (l *lab) behave(s s3server.STS) {
	l.t.Helper()
	if err := l.server.SetSTS(l.t.Context(), s); err != nil {
		l.t.Fatal(err)
	}
}

// role makes a role that the controller may take on, and that may do what policy says.
func (l *lab) role(name, policy string, trusted ...string) string {
	l.t.Helper()
	arn, err := l.server.SetRole(l.t.Context(), s3server.Role{Name: name, Policy: policy, Trust: s3server.Trust{Users: trusted}})
	if err != nil {
		l.t.Fatal(err)
	}
	return arn
}

// sessionsMade is how many sessions the service has made for anybody.
func (l *lab) sessionsMade() int {
	l.t.Helper()
	calls, err := l.server.STSCalls(l.t.Context())
	if err != nil {
		l.t.Fatal(err)
	}
	return calls.Made()
}

func TestTheControllerTakesOnARole(t *testing.T) {
	t.Parallel()
	l := newLab(t, "")
	backendRole, foreign := l.role("csi-controller", everything, "controller"), l.role("foreign", everything, "somebody")
	for name, c := range map[string]struct{ settings, secret string }{
		"backend": {"controllerRoleARN: " + backendRole, ""},
		"secret":  {"", l.role("tenant", everything, "controller")},
	} {
		t.Run(name, func(t *testing.T) {
			p := l.process(settings(c.settings))
			p.role = c.secret
			before := l.sessionsMade()
			for i := range 4 {
				id := p.create(fmt.Sprintf("%s-%d", name, i))
				p.there(id)
				l.put(id.Prefix + "data")
				if i == 0 {
					p.delete(id)
					l.same("data", l.keysBelow(id.Prefix), nil)
				}
			}
			// One for all the work, one for the deletion.
			if n := l.sessionsMade() - before; n != 2 {
				t.Errorf("%d sessions were made, want 2", n)
			}
		})
	}
	l.want(l.process().tryCreate("without-a-role"), fault.Denied)
	l.want(l.process(settings("controllerRoleARN: "+foreign)).tryCreate("v"), fault.Denied, foreign)

	// All its sessions are revoked, as an operator does after a break-in.
	p := l.process(settings("controllerRoleARN: " + backendRole))
	before := l.sessionsMade()
	p.create("first")
	if err := l.server.RevokeSessions(l.t.Context(), backendRole); err != nil {
		t.Fatal(err)
	}
	l.want(p.tryCreate("second"), fault.Unauthenticated)
	p.create("second")
	if n := l.sessionsMade() - before; n != 2 {
		t.Errorf("%d sessions, want 2", n)
	}
}

// What needs a session fails as its service does, leaves no trace, and works when the service does.
func TestATokenServiceThatMakesNoSession(t *testing.T) {
	t.Parallel()
	l := newLab(t, everything)
	role := l.role("csi-controller", everything, "controller")
	for name, c := range map[string]struct {
		behaviour s3server.STS
		kind      fault.Kind
	}{
		"refused":     {s3server.STS{Fault: s3server.FaultRefuse}, fault.Denied},
		"throttled":   {s3server.STS{Fault: s3server.FaultThrottle}, fault.Busy},
		"unavailable": {s3server.STS{Fault: s3server.FaultUnavailable}, fault.Unavailable},
		"down":        {s3server.STS{Fault: s3server.FaultDown}, fault.Unavailable},
	} {
		inRole, deleter, prover := l.process(settings("controllerRoleARN: "+role)), l.process(), l.process(settings("expectedBucketOwner: "+
			"'000000000000'")) // or it is asked for, too
		id := deleter.create(name)
		l.put(id.Prefix + "data")
		before := l.volumes()
		l.behave(c.behaviour)
		l.want(inRole.tryCreate(name+"-role"), c.kind, role)
		l.want(deleter.tryDelete(id), c.kind, id.String())
		l.want(prover.tryCreate(name+"-scoped", "scope", "required"), c.kind, "scope: required")
		if name == "refused" {
			l.want(prover.tryCreate(name+"-"+l.bucket, "scope", "required", "bucketName", ""), c.kind, "scope: required")
			if slices.Contains(prover.hooks.sent(), "CreateBucket") {
				t.Error("a bucket was made")
			}
		}
		l.same("records", l.volumes(), before)
		l.state(name, "active")
		l.same("data", l.keysBelow(id.Prefix), []string{id.Prefix + "data"})
		// Pods' tokens are nodes' business: a volume for them does not wait for the controller's way to a session.
		prover.create(name+"-pods", "scope", "required", "credentials", "workload")

		l.behave(s3server.STS{})
		inRole.create(name + "-role") // it recovers by itself
		deleter.delete(id)
		l.same("data", l.keysBelow(id.Prefix), nil)
	}
	if !strings.Contains(canaries.logged(), "Cannot verify scope, leaving it to nodes") {
		t.Error("the log does not say that nodes prove it")
	}
}

// A deletion that takes longer than a session lasts goes on with the next one.
func TestALongDeletionOutlivesItsSession(t *testing.T) {
	t.Parallel()
	l := newLab(t, "")
	role := settings("controllerRoleARN: " + l.role("short", everything, "controller"))
	id := l.process(role).create("v")
	l.put(numbered(id.Prefix, 80)...)
	l.behave(s3server.STS{MaxDuration: 6 * time.Second})
	p := l.process(role)
	var mu sync.Mutex
	used := map[string]bool{}
	p.hooks.set(func(h *hooks) {
		h.answer = func(operation string, header http.Header) *http.Response {
			switch operation {
			case "DeleteObject":
				mu.Lock()
				defer mu.Unlock()
				used[header.Get("X-Amz-Security-Token")] = true
			case "DeleteObjects":
				return refusal(501, "NotImplemented") // so that it is one request for each object
			}
			return nil
		}
		h.after = func(_ int, operation string) error {
			if operation == "DeleteObject" {
				time.Sleep(100 * time.Millisecond) // a slow service: 8 seconds for all
			}
			return nil
		}
	})
	p.delete(id)
	l.same("data", l.keysBelow(id.Prefix), nil)
	l.state("v", "deleted")
	if len(used) < 2 {
		t.Errorf("%d sessions deleted objects", len(used))
	}
}
