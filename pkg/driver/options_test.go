package driver

import (
	"errors"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

func environment(vars map[string]string) Environment {
	return Environment{
		Lookup:   func(key string) (string, bool) { v, ok := vars[key]; return v, ok },
		Hostname: func() (string, error) { return "host-1", nil },
	}
}

func parse(t *testing.T, args string, vars map[string]string) Options {
	t.Helper()
	o, err := Parse(strings.Fields(args), environment(vars))
	if err != nil {
		t.Fatalf("Parse(%q): %v", args, err)
	}
	return o
}

func TestOptions_DefaultsAreValid(t *testing.T) {
	for _, mode := range Modes() {
		o := parse(t, string(mode), nil)
		if o.Mode != mode || o.Common.Endpoint != "unix:///csi/csi.sock" || o.Common.DriverName != "s3.csi.driver" {
			t.Errorf("%s: %+v", mode, o)
		}
		if mode.Node() && (o.Node.NodeID != "host-1" || o.Node.UIDs != UIDRange{2000000, 2065535} || o.Node.DefaultClient != "mountpoint-s3") {
			t.Errorf("%s: node options %+v", mode, o.Node)
		}
	}
	if o := parse(t, "", nil); o.Mode != ModeAll {
		t.Errorf("no arguments: mode %s", o.Mode)
	}
	if o := parse(t, "--v=4", nil); o.Mode != ModeAll || o.Common.Verbosity != 4 {
		t.Errorf("a flag first: %+v", o)
	}
	if o := parse(t, "-v=4", nil); o.Common.Verbosity != 4 {
		t.Errorf("-v=4: %+v", o.Common)
	}
}

func TestOptions_Precedence(t *testing.T) {
	vars := map[string]string{
		"S3_CSI_ENDPOINT": "unix:///env/csi.sock", "CSI_ENDPOINT": "unix:///other/csi.sock", "CSI_NODE_NAME": "node-7",
		"S3_CSI_SHUTDOWN_TIMEOUT": "7s", "S3_CSI_UID_RANGE": "5000-5999", "S3_CSI_HTTP_ENDPOINT": ":9808", "S3_CSI_V": "5",
		"S3_CSI_VOLUME_ATTACH_LIMIT": "12", "S3_CSI_DRAIN_TIMEOUT": "", "AWS_REGION": "eu-north-1", "AWS_DEFAULT_REGION": "us-west-2",
		"AWS_ENDPOINT_URL": "https://s3.example.com", "S3_CSI_VERSION": "true",
	}
	o := parse(t, "node --shutdown-timeout=9s", vars)
	if o.Common.Endpoint != "unix:///env/csi.sock" {
		t.Errorf("S3_CSI_ENDPOINT must win over CSI_ENDPOINT: %s", o.Common.Endpoint)
	}
	if o.Common.ShutdownTimeout != 9*time.Second {
		t.Errorf("the command line must win: %v", o.Common.ShutdownTimeout)
	}
	if o.Node.NodeID != "node-7" || o.Node.UIDs != (UIDRange{5000, 5999}) || o.Node.VolumeAttachLimit != 12 || o.Common.HTTPEndpoint != ":9808" ||
		o.Common.Verbosity != 5 {
		t.Errorf("environment: %+v %+v", o.Common, o.Node)
	}
	if o.Node.DrainTimeout != 24*time.Hour {
		t.Errorf("an empty variable must be an unset one: %v", o.Node.DrainTimeout)
	}
	if o.DefaultRegion != "eu-north-1" || o.DefaultEndpoint != "https://s3.example.com" {
		t.Errorf("default backend: %q %q", o.DefaultRegion, o.DefaultEndpoint)
	}
	delete(vars, "S3_CSI_ENDPOINT")
	delete(vars, "AWS_REGION")
	vars["AWS_ENDPOINT_URL_S3"] = "https://other.example.com"
	o = parse(t, "node", vars)
	if o.Common.Endpoint != "unix:///other/csi.sock" {
		t.Errorf("CSI_ENDPOINT: %s", o.Common.Endpoint)
	}
	if o.DefaultRegion != "us-west-2" || o.DefaultEndpoint != "https://other.example.com" {
		t.Errorf("default backend: %q %q", o.DefaultRegion, o.DefaultEndpoint)
	}
	vars["S3_CSI_NODE_ID"] = "node-8"
	if o := parse(t, "node", vars); o.Node.NodeID != "node-8" {
		t.Errorf("S3_CSI_NODE_ID must win over CSI_NODE_NAME: %s", o.Node.NodeID)
	}
}

func TestVolumeLimit_Of(t *testing.T) {
	const gi = 1 << 30
	for _, tc := range []struct {
		flag     string
		one, all uint64
		want     int64
	}{
		{"0", gi, 8 * gi, 0}, {"12", gi, 8 * gi, 12}, {"12", 0, 0, 12},
		{"auto", gi, 8*gi + 1, 8}, {"auto", 2 * gi, gi, 1}, {"auto", 0, gi, 0}, {"auto", gi, 0, 0},
	} {
		var l VolumeLimit
		if err := l.Set(tc.flag); err != nil || l.String() != tc.flag {
			t.Errorf("%s is read as %s, %v", tc.flag, l.String(), err)
		}
		if got := l.Of(tc.one, tc.all); got != tc.want {
			t.Errorf("%s with %d of %d bytes is %d, want %d", tc.flag, tc.one, tc.all, got, tc.want)
		}
	}
}

func TestOptions_EveryFlagHasAVariable(t *testing.T) {
	values := map[string]struct{ good, bad string }{
		"endpoint": {"/tmp/x.sock", "relative/path"}, "driver-name": {"a.b", "a_b"}, "config": {"/etc/c.yaml", "relative.yaml"},
		"http-endpoint":  {"127.0.0.1:1", "nowhere"},
		"logging-format": {"json", "xml"}, "v": {"3", "many"}, "shutdown-timeout": {"3s", "-1s"}, "cluster-id": {"c1", "two words"},
		"deletion-workers": {"3", "65"}, "copy-workers": {"8", "257"},
		"node-id": {"n", "two words"}, "state-dir": {"/run/x", "relative"}, "cache-dir": {"/var/x", "/a/../b"}, "client-dir": {"/opt/x", "relative"},
		"default-client": {"rclone", "no_client"}, "launcher": {"process", "systemctl"}, "node-dns": {"pod", "cluster"}, "uid-range": {"3000-3001", "2000000"},
		"target-root": {"/var/lib/kubelet", "relative"}, "volume-attach-limit": {"auto", "-1"}, "inline-volumes": {"true", "perhaps"},
		"pod-clients": {"true", "perhaps"}, "mount-timeout": {"3s", "1ms"},
		"drain-timeout": {"3s", "soon"}, "host-dir": {"/opt/y", "relative"}, "heal": {"false", "perhaps"}, "hang-timeout": {"3s", "1ms"},
		"allow-isolated": {"true", "perhaps"},
		"memory-limit":   {"2Gi", "1MiB"}, "cpu-weight": {"3", "10001"}, "tasks-max": {"64", "31"}, "slice-memory-limit": {"30%", "101%"},
		"linger-max-mounts": {"3", "-1"}, "linger-max-memory": {"30%", "1Mi"}, "usage-max-requests": {"7", "-1"}, "volume-metrics": {"true", "perhaps"},
		"volume-health": {"true", "perhaps"},
	}
	for _, mode := range Modes() {
		new(Options).Flags(mode).VisitAll(func(f *pflag.Flag) {
			if f.Name == "version" {
				return
			}
			value, ok := values[f.Name]
			if !ok {
				t.Errorf("add values for --%s to this test", f.Name)
				return
			}
			variable := FlagVariables(f.Name)[0]
			var o Options
			fs := o.Flags(mode)
			c := &checker{origin: map[string]string{}}
			if err := o.applyEnvironment(fs, environment(map[string]string{variable: value.good}), c); err != nil {
				t.Errorf("%s: %v", f.Name, err)
			}
			if got := fs.Lookup(f.Name).Value.String(); got != value.good {
				t.Errorf("--%s from %s: %q, want %q", f.Name, variable, got, value.good)
			}
			_, given := Parse([]string{string(mode), "--" + f.Name + "=" + value.bad}, environment(nil))
			_, set := Parse([]string{string(mode)}, environment(map[string]string{variable: value.bad}))
			for place, err := range map[string]error{"--" + f.Name: given, variable: set} {
				if usage := (*UsageError)(nil); !errors.As(err, &usage) || !strings.Contains(err.Error(), place) || !strings.Contains(err.Error(), value.bad) {
					t.Errorf("mode %s, %s is %q: %v, want a usage error that names both", mode, place, value.bad, err)
				}
			}
		})
	}
}

func TestOptions_MistakesAreUsageErrors(t *testing.T) {
	long := strings.Repeat("x", 64)
	tests := []struct {
		args string
		vars map[string]string
		want []string // parts of the message
	}{
		{"contoller", nil, []string{`unknown mode "contoller"`, "controller, node, check"}},
		{"controller --uid-range=1-2", nil, []string{"--uid-range is a flag of modes all and node", "mode controller"}},
		{"node --cluster-id=x", nil, []string{"--cluster-id is a flag of modes all and controller", "mode node"}},
		{"node --no-such-flag", nil, []string{"unknown flag: --no-such-flag", "s3-csi-driver node --help"}},
		{"node controller", nil, []string{`unexpected argument "controller"`}},
		{"node --shutdown-timeout=soon", nil, []string{"--shutdown-timeout", "soon"}},
		{"node", map[string]string{"S3_CSI_SHUTDOWN_TIMEOUT": "soon"}, []string{"S3_CSI_SHUTDOWN_TIMEOUT", "soon"}},
		{"node", map[string]string{"CSI_ENDPOINT": "tcp://10.0.0.1:1"}, []string{"CSI_ENDPOINT (--endpoint)", "10.0.0.1", "loopback"}},
		{"--endpoint=unix://relative", nil, []string{"--endpoint", "absolute"}},
		{"--endpoint=http://x", nil, []string{"--endpoint", "neither"}},
		{"--endpoint=unix:///" + strings.Repeat("x", 108), nil, []string{"--endpoint", "107"}},
		{"--driver-name=" + long, nil, []string{"--driver-name", "64"}},
		{"--driver-name=-x", nil, []string{"--driver-name", "must start"}},
		{"--driver-name=a_b", nil, []string{"--driver-name", "'_'"}},
		{"--driver-name=", nil, []string{"--driver-name", "empty"}},
		{"--http-endpoint=9808", nil, []string{"--http-endpoint", "host:port"}},
		{"--http-endpoint=:99999", nil, []string{"--http-endpoint", "99999"}},
		{"--logging-format=xml", nil, []string{"--logging-format", "text, json"}},
		{"--v=11", nil, []string{"--v", "between 0 and 10"}},
		{"--shutdown-timeout=-1s", nil, []string{"--shutdown-timeout"}},
		{"controller --cluster-id=a/b", nil, []string{"--cluster-id", "'/'"}},
		{"controller --deletion-workers=0", nil, []string{"--deletion-workers", "between 1 and 64"}},
		{"node --node-id=" + strings.Repeat("n", 257), nil, []string{"--node-id", "256"}},
		{"node --state-dir=run", nil, []string{"--state-dir", "absolute"}},
		{"node --state-dir=/run//x/", nil, []string{"--state-dir", `"/run/x"`}},
		{"node --launcher=docker", nil, []string{"--launcher", "docker", "systemd, process, auto"}},
		{"node --node-dns=cluster", nil, []string{"--node-dns", "cluster", "host, pod"}},
		{"controller --node-dns=pod", nil, []string{"--node-dns", "flag of modes"}},
		{"node --memory-limit=1MiB", nil, []string{"--memory-limit", "1MiB", "512Mi", "50%"}},
		{"node --memory-limit=1Mi", nil, []string{"--memory-limit", "16Mi"}},
		{"node --slice-memory-limit=101%", nil, []string{"--slice-memory-limit", "1% to 100%"}},
		{"node --cpu-weight=10001", nil, []string{"--cpu-weight", "10000"}},
		{"node --tasks-max=8", nil, []string{"--tasks-max", "32"}},
		{"node --linger-max-mounts=-1", nil, []string{"--linger-max-mounts", "negative"}},
		{"node --usage-max-requests=-1", nil, []string{"--usage-max-requests", "negative"}},
		{"node --uid-range=5", nil, []string{"--uid-range", "two user ids"}},
		{"node --uid-range=0-10", nil, []string{"--uid-range", "1000"}},
		{"node --uid-range=3000-2000", nil, []string{"--uid-range", "smaller"}},
		{"node --uid-range=2000-70000", nil, []string{"--uid-range", "65534"}},
		{"node --uid-range=100000-4294967295", nil, []string{"--uid-range", "not a user id"}},
		{"node --volume-attach-limit=-1", nil, []string{"--volume-attach-limit", "auto"}},
		{"node --drain-timeout=721h", nil, []string{"--drain-timeout"}},
		{"controller --v=11 --driver-name=- --deletion-workers=0", nil, []string{"--v", "--driver-name", "--deletion-workers"}},
		{"--v=2 node", nil, []string{`"node"`, "the mode comes first"}},
		{"--endpoint", nil, []string{"--endpoint"}},
		{"node --state-dir=x --cache-dir=y", nil, []string{"--state-dir", "--cache-dir"}},
	}
	for _, tt := range tests {
		_, err := Parse(strings.Fields(tt.args), environment(tt.vars))
		if usage := (*UsageError)(nil); !errors.As(err, &usage) {
			t.Errorf("Parse(%q): %v, want a usage error", tt.args, err)
			continue
		}
		for _, part := range tt.want {
			if !strings.Contains(err.Error(), part) {
				t.Errorf("Parse(%q): %q does not say %q", tt.args, err, part)
			}
		}
	}
}

func TestOptions_VersionAndHelp(t *testing.T) {
	o, err := Parse([]string{"node", "--version", "--state-dir=relative"}, environment(nil))
	if err != nil || !o.Common.Version {
		t.Errorf("--version: %+v, %v", o.Common, err)
	}
	if _, err := Parse([]string{"--help"}, environment(nil)); !errors.Is(err, pflag.ErrHelp) {
		t.Errorf("--help: %v", err)
	}
	for _, mode := range Modes() {
		for _, part := range []string{"--endpoint", "S3_CSI_", `mode "` + string(mode) + `"`} {
			if text := Usage(mode); !strings.Contains(text, part) {
				t.Errorf("the help of mode %s does not say %s:\n%s", mode, part, text)
			}
		}
	}
	if text := Usage(ModeNode); !strings.Contains(text, "--uid-range") || strings.Contains(text, "--cluster-id") {
		t.Errorf("the help of mode node shows the wrong flags:\n%s", text)
	}
}

func TestOptions_UnreadableHostNameIsAnError(t *testing.T) {
	env := environment(nil)
	env.Hostname = func() (string, error) { return "", os.ErrPermission }
	if _, err := Parse([]string{"node"}, env); err == nil || !strings.Contains(err.Error(), "--node-id") {
		t.Errorf("got %v", err)
	}
	if _, err := Parse([]string{"controller"}, env); err != nil {
		t.Errorf("a controller needs no node id: %v", err)
	}
}

func TestMemory_IsBytesOrAShare(t *testing.T) {
	for text, want := range map[string]uint64{"0": 0, "1Gi": 1 << 30, "50%": 4000, "1%": volume.MinMemoryLimit, "20000000": 20000000} {
		var m Memory
		if err := m.Set(text); err != nil {
			t.Fatal(err)
		}
		total := uint64(8000)
		if text == "50%" {
			total, want = 8<<30, 8<<30/100*50
		}
		if got := m.Of(total); got != want {
			t.Errorf("%s of %d: %d, want %d", text, total, got, want)
		}
		if m.String() != text {
			t.Errorf("%s is shown as %s", text, m.String())
		}
	}
}

func FuzzMemory(f *testing.F) {
	for _, s := range []string{"0", "1Gi", "50%", "0%", "%", "101%", "99999999999999999999", "-1", "1e9"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		var m, again Memory
		if m.Set(text) != nil {
			return
		}
		if err := again.Set(m.String()); err != nil || again != m {
			t.Errorf("%q is %s, which is %s (%v)", text, m.String(), again.String(), err)
		}
	})
}

func TestChosenLimits_DifferFromDefaults(t *testing.T) {
	o := parse(t, "node", nil)
	if got := o.Node.ChosenLimits(); len(got) != 0 {
		t.Errorf("%v", got)
	}
	o = parse(t, "node --memory-limit=0 --tasks-max=1024 --cpu-weight=50", nil)
	if got := o.Node.ChosenLimits(); !slices.Equal(got, []string{"--memory-limit", "--cpu-weight"}) {
		t.Errorf("%v", got)
	}
	o = parse(t, "node --volume-attach-limit=12", nil)
	if got := o.Node.ChosenLimits(); len(got) != 0 {
		t.Errorf("%v", got)
	}
	o = parse(t, "node --volume-attach-limit=auto", nil)
	if got := o.Node.ChosenLimits(); !slices.Equal(got, []string{"--volume-attach-limit=auto"}) {
		t.Errorf("%v", got)
	}
}

func TestEnvironment_EndpointsThatClientsWouldNotUseAreRefused(t *testing.T) {
	for _, variable := range []string{"AWS_USE_FIPS_ENDPOINT", "AWS_USE_DUALSTACK_ENDPOINT"} {
		if _, err := Parse([]string{"node"}, environment(map[string]string{variable: "true"})); err == nil || !strings.Contains(err.Error(), variable) {
			t.Errorf("%s: %v", variable, err)
		}
		parse(t, "node", map[string]string{variable: "false"})
	}
}
