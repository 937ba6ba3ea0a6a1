package volume

import (
	"strings"
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

const uuid = "0b2f3c1e-8d4a-4c55-9a51-2f6f7f0d9e11"

// wantInvalid fails unless err is Invalid, names the field and holds the words.
func wantInvalid(t *testing.T, err error, field string, words ...string) {
	t.Helper()
	if !fault.Is(err, fault.Invalid) {
		t.Fatalf("error %v is not Invalid", err)
	}
	if field != "" && !strings.HasPrefix(err.Error(), field+": ") {
		t.Errorf("error %q does not name the field %s", err, field)
	}
	for _, word := range words {
		if !strings.Contains(err.Error(), word) {
			t.Errorf("error %q does not say %q", err, word)
		}
	}
}

func TestParseIDReadsWhatStringWrites(t *testing.T) {
	for s, want := range map[string]ID{
		"default:my-bucket":                             {"default", "my-bucket", ""},
		"default:my-bucket/pvc-1/":                      {"default", "my-bucket", "pvc-1/"},
		"minio-2:data/team/a b/pvc-1@2/":                {"minio-2", "data", "team/a b/pvc-1@2/"},
		"default:base--usw2-az1--x-s3/p/":               {"default", "base--usw2-az1--x-s3", "p/"},
		"default:b.with.dots/größe/":                    {"default", "b.with.dots", "größe/"},
		"x:My_bucket-an/a/":                             {"x", "My_bucket-an", "a/"},
		"x:logs-111122223333-us-west-2-an/a:b/":         {"x", "logs-111122223333-us-west-2-an", "a:b/"},
		"default:aaa/" + strings.Repeat("p", 115) + "/": {"default", "aaa", strings.Repeat("p", 115) + "/"},
	} {
		got, err := ParseID(s)
		if err != nil {
			t.Errorf("ParseID(%q): %v", s, err)
			continue
		}
		if got != want || got.String() != s {
			t.Errorf("ParseID(%q) = %#v, written %q", s, got, got.String())
		}
	}
}

func TestParseIDRefusesAnythingElse(t *testing.T) {
	for name, s := range map[string]string{
		"empty":                  "",
		"no backend":             ":bucket",
		"no colon":               "fake-vol-id",
		"no bucket":              "default:",
		"bucket in spaces":       "default:my bucket",
		"bucket with colon":      "default:my:bucket",
		"bucket of dots":         "default:...",
		"bucket with dash first": "default:-bucket",
		"backend in capitals":    "Default:bucket",
		"backend too long":       strings.Repeat("b", 33) + ":bucket",
		"backend with dash last": "b-:bucket",
		"prefix without slash":   "default:bucket/prefix",
		"empty prefix":           "default:bucket/",
		"double slash":           "default:bucket//",
		"inner double slash":     "default:bucket/a//b/",
		"parent directory":       "default:bucket/../",
		"inner parent directory": "default:bucket/a/../b/",
		"this directory":         "default:bucket/./",
		"the records":            "default:bucket/.s3-csi/",
		"below the records":      "default:bucket/.s3-csi/volumes/",
		"beside the records":     "default:bucket/.s3-csi-x/",
		"newline":                "default:bucket/a\nb/",
		"NUL":                    "default:bucket/a\x00/",
		"DEL":                    "default:bucket/a\x7f/",
		"line separator":         "default:bucket/a\u2028/",
		"not UTF-8":              "default:bucket/\xff/",
		"too long":               "default:aaa/" + strings.Repeat("p", 116) + "/",
		"leading space":          " default:bucket",
		"trailing newline":       "default:bucket\n",
	} {
		t.Run(name, func(t *testing.T) {
			if id, err := ParseID(s); err == nil {
				t.Fatalf("ParseID(%q) = %#v", s, id)
			} else {
				wantInvalid(t, err, "volume_id")
			}
		})
	}
}

func TestNameSegmentOfAnIDIsTheNameAndItsGeneration(t *testing.T) {
	for prefix, want := range map[string]struct {
		segment    string
		generation int
		ok         bool
	}{
		"":                                      {},
		"pvc-1/":                                {"pvc-1", 1, true},
		"base/pvc-1@2/":                         {"pvc-1", 2, true},
		"a/b/c@9999/":                           {"c", 9999, true},
		"pvc-1@1/":                              {},
		"pvc-1@0/":                              {},
		"pvc-1@02/":                             {},
		"pvc-1@+2/":                             {},
		"pvc-1@/":                               {},
		"pvc-1@2@3/":                            {},
		"pvc-1@10000/":                          {},
		"@2/":                                   {},
		".hidden/":                              {},
		"a b/":                                  {},
		"base/" + strings.Repeat("n", 41) + "/": {},
		"pvc-1":                                 {}, // not a prefix
	} {
		segment, generation, ok := ID{"default", "bucket", prefix}.NameSegment()
		if segment != want.segment || generation != want.generation || ok != want.ok {
			t.Errorf("NameSegment of %q = %q, %d, %v", prefix, segment, generation, ok)
		}
	}
}

func TestLooksForeignTellsHandlesOfOtherDriversFromAbsentVolumes(t *testing.T) {
	for handle, want := range map[string]bool{
		"pvc-" + uuid:    true,
		uuid:             true,
		"csi-s3-" + uuid: true,
		"da39a3ee5e6b4b0d3255bfef95601890afd80709": true,
		"bucket/path":                        true,
		"bucket/path/":                       true,
		"bucket/pvc-" + uuid:                 true,
		"fake-vol-id":                        false,
		"my-static-volume":                   false,
		"":                                   false,
		"default:bucket":                     false,
		"default:bucket/p/":                  false,
		"default:Bad_Bucket/pvc-" + uuid:     false,
		"bucket/../other":                    false,
		"bucket//path":                       false,
		"bucket/":                            false,
		"/absolute":                          false,
		"bucket$/path":                       false,
		"bucket/" + strings.Repeat("p", 128): false,
	} {
		if got := LooksForeign(handle); got != want {
			t.Errorf("LooksForeign(%q) = %v", handle, got)
		}
	}
}

func TestValidateBackendName(t *testing.T) {
	for _, name := range []string{"default", "m", "minio-2", strings.Repeat("b", 32)} {
		if err := ValidateBackendName(name); err != nil {
			t.Errorf("%q: %v", name, err)
		}
	}
	for _, name := range []string{"", "-a", "a-", "A", "a.b", "a:b", "a/b", "a b", strings.Repeat("b", 33)} {
		if err := ValidateBackendName(name); !fault.Is(err, fault.Invalid) {
			t.Errorf("%q: %v", name, err)
		}
	}
}

func FuzzParseID(f *testing.F) {
	for _, s := range []string{"default:bucket", "default:bucket/p@2/", "a:b/c", "x:abc/../", "default:abc/.s3-csi/volumes/", "pvc-" + uuid, "bucket/path"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		LooksForeign(s)
		id, err := ParseID(s)
		if err != nil {
			wantInvalid(t, err, "volume_id")
			return
		}
		if id.String() != s || len(s) > maxString {
			t.Fatalf("%q became %q", s, id.String())
		}
		if LooksForeign(s) {
			t.Fatalf("%q is ours and foreign", s)
		}
		if _, err := ValidateBucketName(id.Bucket); err != nil {
			t.Fatal(err)
		}
		if id.Prefix != "" && (!strings.HasSuffix(id.Prefix, "/") || strings.HasPrefix(id.Prefix, "/") || strings.Contains("/"+id.Prefix, "/../")) {
			t.Fatalf("prefix %q", id.Prefix)
		}
		if segment, generation, ok := id.NameSegment(); ok && !strings.HasSuffix("/"+id.Prefix, "/"+element(segment, generation)) {
			t.Fatalf("%q, %d is not the end of %q", segment, generation, id.Prefix)
		}
	})
}
