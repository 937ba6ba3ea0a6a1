package controller

import (
	"fmt"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/service/s3"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision"
	"github.com/s3-csi/s3-csi-driver/tests/s3server"
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
	backendRole := l.role("csi-controller", everything, "controller")
	secretRole := l.role("tenant", everything, "controller")
	for name, c := range map[string]struct{ settings, secret string }{
		"of the backend": {"controllerRoleARN: " + backendRole, ""},
		"of the secret":  {"", secretRole},
	} {
		t.Run(name, func(t *testing.T) {
			p := l.process(settings(c.settings))
			before := l.sessionsMade()
			request := func(name string) provision.CreateRequest {
				r := l.createRequest(name)
				r.RoleARN = c.secret
				return r
			}
			for i := range 4 {
				name := fmt.Sprintf("%s-%d", name[len(name)-6:], i)
				id, err := p.Create(l.ctx(), request(name))
				if err != nil {
					t.Fatal(err)
				}
				if err := p.Lookup(l.ctx(), provision.LookupRequest{ID: id, Keys: l.keys, RoleARN: c.secret}); err != nil {
					t.Error(err)
				}
				l.put(id.Prefix + "data")
				if i == 0 {
					if err := p.Delete(l.ctx(), provision.DeleteRequest{ID: id, Keys: l.keys, RoleARN: c.secret}); err != nil {
						t.Error(err)
					}
					l.same("data", l.keysBelow(id.Prefix), []string{})
				}
			}
			// One for all the work, one for the deletion.
			if n := l.sessionsMade() - before; n != 2 {
				t.Errorf("%d sessions were made, want 2", n)
			}
		})
	}
	_, err := l.process().Create(l.ctx(), l.createRequest("without-a-role"))
	l.want(err, fault.Denied)
}

func TestARoleThatCannotBeHad(t *testing.T) {
	t.Parallel()
	l := newLab(t, "")
	role := l.role("csi-controller", everything, "controller")
	foreign := l.role("foreign", everything, "somebody")
	_, err := l.process(settings("controllerRoleARN: "+foreign)).Create(l.ctx(), l.createRequest("v"))
	l.want(err, fault.Denied, foreign)
	for name, c := range map[string]struct {
		behaviour s3server.STS
		kind      fault.Kind
	}{
		"refused":     {s3server.STS{Fault: s3server.FaultRefuse}, fault.Denied},
		"throttled":   {s3server.STS{Fault: s3server.FaultThrottle}, fault.Busy},
		"unavailable": {s3server.STS{Fault: s3server.FaultUnavailable}, fault.Unavailable},
		"down":        {s3server.STS{Fault: s3server.FaultDown}, fault.Unavailable},
	} {
		p := l.process(settings("controllerRoleARN: " + role))
		l.behave(c.behaviour)
		_, err := p.Create(l.ctx(), l.createRequest(name))
		l.want(err, c.kind, role)
		if r := l.record(name); r != "" {
			t.Errorf("%s: there is a record: %s", name, r)
		}
		l.behave(s3server.STS{})
		p.create(name) // it recovers by itself
	}
}

func TestARolesSessionIsRenewed(t *testing.T) {
	t.Parallel()
	l := newLab(t, "")
	role := l.role("csi-controller", everything, "controller")
	p := l.process(settings("controllerRoleARN: " + role))
	p.create("first")
	// Somebody takes all its sessions back, as an operator does after a break-in.
	if err := l.server.RevokeSessions(l.t.Context(), role); err != nil {
		t.Fatal(err)
	}
	_, err := p.Create(l.ctx(), l.createRequest("second"))
	l.want(err, fault.Unauthenticated)
	p.create("second")
	if n := l.sessionsMade(); n != 2 {
		t.Errorf("%d sessions, want 2", n)
	}
	// Short ones are renewed ahead of their end, also by a clock of the service that is minutes off.
	l.behave(s3server.STS{MaxDuration: 10 * time.Second, ClockOffset: 4 * time.Minute})
	p = l.process(settings("controllerRoleARN: " + role))
	began := time.Now()
	p.create("many")
	// One lasts for 8 or 9 seconds by the driver's count, and the next one is due after four fifths of that.
	first := time.Now()
	for i, due := 0, false; !due; i++ {
		time.Sleep(250 * time.Millisecond) // it is the time that passes that is tested
		due = time.Since(first) > 9*time.Second
		p.create(fmt.Sprint("many-", i))
	}
	if n, took := l.sessionsMade()-2, time.Since(began); n < 2 || n > 1+int(took/(6*time.Second)) {
		t.Errorf("%d sessions were made in %v", n, took)
	}
}

func TestASessionInTheSecretThatIsOverIsUnauthenticated(t *testing.T) {
	t.Parallel()
	l := newLab(t, everything)
	role := l.role("short", everything, "controller")
	l.behave(s3server.STS{MaxDuration: 5 * time.Second})
	p := l.process(settings("controllerRoleARN: " + role))
	p.create("v")
	session := p.sessions.made()[0]
	over := l.as(session)
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		if _, err := over.HeadBucket(l.ctx(), &s3.HeadBucketInput{Bucket: &l.bucket}); err != nil {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("a session of five seconds does not end")
		}
	}
	r := l.createRequest("w")
	r.Keys = session
	_, err := l.process().Create(l.ctx(), r)
	l.want(err, fault.Unauthenticated)
}

func TestADeletionWithoutAnSTSFailsInWordsAndGoesOnLater(t *testing.T) {
	t.Parallel()
	l := newLab(t, everything)
	for name, c := range map[string]struct {
		behaviour s3server.STS
		kind      fault.Kind
	}{
		"refused":     {s3server.STS{Fault: s3server.FaultRefuse}, fault.Denied},
		"throttled":   {s3server.STS{Fault: s3server.FaultThrottle}, fault.Busy},
		"unavailable": {s3server.STS{Fault: s3server.FaultUnavailable}, fault.Unavailable},
		"down":        {s3server.STS{Fault: s3server.FaultDown}, fault.Unavailable},
	} {
		p := l.process()
		id := p.create(name)
		l.put(id.Prefix + "data")
		l.behave(c.behaviour)
		err := p.tryDelete(id)
		l.want(err, c.kind, id.String())
		l.state(name, "active")
		l.same("data", l.keysBelow(id.Prefix), []string{id.Prefix + "data"})
		l.behave(s3server.STS{})
		p.delete(id)
		l.same("data", l.keysBelow(id.Prefix), []string{})
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
		h.answer = func(_ int, operation string) *http.Response {
			if operation == "DeleteObjects" {
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
		h.header = func(operation string, header http.Header) {
			if operation == "DeleteObject" {
				mu.Lock()
				defer mu.Unlock()
				used[header.Get("X-Amz-Security-Token")] = true
			}
		}
	})
	p.delete(id)
	l.same("data", l.keysBelow(id.Prefix), []string{})
	l.state("v", "deleted")
	if len(used) < 2 {
		t.Errorf("%d sessions deleted objects", len(used))
	}
}
