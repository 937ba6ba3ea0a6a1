package volume

import (
	"strings"
	"testing"
)

func TestNameSegmentKeepsNamesThatAreSafe(t *testing.T) {
	for _, name := range []string{"pvc-" + uuid, "a", "A.b_c-9", "data..x", strings.Repeat("n", 40)} {
		if got := NameSegment(name); got != name {
			t.Errorf("NameSegment(%q) = %q", name, got)
		}
	}
}

func TestNameSegmentHashesTheRestReadably(t *testing.T) {
	seen := map[string]string{}
	for name, start := range map[string]string{
		"":                                 "v-",
		".":                                "v-",
		"..":                               "v-",
		"/":                                "v-",
		".hidden":                          "hidden-",
		"-dash":                            "dash-",
		"_low":                             "low-",
		"my volume":                        "my-volume-",
		"my/volume":                        "my-volume-",
		"my@2":                             "my-2-",
		"größe":                            "gr-e-",
		"数据":                               "v-",
		"a\x00b":                           "a-b-",
		strings.Repeat("n", 41):            strings.Repeat("n", 19) + "-",
		strings.Repeat("n", 42):            strings.Repeat("n", 19) + "-",
		"looks-" + strings.Repeat("a", 20): "looks-aaaaaaaaaaaaa-",
	} {
		got := NameSegment(name)
		if !strings.HasPrefix(got, start) || len(got) > 40 || !isSegment(got, 40) {
			t.Errorf("NameSegment(%q) = %q", name, got)
		}
		if other, ok := seen[got]; ok {
			t.Errorf("%q and %q share the segment %q", name, other, got)
		}
		seen[got] = name
		if again := NameSegment(got); again == got {
			t.Errorf("the name %q takes the segment of %q", got, name)
		}
	}
}

// Volume records are found by segment for as long as a volume lives.
func TestNameSegmentNeverChanges(t *testing.T) {
	for name, want := range map[string]string{
		"my volume":             "my-volume-wfp32b4fvxzdfehjgxu7",
		"hello/world":           "hello-world-oypjd2zugpwpqinn3zjw",
		strings.Repeat("n", 50): "nnnnnnnnnnnnnnnnnnn-pxlawhoggjr23dnkd6ii",
	} {
		if got := NameSegment(name); got != want {
			t.Errorf("NameSegment(%q) = %q, was %q", name, got, want)
		}
	}
}

func FuzzNameSegment(f *testing.F) {
	for _, s := range []string{"pvc-" + uuid, "..", "a/b", "a@2", "-", strings.Repeat("x", 128), "looks-" + strings.Repeat("a", 20)} {
		f.Add(s, s+"x")
	}
	f.Fuzz(func(t *testing.T, a, b string) {
		sa, sb := NameSegment(a), NameSegment(b)
		if !isSegment(sa, maxSegment) || strings.ContainsAny(sa, "@/:") || sa[0] == '.' {
			t.Fatalf("NameSegment(%q) = %q", a, sa)
		}
		if (sa == sb) != (a == b) {
			t.Fatalf("%q and %q have segments %q and %q", a, b, sa, sb)
		}
		for _, generation := range []int{1, 2, MaxGeneration} {
			id := ID{"default", "bucket", "base/" + element(sa, generation)}
			if segment, g, ok := id.NameSegment(); !ok || segment != sa || g != generation {
				t.Fatalf("%v reads as %q, %d, %v", id, segment, g, ok)
			}
		}
	})
}
