package create

import (
	"strings"
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/identity"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/identity/identitytest"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

func lab(t *testing.T, settings string) backend.Backend {
	t.Helper()
	_, be := identitytest.Lab(t, settings)
	return be
}

func request(t *testing.T, namespace string, pairs ...string) Request {
	t.Helper()
	params := map[string]string{"backend": "lab", "bucketName": "data"}
	for i := 0; i < len(pairs); i += 2 {
		params[pairs[i]] = pairs[i+1]
		if pairs[i+1] == "" {
			delete(params, pairs[i])
		}
	}
	p, err := volume.ParseParameters(params, "v")
	if err != nil {
		t.Fatal(err)
	}
	return Request{Name: "v", Namespace: namespace, Parameters: p}
}

const rules = `allow: [{namespaces: [team-*], buckets: [data], roles: ["arn:aws:iam::*:role/csi-team-*"], sources: [workload]}, {namespaces: [ops]}]`

func TestWhatTheOperatorsRulesForbidIsNotCreated(t *testing.T) {
	for name, c := range map[string]struct {
		settings string
		r        Request
		says     string // "": it is allowed
	}{
		"no rules":                     {"", request(t, ""), ""},
		"nothing is known of the role": {rules, request(t, "team-a"), ""},
		"as the rule says":             {rules, request(t, "team-a", "credentials", "workload", "roleARN", "arn:aws:iam::111122223333:role/csi-team-a"), ""},
		"another namespace":            {rules, request(t, "stranger"), "stranger"},
		"no namespace is known":        {rules, request(t, ""), "--extra-create-metadata"},
		"another bucket":               {rules, request(t, "team-a", "bucketName", "other"), "other"},
		"another source":               {rules, request(t, "team-a", "credentials", "driver"), "driver"},
		"another role":                 {rules, request(t, "team-a", "roleARN", "arn:aws:iam::111122223333:role/admin"), "role/admin"},
		"the second rule":              {rules, request(t, "ops", "bucketName", "other", "credentials", "driver"), ""},
		"a template that is known":     {rules, request(t, "team-a", "roleARN", "arn:aws:iam::111122223333:role/csi-${pod.namespace}"), ""},
		"a template that is too wide":  {rules, request(t, "team-a", "roleARN", "arn:aws:iam::111122223333:role/x-${pod.namespace}"), "role/x-team-a"},
		"a template of the pod":        {rules, request(t, "team-a", "roleARN", "arn:aws:iam::111122223333:role/${pod.serviceAccountName}"), ""},
		"the backend's own role": {rules + ", workloadRoleARN: 'arn:aws:iam::111122223333:role/all'", request(t, "team-a", "credentials", "workload"),
			"role/all"},
		"which is for workloads": {rules + ", workloadRoleARN: 'arn:aws:iam::111122223333:role/all'", request(t, "team-a"), ""},
	} {
		t.Run(name, func(t *testing.T) {
			err := admit(lab(t, c.settings), c.r)
			if (err == nil) != (c.says == "") || err != nil && (!fault.Is(err, fault.Denied) || !strings.Contains(err.Error(), c.says)) {
				t.Errorf("%v, want %q", err, c.says)
			}
		})
	}
}

// Nothing is asked of any service: the Creator has no clients.
func TestARequestIsCheckedAgainstTheRulesFirst(t *testing.T) {
	config, _ := identitytest.Lab(t, rules)
	identities, err := identity.New(config, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	c := &Creator{Identities: identities}
	for _, r := range []Request{request(t, "stranger"), request(t, "team-a", "bucketName", "")} {
		if _, err := c.Create(t.Context(), r); !fault.Is(err, fault.Denied) {
			t.Errorf("%s: %v", r.Namespace, err)
		}
	}
}

func TestAVolumeCannotAskForLessThanItsBackend(t *testing.T) {
	for _, c := range []struct {
		settings, scope string
		kind            fault.Kind // Unknown: it is allowed
	}{
		{"", "", fault.Unknown},
		{"", "off", fault.Unknown},
		{"", "required", fault.Unknown},
		{"scope: required", "", fault.Unknown},
		{"scope: required", "auto", fault.Precondition},
		{"scope: auto", "off", fault.Precondition},
		{"scope: 'off'", "required", fault.Unknown},
	} {
		var pairs []string
		if c.scope != "" {
			pairs = []string{"scope", c.scope}
		}
		if err := admit(lab(t, c.settings), request(t, "", pairs...)); fault.KindOf(err) != c.kind || (err == nil) != (c.kind == fault.Unknown) {
			t.Errorf("backend %q, volume %q: %v", c.settings, c.scope, err)
		}
	}
}

func TestARoleThatTwoPodsWouldShareIsRefusedAtOnce(t *testing.T) {
	for role, unique := range map[string]bool{"${pod.namespace}-${pod.serviceAccountName}": false, "${pod.namespace}.${pod.serviceAccountName}": true} {
		err := admit(lab(t, ""), request(t, "team-a", "roleARN", "arn:aws:iam::111122223333:role/"+role))
		if unique != (err == nil) || !unique && (!fault.Is(err, fault.Invalid) || !strings.Contains(err.Error(), "parameters.roleARN")) {
			t.Errorf("%s: %v", role, err)
		}
	}
}
