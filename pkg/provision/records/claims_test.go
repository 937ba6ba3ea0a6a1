package records

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

// A deletion must know which runs may still write, and what is ready or deleted has none.
func TestClaimsStayUntilNothingIsWrittenAnyMore(t *testing.T) {
	claims := []string{"a", "b"}
	for state, want := range map[State]bool{StateCutting: true, StateCopying: true, StateDeleting: true, StateReady: false, StateDeleted: false} {
		s := testSnapshot()
		s.Makers = claims
		if got := s.With(state, testTime).Makers; slices.Equal(got, claims) != want || len(got) > 0 != want {
			t.Errorf("snapshot %s: %q", state, got)
		}
	}
	for state, want := range map[State]bool{StateFilling: true, StateDeleting: true, StateActive: false, StateDeleted: false} {
		if got := (Record{Fillers: claims}).With(state, testTime).Fillers; slices.Equal(got, claims) != want || len(got) > 0 != want {
			t.Errorf("volume %s: %q", state, got)
		}
	}
}

func TestATagHasTheLastClaims(t *testing.T) {
	tags := Tags{}
	if got := tags.Fillers(); len(got) > 0 {
		t.Errorf("without a tag: %q", got)
	}
	var claims []string
	for i := range 20 {
		claims = append(claims, fmt.Sprintf("%s-%02d", strings.Repeat("X", 31), i))
		tags.SetFillers(claims)
		got := tags.Fillers()
		if len(tags[TagFillers]) > maxTagValue || len(got) < min(len(claims), 7) || !slices.Equal(got, claims[len(claims)-len(got):]) {
			t.Errorf("of %d claims: %q", len(claims), got)
		}
	}
}
