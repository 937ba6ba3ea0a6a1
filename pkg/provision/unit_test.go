package provision

import (
	"context"
	"errors"
	"maps"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"
	"go.uber.org/goleak"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestWhatBucketTagsMean(t *testing.T) {
	want := tags{tagDriver: "d", tagCluster: "c", tagVolume: "default:b", tagName: "v", tagParameters: "v1:0", tagOnDelete: "delete", tagState: "active"}
	with := func(k, v string) tags {
		have := tags{"cost-centre": "42"}
		maps.Copy(have, want)
		if have[k] = v; v == "" {
			delete(have, k)
		}
		return have
	}
	for name, tc := range map[string]struct {
		have tags
		kind fault.Kind
	}{
		"ours":              {with("cost-centre", "43"), fault.Unknown},
		"none":              {tags{}, fault.Exists},
		"an operator's":     {tags{"team": "a"}, fault.Exists},
		"another driver":    {with(tagDriver, "x"), fault.Exists},
		"another cluster":   {with(tagCluster, "x"), fault.Exists},
		"no cluster":        {with(tagCluster, ""), fault.Exists},
		"another volume":    {with(tagVolume, "default:x"), fault.Exists},
		"another name":      {with(tagName, "x"), fault.Exists},
		"other parameters":  {with(tagParameters, "v1:1"), fault.Exists},
		"one is missing":    {with(tagParameters, ""), fault.Exists},
		"one more of ours":  {with(tagPrefix+"more", "x"), fault.Exists},
		"being deleted":     {with(tagState, "deleting"), fault.Busy},
		"retained":          {with(tagState, "deleted"), fault.Exists},
		"another's, ending": {tags{tagDriver: "x", tagVolume: "default:b", tagState: "deleting"}, fault.Exists},
	} {
		if err := decideBucket(tc.have, want, "b"); fault.KindOf(err) != tc.kind || (err == nil) != (tc.kind == fault.Unknown) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestTagValuesFitEverywhere(t *testing.T) {
	seen := map[string]string{}
	for _, name := range []string{"v", "pvc-0123", "a b", "a{b}", "a|b", "größe", "grösse", strings.Repeat("x", 128), strings.Repeat("x", 200), " v", "v\n"} {
		v := tagValue(name)
		if len(v) > 128 || strings.ContainsFunc(v, func(r rune) bool { return !tagRune(r) || r == ' ' }) {
			t.Errorf("%q became %q", name, v)
		}
		if other, ok := seen[v]; ok {
			t.Errorf("%q and %q are both %q", other, name, v)
		}
		seen[v] = name
	}
}

func TestOwnersAreChecked(t *testing.T) {
	for _, o := range []owner{{"", "c"}, {"a b", ""}, {"d", "c|d"}, {"d", "ä"}, {"d", strings.Repeat("c", 129)}} {
		if err := o.check(); err == nil {
			t.Errorf("%q is an owner", o)
		}
	}
	if err := (owner{"s3.csi.driver", ""}).check(); err != nil {
		t.Error(err)
	}
}

func TestNothingOutsideThePrefixIsDeleted(t *testing.T) {
	for _, tc := range []struct {
		prefix, key string
		ok          bool
	}{
		{"vol-1/", "vol-1/x", true}, {"vol-1/", "vol-1/", true}, {"", "x", true},
		{"vol-1/", "vol-10/x", false}, {"vol-1/", "vol-1", false}, {"vol-1/", "", false}, {"vol-1", "vol-1/x", false}, {"vol-1", "vol-10", false},
	} {
		if err := below(tc.prefix, tc.key); (err == nil) != tc.ok {
			t.Errorf("%q below %q: %v", tc.key, tc.prefix, err)
		}
	}
}

func TestKeysOfListingsAreDecodedWhereTheServiceEncodedThem(t *testing.T) {
	for _, tc := range []struct {
		key      string
		encoding types.EncodingType
		want     string
	}{
		{"a+b%2Fc%01", types.EncodingTypeUrl, "a b/c\x01"}, {"a+b%2F", "", "a+b%2F"}, {"100%", types.EncodingTypeUrl, "!"},
	} {
		got, err := plainKey(aws.String(tc.key), tc.encoding)
		if (tc.want == "!") != (err != nil) || err == nil && got != tc.want {
			t.Errorf("%q: %q, %v", tc.key, got, err)
		}
	}
}

func TestKeysThatXMLCannotHold(t *testing.T) {
	for key, want := range map[string]bool{"a b": true, "ä<&>": true, "a\x01": false, "a\nb": false, "a\uFFFE": false, "a\xff": false, "\U0001F600": true} {
		if got := xmlSafe(key); got != want {
			t.Errorf("%q: %t", key, got)
		}
	}
}

func TestEveryRefusalOfAMultiDeleteCounts(t *testing.T) {
	e := eraser{progress: &progress{}}
	batch := []object{{"a", ""}, {"b", "1"}, {"c", ""}}
	failed := []types.Error{
		{Key: aws.String("a"), Code: aws.String("SlowDown")},
		{Key: aws.String("b"), VersionId: aws.String("1"), Code: aws.String("AccessDenied"), Message: aws.String("locked")},
		{Key: aws.String("nobody asked"), Code: aws.String("InternalError")},
		{},
	}
	busy := e.judge(batch, failed, true)
	if len(busy) != 1 || busy[0].key != "a" || e.refused.count != 3 || !e.refused.denied || e.progress.refused.Load() != 3 {
		t.Errorf("busy %v, refused %+v", busy, e.refused)
	}
	if busy := e.judge(batch, failed[:1], false); len(busy) != 0 || e.refused.count != 4 {
		t.Errorf("after the last attempt: busy %v, refused %+v", busy, e.refused)
	}
}

func TestProgressIsReadable(t *testing.T) {
	var p progress
	p.objects.Add(1234567)
	p.uploads.Add(1)
	if got := p.String(); got != "1,234,567 objects removed, 1 unfinished upload aborted" {
		t.Error(got)
	}
	for n, want := range map[int]string{0: "0 objects", 1: "1 object", 999: "999 objects", 1000: "1,000 objects", 123456: "123,456 objects"} {
		if got := count(n, "object"); got != want {
			t.Errorf("%d: %s", n, got)
		}
	}
}

func TestTheThrottleBoundsAndGivesWay(t *testing.T) {
	th := newThrottle(8)
	var now, most atomic.Int64
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			if err := th.acquire(t.Context()); err != nil {
				t.Error(err)
				return
			}
			most.Store(max(most.Load(), now.Add(1)))
			time.Sleep(time.Millisecond)
			now.Add(-1)
			th.release(false)
		})
	}
	wg.Wait()
	if most.Load() > 8 {
		t.Errorf("%d at once", most.Load())
	}
	for range 3 { // one burst counts once
		if err := th.acquire(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	for range 3 {
		th.release(true)
	}
	if th.limit != 4 {
		t.Errorf("the limit is %d after one burst, want 4", th.limit)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := th.acquire(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("during the pause: %v", err)
	}
	for range 200 {
		if err := th.acquire(t.Context()); err != nil {
			t.Fatal(err)
		}
		th.release(false)
	}
	if th.limit != 8 || th.busy != 0 {
		t.Errorf("limit %d, busy %d after better times", th.limit, th.busy)
	}
}

func TestRunsAreOnePerVolumeAndBounded(t *testing.T) {
	rs := newRuns(2)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- rs.run(ctx) }()
	var now, most, jobs atomic.Int64
	asked := make(chan struct{})
	job := func(context.Context, *run) error {
		jobs.Add(1)
		most.Store(max(most.Load(), now.Add(1)))
		<-asked // who comes when it is done gets another
		time.Sleep(5 * time.Millisecond)
		now.Add(-1)
		return nil
	}
	var wg sync.WaitGroup
	for range 4 {
		for _, id := range []string{"a", "b", "c", "d", "e"} {
			r, err := rs.start(id, identity{}, job)
			if err != nil {
				t.Fatal(err)
			}
			wg.Go(func() {
				if err := rs.wait(t.Context(), r); err != nil {
					t.Error(err)
				}
			})
		}
	}
	close(asked)
	wg.Wait()
	if most.Load() > 2 || jobs.Load() != 5 {
		t.Errorf("%d jobs, %d at once", jobs.Load(), most.Load())
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if err := rs.run(t.Context()); err == nil {
		t.Error("Run can be called again")
	}
	if len(rs.byID) != 0 {
		t.Errorf("%d runs are kept", len(rs.byID))
	}
}

func TestARunsFailureIsToldToWhoWaitsForTheNext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rs := newRuns(1)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- rs.run(ctx) }()
		defer func() {
			cancel()
			if err := <-ended; err != nil {
				t.Error(err)
			}
		}()
		r, err := rs.start("v", identity{}, func(context.Context, *run) error { return fault.Errorf(fault.Denied, "locked") })
		if err != nil {
			t.Fatal(err)
		}
		if err := rs.wait(t.Context(), r); !fault.Is(err, fault.Denied) || !strings.Contains(err.Error(), "deleting volume v") {
			t.Errorf("%v", err)
		}
		r, err = rs.start("v", identity{}, func(ctx context.Context, _ *run) error { <-ctx.Done(); return ctx.Err() })
		if err != nil {
			t.Fatal(err)
		}
		short, cancelShort := context.WithTimeout(t.Context(), time.Second)
		defer cancelShort()
		if err := rs.wait(short, r); !fault.Is(err, fault.Busy) || !strings.Contains(err.Error(), "locked") || short.Err() != nil {
			t.Errorf("%v, %v", err, short.Err())
		}
	})
}

func TestKnowledgeIsBounded(t *testing.T) {
	now := testTime
	k := newKnowledge(func() time.Time { return now })
	id := bucketID{"default", "b"}
	k.reserve(id, "a/")
	if !k.reserved(id, "a/") || k.reserved(id, "b/") {
		t.Error("wrong reservations")
	}
	now = now.Add(baseTTL)
	if k.reserved(id, "a/") {
		t.Error("a reservation is believed for ever")
	}
	for i := range 2 * knownBases {
		k.reserve(id, strings.Repeat("x", i))
		k.see(bucketID{"default", strings.Repeat("x", i)}, func(*facts) {})
	}
	if len(k.buckets) > knownBuckets {
		t.Errorf("%d buckets", len(k.buckets))
	}
	k.see(id, func(f *facts) {
		if len(f.bases) > knownBases {
			t.Errorf("%d bases", len(f.bases))
		}
	})
}
