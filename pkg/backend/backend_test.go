package backend

import (
	"reflect"
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
)

// Digests lie in the records of mounts, so an upgrade must not change them.
func TestMountDigestNeverChanges(t *testing.T) {
	for want, b := range map[string]Backend{
		"v1:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855": {Name: "default"},
		"v1:5b96c9906f1216b916228e37012cdfdbf845e5fc989fb99cef4fc535ca720358": {Name: "minio", Endpoint: "https://minio:9000", Region: "eu-west-1", PathStyle: true,
			CAFile: "/ca.pem", ca: "PEM"},
	} {
		if got := b.MountDigest(); got != want {
			t.Errorf("%+v: %s, was %s", b, got, want)
		}
	}
}

// every is a backend and all those that differ from it in one setting; mount marks those for which a mount must be replaced.
func every() (base Backend, others map[string]Backend, mount map[string]bool) {
	base = Backend{Name: "b", Endpoint: "https://a", Region: "r", PathStyle: true, CAFile: "/ca.pem", ca: "PEM", caSum: "1", ControllerCredentials: "driver"}
	others = map[string]Backend{}
	for name, change := range map[string]func(*Backend){
		"Name":                  func(b *Backend) { b.Name = "c" },
		"Endpoint":              func(b *Backend) { b.Endpoint = "https://ar" },
		"Region":                func(b *Backend) { b.Region = "" },
		"PathStyle":             func(b *Backend) { b.PathStyle = false },
		"CAFile":                func(b *Backend) { b.CAFile = "/other.pem" },
		"CA":                    func(b *Backend) { b.ca, b.caSum = "PEM2", "2" },
		"Proxy":                 func(b *Backend) { b.Proxy.URL = "http://p" },
		"Proxy.URL":             func(b *Backend) { b.Proxy.URL = "http://q" },
		"Proxy.CredentialsFile": func(b *Backend) { b.Proxy = Proxy{CredentialsFile: "/p", credentials: "a:b"} },
		"Proxy, credentials":    func(b *Backend) { b.Proxy = Proxy{credentials: "a:b", sum: "1"} },
		"DefaultClient":         func(b *Backend) { b.DefaultClient = "rclone" },
		"RelaxedBucketNames":    func(b *Backend) { b.RelaxedBucketNames = true },
		"DualStack":             func(b *Backend) { b.DualStack = true },
		"FIPS":                  func(b *Backend) { b.FIPS = true },
		"Requests":              func(b *Backend) { b.Requests = Requests{SSE: "AES256"} },
		"Requests, key":         func(b *Backend) { b.Requests = Requests{SSE: "AES256", KMSKeyID: "k"} },
		"Requests, payer":       func(b *Backend) { b.Requests = Requests{RequesterPays: true} },
		"STS":                   func(b *Backend) { b.STS = &STS{} },
		"STS.Endpoint":          func(b *Backend) { b.STS = &STS{Endpoint: "https://a"} },
		"STS.Region":            func(b *Backend) { b.STS = &STS{Region: "https://a"} },
		"SingleController":      func(b *Backend) { b.SingleController = true },
		"AdoptUntaggedBuckets":  func(b *Backend) { b.AdoptUntaggedBuckets = true },
		"ControllerCredentials": func(b *Backend) { b.ControllerCredentials = "secret" },
		"STS.Kinds":             func(b *Backend) { b.STS = &STS{Kinds: []credentials.Kind{credentials.AssumeRole}} },
		"STS.Audience":          func(b *Backend) { b.STS = &STS{Audience: "https://a"} },
		"STS.RoleOptional":      func(b *Backend) { b.STS = &STS{RoleOptional: true} },
		"Scope":                 func(b *Backend) { b.Scope = "off" },
		"Allow":                 func(b *Backend) { b.Allow = &Allow{} },
		"Allow.Namespaces":      func(b *Backend) { b.Allow = &Allow{[]rule{{Namespaces: []string{"a"}}}} },
		"Allow.Buckets":         func(b *Backend) { b.Allow = &Allow{[]rule{{Buckets: []string{"a"}}}} },
		"Allow, two":            func(b *Backend) { b.Allow = &Allow{[]rule{{Buckets: []string{"a"}}, {Buckets: []string{"a"}}}} },
		"Allow, both":           func(b *Backend) { b.Allow = &Allow{[]rule{{Buckets: []string{"a", "a"}}}} },
		"Allow.Roles":           func(b *Backend) { b.Allow = &Allow{[]rule{{Roles: []string{"a"}}}} },
		"Allow.Sources":         func(b *Backend) { b.Allow = &Allow{[]rule{{Sources: []string{"a"}}}} },
		"WorkloadRoleARN":       func(b *Backend) { b.WorkloadRoleARN = "arn" },
		"ControllerRoleARN":     func(b *Backend) { b.ControllerRoleARN = "arn" },
		"PodIdentityAgent":      func(b *Backend) { b.PodIdentityAgent = "arn" },
		"VolumeBuckets":         func(b *Backend) { b.VolumeBuckets = []string{"a"} },
		"VolumeBuckets, two":    func(b *Backend) { b.VolumeBuckets = []string{"a", "a"} },
		"ExpectedBucketOwner":   func(b *Backend) { b.ExpectedBucketOwner = "111122223333" },
	} {
		other := base
		change(&other)
		others[name] = other
	}
	return base, others, map[string]bool{"Endpoint": true, "Region": true, "PathStyle": true, "CA": true, "Proxy": true, "Proxy.URL": true,
		"Proxy, credentials": true,
		"DualStack":          true, "FIPS": true, "Requests": true, "Requests, key": true, "Requests, payer": true}
}

func TestARevisionIsOneSetOfSettings(t *testing.T) {
	base, others, _ := every()
	for _, s := range []struct {
		of     reflect.Type
		prefix string
	}{{reflect.TypeFor[Backend](), ""}, {reflect.TypeFor[STS](), "STS."}, {reflect.TypeFor[Proxy](), "Proxy."}, {reflect.TypeFor[rule](), "Allow."}} {
		for f := range s.of.Fields() {
			if _, ok := others[s.prefix+f.Name]; !ok && f.IsExported() {
				t.Errorf("nothing tells what another %s does to the revision", s.prefix+f.Name)
			}
		}
	}
	seen := map[string]string{base.Revision(): "none"}
	for name, other := range others {
		if same, ok := seen[other.Revision()]; ok {
			t.Errorf("backends with another %s and another %s have one revision", name, same)
		}
		seen[other.Revision()] = name
	}
	again := base
	again.STS, base.STS = &STS{Region: "x"}, &STS{Region: "x"}
	if again.Revision() != base.Revision() {
		t.Error("two readings of one file have two revisions")
	}
}

func TestAMountDigestIsTheWayToTheServiceAndNothingElse(t *testing.T) {
	base, others, mount := every()
	want := base.MountDigest()
	for name, other := range others {
		if got := other.MountDigest(); (got != want) != mount[name] {
			t.Errorf("another %s: %s", name, got)
		}
	}
}
