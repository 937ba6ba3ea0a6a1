package policy

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
)

// Scope is what kind of session a table is tried with.
type Scope string

// The sessions: of the volume, in every mode, of the whole bucket, and of what deletes or measures the volume.
const (
	Writing   Scope = "read-write"
	Keeping   Scope = "read-write without delete"
	Reading   Scope = "read-only"
	Whole     Scope = "whole bucket"
	WholeRead Scope = "whole bucket, read-only"
	Deleting  Scope = "deletion of the volume"
	// Measuring and MeasuringWhole count the objects of the volume, and of the whole bucket.
	Measuring      Scope = "usage of the volume"
	MeasuringWhole Scope = "usage of the whole bucket"
)

// AllScopes are all of them.
func AllScopes() []Scope {
	return []Scope{Writing, Keeping, Reading, Whole, WholeRead, Deleting, Measuring, MeasuringWhole}
}

// outcome is what a service says to a call.
type outcome string

const (
	allowed outcome = "allowed"
	refused outcome = "refused" // 403, of the call or of every key of it
	absurd  outcome = "absurd"  // 400: the service refuses it from every caller
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
	may  []Scope
	call func(ctx context.Context, c *s3.Client, p Place) error
	// odd is what a service says instead, by its name, for a reason that is the service's.
	odd map[string]oddity
}

// oddity is who may make a call of a service, and the answer that others get.
type oddity struct {
	may []Scope
	not outcome
}

// Try makes every call of the table with a session of that scope, and fails the test where one is answered otherwise than it
// should be, or where anything has changed that the session must not reach.
func Try(t testing.TB, p Place, sc Scope, keys credentials.Keys) {
	t.Helper()
	p.keys = keys
	c, ctx := p.Service.client(keys), t.Context()
	for _, r := range slices.Concat(listings(), reads(), writes(), copies(), removals(), others()) {
		may, want := r.may, refused
		if odd, ok := r.odd[p.Service.Name]; ok {
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
		outside := !strings.HasPrefix(key, prefix) && sc != Whole || strings.HasPrefix(key, ".s3-csi/")
		if !outside {
			continue
		}
		if err := p.stands(ctx, p.Bucket, key); err != nil && (sc != Deleting || key != record) {
			t.Errorf("%s: %v", key, err)
		}
	}
}
