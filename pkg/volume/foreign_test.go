package volume

import (
	"reflect"
	"slices"
	"strings"
	"testing"
)

const flagsField = "volume_capability.mount.mount_flags"

// withFlags reads a static volume with mount flags.
func withFlags(flags ...string) (Reading, error) {
	return Read(Given{Handle: "s3-csi-driver-volume", Context: map[string]string{"bucketName": "shared"}, Flags: flags, FlagsField: flagsField,
		DriverName: "s3.csi.driver"})
}

// foreignCase is a volume for another driver.
type foreignCase struct {
	origin Origin
	name   string            // of its row
	given  map[string]string // attributes, or, for options of k8s-csi-s3, what else there is
	flags  []string
	want   Reading // without ID
	refuse string  // or words of the error
}

func TestWhatWasWrittenForOtherDriversIsMapped(t *testing.T) {
	attribute := func(name string, want Attributes, pairs ...string) foreignCase {
		return foreignCase{origin: OriginAWSAttribute, name: name, given: with(nil, pairs...), want: Reading{Attributes: want}}
	}
	flag := func(name string, want Attributes, flags ...string) foreignCase {
		return foreignCase{origin: OriginAWSOption, name: name, flags: flags, want: Reading{Attributes: want}}
	}
	legacy := func(name string, want Attributes, pairs ...string) foreignCase {
		return foreignCase{origin: OriginK8sS3, name: name, given: with(nil, pairs...), want: Reading{Attributes: want}}
	}
	option := func(name, text string, want Attributes) foreignCase {
		want.Client = "rclone"
		return foreignCase{origin: OriginRclone, name: name, given: with(nil, "mounter", "rclone", "options", text), want: Reading{Attributes: want}}
	}
	refused := func(c foreignCase, words string) foreignCase {
		c.want, c.refuse = Reading{}, words
		return c
	}
	ignored := func(c foreignCase, notes ...string) foreignCase {
		c.want.Ignored = notes
		return c
	}
	client := func(c foreignCase, options ...Option) foreignCase {
		c.want.Options = options
		return c
	}
	ours := func(options ...Option) Attributes { return Attributes{MountOptions: options} }
	cases := map[string]foreignCase{
		"the driver's credentials": attribute("authenticationSource", Attributes{Credentials: "driver"}, "authenticationSource", "driver"),
		"the pod's credentials":    attribute("authenticationSource", Attributes{Credentials: "workload"}, "authenticationSource", "pod"),
		"both say the same": attribute("authenticationSource", Attributes{Credentials: "workload"}, "authenticationSource", "pod", "credentials",
			"workload"),
		"no source is the default": attribute("authenticationSource", Attributes{}, "authenticationSource", ""),
		"a source that is none":    refused(attribute("authenticationSource", Attributes{}, "authenticationSource", "node"), "neither driver nor pod"),
		"two sources": refused(attribute("authenticationSource", Attributes{}, "authenticationSource", "pod", "credentials", "driver"),
			"contradicts credentials"),
		"a cache in a directory": attribute("cache", Attributes{Cache: true}, "cache", "emptyDir"),
		"a cache on a volume": ignored(attribute("cache", Attributes{Cache: true}, "cache", "ephemeral", "cacheEphemeralStorageClassName", "gp2"),
			"volume_context.cacheEphemeralStorageClassName: cacheEphemeralStorageClassName: caches are below the driver's --cache-dir"),
		"no cache":         attribute("cache", Attributes{}, "cache", ""),
		"a cache of ours":  attribute("cache", Attributes{Cache: true}, "cache", "true"),
		"an unknown cache": refused(attribute("cache", Attributes{}, "cache", "Memory"), "neither true nor false"),
		"a cache's bound": attribute("cacheEmptyDirSizeLimit", Attributes{Cache: true, CacheSize: 2 << 30}, "cache", "emptyDir",
			"cacheEmptyDirSizeLimit", "2Gi"),
		"a cache's bound with a dot": attribute("cacheEmptyDirSizeLimit", Attributes{Cache: true, CacheSize: 3 << 29}, "cache", "emptyDir",
			"cacheEmptyDirSizeLimit", "1.5Gi"),
		"a cache's bound in thousands": attribute("cacheEmptyDirSizeLimit", Attributes{Cache: true, CacheSize: 5000 * 1000}, "cache", "emptyDir",
			"cacheEmptyDirSizeLimit", "5000k"),
		"a bound that is none": refused(attribute("cacheEmptyDirSizeLimit", Attributes{}, "cache", "emptyDir", "cacheEmptyDirSizeLimit", "lots"),
			"is not an amount of bytes"),
		"a bound of nothing": refused(attribute("cacheEmptyDirSizeLimit", Attributes{}, "cache", "emptyDir", "cacheEmptyDirSizeLimit", "0"),
			"out of range"),
		"a bound without a cache": ignored(attribute("cacheEmptyDirSizeLimit", Attributes{}, "cacheEmptyDirSizeLimit", "2Gi"),
			"volume_context.cacheEmptyDirSizeLimit: cacheEmptyDirSizeLimit: has no effect without cache: emptyDir"),
		"two bounds": refused(attribute("cacheEmptyDirSizeLimit", Attributes{}, "cache", "emptyDir", "cacheEmptyDirSizeLimit", "2Gi", "cacheSize",
			"1Gi"), "contradicts cacheSize"),
		"a limit of memory": attribute("mountpointContainerResourcesLimitsMemory", Attributes{MemoryLimit: 1 << 30},
			"mountpointContainerResourcesLimitsMemory", "1Gi"),
		"a limit of hardly any memory": refused(attribute("mountpointContainerResourcesLimitsMemory", Attributes{}, "mountpointContainerResourcesLimitsMemory",
			"1Mi"), "less than 16Mi"),
		"a limit of memory that is not": refused(attribute("mountpointContainerResourcesLimitsMemory", Attributes{}, "mountpointContainerResourcesLimitsMemory",
			"1GiB"), "1.5Gi"),
		"a cache in memory": refused(attribute("cacheEmptyDirMedium", Attributes{}, "cache", "emptyDir", "cacheEmptyDirMedium", "Memory"),
			"--cache-dir on a tmpfs"),
		"a cache where the node says": attribute("cacheEmptyDirMedium", Attributes{Cache: true}, "cache", "emptyDir", "cacheEmptyDirMedium", ""),

		"region":                          flag("region", Attributes{Region: "us-west-2"}, "region us-west-2"),
		"region of an attribute, too":     refused(flag("region", Attributes{}, "region us-west-2", "--region us-west-1"), "repeats"),
		"region that is none":             refused(flag("region", Attributes{}, "region us west"), "not a region's name"),
		"region without a value":          refused(flag("region", Attributes{}, "region"), "needs a value"),
		"uid":                             flag("uid", Attributes{UID: new(uint32(1000))}, "uid=1000"),
		"uid that is none":                refused(flag("uid", Attributes{}, "--uid root"), "not a whole number"),
		"gid":                             flag("gid", Attributes{GID: new(uint32(2000))}, "--gid=2000"),
		"dir-mode":                        flag("dir-mode", Attributes{DirMode: new(uint32(0o777))}, "--dir-mode 0777"),
		"file-mode":                       flag("file-mode", Attributes{FileMode: new(uint32(0o640))}, "file-mode=640"),
		"file-mode that is none":          refused(flag("file-mode", Attributes{}, "file-mode=rw"), "octal"),
		"expected-bucket-owner":           flag("expected-bucket-owner", Attributes{ExpectedBucketOwner: "111122223333"}, "expected-bucket-owner 111122223333"),
		"read-only":                       flag("read-only", Attributes{ReadOnly: true}, "--read-only"),
		"read-only with a value":          flag("read-only", Attributes{}, "read-only=false"),
		"cache of version 1":              flag("cache", Attributes{Cache: true}, "cache /var/cache/s3"),
		"cache of version 1, and its max": flag("max-cache-size", Attributes{Cache: true, CacheSize: 512 << 20}, "cache /var/cache/s3", "max-cache-size 512"),
		"max-cache-size before the cache": flag("max-cache-size", Attributes{Cache: true, CacheSize: 512 << 20}, "--max-cache-size=512", "--cache=/x"),
		"max-cache-size alone":            client(flag("max-cache-size", Attributes{}, "max-cache-size 512"), Option{"max-cache-size", "512", true}),
		"max-cache-size of two words":     refused(flag("max-cache-size", Attributes{}, "max-cache-size 5 6"), "white space"),
		"max-cache-size that is none":     refused(flag("max-cache-size", Attributes{}, "cache /x", "max-cache-size 1Gi"), "number of MiB"),
		"max-cache-size of more than all": refused(flag("max-cache-size", Attributes{}, "cache /x", "max-cache-size 16777217"), "number of MiB"),

		"the handle's bucket":   legacy("bucket", Attributes{}, "bucket", "bucket"),
		"no bucket":             legacy("bucket", Attributes{}, "bucket", ""),
		"another bucket":        refused(legacy("bucket", Attributes{}, "bucket", "other"), "not the bucket of the volume"),
		"mounter rclone":        legacy("mounter", Attributes{Client: "rclone"}, "mounter", "rclone"),
		"mounter mountpoint":    legacy("mounter", Attributes{Client: "mountpoint-s3"}, "mounter", "mountpoint"),
		"mounter mountpoint-s3": legacy("mounter", Attributes{Client: "mountpoint-s3"}, "mounter", "mountpoint-s3"),
		"no mounter":            legacy("mounter", Attributes{}, "mounter", ""),
		"mounter geesefs":       refused(legacy("mounter", Attributes{}, "mounter", "geesefs"), "set client: rclone"),
		"mounter s3fs":          refused(legacy("mounter", Attributes{}, "mounter", "s3fs", "client", "rclone"), "set client: rclone"),
		"mounter and client":    refused(legacy("mounter", Attributes{}, "mounter", "rclone", "client", "mountpoint-s3"), "contradicts client"),
		"no options":            legacy("options", Attributes{}, "options", ""),
		"options of geesefs": refused(legacy("options", Attributes{}, "options", "--memory-limit 1000 --dir-mode 0777"),
			"memory-limit is not supported: see docs/reference/migrating-settings.md"),
		"options of s3fs": refused(legacy("options", Attributes{}, "mounter", "s3fs", "options", "-o use_cache=/tmp,umask=0"),
			"umask is not supported: see docs/reference/migrating-settings.md"),

		"rclone's uid":             option("uid", "--uid 1000", Attributes{UID: new(uint32(1000))}),
		"rclone's gid":             option("gid", "--gid=5", Attributes{GID: new(uint32(5))}),
		"rclone's dir-perms":       option("dir-perms", "--dir-perms 0750", Attributes{DirMode: new(uint32(0o750))}),
		"rclone's file-perms":      option("file-perms", "--file-perms 0640 ", Attributes{FileMode: new(uint32(0o640))}),
		"rclone's read-only":       option("read-only", " --read-only", Attributes{ReadOnly: true}),
		"rclone's cache of writes": option("vfs-cache-mode", "--vfs-cache-mode writes", Attributes{}),
		"rclone's cache of all": option("vfs-cache-mode", "--vfs-cache-mode=full --vfs-cache-max-size 10G",
			ours(Option{"read-cache", "true", true}, Option{"cache-size", "10Gi", true})),
		"rclone's cache of something": refused(option("vfs-cache-mode", "--vfs-cache-mode=some", Attributes{}), "is not off"),
		"rclone's cache of nothing": ignored(option("vfs-cache-mode", "--vfs-cache-mode off", Attributes{}),
			"volume_context.options: vfs-cache-mode: writes always go through a cache on the node's disk"),
		"rclone's dir-cache-time":        option("dir-cache-time", "--dir-cache-time 5m", ours(Option{"dir-cache-time", "5m", true})),
		"rclone's vfs-write-back":        option("vfs-write-back", "--vfs-write-back 5s", ours(Option{"write-back", "5s", true})),
		"rclone's transfers":             option("transfers", "--transfers 8", ours(Option{"transfers", "8", true})),
		"rclone's transfers, none":       refused(option("transfers", "--transfers", Attributes{}), "needs a value"),
		"rclone's transfers twice":       refused(option("transfers", "--transfers 8 --transfers 9", Attributes{}), "set twice"),
		"rclone's storage class":         option("s3-storage-class", "--s3-storage-class STANDARD_IA", ours(Option{"storage-class", "STANDARD_IA", true})),
		"rclone's storage class, two":    refused(option("s3-storage-class", "--s3-storage-class A,B", Attributes{}), "comma"),
		"rclone's encryption":            option("s3-server-side-encryption", "--s3-server-side-encryption AES256", ours(Option{"sse", "AES256", true})),
		"rclone's key":                   option("s3-sse-kms-key-id", "--s3-sse-kms-key-id arn:x", ours(Option{"sse-kms-key-id", "arn:x", true})),
		"rclone's cache size":            option("vfs-cache-max-size", "--vfs-cache-max-size 512M", ours(Option{"cache-size", "512Mi", true})),
		"rclone's cache size, in KiB":    option("vfs-cache-max-size", "--vfs-cache-max-size 2048", ours(Option{"cache-size", "2048Ki", true})),
		"rclone's cache size, unlimited": refused(option("vfs-cache-max-size", "--vfs-cache-max-size off", Attributes{}), "needs an amount"),
		"rclone's read-ahead":            option("vfs-read-ahead", "--vfs-read-ahead 32MiB", ours(Option{"read-ahead", "32Mi", true})),
		"rclone's chunks":                option("s3-chunk-size", "--s3-chunk-size 16Mi", ours(Option{"part-size", "16Mi", true})),
		"rclone's server times":          option("use-server-modtime", "--use-server-modtime", ours(Option{"server-mtime", "true", true})),
		"rclone's directory markers":     option("s3-directory-markers", "--s3-directory-markers=false", ours(Option{"directory-markers", "false", true})),
		"an option beside one of ours": refused(foreignCase{origin: OriginRclone, name: "transfers",
			given: with(nil, "mounter", "rclone", "options", "--transfers 8", "mountOptions", "transfers=9")}, "which options also sets"),
		"options with quotes":             option("s3-storage-class", `--s3-storage-class "STAND"ARD`, ours(Option{"storage-class", "STANDARD", true})),
		"an option with an escaped quote": refused(option("transfers", `--transfers "a \" b"`, Attributes{}), "white space"),

		"a client of a mount option": {origin: OriginOption, name: "client", flags: []string{"client=rclone"},
			want: Reading{Attributes: Attributes{Client: "rclone"}}},
		"two clients": {origin: OriginOption, name: "client", flags: []string{"client=rclone"}, given: with(nil, "client", "mountpoint-s3"),
			refuse: "contradicts client"},
		"a role of a mount option": {origin: OriginOption, name: "role-arn", flags: []string{"role-arn arn:aws:iam::111122223333:role/a"},
			want: Reading{Attributes: Attributes{RoleARN: "arn:aws:iam::111122223333:role/a"}}},
		"a role that is none": {origin: OriginOption, name: "role-arn", flags: []string{"role-arn=x"},
			refuse: flagsField + "[0]: \"x\" is not a role's ARN"},
		"a backend of a mount option":    {origin: OriginOption, name: "backend", flags: []string{"backend=minio"}},
		"a backend that no one can have": {origin: OriginOption, name: "backend", flags: []string{"backend=MinIO"}, refuse: flagsField + "[0]: backend name"},
		"a client for one of geesefs": {origin: OriginOption, name: "client",
			given: with(nil, "mounter", "geesefs", "options", "--memory-limit 1000", "capacity", "1"), flags: []string{"client=rclone", "backend=minio", "transfers=8"},
			want: Reading{Attributes: Attributes{Client: "rclone"}, Options: []Option{{"transfers", "8", true}}, Ignored: []string{
				"volume_context.mounter: mounter: replaced by the mount option client",
				"volume_context.options: options: replaced by the mount option client; set mountOptions for that client",
			}}},

		"prefix":                 {origin: OriginAWSOption, name: "prefix", flags: []string{"prefix some-s3-prefix/"}},
		"prefix without a slash": {origin: OriginAWSOption, name: "prefix", flags: []string{"--prefix=some-s3-prefix"}},
		"prefix of an attribute, too": {origin: OriginAWSOption, name: "prefix", flags: []string{" prefix  some-s3-prefix/ "},
			given: with(nil, "prefix", "some-s3-prefix")},
		"prefix against the attribute": {origin: OriginAWSOption, name: "prefix", flags: []string{"prefix some-s3-prefix/"}, given: with(nil, "prefix", "other"),
			refuse: "contradicts prefix"},
		"prefix that climbs": {origin: OriginAWSOption, name: "prefix", flags: []string{"prefix ../"}, refuse: `path segment ".."`},
		"prefix of nothing":  {origin: OriginAWSOption, name: "prefix", flags: []string{"prefix"}, refuse: "needs a value"},
	}
	seen := map[Origin][]string{}
	for name, c := range cases {
		seen[c.origin] = append(seen[c.origin], c.name)
		t.Run(name, func(t *testing.T) {
			g := Given{Handle: "bucket/path", Context: c.given, Flags: c.flags, FlagsField: flagsField}
			if c.origin == OriginAWSAttribute || c.origin == OriginAWSOption || c.origin == OriginOption && c.given["mounter"] == "" {
				g.Handle, g.Context = "s3-csi-driver-volume", with(c.given, "bucketName", "bucket")
			}
			got, err := Read(g)
			if c.refuse != "" {
				if err == nil {
					t.Fatalf("accepted: %+v", got)
				}
				wantInvalid(t, err, "", c.refuse)
				return
			}
			must(t, err)
			where := ID{Backend: "default", Bucket: "bucket", Prefix: map[Origin]string{OriginK8sS3: "path/"}[c.origin]}
			if c.name == "prefix" {
				where.Prefix = "some-s3-prefix/"
			}
			if slices.Contains(c.flags, "backend=minio") {
				where.Backend = "minio"
			}
			if c.given["mounter"] != "" {
				where.Prefix = "path/"
			}
			c.want.ID = where
			if c.want.Options == nil {
				c.want.Options = c.want.Attributes.MountOptions
			}
			if !reflect.DeepEqual(got, c.want) {
				t.Errorf("got  %+v\nwant %+v", got, c.want)
			}
		})
	}
	for _, row := range ForeignDocs() {
		if row.Outcome == Mapped && !slices.Contains(seen[row.Origin], row.Name) {
			t.Errorf("no case for %s %s", row.Origin, row.Name)
		}
	}
}

// written is a volume with one word of a row that has no code of its own.
func written(row ForeignDoc, value string) Given {
	name := row.Name
	if name == others {
		name = "something-else"
	}
	g := Given{Handle: "bucket/path", FlagsField: flagsField}
	switch row.Origin {
	case OriginAWSAttribute:
		g.Handle, g.Context = "s3-csi-driver-volume", map[string]string{"bucketName": "bucket", name: value}
	case OriginAWSOption:
		g.Handle, g.Context, g.Flags = "s3-csi-driver-volume", map[string]string{"bucketName": "bucket"}, []string{name + "=" + value}
	case OriginRclone:
		g.Context = map[string]string{"mounter": "rclone", "options": "--" + name + "=" + value}
	case OriginOtherMounter:
		g.Context = map[string]string{"options": "--" + name + " " + value}
	}
	return g
}

func TestEveryRowOfOtherDriversHasItsOutcome(t *testing.T) {
	for _, row := range ForeignDocs() {
		if row.Here == "" || strings.ContainsAny(row.Here, "|\n") {
			t.Errorf("%s %s says %q", row.Origin, row.Name, row.Here)
		}
		if row.Origin == OriginSecret || row.Outcome == Mapped || row.Name == keyBucketName || row.Name == legacyCapacity {
			continue
		}
		t.Run(string(row.Origin)+" "+row.Name, func(t *testing.T) {
			got, err := Read(written(row, "hidden"))
			if row.Outcome == Same { // a switch that is always on, and cannot be turned off
				wantInvalid(t, err, "", row.Here)
				got, err = Read(written(row, "true"))
			}
			if row.Outcome == Refused {
				wantInvalid(t, err, "", row.Here)
				if strings.Contains(err.Error(), "hidden") && row.Name != "cacheEmptyDirMedium" {
					t.Errorf("the error shows a value: %v", err)
				}
				return
			}
			must(t, err)
			want := Reading{ID: got.ID}
			if row.Origin == OriginRclone {
				want.Attributes.Client = "rclone"
			}
			switch row.Outcome {
			case Passed:
				want.Options = []Option{{row.Name, "hidden", true}}
			case Checked:
				want.Claims = []Claim{{row.claim, got.Claims[0].Field, "hidden"}}
			case Ignored:
				if len(got.Ignored) != 1 || !strings.HasSuffix(got.Ignored[0], row.Name+": "+row.Here) || strings.Contains(got.Ignored[0], "hidden") {
					t.Errorf("logged: %q", got.Ignored)
				}
				want.Ignored = got.Ignored
			case Same, Mapped, Refused:
			}
			if !reflect.DeepEqual(got, want) {
				t.Errorf("got  %+v\nwant %+v", got, want)
			}
		})
	}
}

// The options of mount-s3 1.24, of which the AWS driver passes on what it is given.
func TestTheTableHasEveryOptionOfMountpoint(t *testing.T) {
	for _, name := range []string{
		"prefix", "region", "endpoint-url", "force-path-style", "transfer-acceleration", "dual-stack", "requester-pays", "bucket-type", "no-sign-request", "profile",
		"read-only", "storage-class", "allow-delete", "allow-overwrite", "incremental-upload", "auto-unmount", "allow-root", "allow-other", "maximum-throughput-gbps",
		"max-threads", "memory-target", "part-size", "read-part-size", "write-part-size", "ca-bundle", "uid", "gid", "dir-mode", "file-mode", "foreground",
		"expected-bucket-owner", "log-directory", "log-metrics", "otlp-endpoint", "otlp-export-interval", "debug", "debug-crt", "no-log", "cache", "metadata-ttl",
		"negative-metadata-ttl", "max-cache-size", "cache-xz", "user-agent-prefix", "sse", "sse-kms-key-id", "upload-checksums", "infer-content-type", "bind",
		"help", "version",
		"aws-max-attempts", // the driver's own
	} {
		if _, ok := rowNamed(awsOptions(), name); !ok {
			t.Errorf("no row for %s", name)
		}
	}
	seen := map[Origin][]string{}
	for _, row := range ForeignDocs() {
		if slices.Contains(seen[row.Origin], row.Name) {
			t.Errorf("%s %s has two rows", row.Origin, row.Name)
		}
		seen[row.Origin] = append(seen[row.Origin], row.Name)
	}
}

func TestMountFlagsOfStaticVolumesAreReadInEverySpelling(t *testing.T) {
	for _, flag := range []string{
		"metadata-ttl indefinite", "--metadata-ttl indefinite", "metadata-ttl=indefinite", "--metadata-ttl=indefinite", "  metadata-ttl   indefinite ",
		"metadata-ttl= indefinite",
	} {
		got, err := withFlags(flag)
		if want := []Option{{"metadata-ttl", "indefinite", true}}; err != nil || !reflect.DeepEqual(got.Options, want) {
			t.Errorf("%q reads as %+v, %v", flag, got.Options, err)
		}
	}
	for _, flag := range []string{"-d", "debug", "--debug"} {
		got, err := withFlags(flag)
		if want := []Option{{Name: "debug"}}; err != nil || !reflect.DeepEqual(got.Options, want) {
			t.Errorf("%q reads as %+v, %v", flag, got.Options, err)
		}
	}
	for _, flag := range []string{"-f", "foreground", "-h", "-v", "-V", "allow-other"} {
		if got, err := withFlags(flag); err != nil || len(got.Options)+len(got.Ignored) > 0 {
			t.Errorf("%q reads as %+v, %v", flag, got, err)
		}
	}
	if got, err := withFlags("-l /var/log"); err != nil || len(got.Ignored) != 1 {
		t.Errorf("-l reads as %+v, %v", got, err)
	}
}

func TestMountFlags_AreReadAsMeantOrRefused(t *testing.T) {
	for flag, want := range map[string]string{
		`prefix "hello world/"`: "hello world/", `--prefix="hello world/"`: "hello world/", `prefix 'hello world'`: "hello world/", "prefix=o'brien/x": "o'brien/x/",
		`prefix=a"b/`: `a"b/`, `prefix=""`: "", "prefix= a/": "a/", "  --prefix   a b/  ": "a b/",
		`prefix="a/`: "-", `prefix=a/"`: "-", `prefix="a"/`: "-", `prefix "a" "b"`: "-", `prefix='"a"'`: "-", `prefix="'a"`: "-", `prefix=""a""`: "-",
		`prefix="`: "-", `"prefix a/"`: "-",
		`prefix hello\ world/`: "-", `prefix="a\ b/"`: "-", "prefix =a/": "-", "prefix = a/": "-", "prefix a/,allow-delete": "-", "prefix=a/,region=x": "-",
		"allow-delete,prefix a/":    "-",
		"prefix a/ --allow-delete/": "a/ --allow-delete/", "prefix=..": "-", "prefix=a//b": "-", "prefix=/": "-", "prefix": "-", "Prefix=a/": "-",
	} {
		r, err := withFlags(flag)
		if want == "-" {
			wantInvalid(t, err, flagsField+"[0]")
		} else if err != nil || r.ID.Prefix != want {
			t.Errorf("%q reads as the prefix %q, %v", flag, r.ID.Prefix, err)
		}
	}
	for flag, want := range map[string]Attributes{
		`uid="1000"`: {UID: new(uint32(1000))}, `--gid '5'`: {GID: new(uint32(5))}, "cache": {Cache: true}, "cache=false": {},
		`region "eu-west-1"`: {Region: "eu-west-1"}, "read-only=false": {},
	} {
		if r, err := withFlags(flag); err != nil || !reflect.DeepEqual(r.Attributes, want) {
			t.Errorf("%q reads as %+v, %v", flag, r.Attributes, err)
		}
	}
	for _, flag := range []string{
		"allow-other=false", "--foreground false", "allow-other=", "cache=yes", "cache=no", "uid=1,uid=2", "uid 1 2", "uid=0x10", "uid=+1", "uid=01", "uid=-1",
		"uid=4294967295", "uid=1e3", "uid=",
		"dir-mode=0o755", "dir-mode=1777", "dir-mode=rwx", "read-only=yes", "read-only=", "region=", "allow-delete,region x", "max-cache-size=5,debug\"", "UID=5",
		"u_id=5",
	} {
		_, err := withFlags(flag)
		wantInvalid(t, err, flagsField+"[0]")
	}
}

func TestMountFlagsOfStaticVolumesHideNoSecondOption(t *testing.T) {
	for _, flag := range []string{
		"", "--", "-", "-o allow_other", "-oallow_other", "-x", "-uid=1", "---uid=1", "metadata-ttl 1 --cache /x", "metadata-ttl --cache", "prefix --cache",
		"max-threads=8 --cache=/x", "metadata-ttl\t1",
		"metadata-ttl=1\n--x", "Region x", "allow_other", "=x", " ", "a\x00",
	} {
		got, err := withFlags("allow-delete", flag)
		if err == nil {
			t.Errorf("%q reads as %+v", flag, got)
			continue
		}
		wantInvalid(t, err, flagsField+"[1]")
	}
	_, err := withFlags("uid 1", "--uid=1")
	wantInvalid(t, err, flagsField+"[1]", "repeats")
	_, err = withFlags("a="+strings.Repeat("x", 2100), "b="+strings.Repeat("x", 2100))
	wantInvalid(t, err, flagsField, "4096")
	for _, flag := range []string{"-o password=hidden", "password hidden again", "pass_word hidden", "password --hidden"} {
		if _, err := withFlags(flag); err == nil || strings.Contains(err.Error(), "hidden") {
			t.Errorf("%q: %v", flag, err)
		}
	}
}

// What a StorageClass's author wrote for this driver is read as ever: its mount options say nothing about the place.
func TestMountFlagsOfVolumesOfOursAreOptionsOfTheClient(t *testing.T) {
	got, err := Read(Given{Handle: "default:shared/p/", Flags: []string{"uid=1000", "--prefix=x/", "allow-delete"}, FlagsField: flagsField,
		DriverName: AWSDriverName})
	want := Reading{ID: ID{"default", "shared", "p/"}, Options: []Option{{"uid", "1000", true}, {"prefix", "x/", true}, {Name: "allow-delete"}}}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, %v", got, err)
	}
	_, err = Read(Given{Handle: "default:shared/p/", Flags: []string{"prefix x/"}, FlagsField: flagsField})
	wantInvalid(t, err, flagsField+"[0]", "prefix=")
}

func TestUnderTheAWSDriversNameItsVolumesKeepItsDefaults(t *testing.T) {
	off := func(name string) Option { return Option{name, "false", true} }
	for name, tt := range map[string]struct {
		handle, driver string
		context        map[string]string
		flags          []string
		client         string
		options        []Option
	}{
		"nothing may be changed": {"h", AWSDriverName, with(nil, "bucketName", "shared"), nil, "mountpoint-s3",
			[]Option{off("allow-delete"), off("allow-overwrite")}},
		"what the volume allows may be": {"h", AWSDriverName, with(nil, "bucketName", "shared"), []string{"allow-delete"}, "mountpoint-s3",
			[]Option{{Name: "allow-delete"}, off("allow-overwrite")}},
		"in an attribute, too": {"h", AWSDriverName, with(nil, "bucketName", "shared", "mountOptions", "allow-overwrite"), nil, "mountpoint-s3",
			[]Option{{Name: "allow-overwrite"}, off("allow-delete")}},
		"a volume that names its client":  {"h", AWSDriverName, with(nil, "bucketName", "shared", "client", "rclone"), nil, "rclone", nil},
		"a volume of ours":                {"default:shared", AWSDriverName, nil, nil, "", nil},
		"another name of this driver":     {"h", "s3.csi.driver", with(nil, "bucketName", "shared"), nil, "", nil},
		"a volume of k8s-csi-s3":          {"shared", AWSDriverName, with(nil, "capacity", "1"), nil, "", nil},
		"a handle of k8s-csi-s3's, alone": {"pvc-" + uuid, AWSDriverName, nil, nil, "", nil},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := Read(Given{Handle: tt.handle, Context: tt.context, Flags: tt.flags, FlagsField: flagsField, DriverName: tt.driver})
			if err != nil || got.Attributes.Client != tt.client || !reflect.DeepEqual(got.Options, tt.options) {
				t.Errorf("%+v, %v", got, err)
			}
		})
	}
}

func TestAllThatIsRefusedIsSaidAtOnce(t *testing.T) {
	_, err := Read(Given{Handle: "bucket/path", Context: map[string]string{"mounter": "geesefs", "options": "--memory-limit 1000 --dir-mode 0777 --no-systemd " +
		"--what"}})
	wantInvalid(t, err, "volume_context.mounter", "client: rclone", "volume_context.options: memory-limit", "dir-mode", "no-systemd", "what is not supported")
}

func TestParametersOfK8sCSIS3(t *testing.T) {
	got, err := ParseParameters(map[string]string{"bucket": "shared", "mounter": "rclone", "options": "--dir-cache-time 5m --uid 7 --vfs-cache-max-age 1h " +
		"--s3-force-path-style"}, pvc)
	must(t, err)
	want, err := ParseParameters(map[string]string{"bucketName": "shared", "client": "rclone", "mountOptions": "dir-cache-time=5m", "uid": "7"}, pvc)
	must(t, err)
	if got.Digest() != want.Digest() || !reflect.DeepEqual(got.Context(), want.Context()) || got.ID("n", 1) != want.ID("n", 1) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
	if len(got.Ignored) != 1 || !strings.HasPrefix(got.Ignored[0], "parameters.options: vfs-cache-max-age: ") {
		t.Errorf("ignored %q", got.Ignored)
	}
	if wanted := []Claim{{ClaimPathStyle, "parameters.options", ""}}; !reflect.DeepEqual(got.Claims, wanted) {
		t.Errorf("claims %v", got.Claims)
	}
	for name, tt := range map[string]struct {
		params map[string]string
		field  string
		words  []string
	}{
		"geesefs": {with(nil, "mounter", "geesefs", "options", "--memory-limit 1000"), "parameters.mounter",
			[]string{"client: rclone", "parameters.options", "memory-limit"}},
		"two buckets":        {with(nil, "bucket", "one-bucket", "bucketName", "other"), "parameters.bucket", []string{"contradicts bucketName"}},
		"capacity":           {with(nil, "capacity", "1"), "parameters.capacity", []string{"is not a parameter"}},
		"the AWS driver's":   {with(nil, "authenticationSource", "pod"), "parameters.authenticationSource", []string{"nearest is credentials"}},
		"a value of options": {with(nil, "mounter", "rclone", "options", "--uid root"), "parameters.options", []string{"whole number"}},
		"an option and ours": {with(nil, "mounter", "rclone", "options", "--transfers 1", "mountOptions", "transfers=2"), "parameters.mountOptions",
			[]string{"transfers"}},
		"an option elsewhere": {with(nil, "mounter", "rclone", "options", "--s3-endpoint http://x"), "parameters.options", []string{"s3-endpoint is not supported"}},
	} {
		_, err := ParseParameters(tt.params, pvc)
		if err == nil {
			t.Errorf("%s: accepted", name)
			continue
		}
		wantInvalid(t, err, tt.field, tt.words...)
	}
	if got, err := ParseParameters(map[string]string{"bucket": "", "mounter": "", "options": ""}, pvc); err != nil || got.BucketName != "" ||
		got.Node.Client != "" {
		t.Errorf("empty parameters: %+v, %v", got, err)
	}
}

func TestSecretsClaimWhatTheyBringBesideKeys(t *testing.T) {
	got := SecretClaims(map[string]string{"accessKeyID": "a", "secretAccessKey": "b", "endpoint": "https://s3.example", "region": "", "insecure": "true",
		"other": "x"})
	want := []Claim{{ClaimEndpoint, "secrets.endpoint", "https://s3.example"}, {ClaimInsecure, "secrets.insecure", "true"}}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%v", got)
	}
}

func FuzzReadFlags(f *testing.F) {
	for _, s := range []string{
		"prefix some prefix/", "region us-west-2", "--x", "--x=y", "--x y", "uid=1000", "-d", "-o x", "cache /x", "max-cache-size 5", "endpoint-url " +
			"http://h:1", "force-path-style",
		"metadata-ttl indefinite", "--a --b", " prefix  =x ", "allow-other", "read-only=false",
	} {
		f.Add(s, "b=1", "cacheEmptyDirSizeLimit", "1.5Gi")
	}
	f.Add("cache /x", "max-cache-size 7", "cacheEmptyDirSizeLimit", "5k")
	f.Add("uid=1", "gid 2", "options", `--dir-mode 0777 -o a=b,c "x \" y"`)
	f.Add("uid=1", "gid 2", "authenticationSource", "pod")
	f.Fuzz(func(t *testing.T, a, b, key, value string) {
		g := Given{Handle: "h", Context: map[string]string{"bucketName": "shared", key: value}, Flags: []string{a, b}, FlagsField: flagsField,
			DriverName: AWSDriverName}
		r, err := Read(g)
		if err != nil {
			wantInvalid(t, err, "")
			return
		}
		for _, o := range r.Options {
			again, err := ParseMountOptions([]string{o.String()}, "f")
			if err != nil || !reflect.DeepEqual(again, []Option{o}) {
				t.Fatalf("%+v is written %q and reads as %+v, %v", o, o.String(), again, err)
			}
		}
		if r.ID.Bucket != g.Context["bucketName"] || r.ID.Prefix != "" && checkPrefix(r.ID.Prefix) != nil {
			t.Fatalf("the volume is at %v", r.ID)
		}
	})
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
