package controller

import (
	"strings"
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/tests/s3server"
)

func TestRequiredScopeIsProvenOnce(t *testing.T) {
	eachScoped(t, func(t *testing.T, e *env) {
		p := e.process()
		p.create("first", "scope", "required")
		if n := len(p.sessions.made()); n != 1 {
			t.Errorf("%d sessions were made for the proof", n)
		}
		p.hooks.reset()
		id := p.create("second", "scope", "required")
		e.same("requests", p.hooks.sent(), []string{"ListObjectsV2", "PutObject"})
		p.create("third", "scope", "required", "credentials", "secret")
		if n := len(p.sessions.made()); n != 1 {
			t.Errorf("%d sessions were made", n)
		}
		p.delete(id)
	})
}

func TestRequiredScopeOfABucketVolumeIsProven(t *testing.T) {
	eachScoped(t, func(t *testing.T, e *env) {
		p := e.process(settings("scope: required"))
		id := p.create("v-"+e.bucket, "bucketName", "")
		if n := len(p.sessions.made()); n != 1 {
			t.Errorf("%d sessions were made for the proof", n)
		}
		other := p.create("w-"+e.bucket, "bucketName", "")
		if n := len(p.sessions.made()); n != 1 {
			t.Errorf("%d sessions were made for a second bucket", n)
		}
		p.create("v-"+e.bucket, "bucketName", "")
		p.delete(id)
		p.delete(other)
	})
}

func TestRequiredScopeCannotBeHadWithoutATokenService(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		p := e.process()
		for _, pairs := range [][]string{nil, {"credentials", "workload"}, {"bucketName", ""}} {
			_, err := p.Create(e.ctx(), e.createRequest("v-"+e.bucket, append(pairs, "scope", "required")...))
			e.want(err, fault.Precondition, "sts")
		}
		if e.bucketExists("v-" + e.bucket) {
			t.Error("a bucket was made")
		}
		e.same("objects", volumes(e), []string{})
	})
}

// volumes are the records of volumes.
func volumes(e *env) []string { return e.keysBelow(".s3-csi/volumes/") }

func TestAServiceThatIgnoresPoliciesIsFound(t *testing.T) {
	t.Parallel()
	l := newLab(t, everything)
	l.behave(s3server.STS{IgnorePolicies: true})
	p := l.process()
	for _, pairs := range [][]string{{"bucketName", l.bucket}, {"credentials", "workload"}, {"bucketName", ""}} {
		_, err := p.Create(l.ctx(), l.createRequest("v-"+l.bucket, append(pairs, "scope", "required")...))
		l.want(err, fault.Precondition, "does not enforce session policies", "scope")
	}
	if l.bucketExists("v-" + l.bucket) {
		t.Error("the bucket is left")
	}
	l.same("records", volumes(l.env), []string{})
	made := l.sessionsMade()
	_, err := p.Create(l.ctx(), l.createRequest("w", "scope", "required"))
	l.want(err, fault.Precondition)
	if n := l.sessionsMade(); n != made {
		t.Errorf("%d more sessions were made for what was known", n-made)
	}
	p.create("auto")
	l.behave(s3server.STS{})
	l.process().create("w", "scope", "required")
}

// The bucket of a volume may be there already, by an earlier call whose answer was lost: then the refusal is not final.
func TestABucketThatIsThereIsNotRefusedForGood(t *testing.T) {
	t.Parallel()
	l := newLab(t, everything)
	name := "v-" + l.bucket
	id := l.process().create(name, "bucketName", "", "scope", "required")
	l.behave(s3server.STS{IgnorePolicies: true})
	p := l.process()
	for range 2 { // the second one knows
		_, err := p.Create(l.ctx(), l.createRequest(name, "bucketName", "", "scope", "required"))
		l.want(err, fault.Busy, "does not enforce session policies")
	}
	if !l.bucketExists(id.Bucket) {
		t.Error("a volume's bucket was removed")
	}
}

func TestAProofThatCannotBeMadeNow(t *testing.T) {
	t.Parallel()
	l := newLab(t, everything)
	for name, c := range map[string]struct {
		behaviour s3server.STS
		kind      fault.Kind
	}{
		"refused":   {s3server.STS{Fault: s3server.FaultRefuse}, fault.Denied},
		"throttled": {s3server.STS{Fault: s3server.FaultThrottle}, fault.Busy},
		"down":      {s3server.STS{Fault: s3server.FaultDown}, fault.Unavailable},
	} {
		l.behave(c.behaviour)
		p := l.process(settings("expectedBucketOwner: '000000000000'")) // or it is asked for, too
		_, err := p.Create(l.ctx(), l.createRequest(name, "scope", "required"))
		l.want(err, c.kind, "scope: required")
		if name == "refused" {
			_, err = p.Create(l.ctx(), l.createRequest(name+"-"+l.bucket, "scope", "required", "bucketName", ""))
			l.want(err, c.kind, "scope: required")
			if l.bucketExists(name + "-" + l.bucket) {
				t.Error("a bucket was made")
			}
		}
		// Pods' tokens are nodes' business: a volume for them does not wait for the controller's way to a session.
		p.create(name, "scope", "required", "credentials", "workload")
		l.behave(s3server.STS{})
	}
	if !strings.Contains(canaries.logged(), "Leaving the proof of scope to nodes") {
		t.Error("the log does not say that nodes prove it")
	}
}
