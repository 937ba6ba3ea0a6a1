package mount

import (
	"strings"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

func request() Request {
	return Request{
		VolumeID: "default:bucket/pvc-1/", Target: "/t", Volume: volume.ID{Backend: "default", Bucket: "bucket", Prefix: "pvc-1/"},
		Source: credentials.SourceDriver,
	}
}

// A key that changes with a version of the driver would leave every running mount behind.
func TestKey_NeverChanges(t *testing.T) {
	full := request()
	full.Attributes = volume.Attributes{
		Client: "rclone", UID: new(uint32(1000)), GID: new(uint32(0)), DirMode: new(uint32(0o750)), FileMode: new(uint32(0o640)),
		ReadOnly: true, Region: "eu-west-1", ExpectedBucketOwner: "111122223333",
	}
	full.Options = []volume.Option{{Name: "allow-delete"}, {Name: "metadata-ttl", Value: "60", HasValue: true}}
	full.MountGroup, full.SELinuxContext = new(uint32(2000)), "system_u:object_r:container_file_t:s0"
	full.Source, full.Keys = credentials.SourceSecret, credentials.Keys{AccessKeyID: "AKIA", SecretAccessKey: "s"}
	for _, tc := range []struct {
		name string
		r    Request
		want string
	}{
		{"least", request(), "nwvnapvcpz647khmcey2pjuk"},
		{"everything", full, "uxxcvfs7oion3h6qfau44yi6"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			spec := NewSpec(tc.r, []byte("salt"))
			if got := spec.Key(); got != tc.want {
				t.Errorf("key %s, want %s for %s", got, tc.want, spec.Encode())
			}
			if !ValidName(Name(spec.Key(), 1)) {
				t.Error("the name is not valid")
			}
		})
	}
}

// Whatever decides what the FUSE process does, or for whom, makes another mount; what is the publication's own does not.
func TestKey_DiffersWithTheSettings(t *testing.T) {
	keys := credentials.Keys{AccessKeyID: "AKIA", SecretAccessKey: "s"}
	secret := func(r *Request) { r.Source, r.Keys = credentials.SourceSecret, keys }
	base := request()
	for _, tc := range []struct {
		name   string
		change func(*Request)
		same   bool
	}{
		{"another backend", func(r *Request) { r.Volume.Backend = "b" }, false},
		{"another bucket", func(r *Request) { r.Volume.Bucket = "b" }, false},
		{"another prefix", func(r *Request) { r.Volume.Prefix = "pvc-10/" }, false},
		{"another client", func(r *Request) { r.Attributes.Client = "rclone" }, false},
		{"an option", func(r *Request) { r.Options = []volume.Option{{Name: "x"}} }, false},
		{"a uid of zero", func(r *Request) { r.Attributes.UID = new(uint32(0)) }, false},
		{"a group", func(r *Request) { r.MountGroup = new(uint32(1)) }, false},
		{"a read-only volume", func(r *Request) { r.Attributes.ReadOnly = true }, false},
		{"a consistency", func(r *Request) { r.Attributes.Consistency = volume.ConsistencyCloseToOpen }, false},
		{"an SELinux context", func(r *Request) { r.SELinuxContext = "c" }, false},
		{"a secret", secret, false},
		{"a role", func(r *Request) { r.Attributes.RoleARN = "arn:aws:iam::1:role/a" }, false},
		{"a scope", func(r *Request) { r.Attributes.Scope = volume.ScopeAuto }, false},
		{"a session's length", func(r *Request) { r.Attributes.SessionDuration = time.Hour }, false},
		{"a workload", workload("team-a", "app"), false},
		{"the pod of a mount that is not its own", func(r *Request) { r.PodNamespace, r.ServiceAccount = "team-a", "app" }, true},
		{"a read-only publication", func(r *Request) { r.ReadOnly = true }, true},
		{"another target", func(r *Request) { r.Target = "/u" }, true},
		{"another volume of the same place", func(r *Request) { r.VolumeID = "static" }, true},
		{"another time to linger", func(r *Request) { r.Attributes.Linger = time.Minute }, true},
		{"another interval of usage", func(r *Request) { r.Attributes.Usage = volume.UsageOff }, true},
		{"a single writer", func(r *Request) { r.SingleWriter = true }, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := request()
			tc.change(&r)
			if same := NewSpec(r, nil).Key() == NewSpec(base, nil).Key(); same != tc.same {
				t.Errorf("same mount: %t, want %t", same, tc.same)
			}
		})
	}
	t.Run("another pod's service account", func(t *testing.T) {
		keys := map[string]string{}
		for _, pod := range [][2]string{{"team-a", "app"}, {"team-a", "other"}, {"team-b", "app"}} {
			r := request()
			workload(pod[0], pod[1])(&r)
			key := NewSpec(r, nil).Key()
			if who, taken := keys[key]; taken {
				t.Errorf("%v shares the mount of %s", pod, who)
			}
			keys[key] = pod[0] + "/" + pod[1]
			r.Tokens = credentials.Tokens{"aud": {Value: "another"}}
			if NewSpec(r, nil).Key() != key {
				t.Errorf("%v: a new token makes another mount", pod)
			}
		}
	})
	t.Run("the role of the same secret", func(t *testing.T) {
		mine, theirs := request(), request()
		secret(&mine)
		secret(&theirs)
		theirs.SecretRoleARN = "arn:aws:iam::1:role/a"
		if NewSpec(mine, nil).Key() == NewSpec(theirs, nil).Key() {
			t.Error("the role of a secret is everybody's who has its keys")
		}
		if !NewSpec(mine, nil).RotatedFrom(NewSpec(theirs, nil)) {
			t.Error("a secret that gets a role is no rotation")
		}
	})
	t.Run("the secret of a known access key", func(t *testing.T) {
		mine, theirs := request(), request()
		secret(&mine)
		secret(&theirs)
		theirs.Keys.SecretAccessKey = "guess"
		if NewSpec(mine, []byte("n")).Key() == NewSpec(theirs, []byte("n")).Key() {
			t.Error("an access key without its secret is enough to join the mount")
		}
	})
	t.Run("nothing secret is encoded", func(t *testing.T) {
		r := request()
		r.Source, r.Keys = credentials.SourceSecret, credentials.Keys{AccessKeyID: "AKIACANARY", SecretAccessKey: "canary-secret", SessionToken: "canary-token"}
		if s := NewSpec(r, []byte("n")).Encode(); strings.Contains(strings.ToLower(s), "canary") {
			t.Errorf("the spec shows a secret: %s", s)
		}
	})
}

func workload(namespace, account string) func(*Request) {
	return func(r *Request) {
		r.Source, r.PodNamespace, r.ServiceAccount = credentials.SourceWorkload, namespace, account
		r.Tokens = credentials.Tokens{"aud": {Value: "token"}}
	}
}

// Another secret of the same volume is a rotation; a volume that is another, or gets its credentials from elsewhere, is not.
func TestRotatedFrom_NeedsTheSameSettings(t *testing.T) {
	of := func(change func(*Request)) Spec {
		r := request()
		r.Source, r.Keys = credentials.SourceSecret, credentials.Keys{AccessKeyID: "AKIA", SecretAccessKey: "s"}
		change(&r)
		return NewSpec(r, []byte("n"))
	}
	before := of(func(*Request) {})
	for what, tc := range map[string]struct {
		change func(*Request)
		want   bool
	}{
		"the same":         {func(*Request) {}, false},
		"another secret":   {func(r *Request) { r.Keys.SecretAccessKey = "t" }, true},
		"another key":      {func(r *Request) { r.Keys = credentials.Keys{AccessKeyID: "AKIB", SecretAccessKey: "t"} }, true},
		"another role too": {func(r *Request) { r.Keys.SecretAccessKey, r.Attributes.RoleARN = "t", "arn:aws:iam::1:role/a" }, false},
		"another prefix":   {func(r *Request) { r.Keys.SecretAccessKey, r.Volume.Prefix = "t", "x/" }, false},
		"the driver's own": {func(r *Request) { r.Source, r.Keys = credentials.SourceDriver, credentials.Keys{} }, false},
		"a workload's":     {workload("a", "b"), false},
	} {
		if got := of(tc.change).RotatedFrom(before); got != tc.want {
			t.Errorf("%s: %t", what, got)
		}
	}
}

func TestSourceNames(t *testing.T) {
	name := Name(NewSpec(request(), nil).Key(), 7)
	for _, tc := range []struct {
		source string
		ok     bool
	}{
		{SourceName("default:bucket/pvc-1/", name), true},
		{SourceName("a b,c\\d\n\u00e9", name), true},
		{"s3csi:" + name, true},
		{"s3csi:x:../../etc", false},
		{"s3csi:x:" + strings.ToUpper(name), false},
		{"s3csi:x:" + name + "x", false},
		{"s3csi:x:" + strings.TrimSuffix(name, "7"), false},
		{"mountpoint-s3", false},
		{"", false},
	} {
		got, ok := NameOf(tc.source)
		if ok != tc.ok || ok && got != name {
			t.Errorf("%q: %q %t", tc.source, got, ok)
		}
		if strings.ContainsAny(tc.source, " ,\\\n") {
			t.Errorf("%q needs escaping in the mount table", tc.source)
		}
	}
}

func FuzzNameOfSource(f *testing.F) {
	f.Add("s3csi:default:bucket/pvc-1/:" + Name(NewSpec(request(), nil).Key(), 1))
	f.Add("s3csi:x:../..-1")
	f.Fuzz(func(t *testing.T, source string) {
		if name, ok := NameOf(source); ok && strings.ContainsAny(name, "/.\x00") {
			t.Errorf("%q gives the name %q, which is no file name of ours", source, name)
		}
	})
}

func TestStatisticsWithUsage(t *testing.T) {
	client := Stats{TotalBytes: 1000, UsedBytes: 1, AvailableBytes: 999, Inodes: 50, InodesUsed: 2, InodesFree: 48}
	for name, tc := range map[string]struct {
		u    Usage
		want Stats
	}{
		"empty":                {Usage{0, 0, 10}, Stats{10, 0, 10, 50, 0, 50}},
		"of a size":            {Usage{7, 3, 10}, Stats{10, 7, 3, 50, 3, 47}},
		"more than the size":   {Usage{70, 3, 10}, Stats{10, 70, 0, 50, 3, 47}},
		"of an unknown size":   {Usage{7, 3, 0}, Stats{1000, 7, 993, 50, 3, 47}},
		"more than any client": {Usage{7000, 60, 0}, Stats{1000, 7000, 0, 50, 60, 0}},
	} {
		if got := client.With(tc.u); got != tc.want {
			t.Errorf("%s: %+v, want %+v", name, got, tc.want)
		}
	}
}
