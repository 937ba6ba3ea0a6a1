package provision

import (
	"strings"
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

func lab(t *testing.T, settings string) backend.Backend {
	t.Helper()
	be, err := parse(t, "backends:\n  lab: {"+settings+"}\n").Backend("lab")
	if err != nil {
		t.Fatal(err)
	}
	return be
}

func creation1(t *testing.T, namespace string, pairs ...string) CreateRequest {
	t.Helper()
	params := map[string]string{"backend": "lab", "bucketName": "data"}
	for i := 0; i < len(pairs); i += 2 {
		params[pairs[i]] = pairs[i+1]
	}
	p, err := volume.ParseParameters(params, "v")
	if err != nil {
		t.Fatal(err)
	}
	return CreateRequest{Name: "v", Namespace: namespace, Parameters: p}
}

const rules = `allow: [{namespaces: [team-*], buckets: [data], roles: ["arn:aws:iam::*:role/csi-team-*"], sources: [workload]}, {namespaces: [ops]}]`

func TestWhatTheOperatorsRulesForbidIsNotCreated(t *testing.T) {
	for name, c := range map[string]struct {
		settings string
		r        CreateRequest
		says     string // "": it is allowed
	}{
		"no rules":                     {"", creation1(t, ""), ""},
		"nothing is known of the role": {rules, creation1(t, "team-a"), ""},
		"as the rule says":             {rules, creation1(t, "team-a", "credentials", "workload", "roleARN", "arn:aws:iam::111122223333:role/csi-team-a"), ""},
		"another namespace":            {rules, creation1(t, "stranger"), "stranger"},
		"no namespace is known":        {rules, creation1(t, ""), "--extra-create-metadata"},
		"another bucket":               {rules, creation1(t, "team-a", "bucketName", "other"), "other"},
		"another source":               {rules, creation1(t, "team-a", "credentials", "driver"), "driver"},
		"another role":                 {rules, creation1(t, "team-a", "roleARN", "arn:aws:iam::111122223333:role/admin"), "role/admin"},
		"the second rule":              {rules, creation1(t, "ops", "bucketName", "other", "credentials", "driver"), ""},
		"a template that is known":     {rules, creation1(t, "team-a", "roleARN", "arn:aws:iam::111122223333:role/csi-${pod.namespace}"), ""},
		"a template that is too wide":  {rules, creation1(t, "team-a", "roleARN", "arn:aws:iam::111122223333:role/x-${pod.namespace}"), "role/x-team-a"},
		"a template of the pod":        {rules, creation1(t, "team-a", "roleARN", "arn:aws:iam::111122223333:role/${pod.serviceAccountName}"), ""},
		"the backend's own role":       {rules + ", workloadRoleARN: 'arn:aws:iam::111122223333:role/all'", creation1(t, "team-a", "credentials", "workload"), "role/all"},
		"which is for workloads":       {rules + ", workloadRoleARN: 'arn:aws:iam::111122223333:role/all'", creation1(t, "team-a"), ""},
	} {
		t.Run(name, func(t *testing.T) {
			err := admit(lab(t, c.settings), c.r)
			if (err == nil) != (c.says == "") || err != nil && (!fault.Is(err, fault.Denied) || !strings.Contains(err.Error(), c.says)) {
				t.Errorf("%v, want %q", err, c.says)
			}
		})
	}
}

func TestAVolumeCannotAskForLessThanItsBackend(t *testing.T) {
	for _, c := range []struct {
		settings, scope string
		kind            fault.Kind
		required        bool
	}{
		{"", "", fault.Unknown, false},
		{"", "off", fault.Unknown, false},
		{"", "required", fault.Unknown, true},
		{"scope: required", "", fault.Unknown, true},
		{"scope: required", "auto", fault.Precondition, false},
		{"scope: auto", "off", fault.Precondition, false},
		{"scope: 'off'", "required", fault.Unknown, true},
	} {
		var pairs []string
		if c.scope != "" {
			pairs = []string{"scope", c.scope}
		}
		be, r := lab(t, c.settings), creation1(t, "", pairs...)
		if err := admit(be, r); fault.KindOf(err) != c.kind || (err == nil) != (c.kind == fault.Unknown) {
			t.Errorf("backend %q, volume %q: %v", c.settings, c.scope, err)
		}
		if got := scopeRequired(be, r.Parameters); got != c.required {
			t.Errorf("backend %q, volume %q: required is %t", c.settings, c.scope, got)
		}
	}
}

func TestScopeThatCannotBeHadIsFoundAtCreation(t *testing.T) {
	const own = "endpoint: 'http://127.0.0.1:1', "
	for name, c := range map[string]struct {
		settings, bucket, prefix, source, says string
	}{
		"AWS":                              {"", "data", "v/", "", ""},
		"AWS, a whole bucket":              {"", "data", "", "driver", ""},
		"AWS, tokens":                      {"", "data", "v/", "workload", ""},
		"no token service":                 {own + "region: x", "data", "v/", "", "sts"},
		"no token service, tokens":         {own + "region: x", "data", "v/", "workload", "sts"},
		"its own":                          {own + "sts: {}", "data", "v/", "secret", ""},
		"its own, for tokens only":         {own + "sts: {kinds: [webIdentity]}", "data", "v/", "secret", "sts.kinds"},
		"its own, not for tokens":          {own + "sts: {kinds: [assumeRole]}", "data", "v/", "workload", "sts.kinds"},
		"a prefix of a directory bucket":   {"", "data--use1-az4--x-s3", "v/", "", "parameters.bucketName"},
		"an access point by its alias":     {"", "data-abcdefghijklmnopqrstuvwxyz0123456-s3alias", "v/", "", "alias"},
		"a wildcard that AWS can escape":   {"", "data", "v*/", "", ""},
		"a wildcard that others cannot":    {own + "sts: {}", "data", "v*/", "", "parameters.prefix"},
		"a prefix that is no plain text":   {"", "data", "v\x01/", "", "parameters.prefix"},
		"a prefix that leaves its place":   {"", "data", "v/../", "", "parameters.prefix"},
		"a prefix where the records are":   {"", "data", ".s3-csi/volumes/", "", "parameters.prefix"},
		"a prefix that no policy can hold": {"", "data", strings.Repeat("v", 900) + "/", "", "parameters.prefix"},
	} {
		t.Run(name, func(t *testing.T) {
			err := expressible(lab(t, c.settings), c.bucket, c.prefix, volume.Attributes{Credentials: c.source})
			if (err == nil) != (c.says == "") || err != nil && (!fault.Is(err, fault.Precondition) || !strings.Contains(err.Error(), c.says)) {
				t.Errorf("%v, want %q", err, c.says)
			}
		})
	}
}

func TestARoleThatTwoPodsWouldShareIsRefusedAtOnce(t *testing.T) {
	for role, unique := range map[string]bool{"${pod.namespace}-${pod.serviceAccountName}": false, "${pod.namespace}.${pod.serviceAccountName}": true} {
		err := admit(lab(t, ""), creation1(t, "team-a", "roleARN", "arn:aws:iam::111122223333:role/"+role))
		if unique != (err == nil) || !unique && (!fault.Is(err, fault.Invalid) || !strings.Contains(err.Error(), "parameters.roleARN")) {
			t.Errorf("%s: %v", role, err)
		}
	}
}
