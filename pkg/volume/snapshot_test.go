package volume

import (
	"strings"
	"testing"
)

func TestSnapshotIDsAreStrict(t *testing.T) {
	id := SnapshotID{Backend: "default", Bucket: "bucket", Segment: "snapshot-1", Generation: 2}
	if back, err := ParseSnapshotID(id.String()); err != nil || back != id || id.String() != "default:bucket/snapshot-1@2" {
		t.Errorf("%q: %+v, %v", id, back, err)
	}
	if id.Data() != ".s3-csi/snapshots/snapshot-1@2/data/" {
		t.Error(id.Data())
	}
	for _, bad := range []string{
		"", "x", "default:bucket", "default:bucket/", "default:bucket/s", "default:bucket/s@", "default:bucket/s@0", "default:bucket/s@01",
		"default:bucket/s@10000", "default:bucket/a/s@1", "default:bucket/s@1/",
		"default:bucket/@1", "default:bucket/.s@1", "default:b/s@1", "Default:bucket/s@1", "default:bucket/s@1@1", "default:bucket/" + strings.Repeat("s", 41) +
			"@1", strings.Repeat("x", 129),
	} {
		if id, err := ParseSnapshotID(bad); err == nil {
			t.Errorf("%q is %+v", bad, id)
		}
	}
	if _, err := ParseID(id.String()); err == nil {
		t.Error("a snapshot id is a volume id")
	}
}

func FuzzSnapshotID(f *testing.F) {
	for _, s := range []string{"default:bucket/snapshot-1@2", "a:b.c/x@1", "default:bucket/x@9999"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if id, err := ParseSnapshotID(s); err == nil && id.String() != s {
			t.Fatalf("%q is %+v, %q", s, id, id)
		}
	})
}

func TestContentIsReadAsItWasWritten(t *testing.T) {
	for _, c := range []Content{
		{Snapshot: SnapshotID{Backend: "b", Bucket: "bucket", Segment: "s", Generation: 1}}, {Volume: ID{Backend: "b", Bucket: "bucket",
			Prefix: "v/"}}, {Volume: ID{Backend: "b", Bucket: "bucket"}},
	} {
		if back, err := ParseContent(c.String()); err != nil || back != c || c.Backend() != "b" {
			t.Errorf("%q: %+v, %v", c, back, err)
		}
	}
	for _, bad := range []string{"", "x", "snapshot x", "volume x"} {
		if c, err := ParseContent(bad); err == nil {
			t.Errorf("%q is %+v", bad, c)
		}
	}
	with := Parameters{Content: Content{Volume: ID{Backend: "b", Bucket: "bucket"}}}
	if with.Digest() == (Parameters{}).Digest() {
		t.Error("content does not change the digest")
	}
}

func TestEverySnapshotParameterIsParsed(t *testing.T) {
	for _, doc := range SnapshotParameterDocs() {
		_, err := ParseSnapshotParameters(map[string]string{doc.Name: "\x01"})
		wantInvalid(t, err, "parameters."+doc.Name)
		if strings.Contains(err.Error(), "is not a parameter") {
			t.Errorf("%s: %v", doc.Name, err)
		}
	}
	one, err := ParseSnapshotParameters(map[string]string{"maxBytes": "1Gi", "csi.storage.k8s.io/volumesnapshot/name": "s"})
	must(t, err)
	if two, err := ParseSnapshotParameters(map[string]string{"maxBytes": "1073741824", "onDelete": "delete"}); err != nil || one != two ||
		one.Digest() != two.Digest() {
		t.Errorf("%+v and %+v, %v", one, two, err)
	}
	long := ID{Backend: strings.Repeat("b", 32), Bucket: strings.Repeat("c", 63), Prefix: "v/"}
	wantInvalid(t, one.CheckPlace(long), "parameters.bucketName")
	if err := one.CheckPlace(ID{Backend: "default", Bucket: strings.Repeat("c", 63)}); err != nil {
		t.Error(err)
	}
}

func TestAVolumeThatIsASnapshot(t *testing.T) {
	p, err := ParseParameters(map[string]string{"bucketName": "bucket", "snapshotAccess": "direct"}, "v")
	must(t, err)
	wantInvalid(t, p.ApplyAccess(), "parameters.snapshotAccess")
	p.Content.Snapshot = SnapshotID{Backend: "default", Bucket: "other", Segment: "s", Generation: 2}
	wantInvalid(t, p.ApplyAccess(), "parameters.bucketName")
	p.Content.Snapshot.Bucket = "bucket"
	before := p.Digest()
	if err := p.ApplyAccess(); err != nil || p.Digest() == before {
		t.Errorf("%v, digest %s", err, p.Digest())
	}
	for _, handle := range []string{p.ID("v", 1).String(), "static"} {
		r, err := Read(Given{Handle: handle, Context: with(p.Context(), "bucketName", "bucket")})
		if err != nil || r.ID != (ID{"default", "bucket", ".s3-csi/snapshots/s@2/data/"}) || !r.Attributes.ReadOnly || r.Attributes.Snapshot != "" {
			t.Errorf("%s: %+v, %v", handle, r, err)
		}
	}
	_, err = Read(Given{Handle: "static", Context: map[string]string{"bucketName": "bucket", "prefix": "p/", "snapshot": "s@2"}})
	wantInvalid(t, err, "volume_context.snapshot")
	for _, bad := range []string{"s", "s@0", "../x@1", "s@1/", "a/s@1"} {
		_, err = Read(Given{Handle: "static", Context: map[string]string{"bucketName": "bucket", "snapshot": bad}})
		wantInvalid(t, err, "volume_context.snapshot")
	}
}
