package driver

import (
	"slices"
	"testing"
)

func TestHealth_UnfitDriverIsAlive(t *testing.T) {
	h := &Health{}
	if h.Ready() || h.Fit() {
		t.Error("it is ready before it serves")
	}
	h.Serving()
	if !h.Ready() || !h.Fit() {
		t.Error("it is not ready")
	}
	h.Unfit("why")
	if !h.Ready() || h.Fit() || !h.Alive() || !slices.Contains(h.Notes(), "why") {
		t.Errorf("ready %t, fit %t, alive %t, notes %q", h.Ready(), h.Fit(), h.Alive(), h.Notes())
	}
	h.Stopping()
	if h.Ready() || h.Fit() {
		t.Error("it is ready while it stops")
	}
}
