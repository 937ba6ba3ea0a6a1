package records

import (
	"context"
	"errors"
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// counter is a place whose record is a number, which other controllers change before some writes.
func counter(n *int, races int) Place[int] {
	return Place[int]{
		What: "the counter",
		Read: func(context.Context) (int, error) { return *n, nil },
		Write: func(_ context.Context, next int) (int, error) {
			if races--; races >= 0 {
				*n++
				return 0, ErrChanged
			}
			*n = next
			return next, nil
		},
	}
}

func TestUpdate_DecidesAgainAfterARace(t *testing.T) {
	add := func(found int, err error) (*int, error) {
		found += 10
		return &found, err
	}
	for races, want := range map[int]int{0: 10, 1: 11, maxRaces - 1: 10 + maxRaces - 1} {
		n := 0
		if got, err := Update(t.Context(), counter(&n, races), add); err != nil || got != want || n != want {
			t.Errorf("%d races: %d, %v, want %d", races, got, err, want)
		}
	}
	n := 0
	if _, err := Update(t.Context(), counter(&n, maxRaces), add); !fault.Is(err, fault.Busy) {
		t.Errorf("too many races: %v", err)
	}
}

func TestUpdate_WritesNothingWithoutADecision(t *testing.T) {
	n, refused := 3, errors.New("refused")
	for _, want := range []error{nil, refused} {
		got, err := Update(t.Context(), counter(&n, 0), func(int, error) (*int, error) { return nil, want })
		if got != 3 || n != 3 || !errors.Is(err, want) {
			t.Errorf("%d, %v, want %v", got, err, want)
		}
	}
}

func TestUpdate_HoldsTheLockOfThePlace(t *testing.T) {
	n, locked := 0, false
	at := counter(&n, 0)
	at.Lock = func(context.Context) (func(), error) {
		locked = true
		return func() { locked = false }, nil
	}
	if _, err := Update(t.Context(), at, func(found int, err error) (*int, error) {
		if !locked {
			t.Error("not locked")
		}
		return &found, err
	}); err != nil || locked {
		t.Errorf("%v, still locked: %t", err, locked)
	}
}
