package client

import (
	"encoding/json"
	"fmt"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

func invocation() Invocation {
	return Invocation{
		Binary: "/opt/s3-csi/bin/program", Bucket: "bucket", UID: 1000, GID: 2000, DirMode: 0o755, FileMode: 0o644,
		StateDir: "/run/s3-csi/mounts/k-1", CacheDir: "/var/cache/s3-csi/k-1",
	}
}

func everything() Invocation {
	in := invocation()
	in.Prefix = "-o x/--endpoint-url=y/"
	in.Region = "eu-west-1"
	in.Endpoint = "https://s3.example:9000"
	in.PathStyle = true
	in.CAFile = "/run/s3-csi/mounts/k-1/ca.pem"
	in.ExpectedBucketOwner = "111122223333"
	in.UserAgent = "s3-csi-driver/1.2.3"
	in.ConditionalWrites = true
	return in
}

func readOnly(in Invocation) Invocation { in.ReadOnly = true; return in }

func with(in Invocation, texts ...string) Invocation { in.Options = options(texts...); return in }

func limited(in Invocation, memory uint64) Invocation { in.MemoryLimit = memory; return in }

func cached(in Invocation, size uint64) Invocation { in.Cache, in.CacheSize = true, size; return in }

func consistent(in Invocation, consistency string) Invocation {
	in.Consistency = consistency
	return in
}

// The arguments of ordinary mounts of Mountpoint, up to those for metadata.
var (
	readOnlyMountpoint = []string{
		"--foreground", "--allow-other", "--uid=1000", "--gid=2000", "--dir-mode=0755", "--file-mode=0644",
		"--maximum-throughput-gbps=10", "--memory-target=1024",
	}
	writableMountpoint = []string{
		"--foreground", "--allow-other", "--uid=1000", "--gid=2000", "--dir-mode=0755", "--file-mode=0644",
		"--allow-delete", "--allow-overwrite", "--maximum-throughput-gbps=10", "--memory-target=1024",
	}
)

func TestCommandLines(t *testing.T) {
	tests := []struct {
		name, client string
		in           Invocation
		want         []string // without Argv[0]
	}{
		{"a bucket", "mountpoint-s3", invocation(), []string{
			"--foreground", "--allow-other", "--uid=1000", "--gid=2000", "--dir-mode=0755", "--file-mode=0644",
			"--allow-delete", "--allow-overwrite", "--maximum-throughput-gbps=10", "--memory-target=1024", "--", "bucket", "/dev/fd/3",
		}},
		{"all that a volume and its backend can say", "mountpoint-s3", everything(), []string{
			"--foreground", "--allow-other", "--prefix=-o x/--endpoint-url=y/", "--region=eu-west-1", "--endpoint-url=https://s3.example:9000",
			"--force-path-style", "--ca-bundle=/run/s3-csi/mounts/k-1/ca.pem", "--expected-bucket-owner=111122223333",
			"--user-agent-prefix=s3-csi-driver/1.2.3", "--uid=1000", "--gid=2000", "--dir-mode=0755", "--file-mode=0644",
			"--allow-delete", "--allow-overwrite", "--maximum-throughput-gbps=10", "--memory-target=1024", "--", "bucket", "/dev/fd/3",
		}},
		{"a read-only mount is not told so, and can change nothing", "mountpoint-s3",
			readOnly(with(invocation(), "allow-delete", "incremental-upload", "debug")), []string{
				"--foreground", "--allow-other", "--uid=1000", "--gid=2000", "--dir-mode=0755", "--file-mode=0644",
				"--maximum-throughput-gbps=10", "--memory-target=1024", "--metadata-ttl=60", "--negative-metadata-ttl=1", "--debug", "--", "bucket", "/dev/fd/3",
			}},
		{"the author's word replaces the driver's defaults, in the author's order", "mountpoint-s3",
			with(invocation(), "storage-class=STANDARD_IA", "memory-target=512", "allow-delete=false", "allow-overwrite=true", "incremental-upload",
				"maximum-throughput-gbps=25", "debug=false", "dual-stack=true"), []string{
				"--foreground", "--allow-other", "--uid=1000", "--gid=2000", "--dir-mode=0755", "--file-mode=0644",
				"--allow-overwrite", "--incremental-upload", "--storage-class=STANDARD_IA", "--memory-target=512", "--maximum-throughput-gbps=25", "--dual-stack",
				"--", "bucket", "/dev/fd/3",
			}},
		{"renames are turned off", "mountpoint-s3", with(invocation(), "rename=false"), []string{
			"--foreground", "--allow-other", "--uid=1000", "--gid=2000", "--dir-mode=0755", "--file-mode=0644",
			"--allow-delete", "--allow-overwrite", "--maximum-throughput-gbps=10", "--memory-target=1024", "--no-rename", "--", "bucket", "/dev/fd/3",
		}},
		{"renames are on by themselves", "mountpoint-s3", with(invocation(), "rename"), []string{
			"--foreground", "--allow-other", "--uid=1000", "--gid=2000", "--dir-mode=0755", "--file-mode=0644",
			"--allow-delete", "--allow-overwrite", "--maximum-throughput-gbps=10", "--memory-target=1024", "--", "bucket", "/dev/fd/3",
		}},
		{"a cache is in the mount's own directory", "mountpoint-s3", with(invocation(), "max-cache-size=2048"), []string{
			"--foreground", "--allow-other", "--uid=1000", "--gid=2000", "--dir-mode=0755", "--file-mode=0644",
			"--allow-delete", "--allow-overwrite", "--maximum-throughput-gbps=10", "--memory-target=1024",
			"--cache=/var/cache/s3-csi/k-1", "--max-cache-size=2048", "--", "bucket", "/dev/fd/3",
		}},
		{"the parameters ask for a cache", "mountpoint-s3", cached(invocation(), 3<<30+1), []string{
			"--foreground", "--allow-other", "--uid=1000", "--gid=2000", "--dir-mode=0755", "--file-mode=0644",
			"--allow-delete", "--allow-overwrite", "--maximum-throughput-gbps=10", "--memory-target=1024",
			"--cache=/var/cache/s3-csi/k-1", "--max-cache-size=3072", "--", "bucket", "/dev/fd/3",
		}},
		{"a cache of no size has a bound", "mountpoint-s3", limited(cached(with(invocation(), "metadata-ttl=5"), 0), 640<<20), []string{
			"--foreground", "--allow-other", "--uid=1000", "--gid=2000", "--dir-mode=0755", "--file-mode=0644",
			"--allow-delete", "--allow-overwrite", "--maximum-throughput-gbps=10", "--memory-target=512",
			"--cache=/var/cache/s3-csi/k-1", "--max-cache-size=1024", "--metadata-ttl=5", "--", "bucket", "/dev/fd/3",
		}},
		{"the memory target follows the limit", "mountpoint-s3", limited(invocation(), 10<<30), []string{
			"--foreground", "--allow-other", "--uid=1000", "--gid=2000", "--dir-mode=0755", "--file-mode=0644",
			"--allow-delete", "--allow-overwrite", "--maximum-throughput-gbps=10", "--memory-target=8192", "--", "bucket", "/dev/fd/3",
		}},
		{"unless the author gives one that fits", "mountpoint-s3", limited(with(invocation(), "memory-target=600"), 10<<30), []string{
			"--foreground", "--allow-other", "--uid=1000", "--gid=2000", "--dir-mode=0755", "--file-mode=0644",
			"--allow-delete", "--allow-overwrite", "--maximum-throughput-gbps=10", "--memory-target=600", "--", "bucket", "/dev/fd/3",
		}},
		{"a read-only volume keeps what a listing showed", "mountpoint-s3", readOnly(invocation()), append(slices.Clone(readOnlyMountpoint),
			"--metadata-ttl=60", "--negative-metadata-ttl=1", "--", "bucket", "/dev/fd/3")},
		{"unless it asks for the opposite", "mountpoint-s3", readOnly(consistent(invocation(), volume.ConsistencyCloseToOpen)),
			append(slices.Clone(readOnlyMountpoint),
				"--", "bucket", "/dev/fd/3")},
		{"or has a cache, which has a default of its own", "mountpoint-s3", readOnly(cached(invocation(), 1<<30)), append(slices.Clone(readOnlyMountpoint),
			"--cache=/var/cache/s3-csi/k-1", "--max-cache-size=1024", "--", "bucket", "/dev/fd/3")},
		{"or the author's own lifetime", "mountpoint-s3", readOnly(with(invocation(), "metadata-ttl=minimal")), append(slices.Clone(readOnlyMountpoint),
			"--metadata-ttl=minimal", "--", "bucket", "/dev/fd/3")},
		{"a relaxed volume keeps what a listing showed", "mountpoint-s3", consistent(invocation(), volume.ConsistencyRelaxed),
			append(slices.Clone(writableMountpoint),
				"--metadata-ttl=60", "--negative-metadata-ttl=1", "--", "bucket", "/dev/fd/3")},
		{"for as long as the author says", "mountpoint-s3", consistent(with(invocation(), "metadata-ttl=300"), volume.ConsistencyRelaxed),
			append(slices.Clone(writableMountpoint),
				"--metadata-ttl=300", "--", "bucket", "/dev/fd/3")},
		{"and what is missing as well", "mountpoint-s3", consistent(with(invocation(), "negative-metadata-ttl=0"), volume.ConsistencyRelaxed),
			append(slices.Clone(writableMountpoint),
				"--metadata-ttl=60", "--negative-metadata-ttl=0", "--", "bucket", "/dev/fd/3")},
		{"a cache does not change an explicit consistency", "mountpoint-s3", consistent(cached(invocation(), 1<<30), volume.ConsistencyCloseToOpen),
			append(slices.Clone(writableMountpoint),
				"--cache=/var/cache/s3-csi/k-1", "--max-cache-size=1024", "--metadata-ttl=minimal", "--", "bucket", "/dev/fd/3")},
		{"nor does one that is an option", "mountpoint-s3", consistent(with(invocation(), "max-cache-size=5"), volume.ConsistencyCloseToOpen),
			append(slices.Clone(writableMountpoint),
				"--cache=/var/cache/s3-csi/k-1", "--metadata-ttl=minimal", "--max-cache-size=5", "--", "bucket", "/dev/fd/3")},
		{"a relaxed volume shows what a listing has", "rclone", consistent(invocation(), volume.ConsistencyRelaxed), []string{
			"--fuse-fd=3", "--bucket=bucket", "--uid=1000", "--gid=2000", "--dir-mode=0755", "--file-mode=0644",
			"--cache-dir=/var/cache/s3-csi/k-1", "--dir-cache-time=1m0s", "--server-mtime=true",
		}},
		{"but for what the author says", "rclone", consistent(with(invocation(), "server-mtime=false", "dir-cache-time=5m"), volume.ConsistencyRelaxed), []string{
			"--fuse-fd=3", "--bucket=bucket", "--uid=1000", "--gid=2000", "--dir-mode=0755", "--file-mode=0644",
			"--cache-dir=/var/cache/s3-csi/k-1", "--dir-cache-time=5m",
		}},
		{"a volume that is not relaxed has the program's defaults", "rclone", readOnly(consistent(invocation(), volume.ConsistencyCloseToOpen)), []string{
			"--fuse-fd=3", "--bucket=bucket", "--read-only", "--uid=1000", "--gid=2000", "--dir-mode=0755", "--file-mode=0644",
			"--cache-dir=/var/cache/s3-csi/k-1",
		}},
		{"the parameters ask for a cache", "rclone", cached(invocation(), 10<<30), []string{
			"--fuse-fd=3", "--bucket=bucket", "--uid=1000", "--gid=2000", "--dir-mode=0755", "--file-mode=0644",
			"--cache-dir=/var/cache/s3-csi/k-1", "--read-cache=true", "--cache-size=10Gi",
		}},
		{"a cache of no size has a bound", "rclone", cached(invocation(), 0), []string{
			"--fuse-fd=3", "--bucket=bucket", "--uid=1000", "--gid=2000", "--dir-mode=0755", "--file-mode=0644",
			"--cache-dir=/var/cache/s3-csi/k-1", "--read-cache=true", "--cache-size=1Gi",
		}},
		{"owner 0, which it refuses, is left out", "mountpoint-s3", Invocation{Binary: "/b", Bucket: "bucket", DirMode: 0o40750, FileMode: 0}, []string{
			"--foreground", "--allow-other", "--dir-mode=0750", "--file-mode=0000",
			"--allow-delete", "--allow-overwrite", "--maximum-throughput-gbps=10", "--memory-target=1024", "--", "bucket", "/dev/fd/3",
		}},
		{"a bucket", "rclone", invocation(), []string{
			"--fuse-fd=3", "--bucket=bucket", "--uid=1000", "--gid=2000", "--dir-mode=0755", "--file-mode=0644",
			"--cache-dir=/var/cache/s3-csi/k-1",
		}},
		{"all that a volume and its backend can say", "rclone", readOnly(with(everything(), "cache-size=64Mi", "read-cache", "write-back=5s", "server-mtime=false")),
			[]string{
				"--fuse-fd=3", "--bucket=bucket", "--prefix=-o x/--endpoint-url=y/", "--region=eu-west-1", "--endpoint=https://s3.example:9000",
				"--path-style", "--ca-file=/run/s3-csi/mounts/k-1/ca.pem", "--read-only", "--uid=1000", "--gid=2000", "--dir-mode=0755", "--file-mode=0644",
				"--cache-dir=/var/cache/s3-csi/k-1", "--conditional-writes", "--cache-size=64Mi", "--read-cache", "--write-back=5s",
			}},
	}
	for _, tt := range tests {
		t.Run(tt.client+": "+tt.name, func(t *testing.T) {
			c := get(t, tt.client)
			must(t, c.Check(tt.in.Options, "m"))
			got := c.Command(tt.in).Argv
			if got[0] != tt.in.Binary || !slices.Equal(got[1:], tt.want) {
				t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(tt.want, "\n"))
			}
		})
	}
}

func TestEnvironmentsAreCompleteAndInheritNothing(t *testing.T) {
	for _, k := range []string{"HTTP_PROXY", "HTTPS_PROXY", "AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "LD_PRELOAD"} {
		t.Setenv(k, "canary")
	}
	base := []string{
		"PATH=/nonexistent", "HOME=/run/s3-csi/mounts/k-1", "TMPDIR=/run/s3-csi/mounts/k-1", "LANG=C.UTF-8",
		"AWS_CONFIG_FILE=/dev/null", "AWS_SHARED_CREDENTIALS_FILE=/dev/null", "AWS_EC2_METADATA_DISABLED=true",
	}
	for client, want := range map[string][]string{
		"mountpoint-s3": append(slices.Clone(base), "AWS_MAX_ATTEMPTS=8"),
		"rclone":        append(slices.Clone(base), "RCLONE_CONFIG=/dev/null", "GOGC=400"),
	} {
		if got := get(t, client).Command(everything()).Env; !slices.Equal(got, want) {
			t.Errorf("%s gets %q, want %q", client, got, want)
		}
	}
}

func TestRclonesHeapIsToldOfTheMemoryLimit(t *testing.T) {
	for limit, want := range map[uint64]string{128 << 20: "GOMEMLIMIT=100663296", 1 << 30: "GOMEMLIMIT=858993460", 0: "", 1: "GOMEMLIMIT=1"} {
		got := ""
		for _, kv := range get(t, "rclone").Command(limited(invocation(), limit)).Env {
			if strings.HasPrefix(kv, "GOMEMLIMIT=") {
				got = kv
			}
		}
		if got != want {
			t.Errorf("a limit of %d bytes becomes %q, want %q", limit, got, want)
		}
	}
}

func TestCommandLeavesItsInvocationAlone(t *testing.T) {
	for client, list := range map[string][]string{"mountpoint-s3": {"allow-delete", "debug", "sse=AES256"}, "rclone": {"cache-size=64Mi"}} {
		in := with(invocation(), list...)
		c := get(t, client)
		first := c.Command(in)
		if second := c.Command(in); !slices.Equal(first.Argv, second.Argv) || !slices.Equal(in.Options, options(list...)) {
			t.Errorf("%s: %q, then %q; options %v", client, first.Argv, second.Argv, in.Options)
		}
	}
}

func TestRcloneKnowsEveryFlagThatItIsGiven(t *testing.T) {
	source, err := os.ReadFile("../../clients/rclone/config.go")
	must(t, err)
	known := map[string]bool{}
	for _, m := range regexp.MustCompile(`add\("([a-z0-9-]+)", `).FindAllSubmatch(source, -1) {
		known[string(m[1])] = true
	}
	c := get(t, "rclone")
	for _, arg := range c.Command(cached(readOnly(everything()), 1<<30)).Argv[1:] {
		if name, _, _ := strings.Cut(strings.TrimPrefix(arg, "--"), "="); !known[name] {
			t.Errorf("the program has no flag --%s", name)
		}
	}
	for name := range c.Options {
		if !known[name] {
			t.Errorf("the program has no flag --%s", name)
		}
	}
	for name := range known {
		if _, ok := c.Options[name]; !ok && c.Refused[name] == "" {
			t.Errorf("the program's flag --%s is neither an option nor refused", name)
		}
	}
}

func TestQueueLines(t *testing.T) {
	queue := get(t, "rclone").Queue
	for line, want := range map[string]Queue{
		`s3-csi-queue {"uploads":3,"bytes":1288490188}`:       {Uploads: 3, Bytes: 1288490188},
		`s3-csi-queue {"uploads":0,"bytes":0}` + "\n":         {},
		`s3-csi-queue {"uploads":1,"bytes":0}` + "\r\n":       {Uploads: 1},
		`s3-csi-queue {"uploads":1,"bytes":9007199254740993}`: {Uploads: 1, Bytes: 9007199254740993},
	} {
		if q, ok := queue(line); !ok || q != want {
			t.Errorf("%q is %+v, %v; want %+v", line, q, ok, want)
		}
	}
	for _, line := range []string{
		"", "s3-csi-queue", "s3-csi-queue ", "s3-csi-queue {}", `s3-csi-queue {"uploads":1}`,
		` s3-csi-queue {"uploads":1,"bytes":1}`, `ERROR : s3-csi-queue {"uploads":1,"bytes":1}`,
		`s3-csi-queue {"uploads":1,"bytes":1} `, `s3-csi-queue {"uploads":1,"bytes":1}{}`,
		`s3-csi-queue {"bytes":1,"uploads":1}`, `s3-csi-queue {"uploads":1,"bytes":1,"x":1}`,
		`s3-csi-queue {"Uploads":1,"bytes":1}`, `s3-csi-queue {"uploads":1,"uploads":1,"bytes":1}`,
		`s3-csi-queue {"uploads":-1,"bytes":1}`, `s3-csi-queue {"uploads":1,"bytes":-1}`,
		`s3-csi-queue {"uploads":1.0,"bytes":1}`, `s3-csi-queue {"uploads":1,"bytes":99999999999999999999}`,
		`s3-csi-queue null`, `s3-csi-queue [1,2]`, "s3-csi-queue " + strings.Repeat(" ", 1<<20),
	} {
		if q, ok := queue(line); ok {
			t.Errorf("%.80q is %+v, want no report", line, q)
		}
	}
}

func TestRequestsLines(t *testing.T) {
	requests := get(t, "mountpoint-s3").Requests
	const head = `s3-csi-requests {"read":50,"written":7,"operations":{`
	get := `"GetObject":{"requests":5,"errors":3,"throttles":1,"milliseconds":70011,"latencies":[3,1,0,0,0,0,0,0,1]}`
	want := Requests{Read: 50, Written: 7, Operations: map[string]Operation{
		"GetObject": {Requests: 5, Errors: 3, Throttles: 1, Milliseconds: 70011, Latencies: [9]int64{3, 1, 0, 0, 0, 0, 0, 0, 1}},
	}}
	if r, ok := requests(head + get + "}}\n"); !ok || !reflect.DeepEqual(r, want) {
		t.Errorf("%+v, %t", r, ok)
	}
	if r, ok := requests(head + "}}"); !ok || len(r.Operations) != 0 {
		t.Errorf("%+v, %t", r, ok)
	}
	var many []string
	for i := range maxOperations + 1 {
		many = append(many, strings.Replace(get, "GetObject", fmt.Sprintf("A%02d", i), 1))
	}
	for _, line := range []string{
		"", "s3-csi-requests ", "s3-csi-requests {}", head, strings.Replace(head+get+"}}", "50", "-50", 1), strings.Replace(head+get+"}}", "[3,", "[-3,", 1),
		strings.Replace(head+get+"}}", "3,1,", "1,", 1), strings.Replace(head+get+"}}", "GetObject", "", 1), head + strings.Join(many, ",") + "}}",
		strings.Replace(head+get+"}}", "GetObject", strings.Repeat("x", maxOperation+1), 1), "x" + head + "}}", head + "}} ",
	} {
		if r, ok := requests(line); ok {
			t.Errorf("%.80q is %+v, want no report", line, r)
		}
	}
}

func FuzzRequestsLine(f *testing.F) {
	f.Add(`s3-csi-requests {"read":1,"written":2,"operations":{"A":{"requests":1,"errors":0,"throttles":0,"milliseconds":1,"latencies":[1,0,0,0,0,0,0,0,0]}}}`)
	f.Add(`s3-csi-requests {"read":1,"written":2,"operations":null}`)
	f.Fuzz(func(t *testing.T, line string) {
		r, ok := parseRequests(line)
		if !ok {
			return
		}
		if text, err := json.Marshal(r); err != nil || strings.TrimRight(line, "\r\n") != "s3-csi-requests "+string(text) {
			t.Errorf("%q is %+v", line, r)
		}
	})
}

func FuzzQueueLine(f *testing.F) {
	f.Add(`s3-csi-queue {"uploads":3,"bytes":1288490188}`)
	f.Add(`s3-csi-queue {"uploads":1e3,"bytes":1}`)
	f.Add("")
	f.Fuzz(func(t *testing.T, line string) {
		if q, ok := parseQueue(line); ok && (q.Uploads < 0 || q.Bytes < 0 || !strings.HasPrefix(line, "s3-csi-queue ")) {
			t.Errorf("%q is %+v", line, q)
		}
	})
}

func TestRcloneSaysHowManyFilesItPutAside(t *testing.T) {
	conflicts := get(t, "rclone").Conflicts
	for line, want := range map[string]int{
		`s3-csi-conflicts {"files":0}`: 0, "s3-csi-conflicts {\"files\":12}\n": 12,
		`s3-csi-conflicts {"files":-1}`: -1, `s3-csi-conflicts {"files": 1}`: -1, `s3-csi-conflicts {"files":1,"x":2}`: -1,
		`s3-csi-conflicts`: -1, ` s3-csi-conflicts {"files":1}`: -1, `s3-csi-queue {"uploads":1,"bytes":2}`: -1,
	} {
		if n, ok := conflicts(line); ok != (want >= 0) || ok && n != want {
			t.Errorf("%q: %d, %t; want %d", line, n, ok, want)
		}
	}
}

func TestUnstored_IsParsedInTheClientsForm(t *testing.T) {
	const line = `s3-csi-unstored {"files":2,"name":"v/\u003ca\u003e\n","reason":"AccessDenied"}`
	if u, ok := parseUnstored(line + "\n"); !ok || u != (Unstored{Files: 2, Name: "v/<a>\n", Reason: "AccessDenied"}) {
		t.Errorf("%+v, %t", u, ok)
	}
	for _, bad := range []string{
		"", " " + line, line + " ", strings.Replace(line, "2", "-1", 1), strings.Replace(line, `\u003c`, "<", 1),
		strings.Replace(line, "AccessDenied", strings.Repeat("x", maxUnstored), 1), `s3-csi-unstored {"files":1}`,
	} {
		if u, ok := parseUnstored(bad); ok {
			t.Errorf("%.80q: %+v", bad, u)
		}
	}
}
