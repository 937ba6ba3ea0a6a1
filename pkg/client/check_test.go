package client

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// options reads "name" and "name=value".
func options(texts ...string) []volume.Option {
	var out []volume.Option
	for _, t := range texts {
		name, value, has := strings.Cut(t, "=")
		out = append(out, volume.Option{Name: name, Value: value, HasValue: has})
	}
	return out
}

func get(t testing.TB, name string) Client {
	t.Helper()
	c, err := Get(name)
	must(t, err)
	return c
}

func TestGetKnowsTheDefaultAndNamesTheKnownOnes(t *testing.T) {
	if c := get(t, ""); c.Name != Default {
		t.Errorf(`Get("") = %s, want %s`, c.Name, Default)
	}
	_, err := Get("s3fs")
	if !fault.Is(err, fault.Invalid) {
		t.Fatalf("Get(s3fs) = %v, want an Invalid error", err)
	}
	for _, c := range All() {
		if !strings.Contains(err.Error(), c.Name) {
			t.Errorf("%q does not name %s", err, c.Name)
		}
	}
}

func TestCheckAcceptsWhatTheTableSays(t *testing.T) {
	for client, lists := range map[string][][]string{
		"mountpoint-s3": {
			{},
			{"allow-delete", "allow-overwrite=true", "incremental-upload"},
			{"allow-delete=false"},
			{"metadata-ttl=minimal"}, {"metadata-ttl=indefinite"}, {"metadata-ttl=300", "negative-metadata-ttl=0"},
			{"sse=aws:kms", "sse-kms-key-id=arn:aws:kms:eu-west-1:111122223333:key/1234abcd-12ab-34cd-56ef-1234567890ab"},
			{"sse-kms-key-id=arn:aws-us-gov:kms:us-gov-west-1:111122223333:key/mrk-1", "sse=aws:kms:dsse"},
			{"sse=AES256"}, {"storage-class=GLACIER_IR"}, {"upload-checksums=off"},
			{"memory-target=512", "max-threads=1", "maximum-throughput-gbps=100"},
			{"read-part-size=5242880", "write-part-size=67108864"}, {"part-size=16777216"},
			{"write-part-size=1073741824", "memory-target=4096"},
			{"max-cache-size=2048"},
		},
		"rclone": {
			{}, {"cache-size=64Mi"}, {"cache-size=1Ti", "read-cache"}, {"write-back=100ms", "dir-cache-time=1m30s", "read-ahead=0"},
			{"sse=aws:kms", "sse-kms-key-id=arn:aws:kms:eu-west-1:111122223333:key/k", "transfers=8", "part-size=64Mi"},
		},
	} {
		for _, list := range lists {
			if err := get(t, client).Check(options(list...), "mountOptions"); err != nil {
				t.Errorf("%s refuses %q: %v", client, list, err)
			}
		}
	}
}

func TestCheckRefusesAndSaysWhereAndWhy(t *testing.T) {
	tests := []struct {
		client, list, field, want string
	}{
		// Names that are the driver's, each with what to use instead.
		{"mountpoint-s3", "allow-delete endpoint-url=http://evil.example", "m[1]", "backend"},
		{"mountpoint-s3", "region=eu-west-1", "m[0]", "config file"},
		{"mountpoint-s3", "prefix=other/", "m[0]", "parameter prefix"},
		{"mountpoint-s3", "uid=0", "m[0]", "volume parameter"},
		{"mountpoint-s3", "read-only", "m[0]", "readOnly"},
		{"mountpoint-s3", "READ_ONLY", "m[0]", "readOnly"},
		{"mountpoint-s3", "profile=admin", "m[0]", "parameter credentials"},
		{"mountpoint-s3", "no-sign-request", "m[0]", "parameter credentials"},
		{"mountpoint-s3", "log-directory=/etc", "m[0]", "log files"},
		{"mountpoint-s3", "cache=/etc", "m[0]", "parameters cache and cacheSize"},
		{"mountpoint-s3", "expected-bucket-owner=111122223333", "m[0]", "expectedBucketOwner"},
		{"mountpoint-s3", "debug-crt", "m[0]", "debug"},
		{"mountpoint-s3", "ca-bundle=/etc/shadow", "m[0]", "backend"},
		{"rclone", "endpoint=http://evil.example", "m[0]", "backend"},
		{"rclone", "cache-dir=/etc", "m[0]", "directory"},
		{"rclone", "fuse-fd=0", "m[0]", "driver"},
		{"rclone", "config=/etc/passwd", "m[0]", "configuration"},
		// Unknown names.
		{"mountpoint-s3", "alow-delete", "m[0]", `"allow-delete"`},
		{"mountpoint-s3", "allow_delete", "m[0]", `"allow-delete"`},
		{"mountpoint-s3", "o=allow_other", "m[0]", "list each option separately"},
		{"mountpoint-s3", "ox", "m[0]", "no option"},
		{"mountpoint-s3", "", "m[0]", "no option"},
		{"mountpoint-s3", "--allow-delete", "m[0]", "no option"},
		{"rclone", "cachesize=1Gi", "m[0]", `"cache-size"`},
		{"rclone", "allow-delete", "m[0]", "no option"},
		// Values.
		{"mountpoint-s3", "allow-delete=yes", "m[0]", "true or false"},
		{"mountpoint-s3", "allow-delete=", "m[0]", "needs a value"},
		{"mountpoint-s3", "max-threads", "m[0]", "needs a value"},
		{"mountpoint-s3", "max-threads=0", "m[0]", "from 1 to 256"},
		{"mountpoint-s3", "max-threads=+4", "m[0]", "from 1"},
		{"mountpoint-s3", "max-threads=04", "m[0]", "from 1"},
		{"mountpoint-s3", "max-threads=1e1", "m[0]", "from 1"},
		{"mountpoint-s3", "max-threads=99999999999999999999", "m[0]", "from 1"},
		{"mountpoint-s3", "max-threads=4\n", "m[0]", "from 1"},
		{"mountpoint-s3", "memory-target=511", "m[0]", "from 512"},
		{"mountpoint-s3", "read-part-size=5242879", "m[0]", "from 5242880"}, // the client's libraries refuse it
		{"mountpoint-s3", "metadata-ttl=0", "m[0]", "minimal"},
		{"mountpoint-s3", "sse=aws:kms ", "m[0]", "one of"},
		{"mountpoint-s3", "storage-class=-x", "m[0]", "capital letters"},
		{"mountpoint-s3", "storage-class=STANDARD\nx", "m[0]", "capital letters"},
		{"mountpoint-s3", "sse=aws:kms sse-kms-key-id=alias/x", "m[1]", "ARN"},
		{"rclone", "cache-size=1G", "m[0]", "512Mi"},
		{"rclone", "cache-size=9999999999Ti", "m[0]", "512Mi"},
		{"rclone", "write-back=0s", "m[0]", "from 100ms to 1h0m0s"},
		{"rclone", "write-back=-1s", "m[0]", "from 100ms"},
		{"rclone", "dir-cache-time=999999999h999999999h", "m[0]", "from 0s to 24h"},
		{"rclone", "sse=aws:kms:dsse", "m[0]", "one of"},
		{"rclone", "sse-kms-key-id=arn:aws:kms:eu-west-1:111122223333:key/k", "m[0]", "needs the option sse"},
		// Options against each other.
		{"mountpoint-s3", "allow-delete debug allow-delete=false", "m[2]", "first as m[0]"},
		{"mountpoint-s3", "part-size=8388608 read-part-size=8388608", "m[1]", "part-size"},
		{"mountpoint-s3", "sse-kms-key-id=arn:aws:kms:eu-west-1:111122223333:key/k", "m[0]", "needs the option sse"},
		{"mountpoint-s3", "sse=AES256 sse-kms-key-id=arn:aws:kms:eu-west-1:111122223333:key/k", "m[1]", "needs the option sse"},
		{"mountpoint-s3", "write-part-size=1073741824", "m[0]", "raise memory-target"},
		{"mountpoint-s3", "memory-target=512 part-size=524288000", "m[1]", "raise memory-target"},
	}
	for _, tt := range tests {
		t.Run(tt.client+" "+tt.list, func(t *testing.T) {
			err := get(t, tt.client).Check(options(strings.Split(tt.list, " ")...), "m")
			if strings.HasSuffix(tt.list, " ") { // the space belongs to the value
				err = get(t, tt.client).Check(options(tt.list), "m")
			}
			if !fault.Is(err, fault.Invalid) {
				t.Fatalf("Check = %v, want an Invalid error", err)
			}
			if got := err.Error(); !strings.HasPrefix(got, tt.field+": ") || !strings.Contains(got, tt.want) {
				t.Errorf("Check says %q, want it to start with %q and to hold %q", got, tt.field, tt.want)
			}
		})
	}
}

func TestRefusalsDoNotRepeatValuesOfUnknownNames(t *testing.T) {
	for _, c := range All() {
		for _, o := range []string{"secret-access-key=hunter2", "profile=hunter2", "paswd=hunter2"} {
			if err := c.Check(options(o), "m"); err == nil || strings.Contains(err.Error(), "hunter2") {
				t.Errorf("%s on %s: %v", c.Name, o, err)
			}
		}
	}
}

func TestLongTextsAreShortenedInErrors(t *testing.T) {
	for _, o := range []string{strings.Repeat("é", 1000), "storage-class=" + strings.Repeat("x", 1000)} {
		if err := get(t, Default).Check(options(o), "m"); err == nil || len(err.Error()) > 1000 {
			t.Errorf("got %d bytes: %v", len(fmt.Sprint(err)), err)
		}
	}
}

func TestCheckAll_ReadsOptionsOfAllPlacesTogether(t *testing.T) {
	c := get(t, "mountpoint-s3")
	const key = "sse-kms-key-id=arn:aws:kms:eu-west-1:111122223333:key/k"
	for _, tt := range []struct {
		class, flags []string
		field        string // of the error; "": none
	}{
		{[]string{"sse=aws:kms"}, []string{key}, ""},
		{[]string{key}, []string{"debug", "sse=aws:kms"}, ""},
		{[]string{"debug"}, []string{key}, "flags[0]"},
		{[]string{"part-size=8388608"}, []string{"debug", "read-part-size=8388608"}, "flags[1]"},
		{[]string{"debug", "read-part-size=8388608"}, []string{"part-size=8388608"}, "class[1]"},
		{[]string{"debug"}, []string{"debug"}, "flags[0]"},
		{[]string{"rename"}, []string{"allow-delete=false"}, "class[0]"},
		{[]string{"sse=AES256"}, []string{"rename=true"}, "flags[0]"},
		{[]string{"sse=AES256"}, []string{"rename=false"}, ""},
		{[]string{"max-threads=8,debug"}, nil, "class[0]"},
	} {
		f, err := (*fault.Error)(nil), c.CheckAll(Given{"class", options(tt.class...)}, Given{"flags", options(tt.flags...)})
		if tt.field == "" && err != nil || tt.field != "" && (!errors.As(err, &f) || f.Kind != fault.Invalid || f.Field != tt.field) {
			t.Errorf("%q and %q: %v, want an error of %q", tt.class, tt.flags, err, tt.field)
		}
	}
}

func TestOwnersThatAClientCannotShowAreRefused(t *testing.T) {
	zero, one := uint32(0), uint32(1)
	mp, rc := get(t, "mountpoint-s3"), get(t, "rclone")
	for _, err := range []error{mp.CheckOwner(nil, nil, "p"), mp.CheckOwner(&one, &one, "p"), rc.CheckOwner(&zero, &zero, "p")} {
		if err != nil {
			t.Error(err)
		}
	}
	for want, err := range map[string]error{"p.uid: ": mp.CheckOwner(&zero, &one, "p"), "p.gid: ": mp.CheckOwner(nil, &zero, "p")} {
		if !fault.Is(err, fault.Invalid) || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("got %v, want an Invalid error for %s", err, want)
		}
	}
}

func TestLimitsThatFitPass(t *testing.T) {
	for client, tests := range map[string][]struct {
		a    volume.Attributes
		list []string
	}{
		"mountpoint-s3": {
			{volume.Attributes{}, nil},
			{volume.Attributes{MemoryLimit: 640 << 20, TasksMax: 64, CPUWeight: 1}, nil},
			{volume.Attributes{MemoryLimit: 640 << 20}, []string{"memory-target=512"}},
			{volume.Attributes{MemoryLimit: 1280 << 20}, []string{"memory-target=1024", "part-size=67108864"}},
			{volume.Attributes{MemoryLimit: 1 << 60}, []string{"memory-target=1048576"}},
			{volume.Attributes{Cache: true, CacheSize: 1 << 20}, []string{"metadata-ttl=5"}},
			{volume.Attributes{}, []string{"max-cache-size=100"}},
			{volume.Attributes{Consistency: volume.ConsistencyRelaxed}, []string{"metadata-ttl=300", "negative-metadata-ttl=minimal"}},
			{volume.Attributes{Consistency: volume.ConsistencyCloseToOpen, Cache: true}, []string{"metadata-ttl=minimal", "negative-metadata-ttl=0"}},
			{volume.Attributes{ReadOnly: true}, []string{"metadata-ttl=minimal"}},
		},
		"rclone": {
			{volume.Attributes{MemoryLimit: 128 << 20, TasksMax: 64, Cache: true}, []string{"write-back=5s"}},
			{volume.Attributes{}, []string{"read-cache", "cache-size=1Gi"}},
			{volume.Attributes{Consistency: volume.ConsistencyRelaxed}, []string{"dir-cache-time=10s", "server-mtime=false"}},
			{volume.Attributes{Consistency: volume.ConsistencyCloseToOpen}, []string{"dir-cache-time=0s", "server-mtime"}},
		},
	} {
		c := get(t, client)
		for _, tt := range tests {
			must(t, c.Check(options(tt.list...), "m"))
			if err := c.CheckLimits(tt.a, options(tt.list...), "p"); err != nil {
				t.Errorf("%s, %+v, %q: %v", client, tt.a, tt.list, err)
			}
		}
	}
}

func TestLimitsThatAClientCannotLiveWithAreRefused(t *testing.T) {
	for _, tt := range []struct {
		client string
		a      volume.Attributes
		list   string
		want   []string // the first is how the error begins
	}{
		{"mountpoint-s3", volume.Attributes{MemoryLimit: 640<<20 - 1}, "", []string{"p.memoryLimit: ", "mountpoint-s3", "at least 640Mi"}},
		{"mountpoint-s3", volume.Attributes{MemoryLimit: 512 << 20}, "", []string{"p.memoryLimit: 512Mi"}},
		{"mountpoint-s3", volume.Attributes{MemoryLimit: 1279 << 20}, "memory-target=1024", []string{"p.memoryLimit: ", "memory-target=1024", "at least 1280Mi"}},
		{"mountpoint-s3", volume.Attributes{MemoryLimit: 640 << 20}, "memory-target=513", []string{"p.memoryLimit: ", "at least 642Mi"}},
		{"mountpoint-s3", volume.Attributes{MemoryLimit: 640 << 20}, "part-size=268435456", []string{"p.memoryLimit: ", "part-size", "512 MiB"}},
		{"mountpoint-s3", volume.Attributes{TasksMax: 63}, "", []string{"p.tasksMax: 63", "at least 64"}},
		{"mountpoint-s3", volume.Attributes{Cache: true}, "max-cache-size=5", []string{"p.cache: ", "max-cache-size", "remove"}},
		{"rclone", volume.Attributes{MemoryLimit: 127 << 20}, "", []string{"p.memoryLimit: ", "rclone", "at least 128Mi"}},
		{"rclone", volume.Attributes{TasksMax: 32}, "", []string{"p.tasksMax: "}},
		{"rclone", volume.Attributes{Cache: true}, "read-cache=false", []string{"p.cache: ", "read-cache"}},
		{"mountpoint-s3", volume.Attributes{Consistency: volume.ConsistencyRelaxed}, "metadata-ttl=minimal",
			[]string{"p.consistency: relaxed", "metadata-ttl", "remove"}},
		{"mountpoint-s3", volume.Attributes{Consistency: volume.ConsistencyCloseToOpen}, "metadata-ttl=1", []string{"p.consistency: close-to-open", "metadata-ttl"}},
		{"mountpoint-s3", volume.Attributes{Consistency: volume.ConsistencyCloseToOpen}, "metadata-ttl=indefinite", []string{"p.consistency: "}},
		{"mountpoint-s3", volume.Attributes{Consistency: volume.ConsistencyCloseToOpen}, "negative-metadata-ttl=5",
			[]string{"p.consistency: ", "negative-metadata-ttl"}},
		{"rclone", volume.Attributes{Consistency: volume.ConsistencyRelaxed}, "dir-cache-time=9s", []string{"p.consistency: relaxed", "dir-cache-time"}},
		{"rclone", volume.Attributes{Consistency: volume.ConsistencyCloseToOpen}, "dir-cache-time=1h", []string{"p.consistency: close-to-open", "dir-cache-time"}},
		{"rclone", volume.Attributes{Cache: true, CacheSize: 1 << 30}, "cache-size=2Gi", []string{"p.cache: ", "cache-size"}},
	} {
		var list []volume.Option
		if tt.list != "" {
			list = options(tt.list)
		}
		must(t, get(t, tt.client).Check(list, "m"))
		err := get(t, tt.client).CheckLimits(tt.a, list, "p")
		if !fault.Is(err, fault.Invalid) || !strings.HasPrefix(err.Error(), tt.want[0]) {
			t.Errorf("%s, %+v, %q: %v, want an Invalid error that begins with %q", tt.client, tt.a, tt.list, err, tt.want[0])
			continue
		}
		for _, w := range tt.want {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%q does not hold %q", err, w)
			}
		}
	}
}

// What CheckLimits asks for is enough, and what the target leaves beside it is never less than what was promised.
func TestMountpointsMemoryTargetFitsItsLimit(t *testing.T) {
	c := get(t, "mountpoint-s3")
	for target := int64(mountpointLeast); target < 20000; target++ {
		limit := uint64(mountpointLimitFor(target) * mib)
		if got := mountpointTarget(limit); got < target {
			t.Fatalf("a target of %d MiB is said to fit %d bytes, which make one of %d", target, limit, got)
		}
		if limit > c.MinMemory && mountpointTarget(limit-uint64(mib)) >= target {
			t.Fatalf("a target of %d MiB fits less than %d bytes", target, limit)
		}
		if left := int64(limit) - mountpointTarget(limit)*mib; left < mountpointRoom*mib || left < int64(limit)/5 {
			t.Fatalf("a limit of %d bytes leaves %d", limit, left)
		}
	}
}

func TestNeedsMemoryIsTheLeastThatPasses(t *testing.T) {
	for _, tt := range []struct{ client, list string }{
		{"mountpoint-s3", ""},
		{"mountpoint-s3", "memory-target=512"},
		{"mountpoint-s3", "memory-target=1001"},
		{"mountpoint-s3", "memory-target=4096"},
		{"mountpoint-s3", "part-size=209715200"},
		{"mountpoint-s3", "part-size=400000001"},
		{"mountpoint-s3", "write-part-size=800000000"},
		{"mountpoint-s3", "memory-target=1048576"},
		{"rclone", ""},
		{"rclone", "part-size=64Mi"},
	} {
		c := get(t, tt.client)
		var list []volume.Option
		if tt.list != "" {
			list = options(tt.list)
		}
		must(t, c.Check(list, "m"))
		least := c.NeedsMemory(list)
		if err := c.CheckLimits(volume.Attributes{MemoryLimit: least}, list, "p"); err != nil {
			t.Errorf("%s %s: %d bytes are too few: %v", tt.client, tt.list, least, err)
		}
		if err := c.CheckLimits(volume.Attributes{MemoryLimit: least - uint64(mib)}, list, "p"); err == nil {
			t.Errorf("%s %s: a MiB less than %d bytes is enough", tt.client, tt.list, least)
		}
	}
}

// samples are two good values of a type.
func samples(t *testing.T, o OptionType) []string {
	switch o.Kind {
	case Flag:
		return []string{"true", "false"}
	case Integer:
		return []string{fmt.Sprint(o.Min), fmt.Sprint(o.Max)}
	case Enum:
		return []string{o.Words[0], o.Words[len(o.Words)-1]}
	case Duration:
		return []string{fmt.Sprintf("%dms", o.Min), fmt.Sprintf("%dms", o.Max)}
	case Size:
		return []string{volume.FormatQuantity(uint64(o.Min)), volume.FormatQuantity(uint64(o.Max))}
	case Text:
		for _, s := range []string{"STANDARD", "arn:aws:kms:eu-west-1:111122223333:key/k"} {
			if o.Pattern.MatchString(s) {
				return []string{s}
			}
		}
	}
	t.Fatal("no sample")
	return nil
}

func TestEveryRowOfTheTablesIsSound(t *testing.T) {
	for _, c := range All() {
		for name, o := range c.Options {
			t.Run(c.Name+" "+name, func(t *testing.T) {
				if strings.Trim(name, "abcdefghijklmnopqrstuvwxyz-") != "" || strings.HasPrefix(name, "-") {
					t.Error("is no option name")
				}
				if _, both := c.Refused[name]; both {
					t.Error("is allowed and refused")
				}
				if o.Meaning == "" || o.Default == "" || o.Values() == "" {
					t.Error("says too little for the documents")
				}
				for _, bad := range []string{"", " ", "-", "--", "-1", "x y", "a\x00b", "a\nb", "é", "=", "--endpoint-url=x", "1 ", " 1"} {
					if o.takes(bad) {
						t.Errorf("takes %q", bad)
					}
				}
				for _, good := range samples(t, o) {
					if !o.takes(good) {
						t.Errorf("does not take %q", good)
					}
				}
			})
		}
		for name, reason := range c.Refused {
			err := c.Check(options(name+"=x"), "m")
			if err == nil || !strings.Contains(err.Error(), reason) {
				t.Errorf("%s on %s: %v", c.Name, name, err)
			}
		}
	}
}

// implied reports whether options change another argument: a cache has a directory, and it and a lifetime replace the lifetimes that
// the driver gives to a read-only mount.
func implied(name string, list []volume.Option) bool {
	by := map[string][]string{
		"cache":                 {"max-cache-size"},
		"metadata-ttl":          {"max-cache-size"},
		"negative-metadata-ttl": {"max-cache-size", "metadata-ttl"},
	}[name]
	return slices.ContainsFunc(list, func(o volume.Option) bool { return slices.Contains(by, o.Name) })
}

// FuzzCheckedOptionsChangeNothingElse promises that options that pass Check are on the command line as what they are,
// and that the rest of it is what it would have been without them.
func FuzzCheckedOptionsChangeNothingElse(f *testing.F) {
	for _, c := range All() {
		for _, name := range slices.Sorted(maps.Keys(c.Options)) {
			f.Add(c.Name, name, "true", true, "debug", "", false, false)
			f.Add(c.Name, name, "8388608", true, "cache-size", "1Gi", true, true)
		}
	}
	f.Add("mountpoint-s3", "storage-class", "STANDARD --endpoint-url=http://x", true, "sse", "aws:kms", true, false)
	f.Add("mountpoint-s3", "o", "x", true, "ox", "", false, false)
	f.Add("rclone", "cache-size", "1Gi\x00--endpoint=x", true, "--endpoint", "http://x", true, false)
	f.Fuzz(func(t *testing.T, client, name1, value1 string, has1 bool, name2, value2 string, has2, readOnly bool) {
		c, err := Get(client)
		if err != nil {
			return
		}
		list := []volume.Option{{Name: name1, Value: value1, HasValue: has1}, {Name: name2, Value: value2, HasValue: has2}}
		if c.Check(list, "m") != nil {
			if list = list[:1]; c.Check(list, "m") != nil {
				return
			}
		}
		in := invocation()
		in.ReadOnly = readOnly
		plain := c.Command(in)
		in.Options = list
		got := c.Command(in)
		if !slices.Equal(got.Env, plain.Env) {
			t.Errorf("the environment became %q", got.Env)
		}
		for _, a := range got.Argv {
			if strings.ContainsAny(a, "\x00\n\r\t ") {
				t.Errorf("an argument is %q", a)
			}
		}
		mine := func(arg string) bool {
			name, _, _ := strings.Cut(strings.TrimPrefix(arg, "--"), "=")
			return slices.ContainsFunc(list, func(o volume.Option) bool { return o.Name == name }) ||
				implied(name, list)
		}
		rest := slices.DeleteFunc(slices.Clone(got.Argv), mine)
		if want := slices.DeleteFunc(slices.Clone(plain.Argv), mine); !slices.Equal(rest, want) {
			t.Errorf("with %+v the rest of the command line became\n%q, was\n%q", list, rest, want)
		}
		for _, o := range list {
			n := 0
			for _, a := range got.Argv {
				if a == "--"+o.Name || strings.HasPrefix(a, "--"+o.Name+"=") {
					n++
				}
			}
			if n > 1 {
				t.Errorf("%s is %d times in %q", o.Name, n, got.Argv)
			}
		}
	})
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
