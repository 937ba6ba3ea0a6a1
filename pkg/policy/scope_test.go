package policy

import (
	"fmt"
	"maps"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// expect fails the test where a request is judged otherwise.
func expect(t *testing.T, e evaluator, want verdict, what string, questions ...asked) {
	t.Helper()
	got := e.all(questions...)
	if want == denied && got == silent && !e.escapes && e.otherAction(questions) {
		return // a policy without NotAction: what it does not allow, another policy could
	}
	if got != want {
		t.Errorf("%s: %s, want %s", what, got, want)
	}
}

// reach checks everything that a mount's policy says about keys below its prefix.
func reach(t *testing.T, e evaluator, s Scope, c calls, suffix string) {
	t.Helper()
	write, remove := denied, denied
	if !s.ReadOnly {
		write = allowed
		if s.Needs.Delete {
			remove = allowed
		}
	}
	key := s.Prefix + suffix
	expect(t, e, allowed, fmt.Sprintf("a listing of %q", key), c.list("s3:ListBucket", key)...)
	expect(t, e, allowed, fmt.Sprintf("reading %q", key), c.object("s3:GetObject", key)...)
	expect(t, e, write, fmt.Sprintf("writing %q", key), c.object("s3:PutObject", key)...)
	expect(t, e, write, fmt.Sprintf("aborting an upload of %q", key), c.object("s3:AbortMultipartUpload", key)...)
	expect(t, e, remove, fmt.Sprintf("removing %q", key), c.object("s3:DeleteObject", key)...)
	expect(t, e, denied, fmt.Sprintf("removing a version of %q", key), c.object("s3:DeleteObjectVersion", key)...)
	expect(t, e, denied, "a listing of versions", c.list("s3:ListBucketVersions", key)...)
	expect(t, e, denied, "a listing of uploads", c.list("s3:ListBucketMultipartUploads", key)...)
	for what, q := range c.neverObject(key) {
		expect(t, e, denied, what, q...)
	}
	if !s.ReadOnly {
		expect(t, e, allowed, "a copy within the volume", c.copy(c, key, key+"2")...)
	}
}

// closed checks that nothing can be done to a key.
func closed(t *testing.T, e evaluator, c calls, key string) {
	t.Helper()
	for _, action := range []string{"GetObject", "PutObject", "AbortMultipartUpload", "DeleteObject", "DeleteObjectVersion", "ListMultipartUploadParts"} {
		expect(t, e, denied, fmt.Sprintf("%s of %q", action, key), c.object("s3:"+action, key)...)
	}
	for what, q := range c.neverObject(key) {
		expect(t, e, denied, what, q...)
	}
	expect(t, e, denied, fmt.Sprintf("a listing of %q", key), c.list("s3:ListBucket", key)...)
}

func TestAMountReachesItsPrefixAndNothingElse(t *testing.T) {
	for _, bucket := range []string{"data", accessPoint} {
		for _, base := range []Scope{{}, {ReadOnly: true}, {Needs: Needs{Delete: true}}, {AWS: true, KMS: true, Needs: Needs{Delete: true}}} {
			for _, prefix := range []string{"vol-1/", "a/b/vol-1/", "we*rd?${name}$/"} {
				s := base
				s.Bucket, s.Prefix = bucket, prefix
				s.AWS = s.AWS || bucket == accessPoint || strings.Contains(prefix, "*")
				t.Run(fmt.Sprintf("%+v", s), func(t *testing.T) {
					policy, err := s.Session()
					must(t, err)
					e, c, other := newEvaluator(t, policy, s.AWS), calls{bucket: "data"}, calls{bucket: "data2"}
					if bucket == accessPoint {
						c.accessPoint = accessPoint
						other = calls{bucket: "data"} // not through the access point
						another := calls{bucket: "data", accessPoint: accessPoint + "2"}
						closed(t, e, another, prefix+"file")
						expect(t, e, denied, "a listing through another access point", another.list("s3:ListBucket", prefix)...)
					}
					for _, suffix := range []string{"", "file", "dir/file", "../x", "*", "a b/ü"} {
						reach(t, e, s, c, suffix)
					}
					stem := strings.TrimSuffix(prefix, "/")
					for _, key := range []string{"", "x", stem, stem + "0/file", stem + "0/", stem + "@2/file", "x" + prefix + "file", "x/" + prefix + "file",
						".s3-csi/volumes/vol-1",
						strings.ToUpper(prefix) + "file", strings.ReplaceAll(prefix, "*", "xx") + "?", "*", "?", prefix[:1]} {
						if !strings.HasPrefix(key, prefix) {
							closed(t, e, c, key)
						}
					}
					for what, q := range c.never() {
						expect(t, e, denied, what, q...)
					}
					expect(t, e, denied, "DeleteBucket", c.onBucket("s3:DeleteBucket")...)
					closed(t, e, other, prefix+"file")
					expect(t, e, denied, "a listing of another bucket", other.list("s3:ListBucket", prefix)...)
					expect(t, e, denied, "a copy from outside", c.copy(c, "vol-10/file", prefix+"file")...)
					expect(t, e, denied, "a copy from another bucket", c.copy(other, prefix+"file", prefix+"file")...)
					expect(t, e, denied, "a copy to outside", c.copy(c, prefix+"file", "vol-10/file")...)
				})
			}
		}
	}
}

func TestAMountOfAWholeBucketReachesAllButTheRecords(t *testing.T) {
	for _, bucket := range []string{"data", accessPoint} {
		for _, readOnly := range []bool{false, true} {
			t.Run(fmt.Sprint(bucket, readOnly), func(t *testing.T) {
				s := Scope{Bucket: bucket, AWS: bucket == accessPoint, ReadOnly: readOnly, Needs: Needs{Delete: true}}
				policy, err := s.Session()
				must(t, err)
				e, c, other := newEvaluator(t, policy, s.AWS), calls{bucket: "data"}, calls{bucket: "data2"}
				if s.AWS {
					c.accessPoint = accessPoint
					other = calls{bucket: "data"}
				}
				for _, key := range []string{"file", "dir/file", "x/.s3-csi/file", ".s3-csi", ".s3-csi2/file"} {
					reach(t, e, s, c, key)
				}
				for _, prefix := range []string{"", "dir/", ".s3-csi"} {
					expect(t, e, allowed, fmt.Sprintf("a listing of %q", prefix), c.list("s3:ListBucket", prefix)...)
				}
				expect(t, e, allowed, "a listing without a prefix", c.onBucket("s3:ListBucket")...)
				for _, key := range []string{".s3-csi/", ".s3-csi/volumes/pvc-1", ".s3-csi/probe/x"} {
					closed(t, e, c, key)
				}
				never := c.never()
				maps.DeleteFunc(never, func(what string, _ []asked) bool {
					return strings.HasPrefix(what, "a listing") || strings.HasPrefix(what, "HEAD")
				})
				for what, q := range never {
					expect(t, e, denied, what, q...)
				}
				expect(t, e, denied, "DeleteBucket", c.onBucket("s3:DeleteBucket")...)
				closed(t, e, other, "file")
				if !readOnly {
					expect(t, e, denied, "a copy of a record", c.copy(c, ".s3-csi/volumes/pvc-1", "file")...)
				}
			})
		}
	}
}

func TestKeysAreUsedThroughS3ForTheBucketAlone(t *testing.T) {
	kms := func(action, via, context string) asked {
		keys := map[string]string{}
		if via != "" {
			keys["kms:ViaService"] = via
		}
		if context != "" {
			keys["kms:EncryptionContext:aws:s3:arn"] = context
		}
		return asked{"kms:" + action, "arn:aws:kms:eu-west-1:123456789012:key/k", keys}
	}
	const via = "s3.eu-west-1.amazonaws.com"
	s := Scope{Bucket: "data", Prefix: "p/", AWS: true, KMS: true}
	for _, tc := range []struct {
		name     string
		scope    Scope
		question asked
		want     verdict
	}{
		{"an object", s, kms("Decrypt", via, "arn:aws:s3:::data/p/x"), allowed},
		{"with a bucket key", s, kms("GenerateDataKey", via, "arn:aws:s3:::data"), allowed},
		{"another bucket", s, kms("Decrypt", via, "arn:aws:s3:::data2/p/x"), silent}, // S3 refuses the object itself
		{"by another service", s, kms("Decrypt", "ec2.eu-west-1.amazonaws.com", "arn:aws:s3:::data/p/x"), denied},
		{"by itself", s, kms("Decrypt", "", "arn:aws:s3:::data/p/x"), denied},
		{"another action", s, kms("CreateGrant", via, "arn:aws:s3:::data/p/x"), denied},
		{"writing on a read-only mount", Scope{Bucket: "data", Prefix: "p/", AWS: true, KMS: true, ReadOnly: true},
			kms("GenerateDataKey", via, "arn:aws:s3:::data/p/x"), denied},
		{"reading on a read-only mount", Scope{Bucket: "data", Prefix: "p/", AWS: true, KMS: true, ReadOnly: true}, kms("Decrypt", via, "arn:aws:s3:::data/p/x"),
			allowed},
		{"where it is not asked for", Scope{Bucket: "data", Prefix: "p/", AWS: true}, kms("Decrypt", via, "arn:aws:s3:::data/p/x"), denied},
		{"a directory bucket", Scope{Bucket: express, AWS: true, KMS: true}, kms("GenerateDataKey", "s3express.us-east-1.amazonaws.com",
			"arn:aws:s3express:us-east-1:123456789012:bucket/"+express), allowed},
		{"a directory bucket's key by S3", Scope{Bucket: express, AWS: true, KMS: true}, kms("Decrypt", via,
			"arn:aws:s3express:us-east-1:123456789012:bucket/"+express), denied},
	} {
		t.Run(tc.name, func(t *testing.T) {
			policy, err := tc.scope.Session()
			must(t, err)
			expect(t, newEvaluator(t, policy, true), tc.want, policy, tc.question)
		})
	}
}

func TestADirectoryBucketsSessions(t *testing.T) {
	create := func(bucket, mode string) asked {
		q := asked{"s3express:CreateSession", "arn:aws:s3express:us-east-1:123456789012:bucket/" + bucket, map[string]string{}}
		if mode != "" {
			q.context["s3express:SessionMode"] = mode
		}
		return q
	}
	for readOnly, writing := range map[bool]verdict{false: allowed, true: denied} {
		policy, err := Scope{Bucket: express, AWS: true, ReadOnly: readOnly}.Session()
		must(t, err)
		e := newEvaluator(t, policy, true)
		expect(t, e, allowed, "a session for reading", create(express, "ReadOnly"))
		expect(t, e, writing, "a session for writing", create(express, "ReadWrite"))
		expect(t, e, writing, "a session for whatever there is", create(express, ""))
		expect(t, e, denied, "another bucket", create("other--use1-az4--x-s3", "ReadOnly"))
		expect(t, e, denied, "another action", asked{"s3express:DeleteBucket", "arn:aws:s3express:us-east-1:123456789012:bucket/" + express, nil})
		for what, q := range (calls{bucket: "data"}).never() {
			if what != "a directory bucket" {
				expect(t, e, denied, what, q...)
			}
		}
	}
}

func TestADeletionReachesItsVolumeAndItsRecords(t *testing.T) {
	const record = ".s3-csi/volumes/vol-1"
	for _, bucket := range []string{"data", accessPoint} {
		s := Scope{Bucket: bucket, Prefix: "vol-1/", AWS: bucket == accessPoint}
		records := []string{record, ".s3-csi/probe/"}
		if s.AWS {
			records = records[:1] // or it is too long
		}
		policy, err := s.Deletion(records)
		must(t, err)
		e, c := newEvaluator(t, policy, s.AWS), calls{bucket: "data"}
		if s.AWS {
			c.accessPoint = accessPoint
		}
		own := allowed // a record that is missing is 404 and not 403
		if s.AWS {
			own = denied // AWS does not look at conditions for that
		}
		for _, action := range []string{"s3:ListBucket", "s3:ListBucketVersions"} {
			for prefix, want := range map[string]verdict{"vol-1/": allowed, "vol-1/x": allowed, record: own, "vol-1": denied, "": denied, "vol-10/": denied,
				".s3-csi/": denied, ".s3-csi/volumes/vol-10": denied} {
				expect(t, e, want, fmt.Sprintf("%s of %q", action, prefix), c.list(action, prefix)...)
			}
		}
		expect(t, e, allowed, "a listing of uploads", c.onBucket("s3:ListBucketMultipartUploads")...)
		for key, want := range map[string][2]verdict{ // remove, write
			"vol-1/x": {allowed, denied}, "vol-1/": {allowed, denied}, record: {denied, allowed},
			"vol-10/x": {denied, denied}, "vol-1": {denied, denied}, record + "0": {denied, denied}, ".s3-csi/volumes/": {denied, denied},
		} {
			for _, action := range []string{"DeleteObject", "DeleteObjectVersion", "AbortMultipartUpload"} {
				expect(t, e, want[0], action+" of "+key, c.object("s3:"+action, key)...)
			}
			for _, action := range []string{"GetObject", "PutObject"} {
				expect(t, e, want[1], action+" of "+key, c.object("s3:"+action, key)...)
			}
			for what, q := range c.neverObject(key) {
				expect(t, e, denied, what, q...)
			}
		}
		if !s.AWS {
			expect(t, e, allowed, "a test of the service", append(c.object("s3:DeleteObject", ".s3-csi/probe/x"), c.object("s3:PutObject", ".s3-csi/probe/x")...)...)
		}
		for what, q := range c.never() {
			expect(t, e, denied, what, q...)
		}
		expect(t, e, denied, "DeleteBucket", c.onBucket("s3:DeleteBucket")...)
		expect(t, e, denied, "the tags", c.onBucket("s3:PutBucketTagging")...)
		closed(t, e, calls{bucket: "data2", accessPoint: ""}, "vol-1/x")
	}
	policy, err := Scope{Bucket: "data"}.Deletion(nil)
	must(t, err)
	e, c, other := newEvaluator(t, policy, false), calls{bucket: "data"}, calls{bucket: "data2"}
	for _, action := range []string{"ListBucket", "ListBucketVersions", "ListBucketMultipartUploads", "GetBucketTagging", "PutBucketTagging", "DeleteBucket"} {
		expect(t, e, allowed, action, c.onBucket("s3:"+action)...)
		expect(t, e, denied, action+" of another bucket", other.onBucket("s3:"+action)...)
	}
	expect(t, e, allowed, "removing anything", c.object("s3:DeleteObject", ".s3-csi/x")...)
	expect(t, e, denied, "reading anything", c.object("s3:GetObject", "x")...)
	expect(t, e, denied, "a policy", c.onBucket("s3:PutBucketPolicy")...)
}

func TestUsageReachesNamesAndTheRecordAlone(t *testing.T) {
	const record = ".s3-csi/volumes/vol-1"
	for _, bucket := range []string{"data", accessPoint} {
		s := Scope{Bucket: bucket, Prefix: "vol-1/", AWS: bucket == accessPoint}
		policy, err := s.Usage(record, false)
		must(t, err)
		e, c := newEvaluator(t, policy, s.AWS), calls{bucket: "data"}
		if s.AWS {
			c.accessPoint = accessPoint
		}
		for prefix, want := range map[string]verdict{"vol-1/": allowed, "vol-1/x": allowed, "vol-1": denied, "": denied, "vol-10/": denied, ".s3-csi/": denied,
			record: denied} {
			expect(t, e, want, fmt.Sprintf("a listing of %q", prefix), c.list("s3:ListBucket", prefix)...)
		}
		expect(t, e, allowed, "the record", c.object("s3:GetObject", record)...)
		expect(t, e, denied, "writing the record", c.object("s3:PutObject", record)...)
		for _, key := range []string{"vol-1/x", "vol-1/", "vol-10/x", record + "0", ".s3-csi/volumes/"} {
			for _, action := range []string{"GetObject", "PutObject", "AbortMultipartUpload", "DeleteObject", "ListMultipartUploadParts"} {
				expect(t, e, denied, fmt.Sprintf("%s of %q", action, key), c.object("s3:"+action, key)...)
			}
			for what, q := range c.neverObject(key) {
				expect(t, e, denied, what, q...)
			}
		}
		for what, q := range c.never() {
			expect(t, e, denied, what, q...)
		}
		expect(t, e, denied, "the tags", c.onBucket("s3:GetBucketTagging")...)
		closed(t, e, calls{bucket: "data2"}, record)
	}
}

// FuzzSession: whatever the prefix, a policy that is made lets everything below it be reached, nothing else, and says so within
// the limits.
func FuzzSession(f *testing.F) {
	for _, seed := range []struct{ prefix, suffix, other string }{
		{"vol-1/", "file", "vol-10/file"}, {"vol-1/", "", "vol-1"}, {"a*/", "x", "ab/x"}, {"a?/", "x", "ab/x"}, {"${*}/", "x", "*/x"}, {"$/", "$", "$$/"},
		{`"\/`, `\"`, `\/`}, {"é/", "ü", "e/"}, {"", "x", ".s3-csi/x"}, {"a/", "../b/x", "b/x"}, {"${aws:username}/", "x", "root/x"}, {"😀&<>/", "\u2028", "x"},
	} {
		for flags := range uint8(32) {
			f.Add(seed.prefix, seed.suffix, seed.other, flags)
		}
	}
	f.Fuzz(func(t *testing.T, prefix, suffix, other string, flags uint8) {
		s := Scope{Bucket: "data", Prefix: prefix, ReadOnly: flags&1 != 0, AWS: flags&2 != 0, Needs: Needs{Delete: flags&4 != 0}, KMS: flags&8 != 0}
		c, elsewhere := calls{bucket: "data"}, calls{bucket: "data2"}
		if flags&16 != 0 {
			s.Bucket, s.AWS = accessPoint, true
			c.accessPoint, elsewhere = accessPoint, calls{bucket: "data"} // not through it
		}
		policy, err := s.Session()
		again, _ := s.Session()
		if policy != again {
			t.Error("not the same twice")
		}
		if err != nil {
			if !fault.Is(err, fault.Precondition) || policy != "" || !utf8.ValidString(err.Error()) || strings.ContainsAny(err.Error(), "\n\r\x00") {
				t.Errorf("%q, %v", policy, err)
			}
			return
		}
		if len(policy) > MaxSize || strings.ContainsFunc(policy, func(r rune) bool { return r < ' ' || r > '~' }) {
			t.Fatalf("%d characters: %q", len(policy), policy)
		}
		if !utf8.ValidString(suffix + other) {
			return // no key of S3
		}
		e := newEvaluator(t, policy, s.AWS)
		key := prefix + suffix
		if record := strings.HasPrefix(key, ".s3-csi/"); !record {
			reach(t, e, s, c, suffix)
		}
		expect(t, e, denied, "DeleteBucket", c.onBucket("s3:DeleteBucket")...)
		if prefix == "" {
			if strings.HasPrefix(other, ".s3-csi/") {
				closed(t, e, c, other)
			}
			return
		}
		expect(t, e, denied, "a listing without a prefix", c.onBucket("s3:ListBucket")...)
		stem := strings.TrimSuffix(prefix, "/")
		for _, k := range []string{other, suffix, stem, stem + "0/" + suffix, other + prefix, stem[:len(stem)-1] + "/" + suffix} {
			if !strings.HasPrefix(k, prefix) {
				closed(t, e, c, k)
			}
		}
		closed(t, e, elsewhere, key)
	})
}

// FuzzDeletion: whatever the prefix, a policy that is made lets everything below it be deleted, its record be written, and no other
// key be touched.
func FuzzDeletion(f *testing.F) {
	for _, seed := range []struct{ prefix, record, other string }{
		{"vol-1/", ".s3-csi/volumes/vol-1", "vol-10/x"}, {"a/vol-1/", ".s3-csi/volumes/vol-1", ".s3-csi/volumes/vol-10"}, {"a*/", "r*", "ab/x"}, {"${*}/", "$", "*/"},
		{"a/", ".s3-csi/probe/", ".s3-csi/probe"}, {"\"/", "\\", "/"}, {"", "r", "x"},
	} {
		f.Add(seed.prefix, seed.record, seed.other, false)
		f.Add(seed.prefix, seed.record, seed.other, true)
	}
	f.Fuzz(func(t *testing.T, prefix, record, other string, onAWS bool) {
		s := Scope{Bucket: "data", Prefix: prefix, AWS: onAWS}
		policy, err := s.Deletion([]string{record})
		if err != nil {
			if !fault.Is(err, fault.Precondition) {
				t.Error(err)
			}
			return
		}
		if len(policy) > MaxSize || !utf8.ValidString(other) || record == "" {
			return
		}
		e, c := newEvaluator(t, policy, onAWS), calls{bucket: "data"}
		tests := strings.HasSuffix(record, "/")
		for _, action := range []string{"DeleteObject", "DeleteObjectVersion", "AbortMultipartUpload"} {
			expect(t, e, allowed, action, c.object("s3:"+action, prefix+other)...)
			if inside := strings.HasPrefix(other, prefix) || tests && strings.HasPrefix(other, record); !inside {
				expect(t, e, denied, action+" elsewhere", c.object("s3:"+action, other)...)
			}
		}
		for _, action := range []string{"GetObject", "PutObject"} {
			expect(t, e, allowed, action+" of the record", c.object("s3:"+action, record)...)
			if other != record && (!tests || !strings.HasPrefix(other, record)) {
				expect(t, e, denied, action+" elsewhere", c.object("s3:"+action, other)...)
			}
		}
		if prefix != "" && !strings.HasPrefix(other, prefix) && other != record && (!tests || !strings.HasPrefix(other, record)) {
			expect(t, e, denied, "a listing elsewhere", c.list("s3:ListBucket", other)...)
			expect(t, e, denied, "a listing of versions elsewhere", c.list("s3:ListBucketVersions", other)...)
			expect(t, e, denied, "a listing without a prefix", c.onBucket("s3:ListBucketVersions")...)
		}
	})
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
