package volume

import (
	"strings"
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

func TestRolesAreCheckedByTheirForm(t *testing.T) {
	for role, want := range map[Role]string{
		"arn:aws:iam::111122223333:role/name":                                 "",
		"arn:aws-us-gov:iam::111122223333:role/path/of/name+=,.@-_":           "",
		"arn:minio:iam:::role/idmp-x":                                         "",
		"arn:aws:iam::RGW00000000000000001:role/a":                            "",
		"arn:aws:iam::1:role/${pod.namespace}/${pod.serviceAccountName}-role": "",
		"":                                             "is not a role's ARN",
		"arn:aws:iam::1:role/":                         "is not a role's ARN",
		"arn:aws:iam::1:role/a/":                       "is not a role's ARN",
		"arn:aws:iam::1:role//a":                       "is not a role's ARN",
		"arn:aws:sts::1:assumed-role/a":                "is not a role's ARN",
		"arn:aws:iam:eu-west-1:1:role/a":               "is not a role's ARN",
		"arn:${pod.namespace}:iam::1:role/a":           "is not a role's ARN",
		"arn:aws:iam::${pod.namespace}:role/a":         "is not a role's ARN",
		"arn:aws:iam::1:role/*":                        `'*'`,
		"arn:aws:iam::1:role/a b":                      `' '`,
		"arn:aws:iam::1:role/a:b":                      `':'`,
		"arn:aws:iam::1:role/${pod.namespace":          `without "}"`,
		"arn:aws:iam::1:role/${pvc.namespace}":         "unknown template ${pvc.namespace}",
		"arn:aws:iam::1:role/$pod":                     `'$'`,
		Role("arn:aws:iam::1:role/" + long('a', 2000)): "640",
	} {
		err := role.Check()
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %v, want %q", role, err, want)
		}
	}
}

func long(c byte, n int) string { return strings.Repeat(string(c), n) }

func TestRolesAreExpandedWithThePod(t *testing.T) {
	const role = Role("arn:aws:iam::1:role/x/${pod.namespace}.${pod.serviceAccountName}.${pod.namespace}")
	if got, err := role.Expand("team-a", "app"); err != nil || got != "arn:aws:iam::1:role/x/team-a.app.team-a" {
		t.Errorf("%s, %v", got, err)
	}
	if got, err := Role("arn:aws:iam::1:role/plain").Expand("", ""); err != nil || got != "arn:aws:iam::1:role/plain" {
		t.Errorf("%s, %v", got, err)
	}
	if _, err := role.Expand("", "app"); !fault.Is(err, fault.Precondition) || !strings.Contains(err.Error(), "podInfoOnMount") {
		t.Errorf("without a namespace: %v", err)
	}
	// What is not a name of Kubernetes would choose another role.
	for _, bad := range []string{"../admin", "a/b", "a:b", "*", "a\nb"} {
		if got, err := role.Expand("team-a", bad); !fault.Is(err, fault.Precondition) {
			t.Errorf("service account %q: %s, %v", bad, got, err)
		}
	}
}

func FuzzRole(f *testing.F) {
	f.Add("arn:aws:iam::111122223333:role/x/${pod.namespace}", "ns", "sa")
	f.Add("arn:minio:iam:::role/${pod.serviceAccountName}${", "ns", "sa")
	f.Add("arn:aws:iam::1:role/a", "", "")
	f.Fuzz(func(t *testing.T, role, namespace, account string) {
		expanded, err := Role(role).Expand(namespace, account)
		if err != nil {
			return
		}
		// What comes out is a role without templates, and no longer than its parts.
		if err := Role(expanded).Check(); err != nil && len(expanded) <= maxRole {
			t.Errorf("%q becomes %q, which %v", role, expanded, err)
		}
		if Role(expanded).Templated() {
			t.Errorf("%q becomes %q", role, expanded)
		}
	})
}
