package lifecycle_test

import (
	"encoding/json"
	"strconv"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/s3-csi/s3-csi-driver/tests/rig/rigtest"
	"github.com/s3-csi/s3-csi-driver/tests/s3server"
)

func TestMetricsCountCallsByMethodAndCode(t *testing.T) {
	t.Parallel()
	s := rigtest.StartServer(t, s3server.Options{})
	endpoint, _ := socket(t)
	http := port(t)
	p := launch(t, environment(s), "controller", "--endpoint="+endpoint, "--http-endpoint="+http, "--driver-name=metrics.example.com")
	c := dial(t, endpoint)
	p.ready(t, c)
	v := rigtest.Create(t, c, "vol")
	rigtest.Create(t, c, "vol")
	_, err := c.CreateVolume(rigtest.Context(t, patience), rigtest.CreateRequest("vol", "onDelete", "retain"))
	hasCode(t, err, codes.AlreadyExists, "vol")
	rigtest.Delete(t, c, v.GetVolumeId())

	code, page := get(t, http, "/metrics")
	if code != 200 {
		t.Fatalf("/metrics: %d %s", code, page)
	}
	for _, want := range []struct {
		method, code string
		count        int
	}{
		{"CreateVolume", "OK", 2}, {"CreateVolume", "AlreadyExists", 1}, {"DeleteVolume", "OK", 1},
	} {
		found := -1
		for line := range strings.Lines(page) {
			if strings.HasPrefix(line, "csi_plugin_operations_seconds_count{") && strings.Contains(line, `driver_name="metrics.example.com"`) &&
				strings.Contains(line, `grpc_status_code="`+want.code+`"`) && strings.Contains(line, `method_name="/csi.v1.Controller/`+want.method+`"`) {
				f := strings.Fields(line)
				found, _ = strconv.Atoi(f[len(f)-1])
			}
		}
		if found != want.count {
			t.Errorf("csi_plugin_operations_seconds_count of %s with %s: %d, want %d", want.method, want.code, found, want.count)
		}
	}
	contains(t, page, "s3csi_build_info", "process_resident_memory_bytes", "go_goroutines")
	for path, want := range map[string]int{"/healthz": 200, "/readyz": 200, "/": 404, "/debug/pprof/": 404} {
		if code, body := get(t, http, path); code != want {
			t.Errorf("%s: %d %s, want %d", path, code, body, want)
		}
	}
}

func TestJSONLogsAreOneObjectPerLine(t *testing.T) {
	t.Parallel()
	n := rigtest.New(t)
	endpoint, _ := socket(t)
	p := launch(t, environment(n.Server), append([]string{"all", "--launcher=process", "--endpoint=" + endpoint, "--logging-format=json", "--v=10", "--state-dir=" + n.State, "--cache-dir=" + n.Cache,
		"--client-dir=" + n.Clients, "--default-client=" + rigtest.Client, "--uid-range=" + strconv.Itoa(n.FirstUID) + "-" + strconv.Itoa(n.LastUID)}, n.Isolation...)...)
	c := dial(t, endpoint)
	p.ready(t, c)
	v := rigtest.Create(t, c, "vol")
	target := n.Target("a")
	rigtest.Publish(t, c, v, target)
	_, err := c.NodePublishVolume(rigtest.Context(t, patience), rigtest.PublishRequest(&csi.Volume{VolumeId: "default:no-such-bucket/x/"}, n.Target("b")))
	if err == nil {
		t.Error("a bucket that does not exist can be published")
	}
	rigtest.Unpublish(t, c, v, target)
	rigtest.Delete(t, c, v.GetVolumeId())
	p.signal(t, endSignal)
	if code := p.exit(t); code != 0 {
		t.Errorf("exit code %d", code)
	}
	lines := 0
	for line := range strings.Lines(p.stderr.String()) {
		var entry struct {
			Ts  float64
			Msg string
		}
		if err := json.Unmarshal([]byte(line), &entry); err != nil || entry.Ts == 0 || entry.Msg == "" {
			t.Errorf("not a log entry (%v): %s", err, line)
		}
		lines++
	}
	if lines < 10 {
		t.Errorf("only %d lines at --v=10", lines)
	}
	n.NothingLeft(t)
}

func TestVerbosityDecidesWhatIsLogged(t *testing.T) {
	t.Parallel()
	s := rigtest.StartServer(t, s3server.Options{})
	for verbosity, want := range map[string]struct{ says, silent []string }{
		"0": {[]string{`"Starting"`}, []string{`"Request"`, `"Response"`, `"Done"`}},
		"2": {[]string{`"Done" method="CreateVolume"`}, []string{`"Request"`, `"Response"`}},
		"4": {[]string{`"Request" method="CreateVolume"`}, []string{`"Response"`, `method="Probe"`}},
		"5": {[]string{`"Request" method="CreateVolume"`, `"Response" method="CreateVolume"`}, []string{`method="Probe"`}},
		"6": {[]string{`"Request" method="Probe"`, `"Response" method="Probe"`}, nil},
	} {
		t.Run("v="+verbosity, func(t *testing.T) {
			t.Parallel()
			endpoint, _ := socket(t)
			p := launch(t, environment(s), "controller", "--endpoint="+endpoint, "-v", verbosity)
			c := dial(t, endpoint)
			p.ready(t, c)
			rigtest.Create(t, c, "vol")
			_, err := c.CreateVolume(rigtest.Context(t, patience), &csi.CreateVolumeRequest{Name: "bad"})
			hasCode(t, err, codes.InvalidArgument, "volume_capabilities")
			p.signal(t, endSignal)
			p.exit(t)
			log := p.stderr.String()
			contains(t, log, want.says...)
			// What went wrong is always there.
			contains(t, log, `"Request not served"`, "volume_capabilities")
			for _, word := range want.silent {
				if strings.Contains(log, word) {
					t.Errorf("%s is logged at this verbosity:\n%s", word, log)
				}
			}
		})
	}
}
