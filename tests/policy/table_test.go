package policy_test

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/smithy-go"
	smithyhttp "github.com/aws/smithy-go/transport/http"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/policy"
)

// scopes are the sessions of the table: of the volume, in every mode, of the whole bucket, and of what deletes the volume.
type scope string

const (
	writing   scope = "read-write"
	keeping   scope = "read-write without delete"
	reading   scope = "read-only"
	whole     scope = "whole bucket"
	wholeRead scope = "whole bucket, read-only"
	deleting  scope = "deletion of the volume"
)

func allScopes() []scope { return []scope{writing, keeping, reading, whole, wholeRead, deleting} }

// policyFor is what the driver gives to the security token service, in the words for AWS or for others.
func policyFor(s scope, bucket string, aws bool) (string, error) {
	sc := policy.Scope{Bucket: bucket, Prefix: prefix, Needs: policy.Needs{Delete: true}, AWS: aws}
	switch s {
	case keeping:
		sc.Needs.Delete = false
	case reading:
		sc.ReadOnly = true
	case whole:
		sc.Prefix = ""
	case wholeRead:
		sc.Prefix, sc.ReadOnly = "", true
	case deleting:
		return sc.Deletion([]string{record})
	}
	return sc.Session()
}

// outcome is what a service says to a call.
type outcome string

const (
	allowed outcome = "allowed"
	refused outcome = "refused" // 403, of the call or of every key of it
	absurd  outcome = "absurd"  // 400: the service makes nothing of it, whoever asks
)

// judge says what the outcome of a call was. That something is missing is said to who may see it.
func judge(err error) outcome {
	if err == nil {
		return allowed
	}
	if r, ok := errors.AsType[*smithyhttp.ResponseError](err); ok {
		switch r.HTTPStatusCode() {
		case http.StatusForbidden:
			return refused
		case http.StatusBadRequest:
			return absurd
		case http.StatusNotFound:
			return allowed
		}
	}
	if api, ok := errors.AsType[smithy.APIError](err); ok && api.ErrorCode() == "AccessDenied" {
		return refused // of a key
	}
	return outcome(err.Error())
}

// row is a call and the scopes that allow it.
type row struct {
	name string
	may  []scope
	call func(ctx context.Context, c *s3.Client, p place) error
	// odd is what a service says instead, by its name, for a reason that is the service's.
	odd map[string]oddity
}

// oddity is who may make a call of a service, and what the others are told.
type oddity struct {
	may []scope
	not outcome
}

func TestSessionsReachNoFurtherThanTheirScope(t *testing.T) {
	t.Parallel()
	rows := slices.Concat(listings(), reads(), writes(), copies(), removals(), others())
	for _, s := range services(t) {
		for kind := range s.orders {
			for _, sc := range allScopes() {
				if kind != credentials.AssumeRole && sc != writing {
					continue // how a session was made makes no difference, one scope shows
				}
				for _, v := range []variant{{}, {open: true}, {open: true, aws: true}} {
					if v.aws && !s.aws {
						continue
					}
					t.Run(strings.Join([]string{s.name, string(kind), string(sc)}, " ")+v.String(), func(t *testing.T) {
						t.Parallel()
						tryAll(t, s, kind, sc, v, rows)
					})
				}
			}
		}
	}
}

// variant is what a table is tried with.
type variant struct {
	open bool // a bucket policy lets the session do everything
	aws  bool // the session policy is one for AWS
}

func (v variant) String() string {
	text := ""
	if v.open {
		text += ", with a bucket policy that allows all"
	}
	if v.aws {
		text += ", as on AWS"
	}
	return text
}

func tryAll(t *testing.T, s service, kind credentials.Kind, sc scope, v variant, rows []row) {
	t.Helper()
	p, ctx := s.place(t, v.open), t.Context()
	document, err := policyFor(sc, p.own, v.aws)
	if err != nil {
		t.Fatal(err)
	}
	if p.keys, err = s.session(ctx, kind, document); err != nil {
		t.Fatal(err)
	}
	c := s.client(p.keys)
	for _, r := range rows {
		may, want := r.may, refused
		if odd, ok := r.odd[s.name]; ok {
			may, want = odd.may, odd.not
		}
		if slices.Contains(may, sc) {
			want = allowed
		}
		err := r.call(ctx, c, p)
		if got := judge(err); got != want {
			t.Errorf("%s: %s, want %s (%v)", r.name, got, want, err)
		}
	}
	// Whatever was answered: nothing has happened where nothing may.
	for _, key := range seeds() {
		if err := p.stands(ctx, p.other, key); err != nil {
			t.Errorf("the other bucket's %s: %v", key, err)
		}
		outside := !strings.HasPrefix(key, prefix) && sc != whole || strings.HasPrefix(key, ".s3-csi/") && key != record
		if !outside {
			continue
		}
		if err := p.stands(ctx, p.own, key); err != nil && (sc != deleting || key != record) {
			t.Errorf("%s: %v", key, err)
		}
	}
}
