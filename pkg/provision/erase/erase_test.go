package erase

import (
	"testing"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"
	"go.uber.org/goleak"

	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestKeysThatXMLCannotHold(t *testing.T) {
	for key, want := range map[string]bool{"a b": true, "ä<&>": true, "a\x01": false, "a\nb": false, "a\uFFFE": false, "a\xff": false, "\U0001F600": true} {
		if got := xmlSafe(key); got != want {
			t.Errorf("%q: %t", key, got)
		}
	}
}

func TestEveryRefusalOfAMultiDeleteCounts(t *testing.T) {
	e := erasure{task: Task{Progress: &Progress{}}, now: map[buckets.Object]bool{}}
	batch := []buckets.Object{{Key: "a"}, {Key: "b", Version: "1"}, {Key: "c"}}
	failed := []types.Error{
		{Key: aws.String("a"), Code: aws.String("SlowDown")},
		{Key: aws.String("b"), VersionId: aws.String("1"), Code: aws.String("AccessDenied"), Message: aws.String("locked")},
		{Key: aws.String("nobody asked"), Code: aws.String("InternalError")},
		{},
	}
	busy := e.judge(batch, failed, true)
	if len(busy) != 1 || busy[0].Key != "a" || e.refused.count != 3 || !e.refused.denied || e.task.Progress.refused.Load() != 3 {
		t.Errorf("busy %v, refused %+v", busy, e.refused)
	}
	if busy := e.judge(batch, failed[:1], false); len(busy) != 0 || e.refused.count != 4 {
		t.Errorf("after the last attempt: busy %v, refused %+v", busy, e.refused)
	}
}

func TestProgressIsReadable(t *testing.T) {
	var p Progress
	p.objects.Add(1234567)
	p.uploads.Add(1)
	if got := p.String(); got != "1,234,567 objects removed, 1 unfinished upload aborted" {
		t.Error(got)
	}
	for n, want := range map[int]string{0: "0 objects", 1: "1 object", 999: "999 objects", 1000: "1,000 objects", 123456: "123,456 objects"} {
		if got := Count(n, "object"); got != want {
			t.Errorf("%d: %s", n, got)
		}
	}
}
