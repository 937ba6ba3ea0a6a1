package client

import (
	"errors"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// declared returns a valid declaration.
func declared() Declaration {
	return Declaration{
		Program: "geesefs", Fuse: FusePath, Drain: DrainExits, Cache: CacheUnsent, Needs: []string{"delete"}, Memory: "256Mi", Tasks: 128,
		Args: []string{"-f", "--endpoint=${endpoint}", "--region=${region}", "--uid=${uid}", "--dir-mode=${dirMode}", "--memory-limit=${memoryMiB}",
			"--cache=${cacheDir}"},
		ArgsIf: &ConditionalArgs{ReadOnly: []string{"--readonly"}, PathStyle: []string{"--path-style"}, CAFile: []string{"--ca", "${caFile}"},
			Cache: []string{"--cache-size=${cacheMiB}"}, Relaxed: []string{"--stat-cache-ttl=60s"}},
		Operands:    []string{"${bucket}:${prefix}", "${mountpoint}"},
		Environment: map[string]string{"GODEBUG": "madvdontneed=1"},
		Options: map[string]OptionDeclaration{
			"list-type":    {Type: "enum", Values: []string{"1", "2", "ext-v1"}, Meaning: "API of listings."},
			"enable-mtime": {Type: "flag"},
			"no-checksum":  {Type: "flag", Argument: "-onochecksum"},
			"parts":        {Type: "integer", Min: "1", Max: "10000", Argument: "-oparts=${value}"},
			"stat-ttl":     {Type: "duration", Min: "0s", Max: "1h"},
			"part-size":    {Type: "size", Min: "5Mi", Max: "5Gi"},
			"class":        {Type: "text", Pattern: "[A-Z_]+"},
		},
	}
}

func TestADeclaredClientBuildsItsCommand(t *testing.T) {
	c, err := declared().Client("geese", "clients.geese")
	must(t, err)
	option := func(name, value string) volume.Option {
		return volume.Option{Name: name, Value: value, HasValue: value != ""}
	}
	options := []volume.Option{
		option("parts", "7"), option("enable-mtime", ""), option("no-checksum", "true"), option("list-type", "ext-v1"), option("stat-ttl", "90s"), option("part-size",
			"8Mi"), option("class", "COLD"),
	}
	must(t, c.Check(options, "mountOptions"))
	full := Invocation{
		Binary: "/opt/geesefs", Bucket: "b", Prefix: "a b/${fd}/", Region: "eu", Endpoint: "https://s3:9000", PathStyle: true, CAFile: "/ca", ReadOnly: true, UID: 5,
		DirMode: 0o750, StateDir: "/s", CacheDir: "/c", MemoryLimit: 512 << 20, Cache: true, CacheSize: 3 << 30,
		Consistency: volume.ConsistencyRelaxed, Options: options,
	}
	got := c.Command(full)
	want := []string{
		"/opt/geesefs", "-f", "--endpoint=https://s3:9000", "--region=eu", "--uid=5", "--dir-mode=0750", "--memory-limit=512", "--cache=/c",
		"--readonly", "--ca", "/ca", "--path-style", "--cache-size=3072", "--stat-cache-ttl=60s",
		"-oparts=7", "--enable-mtime", "-onochecksum", "--list-type=ext-v1", "--stat-ttl=90s", "--part-size=8Mi", "--class=COLD", "b:a b/${fd}/", "/dev/fd/3",
	}
	if !slices.Equal(got.Argv, want) {
		t.Errorf("argv\n%q, want\n%q", got.Argv, want)
	}
	if !slices.Contains(got.Env, "GODEBUG=madvdontneed=1") || !slices.Contains(got.Env, "AWS_CONFIG_FILE=/dev/null") ||
		!slices.Equal(got.Files, []string{"/ca"}) || !slices.Equal(got.Ports, []uint16{9000}) {
		t.Errorf("%+v", got)
	}
	bare := c.Command(Invocation{Binary: "/opt/geesefs", Bucket: "b", Region: "eu", UID: 5, DirMode: 0o700, CacheDir: "/c"})
	if want := []string{"/opt/geesefs", "-f", "--region=eu", "--uid=5", "--dir-mode=0700", "--cache=/c", "b:", "/dev/fd/3"}; !slices.Equal(bare.Argv, want) {
		t.Errorf("argv without settings\n%q, want\n%q", bare.Argv, want)
	}
	if got.StaticKeys || c.StaticKeys {
		t.Error("it gets static keys")
	}
	if !c.Needs(nil, false).Delete || c.Needs(nil, true).Delete || !c.WriteBack || c.ExitsEarly || c.MinMemory != 256<<20 || c.MinTasks != 128 {
		t.Errorf("%+v", c)
	}
}

func TestOptionsOfADeclaredClientAreCheckedLikeOthers(t *testing.T) {
	c, err := declared().Client("geese", "clients.geese")
	must(t, err)
	for _, o := range []volume.Option{
		{Name: "list-type", Value: "3", HasValue: true}, {Name: "parts", Value: "0", HasValue: true}, {Name: "parts"}, {Name: "stat-ttl", Value: "2h",
			HasValue: true},
		{Name: "part-size", Value: "1Mi", HasValue: true}, {Name: "class", Value: "COLDx", HasValue: true}, {Name: "class", Value: "A B",
			HasValue: true}, {Name: "unknown"},
		{Name: "uid", Value: "0", HasValue: true}, {Name: "endpoint", Value: "http://x", HasValue: true}, {Name: "allow-other"}, {Name: "enable-mtime", Value: "1",
			HasValue: true},
	} {
		if err := c.Check([]volume.Option{o}, "mountOptions"); !fault.Is(err, fault.Invalid) {
			t.Errorf("%+v: %v", o, err)
		}
	}
	if err := c.CheckInline(volume.Attributes{}, nil, Share{}); !fault.Is(err, fault.Denied) {
		t.Errorf("inline: %v", err)
	}
}

func TestDeclaredClient_RefusesAttributesWithoutAnArgument(t *testing.T) {
	all := []string{"--uid=${uid}", "--gid=${gid}", "--dir-mode=${dirMode}", "--file-mode=${fileMode}", "--cache=${cacheDir}", "--cache-size=${cacheMiB}"}
	one := uint32(1)
	set := map[string]func(prefix *string, a *volume.Attributes){
		"prefix":    func(prefix *string, _ *volume.Attributes) { *prefix = "p/" },
		"uid":       func(_ *string, a *volume.Attributes) { a.UID = &one },
		"gid":       func(_ *string, a *volume.Attributes) { a.GID = &one },
		"dirMode":   func(_ *string, a *volume.Attributes) { a.DirMode = &one },
		"fileMode":  func(_ *string, a *volume.Attributes) { a.FileMode = &one },
		"cache":     func(_ *string, a *volume.Attributes) { a.Cache = true },
		"cacheSize": func(_ *string, a *volume.Attributes) { a.CacheSize = 1 << 30 },
	}
	for _, complete := range []bool{true, false} {
		d := declared()
		d.ArgsIf, d.Args, d.Operands = nil, nil, []string{"${bucket}", "${mountpoint}"}
		if complete {
			d.Args, d.Operands = all, []string{"${bucket}:${prefix}", "${mountpoint}"}
		}
		c, err := d.Client("geese", "clients.geese")
		must(t, err)
		for name, change := range set {
			var prefix string
			var a volume.Attributes
			change(&prefix, &a)
			f, err := (*fault.Error)(nil), c.CheckVolume(Volume{Place: "volume_context", Prefix: prefix, Attributes: a})
			if refused := errors.As(err, &f) && f.Kind == fault.Invalid && f.Field == "volume_context."+name; refused == complete || complete && err != nil {
				t.Errorf("%s, with all arguments %t: %v", name, complete, err)
			}
		}
		if err := c.CheckVolume(Volume{Group: &one}); (err == nil) != complete {
			t.Errorf("a group, with all arguments %t: %v", complete, err)
		}
		if err := c.CheckVolume(Volume{}); err != nil {
			t.Errorf("nothing set: %v", err)
		}
	}
}

func TestADeclarationThatCannotServeIsRefused(t *testing.T) {
	for field, change := range map[string]func(d *Declaration){
		"program":                      func(d *Declaration) { d.Program = "../geesefs" },
		"sha256":                       func(d *Declaration) { d.SHA256 = strings.Repeat("A", 64) },
		"fuse":                         func(d *Declaration) { d.Fuse = "socket" },
		"credentials":                  func(d *Declaration) { d.Credentials = "keys" },
		"drain":                        func(d *Declaration) { d.Drain = "" },
		"cache":                        func(d *Declaration) { d.Cache = CacheNone }, // it has ${cacheDir}
		"args[0]":                      func(d *Declaration) { d.Args[0] = "${secretAccessKey}" },
		"args[1]":                      func(d *Declaration) { d.Args[1] = "${prefix}" },
		"operands[1]":                  func(d *Declaration) { d.Operands[1] = "${caFile}${region}${prefix}" },
		"args[2]":                      func(d *Declaration) { d.Args[2] = "--x=${bucket" },
		"args[4]":                      func(d *Declaration) { d.Args[4] = "${memoryMiB}" },
		"args[3]":                      func(d *Declaration) { d.Args[3] = "a\nb" },
		"args":                         func(d *Declaration) { d.Operands = []string{"${bucket}"} }, // no descriptor
		"argsIf.readOnly[0]":           func(d *Declaration) { d.ArgsIf.ReadOnly[0] = "${keys}" },
		"operands[0]":                  func(d *Declaration) { d.Operands[0] = "" },
		"environment.LD_PRELOAD":       func(d *Declaration) { d.Environment["LD_PRELOAD"] = "/x" },
		"environment.AWS_ENDPOINT_URL": func(d *Declaration) { d.Environment["AWS_ENDPOINT_URL"] = "http://x" },
		"environment.HOME":             func(d *Declaration) { d.Environment["HOME"] = "/root" },
		"environment.lower":            func(d *Declaration) { d.Environment["lower"] = "x" },
		"environment.A":                func(d *Declaration) { d.Environment["A"] = "${bucket}" },
		"needs[0]":                     func(d *Declaration) { d.Needs[0] = "acl" },
		"memory":                       func(d *Declaration) { d.Memory = "1Mi" },
		"tasks":                        func(d *Declaration) { d.Tasks = 3 },
		"options.--x":                  func(d *Declaration) { d.Options["--x"] = OptionDeclaration{Type: "flag"} },
		"options.profile":              func(d *Declaration) { d.Options["profile"] = OptionDeclaration{Type: "flag"} },
		"options.a.type":               func(d *Declaration) { d.Options["a"] = OptionDeclaration{} },
		"options.a.min":                func(d *Declaration) { d.Options["a"] = OptionDeclaration{Type: "integer", Max: "1"} },
		"options.a.max":                func(d *Declaration) { d.Options["a"] = OptionDeclaration{Type: "integer", Min: "2", Max: "1"} },
		"options.a.values":             func(d *Declaration) { d.Options["a"] = OptionDeclaration{Type: "enum"} },
		"options.a.values[0]":          func(d *Declaration) { d.Options["a"] = OptionDeclaration{Type: "enum", Values: []string{"-x"}} },
		"options.a.pattern":            func(d *Declaration) { d.Options["a"] = OptionDeclaration{Type: "text", Pattern: "("} },
		"options.b.pattern":            func(d *Declaration) { d.Options["b"] = OptionDeclaration{Type: "text", Pattern: `\Qa`} },
		"options.a.argument":           func(d *Declaration) { d.Options["a"] = OptionDeclaration{Type: "flag", Argument: "--a=${value}"} },
	} {
		d := declared()
		change(&d)
		_, err := d.Client("geese", "clients.geese")
		if e := (*fault.Error)(nil); !errors.As(err, &e) || e.Field != "clients.geese."+field {
			t.Errorf("%s: %v", field, err)
		}
	}
	d := declared()
	d.Credentials = CredentialsStatic // and it keeps unsent files
	if _, err := d.Client("geese", "clients.geese"); !fault.Is(err, fault.Invalid) {
		t.Errorf("static keys and unsent files: %v", err)
	}
	d.Cache = CacheCopies
	if c, err := d.Client("geese", "clients.geese"); err != nil || !c.StaticKeys || !c.Command(Invocation{Binary: "/p"}).StaticKeys {
		t.Errorf("static keys: %v", err)
	}
	if _, err := declared().Client("rclone", "clients.rclone"); !fault.Is(err, fault.Invalid) {
		t.Errorf("the name of one of the driver's own clients: %v", err)
	}
}

// FuzzDeclaration checks that whatever is declared, a volume's values stay within one argument each, and no argument has a placeholder
// of something else.
func FuzzDeclaration(f *testing.F) {
	f.Add("--x=${bucket}", "--y=${value}", "[a-z]*", "abc", "p/")
	f.Add("${bucket}:${prefix}", "-o", ".*", "-x", "-p/")
	f.Add("--a", "--b=${value}", `\Qa`, "x", "-p/")
	f.Add("${", "${value}", "(", "${fd}", "${endpoint}")
	f.Fuzz(func(t *testing.T, arg, argument, pattern, value, prefix string) {
		d := declared()
		d.Args = append(d.Args, arg)
		d.Options = map[string]OptionDeclaration{"o": {Type: "text", Pattern: pattern, Argument: argument}}
		c, err := d.Client("geese", "clients.geese")
		if err != nil {
			if !fault.Is(err, fault.Invalid) {
				t.Fatal(err)
			}
			return
		}
		options := []volume.Option{{Name: "o", Value: value, HasValue: true}}
		if c.Check(options, "mountOptions") != nil {
			options = nil
		}
		in := Invocation{Binary: "/p", Bucket: "b", Prefix: prefix, Region: "r", CacheDir: "/c", Options: options}
		argv := c.Command(in).Argv
		if most := 1 + len(d.Args) + len(options) + len(d.Operands); len(argv) > most {
			t.Fatalf("%q has more than %d arguments", argv, most)
		}
		for _, a := range argv[1:] {
			if strings.HasPrefix(prefix, "-") && strings.HasPrefix(a, prefix) && !strings.HasPrefix(arg, "-") && len(prefix) > 1 && !slices.Contains(d.Args, a) {
				t.Fatalf("%q begins with the prefix", a)
			}
		}
	})
}

func TestTheDocumentHasEveryPlaceholderAndKey(t *testing.T) {
	const document = "../../docs/reference/declared-clients.md"
	text, err := os.ReadFile(document)
	must(t, err)
	for name := range maps.Keys(placeholders(Invocation{})) {
		if !strings.Contains(string(text), "`${"+name+"}`") {
			t.Errorf("%s does not have the placeholder ${%s}", document, name)
		}
	}
}

// Clients that find certificates through a variable, such as s3fs through CURL_CA_BUNDLE, get the backend's there.
func TestACAFileIsInTheEnvironment(t *testing.T) {
	d := declared()
	d.Environment = map[string]string{"CURL_CA_BUNDLE": "${caFile}"}
	c, err := d.Client("geese", "clients.geese")
	must(t, err)
	in := invocation()
	in.CAFile = "/run/ca.pem"
	if got := c.Command(in); !slices.Contains(got.Env, "CURL_CA_BUNDLE=/run/ca.pem") || !slices.Equal(got.Files, []string{"/run/ca.pem"}) {
		t.Errorf("%q, may read %q", got.Env, got.Files)
	}
	in.CAFile = ""
	if got := c.Command(in); strings.Contains(strings.Join(got.Env, " "), "CURL_CA_BUNDLE") {
		t.Errorf("without a CA file: %q", got.Env)
	}
	for _, value := range []string{"${prefix}", "x${caFile}", "${caFile}${caFile}"} {
		d.Environment = map[string]string{"CURL_CA_BUNDLE": value}
		if _, err := d.Client("geese", "clients.geese"); !fault.Is(err, fault.Invalid) || !strings.Contains(err.Error(), "clients.geese.environment.CURL_CA_BUNDLE") {
			t.Errorf("%s: %v", value, err)
		}
	}
}
