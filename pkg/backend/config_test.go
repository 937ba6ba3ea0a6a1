package backend

import (
	"encoding/pem"
	"errors"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

func TestConfigGivesWhatTheFileSays(t *testing.T) {
	cfg, err := ParseConfig([]byte(`
# a comment
backends:
  default:
    region: eu-central-1
  minio:
    endpoint: https://minio.storage.svc:9000/
    region: us-east-1
    addressing: virtual
    caFile: /etc/ca.pem
    sts: {region: eu-west-1}
    singleController: true
    adoptUntaggedBuckets: true
    controllerCredentials: secret
    expectedBucketOwner: "012345678901"
    volumeBuckets: [shared, "pvc-*"]
  plain:
    endpoint: http://10.0.0.1:9000
`), "us-west-2", "")
	check(t, err)
	want := []Backend{
		{Name: "default", Region: "eu-central-1", ControllerCredentials: credentials.SourceDriver},
		{Name: "minio", Endpoint: "https://minio.storage.svc:9000", Region: "us-east-1", CAFile: "/etc/ca.pem", STS: &STS{Region: "eu-west-1"},
			SingleController:     true,
			AdoptUntaggedBuckets: true, ControllerCredentials: credentials.SourceSecret, ExpectedBucketOwner: "012345678901",
			VolumeBuckets: []string{"shared", "pvc-*"}},
		{Name: "plain", Endpoint: "http://10.0.0.1:9000", PathStyle: true, ControllerCredentials: credentials.SourceDriver},
	}
	if got := cfg.Backends(); !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
}

func TestWhichBackendsAreDeclared(t *testing.T) {
	for file, want := range map[string]string{
		"": "default", "backends: {}": "default", "backends: {default: {}}": "default", "backends: {a: {}}": "a", "backends: {b: {}, default: {}}": "b default",
	} {
		cfg, err := ParseConfig([]byte(file), "", "")
		check(t, err)
		var got []string
		for _, b := range cfg.Declared() {
			got = append(got, b.Name)
		}
		if strings.Join(got, " ") != want || len(cfg.Backends()) < len(got) {
			t.Errorf("%q: %q, want %q", file, got, want)
		}
	}
}

func TestDefaultBackendComesFromTheEnvironmentAndTheFileOverridesIt(t *testing.T) {
	for name, c := range map[string]struct {
		file, region, endpoint string
		want                   Backend
	}{
		"nothing":       {"", "", "", Backend{}},
		"only comments": {"# empty\n", "eu-west-1", "", Backend{Region: "eu-west-1"}},
		"environment":   {"", "eu-west-1", "http://localhost:9000", Backend{Region: "eu-west-1", Endpoint: "http://localhost:9000", PathStyle: true}},
		"file wins, by the key": {"backends: {default: {region: eu-west-2}}", "eu-west-1", "http://localhost:9000",
			Backend{Region: "eu-west-2", Endpoint: "http://localhost:9000", PathStyle: true}},
		"a bad value that does not count": {"backends: {default: {endpoint: 'https://a'}}", "", "ftp://nowhere",
			Backend{Endpoint: "https://a", PathStyle: true}},
		"path style on AWS": {"backends: {default: {addressing: path}}", "", "", Backend{PathStyle: true}},
	} {
		t.Run(name, func(t *testing.T) {
			cfg, err := ParseConfig([]byte(c.file), c.region, c.endpoint)
			check(t, err)
			c.want.Name, c.want.ControllerCredentials = "default", credentials.SourceDriver
			if got, err := cfg.Backend("default"); err != nil || !reflect.DeepEqual(got, c.want) {
				t.Errorf("got %+v, %v; want %+v", got, err, c.want)
			}
		})
	}
}

func TestConfigErrorsAreInvalidAndNameTheirPlace(t *testing.T) {
	one := func(settings string) string { return "backends:\n  minio:\n    " + settings + "\n" }
	for name, c := range map[string]struct {
		file  string
		parts []string
	}{
		"unknown key at the top":       {"backend: {}", []string{"backend:", "unknown key", "backends"}},
		"unknown key":                  {one("enpoint: https://a"), []string{"backends.minio.enpoint", "unknown key", "endpoint"}},
		"unknown key in sts":           {one("sts: {audiences: x}"), []string{"backends.minio.sts.audiences", "unknown key"}},
		"key in another case":          {one("Region: a"), []string{"backends.minio.Region", "unknown key"}},
		"duplicate key":                {one("region: a\n    region: b"), []string{"region"}},
		"duplicate backend":            {"backends:\n  a: {}\n  a: {}\n", []string{`"a"`}},
		"backend name":                 {"backends: {MinIO: {}}", []string{"backends.MinIO", "backend name"}},
		"backend name too long":        {"backends: {" + strings.Repeat("a", 33) + ": {}}", []string{"backend name"}},
		"backend name with a colon":    {"backends: {'a:b': {}}", []string{"backend name"}},
		"no settings":                  {"backends:\n  minio:\n", []string{"backends.minio", "{}"}},
		"a list":                       {"- a", []string{"must be a map"}},
		"backends as a list":           {"backends: [a]", []string{"backends", "must be a map"}},
		"not YAML":                     {"backends: {", []string{"not valid YAML"}},
		"two documents":                {"backends: {}\n---\nbackends: {}\n", []string{"line 2", "one YAML document"}},
		"empty value":                  {one("endpoint:"), []string{"backends.minio.endpoint", "no value"}},
		"empty string":                 {one(`endpoint: ""`), []string{"backends.minio.endpoint", "is empty"}},
		"wrong type":                   {one("singleController: maybe"), []string{"backends.minio.singleController", "true or false"}},
		"account id as a number":       {one("expectedBucketOwner: 123456789012"), []string{"backends.minio.expectedBucketOwner", "quotes"}},
		"account id":                   {one(`expectedBucketOwner: "1234"`), []string{"backends.minio.expectedBucketOwner", "12 digits"}},
		"endpoint scheme":              {one("endpoint: s3://a"), []string{"backends.minio.endpoint", "https://"}},
		"endpoint without scheme":      {one("endpoint: minio:9000"), []string{"backends.minio.endpoint"}},
		"endpoint host":                {one("endpoint: https://:9000"), []string{"backends.minio.endpoint", "host"}},
		"endpoint path":                {one("endpoint: https://a/bucket"), []string{"backends.minio.endpoint", "path"}},
		"endpoint query":               {one("endpoint: https://a/?x=1"), []string{"backends.minio.endpoint"}},
		"endpoint empty query":         {one("endpoint: https://a/?"), []string{"backends.minio.endpoint"}},
		"endpoint fragment":            {one("endpoint: 'https://a#'"), []string{"backends.minio.endpoint"}},
		"endpoint user":                {one("endpoint: https://user:hunter2@a"), []string{"backends.minio.endpoint", "user or password"}},
		"endpoint that does not parse": {one(`endpoint: "http://hunter2\x7f"`), []string{"backends.minio.endpoint", "not a URL"}},
		"region":                       {one("region: a/b"), []string{"backends.minio.region"}},
		"addressing":                   {one("addressing: auto"), []string{"backends.minio.addressing", "path or virtual"}},
		"relative caFile":              {one("caFile: ca.pem"), []string{"backends.minio.caFile", "absolute"}},
		"controllerCredentials":        {one("controllerCredentials: workload"), []string{"backends.minio.controllerCredentials", "driver or secret"}},
		"volumeBuckets, a name":        {one("volumeBuckets: [good-name, Bad_Name]"), []string{"backends.minio.volumeBuckets[1]"}},
		"volumeBuckets, a pattern":     {one("volumeBuckets: ['a?*']"), []string{"backends.minio.volumeBuckets[0]"}},
		"sts endpoint":                 {one("sts: {endpoint: x}"), []string{"backends.minio.sts.endpoint"}},
		"too large":                    {strings.Repeat("#", maxConfigSize+1), []string{"bytes"}},
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
	_, err := DefaultConfig("", "ftp://a")
	wantText(t, err, "AWS_ENDPOINT_URL")
	_, err = DefaultConfig("a b", "")
	wantText(t, err, "AWS_REGION")
}

func TestUnknownBackendIsAPreconditionThatNamesTheKnown(t *testing.T) {
	cfg, err := ParseConfig([]byte("backends: {minio: {endpoint: 'http://a'}}"), "", "")
	check(t, err)
	_, err = cfg.Backend("ceph")
	if !fault.Is(err, fault.Precondition) {
		t.Errorf("got kind %v", fault.KindOf(err))
	}
	wantText(t, err, `"ceph"`, "default, minio")
}

func TestLoadConfigReadsCAFilesAndRefusesWrongOnes(t *testing.T) {
	server := httptest.NewTLSServer(nil)
	defer server.Close()
	dir := t.TempDir()
	write := func(name string, data []byte) string {
		t.Helper()
		path := filepath.Join(dir, name)
		check(t, os.WriteFile(path, data, 0o600))
		return path
	}
	good := write("good.pem", pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}))
	bad := write("bad.pem", []byte("no certificate"))
	for ca, part := range map[string]string{good: "", bad: "no PEM certificate", dir + "/missing.pem": "no such file", dir: "not a regular file"} {
		path := write("config.yaml", []byte("backends: {minio: {endpoint: 'https://a', caFile: '"+ca+"'}}"))
		cfg, err := LoadConfig(path, "", "")
		if part != "" {
			wantText(t, err, path, "backends.minio.caFile", part)
			continue
		}
		check(t, err)
		if b, _ := cfg.Backend("minio"); b.roots == nil {
			t.Error("the CA file was not read")
		}
	}
	if _, err := LoadConfig(dir+"/none.yaml", "", ""); !fault.Is(err, fault.Precondition) {
		t.Errorf("a missing config file: %v", err)
	}
	large := write("large.yaml", []byte(strings.Repeat("#\n", maxConfigSize)))
	if _, err := LoadConfig(large, "", ""); err == nil {
		t.Error("a config file without bounds was read")
	}
}

func TestControllerKeysNeverComeFromTheOtherSource(t *testing.T) {
	for _, c := range []struct {
		source string
		secret credentials.Keys
		want   credentials.Keys
		kind   fault.Kind
	}{
		{credentials.SourceDriver, credentials.Keys{}, credentials.Keys{}, fault.Unknown},
		{credentials.SourceDriver, testKeys, credentials.Keys{}, fault.Precondition},
		{credentials.SourceSecret, testKeys, testKeys, fault.Unknown},
		{credentials.SourceSecret, credentials.Keys{}, credentials.Keys{}, fault.Precondition},
	} {
		got, err := Backend{Name: "b", ControllerCredentials: c.source}.ControllerKeys(c.secret)
		if got != c.want || fault.KindOf(err) != c.kind || (err == nil) != (c.kind == fault.Unknown) {
			t.Errorf("%s with %v: %v, %v", c.source, c.secret, got, err)
		}
	}
}

func FuzzParseConfig(f *testing.F) {
	f.Add("backends: {minio: {endpoint: 'https://a', sts: {}, region: x}}", "eu-west-1", "http://localhost:9000")
	f.Add("backends:\n  a: {expectedBucketOwner: '123456789012', addressing: path, caFile: /dev/zero}\n", "", "")
	f.Add("backends: {a: {endpoint: 'http://a', sts: {kinds: [assumeRole], audience: x, roleOptional: true}, scope: auto, allow: [{namespaces: ['*'], roles: "+
		"['arn:*']}]}}", "", "")
	f.Add("backends: {default: {workloadRoleARN: 'arn:aws:iam::111122223333:role/${pod.namespace}', podIdentityAgent: 'http://[fd00:ec2::23]/v1/credentials'}}",
		"", "")
	f.Add("backends: {a: &x {b: *x}}", "a/b", "http://u:p@h")
	f.Add("---\nbackends: null\n...\n", "-", "https://[::1]:9000/")
	f.Add("{\"backends\": {\"default\": {\"endpoint\": \"http://a:b\"}}}", "", "http://%zz")
	f.Fuzz(func(t *testing.T, file, region, endpoint string) {
		cfg, err := ParseConfig([]byte(file), region, endpoint)
		if err != nil {
			if !fault.Is(err, fault.Invalid) {
				t.Fatalf("an error that is not Invalid: %v", err)
			}
			return
		}
		if _, err := cfg.Backend("default"); err != nil {
			t.Fatal("there is no default backend")
		}
		for _, b := range cfg.Backends() {
			if !volume.IsName(b.Name, 32) || (b.Region != "" && !regionName.MatchString(b.Region)) || (b.CAFile != "" && b.CAFile[0] != '/') {
				t.Fatalf("an unchecked value: %+v", b)
			}
			// The canonical form is stable and can be given again.
			if again, err := checkEndpoint("x", b.Endpoint); err != nil || again != b.Endpoint {
				t.Fatalf("endpoint %q: %q, %v", b.Endpoint, again, err)
			}
		}
	})
}

// The reference in docs/reference/configuration.md names every key of the file, in the form of a table row, and no other, and its
// examples are accepted.
func TestTheDocumentedConfigIsTheOneThatIsRead(t *testing.T) {
	doc, err := os.ReadFile("../../docs/reference/configuration.md")
	check(t, err)
	want := map[string]bool{}
	var collect func(place string, s reflect.Type)
	collect = func(place string, s reflect.Type) {
		for f := range s.Fields() {
			tag := f.Tag.Get("json")
			switch k := f.Type.Kind(); {
			case tag == "" || tag == "-":
			case tag == ",inline":
				collect(place, f.Type)
			case k == reflect.Pointer || k == reflect.Slice && f.Type.Elem().Kind() == reflect.Struct:
				collect(place+tag+".", f.Type.Elem())
			default:
				want[place+tag] = true
			}
		}
	}
	collect("", reflect.TypeFor[fileBackend]())
	for line := range strings.Lines(string(doc)) {
		row := regexp.MustCompile("^\\| `([A-Za-z.]+)` \\|").FindStringSubmatch(line)
		if row == nil {
			continue
		}
		if !want[row[1]] {
			t.Errorf("the document has a row for %s, which is no key (or is there twice)", row[1])
		}
		delete(want, row[1])
	}
	for key := range want {
		t.Errorf("the document has no row for %s", key)
	}
	examples := regexp.MustCompile("(?s)```yaml\n(.*?)```").FindAllStringSubmatch(string(doc), -1)
	if len(examples) == 0 {
		t.Error("the document has no example")
	}
	for _, example := range examples {
		if _, err := ParseConfig([]byte(example[1]), "", ""); err != nil {
			t.Errorf("an example is refused: %v\n%s", err, example[1])
		}
	}
}

func TestClientsAreDeclaredInTheFile(t *testing.T) {
	document, err := os.ReadFile("../../docs/reference/declared-clients.md")
	check(t, err)
	_, rest, _ := strings.Cut(string(document), "```yaml\nclients:\n")
	example, _, _ := strings.Cut(rest, "```")
	cfg, err := ParseConfig([]byte("clients:\n"+example), "", "")
	check(t, err)
	c, err := cfg.Clients().Get("debian-rclone")
	if err != nil || !c.Declared || c.Options["dir-cache-time"].Max != 3600_000 || len(cfg.Clients().All()) != 3 {
		t.Errorf("%+v, %v", c, err)
	}
	other, err := ParseConfig([]byte(strings.Replace("clients:\n"+example, "1h", "2h", 1)), "", "")
	if err != nil || cfg.same(other) || !cfg.same(cfg) {
		t.Errorf("another declaration is not another config: %v", err)
	}
	for text, field := range map[string]string{
		"clients: {A: {}}":                                             "clients.A",
		"clients: {a: 1}":                                              "clients.a",
		"clients: {a: {program: x, nope: 1}}":                          "clients.a.nope",
		"clients: {a: {tasks: many}}":                                  "clients.a.tasks",
		"clients: {a: {options: {b: {typ: flag}}}}":                    "clients.a.options.b.typ",
		"clients: {a: {argsIf: {root: [x]}}}":                          "clients.a.argsIf.root",
		"clients: {a: {environment: [x]}}":                             "clients.a.environment",
		"clients: {rclone: {program: x, fuse: path, operands: ['x']}}": "clients.rclone",
	} {
		_, err := ParseConfig([]byte(text), "", "")
		if f := (*fault.Error)(nil); !errors.As(err, &f) || f.Field != field {
			t.Errorf("%s: %v, want an error at %s", text, err, field)
		}
	}
}

func TestEndpoints_AreHonouredOrRefused(t *testing.T) {
	for endpoint, want := range map[string]string{
		"https://s3.example.com": "https://s3.example.com", "HTTPS://S3.Example.COM/": "https://s3.example.com", "http://h:9000/": "http://h:9000",
		"https://h:443": "https://h:443", "https://h:": "https://h",
		"http://[::1]:9000": "http://[::1]:9000", "https://[2001:DB8::1]": "https://[2001:db8::1]", "https://10.0.0.1:1": "https://10.0.0.1:1",
		"https://xn--mnchen-3ya.example": "https://xn--mnchen-3ya.example",
		"https://minio_1":                "https://minio_1", "https://h.": "https://h.",
		"https://h:0": "", "https://h:65536": "", "https://h:08443": "", "https://h:-1": "", "https://h:https": "", "https://münchen.example": "",
		"http://[::1": "", "http://::1": "", "http://[fe80::1%25eth0]": "",
		"https://user:canary@h": "", "https://h/path": "", "https://h//": "", "https://h?": "", "https://h?x": "", "https://h#": "", " https://h": "",
		"https://h ": "", "h": "", "h:9000": "", "//h": "", "https:h": "",
		"https:///h": "", "s3://h": "", "https://h\n": "", "https://-h": "", "https://h..x": "", "https://.": "", "https://a b": "", "https://[h]": "",
		"https://*.h": "",
	} {
		got, err := checkEndpoint("backends.b.endpoint", endpoint)
		if want != "" && (err != nil || got != want) {
			t.Errorf("%q: %q, %v, want %q", endpoint, got, err, want)
		}
		f := (*fault.Error)(nil)
		if want == "" && (!errors.As(err, &f) || f.Kind != fault.Invalid || f.Field != "backends.b.endpoint" || strings.Contains(err.Error(), "canary")) {
			t.Errorf("%q: %q, %v", endpoint, got, err)
		}
	}
}
