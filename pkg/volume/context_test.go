package volume

import (
	"reflect"
	"strings"
	"testing"
)

func TestParseContextReadsWhatCreateVolumeWrote(t *testing.T) {
	p, err := ParseParameters(map[string]string{
		"bucketName": "shared", "prefix": "base", "client": "rclone", "credentials": "driver", "uid": "1000", "gid": "2000", "dirMode": "750",
		"fileMode": "0", "readOnly": "true", "mountOptions": "a,b=1,c=", "expectedBucketOwner": "111122223333",
		"roleARN": "arn:aws:iam::111122223333:role/pods/${pod.namespace}.${pod.serviceAccountName}", "scope": "required", "sessionDuration": "90m",
		"memoryLimit": "1073741824", "cpuWeight": "10000", "tasksMax": "32", "cache": "true", "cacheSize": "3G", "consistency": "close-to-open", "linger": "600s",
		"usage": "3600s",
	}, pvc)
	must(t, err)
	context := with(p.Context(),
		"csi.storage.k8s.io/pod.name", "pod",
		"csi.storage.k8s.io/serviceAccount.tokens", strings.Repeat("t", 5000),
		"csi.storage.k8s.io/ephemeral", "false",
		"storage.kubernetes.io/csiProvisionerIdentity", "1-2-s3.csi.driver")
	id, attributes, err := parseContext("default:shared/base/"+pvc+"/", context)
	must(t, err)
	if want := (ID{"default", "shared", "base/" + pvc + "/"}); id != want {
		t.Errorf("place %v", id)
	}
	if !reflect.DeepEqual(attributes, p.Node) {
		t.Errorf("got  %+v\nwant %+v", attributes, p.Node)
	}
}

func TestVolumeContextIsMinimalAndStable(t *testing.T) {
	p, err := ParseParameters(map[string]string{
		"bucketName": "shared", "prefix": "base", "onDelete": "retain", "uid": "0", "dirMode": "755", "readOnly": "false", "mountOptions": "--a,--b=1",
		"backend":     "minio",
		"memoryLimit": "1048576K", "cpuWeight": "7", "cache": "true", "cacheSize": "2147483648", "sessionDuration": "3600s", "scope": "auto", "usage": "off",
	}, pvc)
	must(t, err)
	want := map[string]string{"uid": "0", "dirMode": "0755", "mountOptions": "a,b=1", "memoryLimit": "1000Mi", "cpuWeight": "7", "cache": "true",
		"cacheSize": "2Gi", "sessionDuration": "1h0m0s", "scope": "auto", "usage": "off"}
	if got := p.Context(); !reflect.DeepEqual(got, want) {
		t.Errorf("context %v", got)
	}
}

func TestParseContextFindsThePlace(t *testing.T) {
	for name, tt := range map[string]struct {
		handle  string
		context map[string]string
		want    ID
	}{
		"our id alone":                     {"default:shared/p/", nil, ID{"default", "shared", "p/"}},
		"our id, context agrees":           {"minio:shared/p/", with(nil, "bucketName", "shared", "prefix", "p", "backend", "minio"), ID{"minio", "shared", "p/"}},
		"our id of a bucket, empty prefix": {"default:shared", with(nil, "prefix", ""), ID{"default", "shared", ""}},
		"static bucket":                    {"any handle at all", with(nil, "bucketName", "shared"), ID{"default", "shared", ""}},
		"static prefix":                    {"h", with(nil, "bucketName", "shared", "prefix", "a/b", "backend", "minio"), ID{"minio", "shared", "a/b/"}},
		"static prefix with wildcards":     {"h", with(nil, "bucketName", "shared", "prefix", "a@2/*$/"), ID{"default", "shared", "a@2/*$/"}},
		"static with a colon":              {"arn:x", with(nil, "bucketName", "shared"), ID{"default", "shared", ""}},
		"static, handle like a legacy one": {"pvc-" + uuid, with(nil, "bucketName", "shared"), ID{"default", "shared", ""}},
		"static access point":              {"h", with(nil, "bucketName", "my-ap-abc-s3alias"), ID{"default", "my-ap-abc-s3alias", ""}},
		"legacy bucket":                    {pvc, nil, ID{"default", pvc, ""}},
		"legacy bucket and path":           {"bucket/" + pvc, with(nil, "capacity", "1024", "bucket", "bucket"), ID{"default", "bucket", pvc + "/"}},
		"legacy path with slash":           {"bucket/a/b/", nil, ID{"default", "bucket", "a/b/"}},
		"legacy by its context":            {"manual-bucket", with(nil, "mounter", "rclone"), ID{"default", "manual-bucket", ""}},
		"legacy with a backend":            {"bucket/path", with(nil, "backend", "minio"), ID{"minio", "bucket", "path/"}},
	} {
		t.Run(name, func(t *testing.T) {
			got, _, err := parseContext(tt.handle, tt.context)
			if err != nil || got != tt.want {
				t.Errorf("got %#v, %v", got, err)
			}
		})
	}
}

func TestParseContextReadsTheAttributesOfStaticAndLegacyVolumes(t *testing.T) {
	_, got, err := parseContext("h", map[string]string{"bucketName": "shared", "region": "eu-central-1", "client": "rclone", "readOnly": "true", "uid": "5"})
	if want := (Attributes{Region: "eu-central-1", Client: "rclone", ReadOnly: true, UID: new(uint32(5))}); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("static: %+v, %v", got, err)
	}
	for mounter, client := range map[string]string{"rclone": "rclone", "mountpoint": "mountpoint-s3", "": ""} {
		_, got, err := parseContext("bucket/path", map[string]string{"mounter": mounter, "capacity": "1", "options": ""})
		if want := (Attributes{Client: client}); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("legacy mounter %q: %+v, %v", mounter, got, err)
		}
	}
}

func TestParseContextDoesNotChangeTheContext(t *testing.T) {
	context := map[string]string{"mounter": "rclone", "csi.storage.k8s.io/pod.name": "p"}
	before := with(context)
	if _, _, err := parseContext("bucket/path", context); err != nil || !reflect.DeepEqual(context, before) {
		t.Errorf("%v, %v", context, err)
	}
}

func TestParseContextRefuses(t *testing.T) {
	static := map[string]string{"bucketName": "shared"}
	for name, tt := range map[string]struct {
		handle  string
		context map[string]string
		field   string
		words   []string
	}{
		"no handle":                       {"", static, "volume_id", []string{"missing"}},
		"a long handle":                   {strings.Repeat("h", 129), static, "volume_id", []string{"128"}},
		"a control character in a handle": {"a\nb", static, "volume_id", nil},
		"another bucket than our id":      {"default:shared/p/", with(nil, "bucketName", "other"), "volume_context.bucketName", []string{"shared", "other"}},
		"another prefix than our id":      {"default:shared/p/", with(nil, "prefix", "q"), "volume_context.prefix", nil},
		"a wider prefix than our id":      {"default:shared/p/", with(nil, "prefix", ""), "volume_context.prefix", nil},
		"another backend than our id":     {"default:shared/p/", with(nil, "backend", "minio"), "volume_context.backend", nil},
		"a broken id of ours":             {"default:shared/../", nil, "volume_id", []string{".."}},
		"no bucket anywhere":              {"my-volume", nil, "volume_context.bucketName", []string{"missing"}},
		"fake-vol-id":                     {"fake-vol-id", nil, "volume_context.bucketName", nil},
		"empty bucket":                    {"h", with(nil, "bucketName", ""), "volume_context.bucketName", nil},
		"bad bucket":                      {"h", with(nil, "bucketName", "Sha:red"), "volume_context.bucketName", nil},
		"bad backend":                     {"h", with(static, "backend", ""), "volume_context.backend", nil},
		"absolute prefix":                 {"h", with(static, "prefix", "/a"), "volume_context.prefix", nil},
		"climbing prefix":                 {"h", with(static, "prefix", "a/../../b"), "volume_context.prefix", []string{".."}},
		"prefix in the records":           {"h", with(static, "prefix", ".s3-csi/volumes"), "volume_context.prefix", []string{"records"}},
		"template in a static prefix is literal but control characters are not": {"h", with(static, "prefix", "a\x1b"), "volume_context.prefix", nil},
		"bad region":                     {"h", with(static, "region", "us east"), "volume_context.region", nil},
		"unknown key with its nearest":   {"h", with(static, "filesMode", "1"), "volume_context.filesMode", []string{"nearest is fileMode"}},
		"a StorageClass's key":           {"h", with(static, "onDelete", "delete"), "volume_context.onDelete", nil},
		"a key that looks like the CO's": {"h", with(static, "csi.storage.k8s.io", "x"), "volume_context.csi.storage.k8s.io", nil},
		"AWS's authenticationSource":     {"h", with(static, "authenticationSource", "node"), "volume_context.authenticationSource", []string{"credentials"}},
		"legacy key on a static volume":  {"h", with(static, "mounter", "s3fs"), "volume_context.mounter", []string{"client"}},
		"legacy options":                 {"bucket/path", with(nil, "options", "--memory-limit 1000"), "volume_context.options", []string{"memory-limit"}},
		"legacy geesefs":                 {"bucket/path", with(nil, "mounter", "geesefs"), "volume_context.mounter", []string{"client: "}},
		"legacy mounter against client": {"bucket/path", with(nil, "mounter", "rclone", "client", "mountpoint-s3"), "volume_context.mounter",
			[]string{"contradicts"}},
		"legacy bucket against handle": {"bucket/path", with(nil, "bucket", "other"), "volume_context.bucket", nil},
		"legacy handle with a prefix":  {"bucket/path", with(nil, "prefix", "other"), "volume_context.prefix", []string{"bucketName"}},
		"legacy handle that climbs":    {"bucket/../other", with(nil, "capacity", "1"), "volume_id", []string{".."}},
		"legacy bad backend":           {"bucket/path", with(nil, "backend", "A"), "volume_context.backend", nil},
		"bad uid":                      {"default:shared", with(nil, "uid", "x"), "volume_context.uid", nil},
		"a source that is none":        {"default:shared", with(nil, "credentials", "pod"), "volume_context.credentials", []string{"driver", "secret", "workload"}},
		"a role that is none":          {"default:shared", with(nil, "roleARN", "admin"), "volume_context.roleARN", []string{"arn:aws:iam"}},
		"a role of another pod": {"default:shared", with(nil, "roleARN", "arn:aws:iam::1:role/${pod.name}"), "volume_context.roleARN",
			[]string{"${pod.name}", "${pod.serviceAccountName}"}},
		"a scope that is none":     {"default:shared", with(nil, "scope", "none"), "volume_context.scope", []string{"required", "auto", "off"}},
		"a session of no time":     {"default:shared", with(nil, "sessionDuration", "0s"), "volume_context.sessionDuration", []string{"1s to 36h"}},
		"a session of days":        {"default:shared", with(nil, "sessionDuration", "37h"), "volume_context.sessionDuration", nil},
		"a session without a unit": {"default:shared", with(nil, "sessionDuration", "3600"), "volume_context.sessionDuration", nil},
		"a duration of no session": {"default:shared", with(nil, "sessionDuration", "1h", "scope", "off"), "volume_context.sessionDuration", []string{"scope: off"}},
		"bad option":               {"default:shared", with(nil, "mountOptions", "-o,x"), "volume_context.mountOptions[0]", nil},
		"memory of nothing":        {"default:shared", with(nil, "memoryLimit", ""), "volume_context.memoryLimit", nil},
		"cacheSize without cache":  {"default:shared", with(nil, "cacheSize", "1Gi"), "volume_context.cacheSize", nil},
		"oversize":                 {"h", with(static, "client", strings.Repeat("c", 4096)), "volume_context", []string{"4096"}},
	} {
		t.Run(name, func(t *testing.T) {
			id, attributes, err := parseContext(tt.handle, tt.context)
			if err == nil {
				t.Fatalf("accepted: %v, %+v", id, attributes)
			}
			wantInvalid(t, err, tt.field, tt.words...)
		})
	}
}

func FuzzParseContext(f *testing.F) {
	f.Add("default:shared/p/", "", "", "uid", "1000", "gid", "5")
	f.Add("h", "shared", "a/b", "region", "us-east-1", "mountOptions", "a,b=1")
	f.Add("bucket/path", "", "", "mounter", "rclone", "capacity", "10")
	f.Add("bucket/path", "", "", "options", "--x", "bucket", "bucket")
	f.Add("default:shared/p/", "other", "", "dirMode", "755", "readOnly", "true")
	f.Add("default:shared/p/", "", "", "cache", "true", "cacheSize", "10Gi")
	f.Add("h", "shared", "", "memoryLimit", "1500M", "tasksMax", "64")
	f.Add("h", "shared", "", "roleARN", "arn:aws:iam::111122223333:role/a/${pod.namespace}", "scope", "required")
	f.Add("h", "shared", "", "sessionDuration", "15m", "credentials", "workload")
	f.Add(pvc, "", "", "csi.storage.k8s.io/pod.name", "x", "client", "rclone")
	f.Fuzz(func(t *testing.T, handle, bucket, prefix, k1, v1, k2, v2 string) {
		context := map[string]string{k1: v1, k2: v2}
		if bucket != "" {
			context["bucketName"] = bucket
		}
		if prefix != "" {
			context["prefix"] = prefix
		}
		id, attributes, err := parseContext(handle, context)
		if err != nil {
			wantInvalid(t, err, "")
			return
		}
		if own, err := ParseID(handle); err == nil && id != own {
			t.Fatalf("%q is at %v", handle, id)
		}
		if s := id.String(); len(s) <= maxString {
			if parsed, err := ParseID(s); err != nil || parsed != id {
				t.Fatalf("place %q: %v", s, err)
			}
		}
		// What was read can be written and means the same.
		if size := mapSize(attributes.context()); size <= maxMap {
			_, again, err := parseContext("default:bucket", attributes.context())
			if err != nil || !reflect.DeepEqual(again, attributes) {
				t.Fatalf("%+v reads again as %+v, %v", attributes, again, err)
			}
		}
	})
}

func TestSessionDuration_NeedsASession(t *testing.T) {
	const role = "arn:aws:iam::111122223333:role/r"
	for _, tt := range []struct {
		pairs   []string
		refused bool
	}{
		{[]string{"scope", "off"}, true}, {[]string{"scope", "off", "credentials", "secret"}, true}, {[]string{"scope", "off", "credentials", "workload"}, false},
		{[]string{"scope", "off", "roleARN", role}, false}, {[]string{"scope", "auto"}, false}, {nil, false},
	} {
		_, _, err := parseContext("h", with(map[string]string{"bucketName": "shared", "sessionDuration": "1h"}, tt.pairs...))
		if tt.refused {
			wantInvalid(t, err, "volume_context.sessionDuration")
		} else if err != nil {
			t.Errorf("%q: %v", tt.pairs, err)
		}
	}
}

func TestNamesOfSecrets_AreNotIgnoredInAVolumeOrClass(t *testing.T) {
	for _, key := range []string{"csi.storage.k8s.io/node-publish-secret-name", "csi.storage.k8s.io/node-publish-secret-namespace",
		"csi.storage.k8s.io/provisioner-secret-name"} {
		_, _, err := parseContext("h", map[string]string{"bucketName": "shared", key: "s"})
		wantInvalid(t, err, "volume_context."+key, "nodePublishSecretRef")
		_, err = ParseParameters(map[string]string{"bucketName": "shared", key: "s"}, "v")
		wantInvalid(t, err, "parameters."+key)
		_, err = ParseSnapshotParameters(map[string]string{key: "s"})
		wantInvalid(t, err, "parameters."+key)
		_, err = ParseMutable(map[string]string{key: "s"})
		wantInvalid(t, err, "mutable_parameters", key)
	}
}

func TestPrefixes_InQuotesOrTooLongAreRefused(t *testing.T) {
	for prefix, want := range map[string]string{
		`"a"`: "-", `'a'`: "-", `""`: "-", strings.Repeat("p", 1023): "-", `"a"/`: `"a"/`, `a"`: `a"/`, `"`: `"/`,
		strings.Repeat("p", 1022): strings.Repeat("p", 1022) + "/",
	} {
		id, _, err := parseContext("h", map[string]string{"bucketName": "shared", "prefix": prefix})
		if want == "-" {
			wantInvalid(t, err, "volume_context.prefix")
		} else if err != nil || id.Prefix != want {
			t.Errorf("%q: %q, %v", prefix, id.Prefix, err)
		}
	}
	_, err := ParseParameters(map[string]string{"bucketName": "shared", "prefix": "'a'"}, "v")
	wantInvalid(t, err, "parameters.prefix")
}

// parseContext is Read without mount flags.
func parseContext(handle string, context map[string]string) (ID, Attributes, error) {
	r, err := Read(Given{Handle: handle, Context: context})
	return r.ID, r.Attributes, err
}
