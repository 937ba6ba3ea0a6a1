package copier

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/identity"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/records"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/runs"
)

// paper is a record in memory, and its target.
type paper struct {
	now    Status
	writes int
}

func (p *paper) Place(buckets.Bucket) records.Place[Status] {
	return records.Place[Status]{
		What: "the paper", Read: func(context.Context) (Status, error) { return p.now, nil },
		Write: func(_ context.Context, next Status) (Status, error) {
			p.now = next
			p.writes++
			return next, nil
		},
	}
}

func (*paper) Status(found Status, readErr error) (Status, error) { return found, readErr }

func (*paper) WithClaims(found Status, claims []string) Status {
	found.Claims = claims
	return found
}

func (*paper) WithTotals(Status, Totals) Status { return Status{State: Done} }

func (*paper) Prepare(context.Context, *Claimed[Status]) error { return nil }

func (*paper) CheckSource(context.Context, *Claimed[Status]) error { return nil }

func (*paper) Discard(context.Context, identity.Identity, error) error { return nil }

const lag = time.Minute

// claimed returns a copy of a controller.
func (p *paper) claimed(claims *runs.Claims) *Claimed[Status] {
	return &Claimed[Status]{Services: Services{Claims: claims, Copier: New(Options{Workers: 1})}, Target: p, What: "paper", claim: claims.New()}
}

func (p *paper) want(t *testing.T, what string, err, want error, claims ...string) {
	t.Helper()
	if !errors.Is(err, want) || (err == nil) != (want == nil) || !slices.Equal(p.now.Claims, claims) {
		t.Errorf("%s: %v, want %v, and the claims are %q, want %q", what, err, want, p.now.Claims, claims)
	}
}

func TestClaimed_OnlyTheLastClaimCompletesTheCopy(t *testing.T) {
	p := &paper{now: Status{State: Wanted}}
	first, second := p.claimed(runs.NewClaims(lag)), p.claimed(runs.NewClaims(lag))
	others, err := first.claimTarget(t.Context())
	if p.want(t, "the first claim", err, nil, first.claim.ID); len(others) > 0 {
		t.Errorf("others: %q", others)
	}
	others, err = second.claimTarget(t.Context())
	both := []string{first.claim.ID, second.claim.ID}
	if p.want(t, "the second claim", err, nil, both...); !slices.Equal(others, both[:1]) {
		t.Errorf("others: %q", others)
	}
	writes := p.writes
	p.want(t, "the first one finishes", first.Finish(t.Context(), Totals{}), errTaken, both...)
	p.want(t, "the first one goes on", first.checkWanted(t.Context()), errTaken, both...)
	_, err = first.claimTarget(t.Context())
	if p.want(t, "the first one takes over at once", err, errTaken, both...); p.writes != writes {
		t.Errorf("%d writes", p.writes-writes)
	}
	p.want(t, "the second one goes on", second.checkWanted(t.Context()), nil, both...)
	p.want(t, "the second one finishes", second.Finish(t.Context(), Totals{}), nil)
	p.want(t, "it finishes again", second.Finish(t.Context(), Totals{}), nil)
	p.want(t, "the first one sees it", first.checkWanted(t.Context()), errDone)
	p.now.State = Over
	if err := second.Finish(t.Context(), Totals{}); !errors.Is(err, ErrOver) || !fault.Is(err, fault.Busy) {
		t.Error(err)
	}
}

func TestClaimed_WaitsForRunsThatItStopped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := &paper{now: Status{State: Wanted, Claims: []string{"killed"}}}
		c := p.claimed(runs.NewClaims(lag))
		if _, err := c.claimTarget(t.Context()); err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		if err := c.outwaitOthers(t.Context()); err != nil || time.Since(began) < lag {
			t.Errorf("%v after %v", err, time.Since(began))
		}
		p.now.Claims = append(p.now.Claims, "other")
		p.want(t, "another run takes over", c.outwaitOthers(t.Context()), errTaken, p.now.Claims...)
	})
}

func TestClaimed_ReleaseKeepsTheClaimsOfOthers(t *testing.T) {
	p := &paper{now: Status{State: Wanted, Claims: []string{"killed"}}}
	c := p.claimed(runs.NewClaims(lag))
	if _, err := c.claimTarget(t.Context()); err != nil {
		t.Fatal(err)
	}
	c.releaseClaim(t.Context())
	p.want(t, "before the run has ended", nil, nil, "killed", c.claim.ID)
	c.claim.End()
	c.releaseClaim(t.Context())
	p.want(t, "after it", nil, nil, "killed")
	p.now.Claims = []string{"other"}
	writes := p.writes
	if c.releaseClaim(t.Context()); p.writes != writes {
		t.Error("a claim that is gone is released")
	}
}
