package backend

import (
	"reflect"
	"strings"
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

const awsRole = "arn:aws:iam::111122223333:role/"

// parsed is the backend of that name in a config.
func parsed(t *testing.T, file, name string) Backend {
	t.Helper()
	cfg, err := ParseConfig([]byte(file), "", "")
	check(t, err)
	b, err := cfg.Backend(name)
	check(t, err)
	return b
}

func TestConfigSaysHowSessionsAreMadeAndWhoMayHaveThem(t *testing.T) {
	const file = `
backends:
  default:
    scope: required
    workloadRoleARN: arn:aws:iam::111122223333:role/${pod.namespace}.${pod.serviceAccountName}
    controllerRoleARN: arn:aws:iam::111122223333:role/s3csi
    podIdentityAgent: http://[fd00:ec2::23]/v1/credentials
    allow:
    - {namespaces: [a, "b-*"], buckets: ["*"], roles: ["arn:aws:iam::111122223333:role/*"], sources: [workload, driver]}
    - namespaces: [admin]
  minio:
    endpoint: http://minio:9000
    sts: {kinds: [webIdentity, assumeRole], audience: "https://minio", roleOptional: true, endpoint: "http://sts:1/", region: x}
    workloadRoleARN: arn:minio:iam:::role/idp-x
`
	got := parsed(t, file, "default")
	want := Backend{
		Name: "default", ControllerCredentials: credentials.SourceDriver, Scope: volume.ScopeRequired,
		WorkloadRoleARN: awsRole + "${pod.namespace}.${pod.serviceAccountName}", ControllerRoleARN: awsRole +
			"s3csi", PodIdentityAgent: "http://[fd00:ec2::23]/v1/credentials",
		Allow: &Allow{[]rule{
			{[]string{"a", "b-*"}, []string{"*"}, []string{awsRole + "*"}, []string{"workload", "driver"}},
			{Namespaces: []string{"admin"}},
		}},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
	sts := parsed(t, file, "minio").STS
	if want := (&STS{"http://sts:1", "x", []credentials.Kind{credentials.AssumeRole, credentials.WebIdentity}, "https://minio", true}); !reflect.DeepEqual(sts,
		want) {
		t.Errorf("got %+v, want %+v", sts, want)
	}
}

func TestTheWordOffNeedsNoQuotes(t *testing.T) {
	for _, text := range []string{"off", `"off"`, "'off'"} {
		if got := parsed(t, "backends: {default: {scope: "+text+"}}", "default").Scope; got != volume.ScopeOff {
			t.Errorf("%s: %q", text, got)
		}
	}
}

func TestErrorsInTheSettingsOfSessionsNameTheirPlace(t *testing.T) {
	aws := func(settings string) string { return "backends:\n  default:\n    " + settings + "\n" }
	other := func(settings string) string {
		return "backends:\n  minio:\n    endpoint: http://minio:9000\n    " + settings + "\n"
	}
	for name, c := range map[string]struct {
		file  string
		parts []string
	}{
		"scope":                   {aws("scope: always"), []string{"backends.default.scope", "required, auto or off"}},
		"scope that is a boolean": {aws("scope: on"), []string{"backends.default.scope", "string"}},
		"kind":                    {aws("sts: {kinds: [saml]}"), []string{"backends.default.sts.kinds", "saml", "assumeRole"}},
		"kind that is no session": {aws("sts: {kinds: [asIs]}"), []string{"backends.default.sts.kinds"}},
		"kind twice":              {aws("sts: {kinds: [assumeRole, assumeRole]}"), []string{"backends.default.sts.kinds", "twice"}},
		"no kinds":                {aws("sts: {kinds: []}"), []string{"backends.default.sts.kinds", "empty"}},
		"kinds as a string":       {aws("sts: {kinds: assumeRole}"), []string{"backends.default.sts.kinds", "list"}},
		"kinds with nothing":      {aws("sts: {kinds: [null]}"), []string{"backends.default.sts.kinds[0]"}},
		"audience":                {aws("sts: {audience: 'a b'}"), []string{"backends.default.sts.audience"}},
		"audience of the agent":   {aws("sts: {audience: pods.eks.amazonaws.com}"), []string{"backends.default.sts.audience", "Pod Identity"}},
		"roleOptional on AWS":     {aws("sts: {roleOptional: true}"), []string{"backends.default.sts.roleOptional", "MinIO"}},
		"roleOptional":            {other("sts: {roleOptional: maybe}"), []string{"backends.minio.sts.roleOptional", "true or false"}},
		"role":                    {aws("workloadRoleARN: admin"), []string{"backends.default.workloadRoleARN", "ARN"}},
		"role of another service": {aws("workloadRoleARN: arn:minio:iam:::role/x"), []string{"backends.default.workloadRoleARN", "AWS"}},
		"role without an account": {aws("controllerRoleARN: arn:aws:iam:::role/x"), []string{"backends.default.controllerRoleARN"}},
		"role with a template":    {aws("controllerRoleARN: " + awsRole + "${pod.namespace}"), []string{"backends.default.controllerRoleARN", "no pod"}},
		"role with another one":   {aws("workloadRoleARN: " + awsRole + "${pod.name}"), []string{"backends.default.workloadRoleARN", "${pod.name}"}},
		"role that pods share": {aws("workloadRoleARN: " + awsRole + "${pod.namespace}-${pod.serviceAccountName}"),
			[]string{"backends.default.workloadRoleARN", "two pods"}},
		"agent that is elsewhere": {aws("podIdentityAgent: http://10.0.0.1/v1/credentials"), []string{"backends.default.podIdentityAgent",
			"loopback or link-local"}},
		"agent with a name":        {aws("podIdentityAgent: http://localhost/v1/credentials"), []string{"backends.default.podIdentityAgent"}},
		"agent with a user":        {aws("podIdentityAgent: http://hunter2@127.0.0.1/"), []string{"backends.default.podIdentityAgent"}},
		"agent of another service": {other("podIdentityAgent: http://127.0.0.1/"), []string{"backends.minio.podIdentityAgent", "AWS"}},
		"no rules":                 {aws("allow: []"), []string{"backends.default.allow", "empty"}},
		"rules as a map":           {aws("allow: {namespaces: [a]}"), []string{"backends.default.allow", "list"}},
		"rule that allows all":     {aws("allow: [{namespaces: [a]}, {}]"), []string{"backends.default.allow[1]", "everything"}},
		"unknown key in a rule":    {aws("allow: [{namespace: a}]"), []string{"backends.default.allow[0].namespace", "unknown key", "namespaces"}},
		"empty pattern":            {aws(`allow: [{namespaces: [""]}]`), []string{"backends.default.allow[0].namespaces[0]"}},
		"number":                   {aws(`allow: [{buckets: [7]}]`), []string{"backends.default.allow[0].buckets[0]", "quotes"}},
		"another wildcard":         {aws(`allow: [{namespaces: ["team-?"]}]`), []string{"backends.default.allow[0].namespaces", "'?'"}},
		"expression":               {aws(`allow: [{roles: ["^arn"]}]`), []string{"backends.default.allow[0].roles"}},
		"source":                   {aws(`allow: [{sources: [pod]}]`), []string{"backends.default.allow[0].sources", "workload"}},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := ParseConfig([]byte(c.file), "", "")
			if !fault.Is(err, fault.Invalid) {
				t.Fatalf("got %v of kind %v, want Invalid", err, fault.KindOf(err))
			}
			wantText(t, err, c.parts...)
			if strings.Contains(err.Error(), "hunter2") {
				t.Errorf("the error repeats a password: %v", err)
			}
		})
	}
}

func TestWhichSessionsAServiceMakesIsWhatTheOperatorSays(t *testing.T) {
	all := []credentials.Kind{credentials.AssumeRole, credentials.WebIdentity, credentials.FederationToken, credentials.PodIdentity}
	for name, c := range map[string]struct {
		settings string
		want     []credentials.Kind
		audience string
	}{
		"AWS":                     {"{}", all, "sts.amazonaws.com"},
		"AWS with an STS":         {"{sts: {}}", all, "sts.amazonaws.com"},
		"AWS with less":           {"{sts: {kinds: [assumeRole], audience: x}}", []credentials.Kind{credentials.AssumeRole, credentials.PodIdentity}, "x"},
		"a service":               {"{endpoint: 'http://a'}", nil, ""},
		"a service with an STS":   {"{endpoint: 'http://a', sts: {}}", []credentials.Kind{credentials.AssumeRole, credentials.WebIdentity}, ""},
		"a service that has more": {"{endpoint: 'http://a', sts: {kinds: [federationToken], audience: x}}", []credentials.Kind{credentials.FederationToken}, "x"},
	} {
		t.Run(name, func(t *testing.T) {
			b := parsed(t, "backends: {default: "+c.settings+"}", "default")
			var got []credentials.Kind
			for _, k := range all {
				if b.Makes(k) {
					got = append(got, k)
				}
			}
			if !reflect.DeepEqual(got, c.want) || b.Audience() != c.audience || !b.Makes(credentials.AsIs) {
				t.Errorf("makes %v for audience %q, want %v for %q", got, b.Audience(), c.want, c.audience)
			}
		})
	}
}

func TestAVolumeCanAskForMoreThanItsBackendAndNeverForLess(t *testing.T) {
	const off, auto, required, refused = volume.ScopeOff, volume.ScopeAuto, volume.ScopeRequired, "refused"
	for _, c := range []struct{ backend, volume, want string }{
		{"", "", auto}, {"", off, off}, {"", auto, auto}, {"", required, required},
		{off, "", off}, {off, off, off}, {off, auto, auto}, {off, required, required},
		{auto, "", auto}, {auto, off, refused}, {auto, auto, auto}, {auto, required, required},
		{required, "", required}, {required, off, refused}, {required, auto, refused}, {required, required, required},
	} {
		got, err := Backend{Name: "b", Scope: c.backend}.ScopeOf(c.volume)
		if fault.Is(err, fault.Precondition) {
			wantText(t, err, "backend b", "scope: "+c.backend)
			got = refused
		}
		if got != c.want {
			t.Errorf("backend %q, volume %q: %q, %v, want %q", c.backend, c.volume, got, err, c.want)
		}
	}
	if _, err := (Backend{}).ScopeOf("none"); !fault.Is(err, fault.Invalid) {
		t.Errorf("an unknown scope: %v", err)
	}
}

func TestPartitionsFollowRegions(t *testing.T) {
	for region, want := range map[string]string{
		"": "aws", "eu-west-1": "aws", "cn-north-1": "aws-cn", "us-gov-west-1": "aws-us-gov",
		"us-iso-east-1": "aws-iso", "us-isob-east-1": "aws-iso-b", "eusc-de-east-1": "aws-eusc",
	} {
		if got := (Backend{Region: region}).Partition(); got != want {
			t.Errorf("%s: %s, want %s", region, got, want)
		}
	}
	if got := (Backend{Endpoint: "http://a", Region: "cn-x"}).Partition(); got != "aws" {
		t.Errorf("a service that is not AWS: %s", got)
	}
}

func TestTemplatesThatCouldMixUpPodsAreRefused(t *testing.T) {
	for role, ok := range map[string]bool{
		"x": true, "${pod.namespace}": true, "a-${pod.serviceAccountName}-b": true,
		"${pod.namespace}.${pod.serviceAccountName}":                    true,
		"${pod.namespace}/${pod.serviceAccountName}":                    true,
		"${pod.serviceAccountName}_${pod.namespace}":                    true,
		"${pod.namespace}-${pod.serviceAccountName}":                    false,
		"${pod.namespace}${pod.serviceAccountName}":                     false,
		"${pod.serviceAccountName}.${pod.namespace}":                    false,
		"${pod.namespace}-x-${pod.serviceAccountName}":                  false,
		"${pod.namespace}/${pod.namespace}-${pod.serviceAccountName}":   false,
		"${pod.namespace}-${pod.namespace}.${pod.serviceAccountName}.x": true,
	} {
		if err := CheckTemplates(role); (err == nil) != ok {
			t.Errorf("%s: %v", role, err)
		}
	}
}
