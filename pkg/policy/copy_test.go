package policy

import (
	"strings"
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

func TestACopyReachesItsSourceAndItsTarget(t *testing.T) {
	for name, c := range map[string]struct {
		aws             bool
		from, to        string
		source, target  string
		outside, inside string // keys of the source's bucket that are no part of it, and that are
	}{
		"one bucket, AWS":   {true, "data", "data", "a/v/", ".s3-csi/snapshots/s@1/", "a/v2/x", "a/v/x"},
		"one bucket, MinIO": {false, "data", "data", "a/v/", ".s3-csi/snapshots/s@1/", "a/v2/x", "a/v/x"},
		"two, AWS":          {true, "data", "copies", "a/v/", ".s3-csi/snapshots/s@1/", "a/v2/x", "a/v/x"},
		"a bucket, MinIO":   {false, "data", "copies", "", ".s3-csi/snapshots/s@1/", ".s3-csi/probe/x", "x"},
		"to a bucket, AWS":  {true, "copies", "data", ".s3-csi/snapshots/s@1/", "", ".s3-csi/snapshots/s@10/x", ".s3-csi/snapshots/s@1/x"},
	} {
		t.Run(name, func(t *testing.T) {
			text, err := Copy{Source: Scope{Bucket: c.from, Prefix: c.source, AWS: c.aws, KMS: c.aws},
				Target: Scope{Bucket: c.to, Prefix: c.target, AWS: c.aws, KMS: c.aws}}.Policy()
			must(t, err)
			if len(text) > MaxSize {
				t.Errorf("%d characters", len(text))
			}
			versions, err := Copy{Source: Scope{Bucket: c.from, Prefix: c.source, AWS: c.aws, KMS: c.aws},
				Target: Scope{Bucket: c.to, Prefix: c.target, AWS: c.aws, KMS: c.aws}, Versions: true}.Policy()
			if err != nil || len(versions) > MaxSize {
				t.Errorf("with versions: %d characters, %v", len(versions), err)
			}
			e := newEvaluator(t, text, c.aws)
			from, to := calls{bucket: c.from}, calls{bucket: c.to}
			list := func(at calls, prefix string) []asked {
				if prefix == "" {
					return at.onBucket("s3:ListBucket")
				}
				return at.list("s3:ListBucket", prefix)
			}
			at := c.target + "x"
			for what, q := range map[string][]asked{
				"listing the source": list(from, c.source), "listing the target": list(to, c.target), "uploads": to.onBucket("s3:ListBucketMultipartUploads"),
				"reading": from.object("s3:GetObject", c.inside), "its tags": from.object("s3:GetObjectTagging", c.inside), "copying": to.copy(from, c.inside, at),
				"reading the copy": to.object("s3:GetObject", at), "tagging": to.object("s3:PutObjectTagging", at), "aborting": to.object("s3:AbortMultipartUpload",
					at), "removing": to.object("s3:DeleteObject", at),
			} {
				if got := e.all(q...); got != allowed {
					t.Errorf("%s: %s", what, got)
				}
			}
			old := newEvaluator(t, versions, c.aws)
			for _, action := range []string{"s3:GetObjectVersion", "s3:GetObjectVersionTagging"} {
				if of, beside, without := old.all(from.object(action, c.inside)...), old.all(from.object(action, c.outside)...), e.all(from.object(action,
					c.inside)...); of != allowed || beside == allowed || without == allowed {
					t.Errorf("%s: %s of the source, %s beside it, %s of a copy without versions", action, of, beside, without)
				}
			}
			listing := from.onBucket("s3:ListBucketVersions")
			if c.source != "" {
				listing = from.list("s3:ListBucketVersions", c.source)
			}
			if of, without := old.all(listing...), e.all(listing...); of != allowed || without == allowed {
				t.Errorf("listing versions: %s, and %s in a copy without versions", of, without)
			}
			elsewhere := calls{bucket: "another"}
			for what, q := range map[string][]asked{
				"writing the source": from.object("s3:PutObject", c.inside), "removing from the source": from.object("s3:DeleteObject",
					c.inside), "reading beside it": from.object("s3:GetObject", c.outside),
				"writing beside it": from.object("s3:PutObject", c.outside), "a record": from.object("s3:GetObject",
					".s3-csi/volumes/v"), "writing a record": to.object("s3:PutObject", ".s3-csi/volumes/v"),
				"another bucket": elsewhere.object("s3:GetObject", c.inside), "listing another bucket": elsewhere.onBucket("s3:ListBucket"), "deleting the " +
					"bucket": to.onBucket("s3:DeleteBucket"), "its policy": to.onBucket("s3:PutBucketPolicy"),
			} {
				if what == "writing the source" && c.source == "" && c.from == c.to {
					continue
				}
				if got := e.all(q...); got == allowed {
					t.Errorf("%s: %s", what, got)
				}
			}
		})
	}
}

func TestCopiesThatNoPolicyCanDescribe(t *testing.T) {
	good := Scope{Bucket: "data", Prefix: "v/", AWS: true}
	for name, bad := range map[string]Scope{
		"a directory bucket": {Bucket: "data--use1-az4--x-s3", AWS: true}, "the records": {Bucket: "data", Prefix: ".s3-csi/volumes/",
			AWS: true}, "all snapshots": {Bucket: "data", Prefix: ".s3-csi/snapshots/", AWS: true},
		"a long prefix": {Bucket: "data", Prefix: strings.Repeat("p", 1500) + "/", AWS: true},
	} {
		for _, c := range []Copy{{Source: good, Target: bad}, {Source: bad, Target: good}} {
			if text, err := c.Policy(); !fault.Is(err, fault.Precondition) || text != "" {
				t.Errorf("%s: %q, %v", name, text, err)
			}
		}
	}
	if _, err := (Scope{Bucket: "data", Prefix: ".s3-csi/snapshots/s@1/data/", AWS: true}).Session(); !fault.Is(err, fault.Precondition) {
		t.Errorf("a mount that writes to a snapshot: %v", err)
	}
	if _, err := (Scope{Bucket: "data", Prefix: ".s3-csi/snapshots/s@1/data/", AWS: true, ReadOnly: true}).Session(); err != nil {
		t.Errorf("a mount that reads a snapshot: %v", err)
	}
}
