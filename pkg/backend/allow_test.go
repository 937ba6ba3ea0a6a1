package backend

import (
	"strings"
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

func TestAUseMustMatchOneOfTheRules(t *testing.T) {
	b := parsed(t, `
backends:
  default:
    allow:
    - namespaces: [team-a, "team-a-*"]
      buckets: ["team-a-*"]
      roles: ["arn:aws:iam::111122223333:role/team-a/*"]
      sources: [workload]
    - namespaces: [admin]
    - {namespaces: ["*"], buckets: [public]}
`, "default")
	const role = awsRole + "team-a/x"
	for name, c := range map[string]struct {
		use  Use
		want []string // parts of the refusal; nil: it is allowed
	}{
		"all matches":                     {Use{Namespace: "team-a", Bucket: "team-a-1", RoleARN: role, Source: "workload"}, nil},
		"a pattern matches":               {Use{Namespace: "team-a-x", Bucket: "team-a-1", RoleARN: role, Source: "workload"}, nil},
		"another rule matches":            {Use{Namespace: "admin", Bucket: "x", Source: "driver"}, nil},
		"any namespace is an unknown one": {Use{Bucket: "public", Source: "secret"}, nil},
		"another namespace": {Use{Namespace: "team-b", Bucket: "team-a-1", RoleARN: role, Source: "workload"},
			[]string{"allow[0]", `"team-b" in namespaces`, "backends.default"}},
		"a name that begins the same": {Use{Namespace: "team-ab", Bucket: "team-a-1", RoleARN: role, Source: "workload"}, []string{"team-ab"}},
		"another bucket": {Use{Namespace: "team-a", Bucket: "team-b-1", RoleARN: role, Source: "workload"},
			[]string{"allow[0]", `"team-b-1" in buckets`}},
		"another role": {Use{Namespace: "team-a", Bucket: "team-a-1", RoleARN: awsRole + "team-b/x", Source: "workload"},
			[]string{"allow[0]", "in roles"}},
		"no role":                           {Use{Namespace: "team-a", Bucket: "team-a-1", Source: "workload"}, []string{`"" in roles`, "no role"}},
		"another source":                    {Use{Namespace: "team-a", Bucket: "team-a-1", RoleARN: role, Source: "driver"}, []string{`"driver" in sources`}},
		"an unknown namespace":              {Use{Bucket: "team-a-1", RoleARN: role, Source: "workload"}, []string{"podInfoOnMount"}},
		"a creation":                        {Use{Namespace: "team-a", Bucket: "team-a-1", Creation: true}, nil},
		"a creation elsewhere":              {Use{Namespace: "team-a", Bucket: "team-b-1", Creation: true}, []string{"team-b-1"}},
		"a creation for another source":     {Use{Namespace: "team-a", Bucket: "team-a-1", Source: "secret", Creation: true}, []string{`"secret" in sources`}},
		"a creation for an unknown one":     {Use{Bucket: "team-a-1", Creation: true}, []string{"--extra-create-metadata"}},
		"a rule that nearly matches counts": {Use{Namespace: "team-b", Bucket: "team-b-1", RoleARN: role, Source: "workload"}, []string{"allow[1]"}},
	} {
		t.Run(name, func(t *testing.T) {
			err := b.Allows(c.use)
			if c.want == nil {
				check(t, err)
				return
			}
			if !fault.Is(err, fault.Denied) {
				t.Fatalf("got %v, want Denied", err)
			}
			wantText(t, err, c.want...)
		})
	}
	if err := (Backend{}).Allows(Use{}); err != nil {
		t.Errorf("without rules: %v", err)
	}
}

func TestPatternsHaveNoWildcardButTheStar(t *testing.T) {
	for pattern, values := range map[string][2][]string{ // matching, not matching
		"a":     {{"a"}, {"b", "aa", "A"}},
		"a*":    {{"a", "ab", "a-b"}, {"ba"}},
		"*a":    {{"a", "ba"}, {"ab"}},
		"a*b*c": {{"abc", "axbxc", "abbc", "abcbc"}, {"ac", "acb", "abcx"}},
		"a*a":   {{"aa", "aba"}, {"a"}},
		"a.b":   {{"a.b"}, {"axb"}},
		"**":    {{"a", ""}, nil},
	} {
		for i, list := range values {
			for _, v := range list {
				if got := matches(pattern, v); got != (i == 0) {
					t.Errorf("%q matches %q: %t", pattern, v, got)
				}
			}
		}
	}
}

func FuzzMatches(f *testing.F) {
	f.Add("team-*", "team-a")
	f.Add("a*b*c", "abbc")
	f.Add("**", "")
	f.Fuzz(func(t *testing.T, pattern, value string) {
		if len(pattern) > 20 || len(value) > 50 {
			return
		}
		if got, want := matches(pattern, value), slowMatches(pattern, value); got != want {
			t.Fatalf("%q matches %q: %t, want %t", pattern, value, got, want)
		}
		if !strings.Contains(pattern, "*") && matches(pattern, value) != (pattern == value) {
			t.Fatalf("%q is no pattern", pattern)
		}
	})
}

// slowMatches is what matches means.
func slowMatches(pattern, value string) bool {
	if pattern == "" {
		return value == ""
	}
	if pattern[0] == '*' {
		return slowMatches(pattern[1:], value) || value != "" && slowMatches(pattern, value[1:])
	}
	return value != "" && value[0] == pattern[0] && slowMatches(pattern[1:], value[1:])
}
