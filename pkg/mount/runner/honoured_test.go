package runner

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/driver"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/mounttest"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/mounttest/parts"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// sweep takes publications from their requests to the command lines of their clients, as the node service does, without starting them.
type sweep struct {
	driver.Mounter
	t    *testing.T
	node *driver.Node
	r    *Runner
	got  mount.Request
}

func newSweep(t *testing.T) *sweep {
	t.Helper()
	s := &sweep{t: t, r: &Runner{Store: parts.New(t, mounttest.S3{}).Store}}
	s.node = driver.NewNode(s, "s3.csi.driver", driver.NodeOptions{NodeID: "n"})
	return s
}

func (s *sweep) Publish(_ context.Context, r mount.Request, refused error) error {
	s.got = r
	return refused
}

// served is what a publication leads to.
type served struct {
	mount.Request
	spec mount.Spec
	argv []string
}

func (s *sweep) publish(clientName string, context map[string]string, change func(*csi.NodePublishVolumeRequest)) (served, error) {
	s.t.Helper()
	req := &csi.NodePublishVolumeRequest{
		VolumeId: "handle", TargetPath: "/pods/1/mount", VolumeContext: map[string]string{"bucketName": "bucket", "client": clientName},
		VolumeCapability: &csi.VolumeCapability{
			AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
			AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER},
		},
	}
	for key, value := range context {
		req.VolumeContext[key] = value
	}
	if change != nil {
		change(req)
	}
	if _, err := s.node.NodePublishVolume(s.t.Context(), req); err != nil {
		return served{}, err
	}
	cl, err := client.Get(s.got.Attributes.Client)
	if err != nil {
		return served{}, fault.Field("volume_context.client", "%w", err)
	}
	given := client.Volume{Place: "volume_context", Prefix: s.got.Volume.Prefix, Attributes: s.got.Attributes, Group: s.got.MountGroup,
		Options: []client.Given{{Field: "mountOptions", Options: s.got.Options}}}
	if err := cl.CheckVolume(given); err != nil {
		return served{}, err
	}
	spec := mount.NewSpec(s.got, nil)
	options, err := spec.ParseOptions()
	if err != nil {
		s.t.Fatalf("%v: the options of the spec are not read again: %v", context, err)
	}
	m := state.Mount{Spec: spec, Name: "k-1", UID: 2000000}
	if err := (backend.Backend{Name: "default"}).CheckBucketName(spec.Bucket); err != nil { // as a publication does
		return served{}, fault.Field("volume_context.bucketName", "%w", err)
	}
	in := s.r.invocation(m, service{cl, backend.Backend{Name: "default"}, backend.BucketInfo{Name: spec.Bucket, Region: spec.Region,
		Owner: spec.ExpectedBucketOwner}},
		options)
	return served{s.got, spec, cl.Command(in).Argv}, nil
}

// refusedAt checks that an error is Invalid and names the field, or an element of it.
func refusedAt(t *testing.T, what string, err error, fields ...string) {
	t.Helper()
	f := (*fault.Error)(nil)
	if !errors.As(err, &f) || f.Kind != fault.Invalid || !slices.ContainsFunc(fields,
		func(field string) bool { return f.Field == field || strings.HasPrefix(f.Field, field+"[") }) {
		t.Errorf("%s: %v, want InvalidArgument of %q", what, err, fields)
	}
}

var clients = []string{"mountpoint-s3", "rclone"}

// edge is a value of an attribute, and what it leads to with each client: an argument of the command line, or a part of the mount's spec.
// "-" is a refusal, "" the attribute of the request alone, and "!" before an argument means that there is none.
type edge struct{ value, mountpoint, rclone string }

func (e edge) of(clientName string) string {
	if clientName == "rclone" {
		return e.rclone
	}
	return e.mountpoint
}

func alike(outcome string, values ...string) (edges []edge) {
	for _, v := range values {
		edges = append(edges, edge{v, outcome, outcome})
	}
	return edges
}

// edges are the values of each attribute at the limits of its range and beyond.
func edges() map[string][]edge {
	all := func(lists ...[]edge) []edge { return slices.Concat(lists...) }
	refused := func(values ...string) []edge { return alike("-", append(values, "", " ", "\x01")...) }
	identity := func(flag string) []edge {
		return all([]edge{{"0", "-", flag + "=0"}}, alike(flag+"=1", "1"), alike(flag+"=65534", "65534"), alike(flag+"=2147483648", "2147483648"),
			alike(flag+"=4294967294", "4294967294"),
			refused("4294967295", "4294967296", "-1", "+1", "01", "0x10", "1e3", " 1", "1 ", "root", "1.0", "１"))
	}
	mode := func(flag string) []edge {
		return all(alike(flag+"=0000", "0", "0000"), alike(flag+"=0755", "755", "0755"), alike(flag+"=0777", "0777"),
			refused("1777", "0o755", "00755", "888", "-1", "+755", " 755", "rwxr-xr-x", "493"))
	}
	flag := func(on string) []edge {
		return all(alike(on, "true"), alike("", "false"), refused("True", "TRUE", "1", "0", "yes", "on", " true", "true "))
	}
	none := refused("0", "-1s", "90", "1e3", "NaN", "1d", "1h ", "9999h", "1.5s", "infinite")
	bytes := []string{"0", "-1Gi", "1e3", "NaN", "1.5Gi", "1GB", "1 Gi", "05Mi", "9223372036854775808", "9999999Ti", "1Gi "}
	return map[string][]edge{
		"backend": all(alike(`"backend":"minio"`, "minio"), refused("Minio", "-a", "a_b", strings.Repeat("b", 33))),
		"bucketName": all([]edge{{"my.bucket", "my.bucket", "--bucket=my.bucket"}},
			refused("s3://b/p", "arn:aws:s3:us-east-1:1:accesspoint/x", "a", "Bucket", "a..b", "b.", "127.0.0.1", strings.Repeat("b", 64), "b/p")),
		"prefix": all(alike("--prefix=a/", "a", "a/"), alike("!--prefix", ""), alike("--prefix=-o x/", "-o x"), alike("--prefix=größe/", "größe/"),
			alike("--prefix=a\"b/", `a"b`), alike(`--prefix="a"/`, `"a"/`),
			alike("--prefix="+strings.Repeat("p", 1022)+"/", strings.Repeat("p", 1022)),
			alike("-", strings.Repeat("p", 1023), "/", "/a", "a//b", "..", "a/../b", "./a", ".s3-csi/", ".s3-csi", "a\nb", "a\x00", "a\u2028", `"a"`, `'a'`)),
		"snapshot": all(alike("--prefix=.s3-csi/snapshots/s@1/data/", "s@1"),
			refused("s", "s@0", "s@01", "s@10000", "@1", "s/x@1", strings.Repeat("s", 41)+"@1")),
		"expectedBucketOwner": all([]edge{{"111122223333", "--expected-bucket-owner=111122223333", `"expectedBucketOwner":"111122223333"`}},
			refused("11112222333", "1111222233334", "11112222333x", " 111122223333", "1111-2222-3333")),
		"region": all(alike("--region=eu-west-1", "eu-west-1"), alike("--region=RegionOne", "RegionOne"),
			refused("eu west", "-eu", "eu/west", strings.Repeat("r", 65))),
		"client":      all(alike("-", "nosuch", "mount-s3", "Rclone", "", " ", "\x01", "rclone ")),
		"credentials": all(alike(`"source":"driver"`, "driver"), refused("Driver", "pod", "none", "driver ")),
		"roleARN": all(alike(`"roleARN":"arn:aws:iam::111122223333:role/r"`, "arn:aws:iam::111122223333:role/r"),
			refused("r", "arn:aws:iam::111122223333:user/u", "arn:aws:iam::111122223333:role/", "arn:aws:iam::111122223333:role/${x}",
				"arn:aws:iam::111122223333:role/r\n")),
		"scope": all(alike(`"scope":"required"`, "required"), alike(`"scope":"off"`, "off"), refused("Off", "false", "none")),
		"sessionDuration": all(alike(`"sessionDuration":1000000000`, "1s", "1000ms"), alike(`"sessionDuration":129600000000000`, "36h", "2160m"), none,
			alike("-", "36h1s", "999ms")),
		"uid": identity("--uid"), "gid": identity("--gid"), "dirMode": mode("--dir-mode"), "fileMode": mode("--file-mode"),
		"readOnly": flag(`"readOnly":true`),
		"memoryLimit": all([]edge{{"640Mi", `"memoryLimit":671088640`, `"memoryLimit":671088640`}, {"639Mi", "-", `"memoryLimit":670040064`},
			{"128Mi", "-", `"memoryLimit":134217728`}, {"127Mi", "-", "-"}},
			alike(`"memoryLimit":1000000000`, "1G", "1000M", "1000000000"), refused(bytes...)),
		"cpuWeight": all(alike(`"cpuWeight":1`, "1"), alike(`"cpuWeight":10000`, "10000"), refused("0", "10001", "-1", "1e3", "100%", "0x10", " 1", "01")),
		"tasksMax":  all(alike(`"tasksMax":64`, "64"), alike(`"tasksMax":4194304`, "4194304"), refused("0", "31", "63", "4194305", "-1", "1e3", "infinity", "064")),
		"cache": all([]edge{{"true", "--max-cache-size=1024", "--read-cache=true"}, {"false", "!--cache=", "!--read-cache"},
			{"emptyDir", "--max-cache-size=1024", "--read-cache=true"}, {"", "!--cache=", "!--read-cache"}}, alike("-", "True", "yes", "1", " true", "memory")),
		"cacheSize": all([]edge{{"1Mi", "--max-cache-size=1", "--cache-size=1Mi"}, {"1500K", "--max-cache-size=1", "--cache-size=1500000"},
			{"16Ti", "--max-cache-size=16777216", "--cache-size=16Ti"}}, refused(bytes...), refused("1048575", "17Ti")),
		"consistency": all([]edge{{"relaxed", "--metadata-ttl=60", "--dir-cache-time=1m0s"}, {"close-to-open", "!--metadata-ttl", "!--dir-cache-time"}},
			refused("Relaxed", "strict", "none")),
		"linger": all(alike("", "1s", "24h"), none, alike("-", "24h1s", "500ms")),
		"usage":  all(alike("", "10m", "168h", "off"), none, alike("-", "9m59s", "168h1s", "Off", "false")),
		"mountOptions": all(alike("--debug", "debug", "--debug", "debug=true"), alike("!--debug", "debug=false", ""),
			alike("-", "debug,debug", "debug,,debug", ",debug", "debug,", "debug, debug", "debug=", "-d", "-o debug", "debug true", "DEBUG", "debug=True", "nosuch",
				`debug="true`, "read-only", "ro", "rw", "uid=1", "umask=022", "allow-root", "allow_other", " ", "\x01")),
	}
}

// Each attribute of the table, at the edges of its range, is part of what each client is started with, or is refused by name; in a class as
// in a volume. An attribute without edges fails the test.
func TestAttributes_AreHonouredOrRefusedWithEachClient(t *testing.T) {
	s, table := newSweep(t), edges()
	companions := map[string]map[string]string{"cacheSize": {"cache": "true"}}
	for _, doc := range volume.ParameterDocs() {
		if doc.Scope == volume.ScopeClass {
			continue
		}
		accepted, refused := 0, 0
		for _, e := range table[doc.Name] {
			for _, c := range clients {
				what, want := fmt.Sprintf("%s: %q with %s", doc.Name, e.value, c), e.of(c)
				context := map[string]string{doc.Name: e.value}
				for key, value := range companions[doc.Name] {
					context[key] = value
				}
				got, err := s.publish(c, context, nil)
				if want == "-" {
					refused++
					refusedAt(t, what, err, "volume_context."+doc.Name, "mountOptions")
				} else if accepted++; err != nil {
					t.Errorf("%s: %v", what, err)
				} else {
					got.shows(t, what, want)
					got.keeps(t, what, doc, e.value)
				}
				if doc.Scope != volume.ScopeBoth || slices.Contains([]string{"backend", "bucketName", "prefix"}, doc.Name) || e.value == "emptyDir" ||
					doc.Name == "cache" && e.value == "" {
					continue
				}
				// The same parser, so that the CO learns it before a volume is made. The client's own bounds are the controller's to check.
				context["bucketName"] = "bucket"
				if _, classErr := volume.ParseParameters(context, "v"); classErr != nil && want != "-" {
					t.Errorf("%s: refused in a class: %v", what, classErr)
				}
			}
		}
		if accepted == 0 && doc.Name != "client" || refused == 0 {
			t.Errorf("attribute %s has %d values that are honoured and %d that are refused in the table of this test", doc.Name, accepted, refused)
		}
	}
}

// shows checks that an outcome is in the command line or the spec.
func (s served) shows(t *testing.T, what, want string) {
	t.Helper()
	absent, ok := strings.CutPrefix(want, "!")
	switch {
	case ok:
		if i := slices.IndexFunc(s.argv, func(arg string) bool { return strings.HasPrefix(arg, absent) }); i >= 0 {
			t.Errorf("%s: the client is started with %s", what, s.argv[i])
		}
	case strings.HasPrefix(want, `"`):
		if !strings.Contains(s.spec.Encode(), want) {
			t.Errorf("%s: the spec lacks %s: %s", what, want, s.spec.Encode())
		}
	case want != "" && !slices.Contains(s.argv, want):
		t.Errorf("%s: the client is started without %s: %q", what, want, s.argv)
	}
}

// keeps checks that the request has the attribute, whatever its spelling.
func (s served) keeps(t *testing.T, what string, doc volume.ParameterDoc, value string) {
	t.Helper()
	context := (volume.Parameters{Node: s.Attributes}).Context()
	if place := slices.Contains([]string{"backend", "bucketName", "prefix", "snapshot"}, doc.Name); (context[doc.Name] == "") != (place || value == "" ||
		value == "false") {
		t.Errorf("%s: the request has %q", what, context[doc.Name])
	}
}

// optionEdges are the values of an option by its type: those that are accepted, with their argument ("": none), and those that are not.
func optionEdges(t *testing.T, name string, o client.OptionType) (accepted map[string]string, refused []string) {
	t.Helper()
	arg := "--" + name
	accepted, refused = map[string]string{}, []string{name + "=", name + "= ", name + "=\x01", name + "=null", name + `="`}
	with := func(value string) { accepted[name+"="+value] = arg + "=" + value }
	bad := func(values ...string) {
		for _, v := range values {
			refused = append(refused, name+"="+v)
		}
	}
	if o.Kind != client.Flag {
		refused = append(refused, name)
	}
	for _, word := range o.Words {
		with(word)
		bad(word+"x", " "+word)
	}
	switch o.Kind {
	case client.Flag:
		accepted[name], accepted[name+"=true"], accepted[name+"=false"] = arg, arg, "!"+arg
		bad("True", "1", "yes", "on", "0", "false ")
	case client.Integer:
		with(strconv.FormatInt(o.Min, 10))
		with(strconv.FormatInt(o.Max, 10))
		bad(strconv.FormatInt(o.Min-1, 10), strconv.FormatInt(o.Max+1, 10), "1e3", "NaN", "0x10", "+5", "5.0", "05", "5 ", "9223372036854775808", "5Mi")
	case client.Duration:
		with((time.Duration(o.Min) * time.Millisecond).String())
		with((time.Duration(o.Max) * time.Millisecond).String())
		bad((time.Duration(o.Max+1) * time.Millisecond).String(), "-1s", "90", "1e3s", "NaN", "1d", "1.5s", "5s ")
	case client.Size:
		with(volume.FormatQuantity(uint64(o.Min)))
		with(volume.FormatQuantity(uint64(o.Max)))
		bad("17Ti", "-1Mi", "5", "1e3Mi", "NaN", "1.5Gi", "5M", "5MB", "05Mi", "5Mi ")
	case client.Enum:
		bad("nosuch")
	case client.Text:
		sample, ok := map[string]string{"storage-class": "STANDARD_IA", "sse-kms-key-id": "arn:aws:kms:eu-west-1:111122223333:key/k"}[name]
		if !ok {
			t.Errorf("option %s has no sample in this test", name)
			return nil, nil
		}
		with(sample)
		accepted[name+`="`+sample+`"`] = arg + "=" + sample
		bad("a b", "-a", "größe", sample+"\u200b", strings.Repeat("A", 700))
	}
	return accepted, refused
}

// Each option of each client reaches its command line or is refused, whether it is an attribute or a mount flag, of a static volume or of one
// that the driver created.
func TestOptions_ReachTheClientOrAreRefused(t *testing.T) {
	s := newSweep(t)
	companions := map[string]string{
		"sse-kms-key-id": "sse=aws:kms", "part-size": "memory-target=65536", "read-part-size": "memory-target=65536", "write-part-size": "memory-target=65536",
	}
	for _, c := range clients {
		cl, err := client.Get(c)
		if err != nil {
			t.Fatal(err)
		}
		for name, o := range cl.Options {
			var more []string
			companion, _, _ := strings.Cut(companions[name], "=")
			if _, has := cl.Options[companion]; has {
				more = []string{companions[name]}
			}
			for carrier, publish := range map[string]func(option string) (served, error){
				"the attribute": func(option string) (served, error) {
					return s.publish(c, map[string]string{"mountOptions": strings.Join(append(more, option), ",")}, nil)
				},
				"a static volume's flag": func(option string) (served, error) {
					return s.publish(c, nil, func(r *csi.NodePublishVolumeRequest) { r.VolumeCapability.GetMount().MountFlags = append(more, option) })
				},
				"a flag": func(option string) (served, error) {
					return s.publish(c, nil, func(r *csi.NodePublishVolumeRequest) {
						r.VolumeId = "default:bucket/v/"
						r.VolumeCapability.GetMount().MountFlags = append(more, option)
					})
				},
			} {
				accepted, refused := optionEdges(t, name, o)
				for option, want := range accepted {
					if want == "!--rename" {
						want = "--no-rename"
					} else if want == "--rename" {
						want = "!--no-rename" // on by default
					}
					got, err := publish(option)
					if err != nil {
						t.Errorf("%s as %s of %s: %v", option, carrier, c, err)
						continue
					}
					got.shows(t, option+" as "+carrier+" of "+c, want)
				}
				for _, option := range append(refused, name+","+name, name+"=a,"+name+"=b", strings.ToUpper(name)) {
					if _, value, _ := strings.Cut(option, "="); carrier == "a static volume's flag" && strings.Trim(value, " ") != value {
						continue // such a flag is read without the spaces around its value
					}
					_, err := publish(option)
					refusedAt(t, option+" as "+carrier+" of "+c, err, "mountOptions", "volume_context.mountOptions", "volume_capability.mount.mount_flags")
				}
			}
		}
		for name := range cl.Refused {
			_, err := s.publish(c, map[string]string{"mountOptions": name}, nil)
			refusedAt(t, name+" of "+c, err, "mountOptions", "volume_context.mountOptions")
		}
	}
}

// An identity comes from the volume, else from the pod's fsGroup, else from the mount; each client shows the same.
func TestIdentity_HasOnePrecedence(t *testing.T) {
	s := newSweep(t)
	for _, tt := range []struct {
		group   string
		context map[string]string
		flags   []string
		want    []string // arguments; "-": refused
		fields  []string
	}{
		{"", nil, nil, []string{"--uid=2000000", "--gid=2000000", "--dir-mode=0777", "--file-mode=0666"}, nil},
		{"65534", nil, nil, []string{"--uid=2000000", "--gid=65534", "--dir-mode=0770", "--file-mode=0660"}, nil},
		{"4294967294", nil, nil, []string{"--gid=4294967294"}, nil},
		{"5", map[string]string{"gid": "7", "fileMode": "0600"}, nil, []string{"--gid=7", "--dir-mode=0770", "--file-mode=0600"}, nil},
		{"5", nil, []string{"gid=7", "dir-mode=0700"}, []string{"--gid=7", "--dir-mode=0700", "--file-mode=0660"}, nil},
		{"", map[string]string{"uid": "7"}, []string{"uid=7"}, []string{"--uid=7"}, nil},
		{"", map[string]string{"uid": "7"}, []string{"uid=8"}, []string{"-"}, []string{"volume_capability.mount.mount_flags"}},
		{"", map[string]string{"readOnly": "true"}, []string{"read-only=false"}, []string{"-"}, []string{"volume_capability.mount.mount_flags"}},
		{"", nil, []string{"uid=7", "--uid 7"}, []string{"-"}, []string{"volume_capability.mount.mount_flags"}},
		{"", nil, []string{"umask=022"}, []string{"-"}, []string{"mountOptions"}},
		{"4294967295", nil, nil, []string{"-"}, []string{"volume_capability.mount.volume_mount_group"}},
		{"-1", nil, nil, []string{"-"}, []string{"volume_capability.mount.volume_mount_group"}},
		{"0x5", nil, nil, []string{"-"}, []string{"volume_capability.mount.volume_mount_group"}},
		{"05", nil, nil, []string{"-"}, []string{"volume_capability.mount.volume_mount_group"}},
		{" 5", nil, nil, []string{"-"}, []string{"volume_capability.mount.volume_mount_group"}},
	} {
		for _, c := range clients {
			what := fmt.Sprintf("group %q, %v, %q with %s", tt.group, tt.context, tt.flags, c)
			got, err := s.publish(c, tt.context, func(r *csi.NodePublishVolumeRequest) {
				r.VolumeCapability.GetMount().VolumeMountGroup, r.VolumeCapability.GetMount().MountFlags = tt.group, tt.flags
			})
			if tt.want[0] == "-" {
				refusedAt(t, what, err, tt.fields...)
				continue
			}
			if err != nil {
				t.Errorf("%s: %v", what, err)
				continue
			}
			for _, arg := range tt.want {
				got.shows(t, what, arg)
			}
		}
	}
}
