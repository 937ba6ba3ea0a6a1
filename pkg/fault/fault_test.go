package fault

import (
	"context"
	"errors"
	"fmt"
	"io"
	"testing"
)

func TestKindOf(t *testing.T) {
	for _, tc := range []struct {
		name string
		err  error
		want Kind
		text string
	}{
		{"plain", io.EOF, Unknown, "EOF"},
		{"kind", Errorf(Busy, "bucket %s", "b"), Busy, "bucket b"},
		{"field", Field("parameters.prefix", "holds %q", "@"), Invalid, `parameters.prefix: holds "@"`},
		{"wrapped kind survives", fmt.Errorf("creating: %w", Errorf(Denied, "no")), Denied, "creating: no"},
		{"outermost wins", Errorf(Busy, "again: %w", Errorf(Denied, "no")), Busy, "again: no"},
		{"deadline", fmt.Errorf("x: %w", context.DeadlineExceeded), Timeout, "x: context deadline exceeded"},
		{"kind over deadline", Errorf(Unavailable, "x: %w", context.DeadlineExceeded), Unavailable, "x: context deadline exceeded"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if got := KindOf(tc.err); got != tc.want {
				t.Errorf("kind %d, want %d", got, tc.want)
			}
			if got := tc.err.Error(); got != tc.text {
				t.Errorf("text %q, want %q", got, tc.text)
			}
		})
	}
	if !errors.Is(Errorf(Busy, "x: %w", io.EOF), io.EOF) {
		t.Error("the cause is lost")
	}
	if Is(nil, Unknown) {
		t.Error("nil has no kind")
	}
}

func TestEveryKindHasANameOfItsOwn(t *testing.T) {
	seen := map[string]bool{}
	for k := Unknown; k <= Unsupported; k++ {
		if name := k.String(); name == "" || seen[name] || ParseKind(name) != k {
			t.Errorf("kind %d is called %q, which is parsed as %d", k, name, ParseKind(name))
		}
		seen[k.String()] = true
	}
	if len(kindNames()) != int(Unsupported)+1 || ParseKind("other") != Unknown || Kind(200).String() != Unknown.String() {
		t.Error("names and kinds differ")
	}
}

func TestPermanent(t *testing.T) {
	for k := Unknown; k <= Unsupported; k++ {
		transient := k == Unknown || k == Busy || k == Unavailable || k == Timeout || k == Exhausted
		if k.Permanent() == transient {
			t.Errorf("%s: permanent %v", k, !transient)
		}
	}
}
