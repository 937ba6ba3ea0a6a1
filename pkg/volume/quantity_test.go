package volume

import (
	"strings"
	"testing"
)

func TestParseQuantity(t *testing.T) {
	for text, want := range map[string]uint64{
		"1": 1, "16777216": 16 << 20, "1Ki": 1 << 10, "512Mi": 512 << 20, "10Gi": 10 << 30, "3Ti": 3 << 40,
		"1K": 1e3, "5M": 5e6, "7G": 7e9, "2T": 2e12, "9223372036854775807": 1<<63 - 1,
	} {
		if got, err := ParseQuantity(text); err != nil || got != want {
			t.Errorf("%q is %d, %v; want %d", text, got, err, want)
		}
	}
	for _, text := range []string{
		"", "0", "00", "01", "-1", "+1", " 1", "1 ", "1.5Gi", "1e3", "1m", "1k", "1gi", "1GiB", "1Pi", "Gi", "1 Gi", "1_000", "0x10", "１",
		"1Gi\n", "9223372036854775808", "8388608Ti", "99999999999999999999", strings.Repeat("9", 1000),
	} {
		if got, err := ParseQuantity(text); err == nil {
			t.Errorf("%q is read as %d", text, got)
		}
	}
}

func FuzzParseQuantity(f *testing.F) {
	for _, text := range []string{"1", "0", "512Mi", "10Gi", "16Ti", "1500M", "1.5Gi", "-1", "9223372036854775807", "8388607Ti", "1Gi\x00"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		n, err := ParseQuantity(text)
		if err != nil {
			return
		}
		if n == 0 || n > 1<<63-1 {
			t.Fatalf("%q is %d", text, n)
		}
		short := FormatQuantity(n)
		again, err := ParseQuantity(short)
		if err != nil || again != n || FormatQuantity(again) != short || len(short) > 20 {
			t.Fatalf("%q is %d, written as %q, read as %d, %v", text, n, short, again, err)
		}
	})
}
