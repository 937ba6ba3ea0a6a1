package credentials

import (
	"errors"
	"strings"
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

func TestRolesOfAWSAndOfOtherServicesAreRead(t *testing.T) {
	for arn, want := range map[string]Role{
		"arn:aws:iam::111122223333:role/name":                 {"aws", "111122223333", "name"},
		"arn:aws-cn:iam::111122223333:role/team/a+b=c,d.e@-f": {"aws-cn", "111122223333", "team/a+b=c,d.e@-f"},
		"arn:minio:iam:::role/idp-Zm9v_bar":                   {"minio", "", "idp-Zm9v_bar"},
		"arn:aws:iam:::role/ceph":                             {"aws", "", "ceph"},
		"arn:tenants:iam::some-tenant:role/x":                 {"tenants", "some-tenant", "x"},
	} {
		if got, err := ParseRole(arn); err != nil || got != want {
			t.Errorf("%s: %+v, %v", arn, got, err)
		}
	}
	for _, arn := range []string{
		"", "name", "arn:aws:iam::111122223333:user/name", "arn:aws:sts::111122223333:assumed-role/a/b",
		"arn:aws:iam::1111:role/name", "arn:aws:iam::11112222333x:role/name",
		"arn:aws:iam::111122223333:role/", "arn:aws:iam::111122223333:role//a", "arn:aws:iam::111122223333:role/a/", "arn:aws:iam::111122223333:role/a b",
		"arn:aws:iam::111122223333:role/*", "arn:aws:iam:eu-west-1:111122223333:role/a", "arn::iam::111122223333:role/a",
		"arn:aws:iam::111122223333:role/${pod.namespace}",
		"arn:aws:iam::111122223333:role/a\n", "arn:aws:iam::111122223333:role/" + strings.Repeat("a", maxRoleARN),
	} {
		if got, err := ParseRole(arn); err == nil {
			t.Errorf("%q was read as %+v", arn, got)
		}
	}
}

func TestASecretMayNameARole(t *testing.T) {
	if got, err := RoleFromSecret(map[string]string{"roleARN": "arn:aws:iam::111122223333:role/a"}); err != nil || got != "arn:aws:iam::111122223333:role/a" {
		t.Errorf("got %q, %v", got, err)
	}
	if got, err := RoleFromSecret(map[string]string{"accessKeyID": "x"}); err != nil || got != "" {
		t.Errorf("got %q, %v", got, err)
	}
	_, err := RoleFromSecret(map[string]string{"roleARN": "canary"})
	if f := (*fault.Error)(nil); !errors.As(err, &f) || f.Kind != fault.Invalid || f.Field != "secrets.roleARN" || strings.Contains(err.Error(), "canary") {
		t.Errorf("got %v", err)
	}
}

func FuzzParseRole(f *testing.F) {
	f.Add("arn:aws:iam::111122223333:role/team/name")
	f.Add("arn:minio:iam:::role/x")
	f.Add("arn:aws:iam::111122223333:role/../x")
	f.Fuzz(func(t *testing.T, arn string) {
		r, err := ParseRole(arn)
		if err != nil {
			return
		}
		if again := "arn:" + r.Partition + ":iam::" + r.Account + ":role/" + r.Name; again != arn {
			t.Fatalf("%q was read as %q", arn, again)
		}
		if strings.ContainsAny(arn, " \n*?$&<>\"'") {
			t.Fatalf("%q is no role", arn)
		}
	})
}
