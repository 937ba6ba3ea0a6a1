package table

import (
	"testing"
	"time"
)

func TestColumnsAlign(t *testing.T) {
	tab := New("A", "LONGER", "C")
	tab.Row("wide cell", "", "x")
	tab.Note("a note with\x1b[2J a control character, wider than all columns together")
	tab.Row("b", "cell", "")
	want := "A          LONGER  C\nwide cell  -       x\n    a note with [2J a control character, wider than all columns together\nb          cell    -\n"
	if got := tab.String(); got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestBytesAndSpans(t *testing.T) {
	for n, want := range map[uint64]string{0: "0B", 1023: "1023B", 1 << 10: "1.0KiB", 61 << 20: "61MiB", 1288490189: "1.2GiB", 5 << 50: "5.0PiB"} {
		if got := Bytes(n); got != want {
			t.Errorf("%d: %s, want %s", n, got, want)
		}
	}
	for d, want := range map[time.Duration]string{
		-time.Second: "0s", 59 * time.Second: "59s", 41*time.Minute + 2*time.Second: "41m02s", 25 * time.Hour: "25h00m", 50 * time.Hour: "2d02h",
	} {
		if got := Span(d); got != want {
			t.Errorf("%d: %s, want %s", d, got, want)
		}
	}
}
