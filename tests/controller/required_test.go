package controller

import (
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/tests/internal/s3server"
)

func TestRequiredScopeIsProvenOnce(t *testing.T) {
	eachScoped(t, func(t *testing.T, e *env) {
		for _, own := range []bool{false, true} {
			p, pairs := e.process(), []string{"scope", "required"}
			if own {
				p, pairs = e.process(settings("scope: required")), []string{"bucketName", ""}
			}
			first := p.create("v-"+e.bucket, pairs...)
			p.hooks.reset()
			second := p.create("w-"+e.bucket, pairs...)
			if !own {
				e.same("requests", p.hooks.sent(), []string{"ListObjectsV2", "PutObject"})
				p.create("x-"+e.bucket, append(pairs, "credentials", "secret")...)
			}
			p.create("v-"+e.bucket, pairs...)
			if n := len(p.sessions.made()); n != 1 {
				t.Errorf("%d sessions were made for the proof, with a bucket of its own: %t", n, own)
			}
			p.delete(first)
			p.delete(second)
		}
	})
}

func TestAServiceThatIgnoresPoliciesIsFound(t *testing.T) {
	t.Parallel()
	l := newLab(t, everything)
	l.behave(s3server.STS{IgnorePolicies: true})
	p := l.process()
	for _, pairs := range [][]string{{"bucketName", l.bucket}, {"credentials", "workload"}, {"bucketName", ""}} {
		l.want(p.tryCreate("v-"+l.bucket, append(pairs, "scope", "required")...), fault.Precondition, "does not enforce session policies", "scope")
	}
	l.gone("v-" + l.bucket)
	l.same("records", l.volumes(), nil)
	made := l.sessionsMade()
	l.want(p.tryCreate("w", "scope", "required"), fault.Precondition)
	if n := l.sessionsMade(); n != made {
		t.Errorf("%d more sessions were made for what was known", n-made)
	}
	p.create("auto")
	l.behave(s3server.STS{})
	l.process().create("w", "scope", "required")

	// The bucket of a volume may be there already, by an earlier call whose answer was lost: then the refusal is not final.
	pairs := []string{"bucketName", "", "scope", "required"}
	id := l.process().create("x-"+l.bucket, pairs...)
	l.behave(s3server.STS{IgnorePolicies: true})
	p = l.process()
	for range 2 { // the second one knows
		l.want(p.tryCreate("x-"+l.bucket, pairs...), fault.Busy, "does not enforce session policies")
	}
	if !l.bucketExists(id.Bucket) {
		t.Error("a volume's bucket was removed")
	}
}
