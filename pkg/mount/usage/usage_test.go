package usage

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	awscredentials "github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/records"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	handle = "default:bucket/v/"
	six    = volume.Usage(6 * time.Hour)
)

// fixture is a node with an S3 service, a clock, and everything that outlives a driver.
type fixture struct {
	t   *testing.T
	now time.Time
	*Meter

	records      stored
	publications []state.Publication
	session      error // of every session
	sessions     []string

	objects map[string]int // keys and sizes
	perPage int
	limit   int          // of pages
	setting volume.Usage // of the record
	size    int64        // of the record
	status  map[string]int
	asked   map[string]int // requests by kind: record, tags, list
	listing func()         // called during each listing; may be nil
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	f := &fixture{
		t: t, now: time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC), records: stored{}, objects: map[string]int{"v/a": 3, "v/b": 4},
		perPage: 1000, limit: 3, setting: six, size: 100, status: map[string]int{}, asked: map[string]int{},
	}
	f.restart()
	return f
}

// restart is a new driver.
func (f *fixture) restart() {
	f.t.Helper()
	var err error
	f.Meter, err = New(f.t.Context(), Options{Store: f.records, Publications: f, Backends: f, Sessions: f, MaxRequests: f.limit,
		Now: func() time.Time { return f.now }})
	if err != nil {
		f.t.Fatal(err)
	}
}

// stored is a Store, by the volumes' IDs.
type stored map[string]state.Usage

func (s stored) All(context.Context) (all []state.Usage, err error) {
	for _, u := range s {
		all = append(all, u)
	}
	return all, nil
}

func (s stored) Write(_ context.Context, u state.Usage) error {
	s[u.VolumeID] = u
	return nil
}

func (s stored) Remove(_ context.Context, id string) error {
	delete(s, id)
	return nil
}

func (f *fixture) All(context.Context) ([]state.Publication, error) { return f.publications, nil }

func (f *fixture) Backend(name string) (backend.Backend, error) {
	return backend.Backend{Name: name, Endpoint: "http://s3.example"}, nil
}

func (f *fixture) UsageKeys(_ context.Context, _ mount.Request, spec mount.Spec, record mount.RecordPlace) (credentials.Keys, error) {
	f.sessions = append(f.sessions, fmt.Sprintf("%s%q record=%q tags=%t", spec.Bucket, spec.Prefix, record.Key, record.Tags))
	return credentials.Keys{AccessKeyID: "a", SecretAccessKey: "s"}, f.session
}

func (f *fixture) With(ctx context.Context, _ backend.Backend, a backend.Access, do func(context.Context, *s3.Client) error) (backend.BucketInfo, error) {
	return a.Bucket, do(ctx, s3.New(s3.Options{
		BaseEndpoint: aws.String("http://s3.example"), Region: "r", UsePathStyle: true, RetryMaxAttempts: 1, HTTPClient: f,
		Credentials: awscredentials.NewStaticCredentialsProvider("a", "s", ""),
	}))
}

// Do answers a request to S3.
func (f *fixture) Do(r *http.Request) (*http.Response, error) {
	query := r.URL.Query()
	kind, body := "record", ""
	switch {
	case query.Has("list-type"):
		kind, body = "list", f.list(query.Get("prefix"), query.Get("continuation-token"))
	case query.Has("tagging"):
		kind = "tags"
		for k, v := range map[string]string{records.TagVolume: "default:bucket", records.TagState: "active", records.TagUsage: f.setting.String(),
			records.TagCapacity: fmt.Sprint(f.size)} {
			body += "<Tag><Key>" + k + "</Key><Value>" + v + "</Value></Tag>"
		}
		body = "<Tagging><TagSet>" + body + "</TagSet></Tagging>"
	case strings.HasPrefix(r.URL.Path, "/bucket/.s3-csi/volumes/"):
		body = f.record()
	default:
		f.t.Errorf("asked for %s", r.URL)
	}
	f.asked[kind]++
	if kind == "list" && f.listing != nil {
		f.listing()
		return nil, r.Context().Err()
	}
	code := f.status[kind]
	if code == 0 {
		code = http.StatusOK
	} else {
		body = "<Error><Code>" + map[int]string{http.StatusNotFound: "NoSuchKey", http.StatusForbidden: "AccessDenied"}[code] + "</Code></Error>"
	}
	return &http.Response{StatusCode: code, Header: http.Header{}, Body: io.NopCloser(strings.NewReader(body)), Request: r}, nil
}

func (f *fixture) record() string {
	id := volume.ID{Backend: "default", Bucket: "bucket", Prefix: "v/"}
	r := records.NewStore(records.Owner{Driver: "d"}, nil, func() time.Time { return f.now }).
		New("v", id, volume.Parameters{BucketName: "bucket", Mutable: volume.Mutable{OnDelete: volume.OnDeleteDelete, Usage: f.setting}, CapacityBytes: f.size})
	b, err := json.Marshal(r)
	if err != nil {
		f.t.Fatal(err)
	}
	return string(b)
}

func (f *fixture) list(prefix, token string) string {
	var keys []string
	for key := range f.objects {
		if strings.HasPrefix(key, prefix) && key > token {
			keys = append(keys, key)
		}
	}
	slices.Sort(keys)
	cut := len(keys) > f.perPage
	keys = keys[:min(len(keys), f.perPage)]
	body := fmt.Sprintf("<ListBucketResult><IsTruncated>%t</IsTruncated>", cut)
	for _, key := range keys {
		body += fmt.Sprintf("<Contents><Key>%s</Key><Size>%d</Size></Contents>", key, f.objects[key])
	}
	if cut {
		body += "<NextContinuationToken>" + keys[len(keys)-1] + "</NextContinuationToken>"
	}
	return body + "</ListBucketResult>"
}

// publish is a publication, after which everything that is due is done.
func (f *fixture) publish(change ...func(*mount.Request, *mount.Spec)) {
	f.t.Helper()
	r := mount.Request{VolumeID: handle, Target: "/t", Attributes: volume.Attributes{Usage: six}}
	spec := mount.Spec{Backend: "default", Bucket: "bucket", Prefix: "v/", Source: credentials.SourceSecret}
	for _, c := range change {
		c(&r, &spec)
	}
	f.publications = []state.Publication{{VolumeID: r.VolumeID, Target: r.Target}}
	f.Observe(r, spec)
	f.pass()
}

// pass is one pass of Run.
func (f *fixture) pass() {
	f.t.Helper()
	if err := f.prune(f.t.Context()); err != nil {
		f.t.Fatal(err)
	}
	for _, e := range f.next() {
		f.visit(f.t.Context(), e)
	}
}

// lists fails the test unless the volume was listed so often since the last call.
func (f *fixture) lists(when string, want int) {
	f.t.Helper()
	if got := f.asked["list"]; got != want {
		f.t.Errorf("%s: listed %d times, want %d", when, got, want)
	}
	f.asked["list"] = 0
}

// value is that of a metric which has that value of a label ("": any), -1 if there is none.
func (f *fixture) value(name, label string) float64 {
	f.t.Helper()
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(f.Collectors()...)
	families, err := registry.Gather()
	if err != nil {
		f.t.Fatal(err)
	}
	for _, family := range families {
		for _, m := range family.GetMetric() {
			for _, l := range append(m.GetLabel(), nil) {
				if family.GetName() == name && (label == "" || l.GetValue() == label) {
					return m.GetGauge().GetValue() + m.GetCounter().GetValue()
				}
			}
		}
	}
	return -1
}

func (f *fixture) measured(when string, want mount.Usage) {
	f.t.Helper()
	if got, ok := f.Of(handle); !ok || got != want {
		f.t.Errorf("%s: %+v, %t; want %+v", when, got, ok, want)
	}
}

func TestAVolumeIsListedOncePerInterval(t *testing.T) {
	f := newFixture(t)
	f.publish(func(r *mount.Request, _ *mount.Spec) { r.Attributes.Usage = 0 })
	f.lists("a volume that does not ask for it", 0)
	f.publish()
	f.lists("the first publication", 1)
	f.measured("the first publication", mount.Usage{Bytes: 7, Objects: 2, CapacityBytes: 100})
	f.objects["v/c"] = 5
	for range 50 { // kubelet republishes
		f.now = f.now.Add(7 * time.Minute)
		f.publish()
	}
	f.lists("within the interval", 0)
	if got := f.asked["record"]; got < 5 || got > 7 {
		t.Errorf("the record was read %d times in almost six hours", got)
	}
	f.restart()
	f.publish()
	f.lists("after a restart of the driver", 0)
	f.measured("after a restart of the driver", mount.Usage{Bytes: 7, Objects: 2, CapacityBytes: 100})
	f.now = f.now.Add(time.Hour)
	f.publish()
	f.lists("after the interval", 1)
	f.measured("after the interval", mount.Usage{Bytes: 12, Objects: 3, CapacityBytes: 100})
	if want := `bucket"v/" record=".s3-csi/volumes/v" tags=false`; f.sessions[0] != want {
		t.Errorf("session %s, want %s", f.sessions[0], want)
	}
}

// Pods that come and go do not have the volume listed more often.
func TestAMeasurementOutlivesItsPublications(t *testing.T) {
	f := newFixture(t)
	f.publish()
	f.lists("the first pod", 1)
	f.publications = nil
	f.pass()
	if _, ok := f.Of(handle); ok {
		t.Error("a volume that is not published is reported")
	}
	f.now = f.now.Add(5 * time.Hour)
	f.pass()
	f.publish()
	f.lists("the next pod", 0)
	f.measured("the next pod", mount.Usage{Bytes: 7, Objects: 2, CapacityBytes: 100})
	f.publications = nil
	f.now = f.now.Add(3 * time.Hour)
	f.pass()
	if len(f.records)+len(f.entries) > 0 {
		t.Errorf("left: %v", f.records)
	}
}

// Secrets and tokens are not kept for longer than the measurement that they came with; what is the driver's own may be.
func TestSourcesAreNotKept(t *testing.T) {
	for source, kept := range map[string]bool{credentials.SourceSecret: false, credentials.SourceWorkload: false, credentials.SourceDriver: true} {
		f := newFixture(t)
		from := func(_ *mount.Request, s *mount.Spec) { s.Source = source }
		f.publish(from)
		f.publish(from)
		if got := f.entries[handle].source != nil; got != kept {
			t.Errorf("%s: kept: %t", source, got)
		}
		f.lists(source, 1)
		f.now = f.now.Add(7 * time.Hour)
		f.pass() // without a publication
		f.lists(source+", later", map[bool]int{true: 1}[kept])
	}
}

func TestTheRecordDecides(t *testing.T) {
	hour := volume.Usage(time.Hour)
	for name, tc := range map[string]struct {
		setting volume.Usage // of the record
		size    int64
		status  int // of the answer
		lists   int
		after   time.Duration // the next listing
		want    mount.Usage
	}{
		"as at creation":     {six, 5, 0, 1, 6 * time.Hour, mount.Usage{Bytes: 7, Objects: 2, CapacityBytes: 5}},
		"more often":         {hour, 5, 0, 1, time.Hour, mount.Usage{Bytes: 7, Objects: 2, CapacityBytes: 5}},
		"without a size":     {six, 0, 0, 1, 6 * time.Hour, mount.Usage{Bytes: 7, Objects: 2}},
		"off":                {volume.UsageOff, 5, 0, 0, 0, mount.Usage{}},
		"no record":          {0, 0, http.StatusNotFound, 1, 6 * time.Hour, mount.Usage{Bytes: 7, Objects: 2}},
		"no permission":      {0, 0, http.StatusForbidden, 1, 6 * time.Hour, mount.Usage{Bytes: 7, Objects: 2}},
		"unavailable so far": {six, 5, http.StatusInternalServerError, 0, 0, mount.Usage{}},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			f.setting, f.size, f.status["record"] = tc.setting, tc.size, tc.status
			f.publish()
			f.lists("at once", tc.lists)
			if got, ok := f.Of(handle); got != tc.want || ok != (tc.lists > 0) {
				t.Errorf("%+v, %t", got, ok)
			}
			if tc.lists == 0 {
				return
			}
			f.now = f.now.Add(tc.after - time.Second)
			f.publish()
			f.lists("before the interval is over", 0)
			f.now = f.now.Add(tc.after/10 + time.Second)
			f.publish()
			f.lists("after the interval", 1)
		})
	}
}

// A change of the interval takes effect within an hour.
func TestAChangedIntervalReachesTheNode(t *testing.T) {
	f := newFixture(t)
	f.setting = volume.UsageOff
	f.publish(func(r *mount.Request, _ *mount.Spec) { r.Attributes.Usage = volume.UsageOff })
	f.lists("off", 0)
	f.setting, f.size = volume.Usage(2*time.Hour), 200
	f.now = f.now.Add(time.Hour)
	f.publish()
	f.lists("two hours", 1)
	f.measured("two hours", mount.Usage{Bytes: 7, Objects: 2, CapacityBytes: 200})
	f.setting, f.size = volume.Usage(volume.MinUsage), 300
	f.now = f.now.Add(time.Hour)
	f.publish()
	f.lists("ten minutes", 1)
	f.measured("an expansion", mount.Usage{Bytes: 7, Objects: 2, CapacityBytes: 300})
	f.setting = volume.UsageOff
	f.now = f.now.Add(time.Hour)
	f.publish()
	f.asked["list"] = 0
	f.now = f.now.Add(time.Hour)
	f.publish()
	f.lists("off again", 0)
	if _, ok := f.Of(handle); ok {
		t.Error("reported although it is off")
	}
}

func TestBucketsAndStaticVolumes(t *testing.T) {
	for name, tc := range map[string]struct {
		handle, prefix, session string
		want                    mount.Usage
		asked                   string // apart from listings
	}{
		"a bucket of its own": {"default:bucket", "", `bucket"" record="" tags=true`, mount.Usage{Bytes: 9, Objects: 3, CapacityBytes: 100}, "tags"},
		"a static bucket":     {"any", "", `bucket"" record="" tags=false`, mount.Usage{Bytes: 9, Objects: 3}, ""},
		"a static prefix":     {"any", "v/", `bucket"v/" record="" tags=false`, mount.Usage{Bytes: 7, Objects: 2}, ""},
		"a snapshot": {handle, ".s3-csi/snapshots/s/", `bucket".s3-csi/snapshots/s/" record=".s3-csi/volumes/v" tags=false`,
			mount.Usage{Bytes: 1000, Objects: 1, CapacityBytes: 100}, "record"},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			f.objects["top"], f.objects[".s3-csi/snapshots/s/x"] = 2, 1000
			f.publish(func(r *mount.Request, s *mount.Spec) { r.VolumeID, s.Prefix = tc.handle, tc.prefix })
			if got, ok := f.Of(tc.handle); !ok || got != tc.want || f.sessions[0] != tc.session {
				t.Errorf("%+v, %t, session %s", got, ok, f.sessions[0])
			}
			f.lists(name, 1)
			for kind, n := range f.asked {
				if n > 0 && kind != tc.asked {
					t.Errorf("asked for the %s", kind)
				}
			}
		})
	}
}

func TestAListingIsBounded(t *testing.T) {
	f := newFixture(t)
	f.perPage = 2
	for i := range 20 {
		f.objects[fmt.Sprintf("v/x%02d", i)] = 1
	}
	f.publish()
	f.lists("more than three pages", 3)
	if got, ok := f.Of(handle); ok {
		t.Errorf("a listing that was cut is reported as %+v", got)
	}
	if got := f.value("s3csi_volume_objects", atLeast); got != 6 {
		t.Errorf("at least %v objects", got)
	}
	f.publish()
	f.lists("again", 0)
	if got := f.value("s3csi_usage_measurements_total", resultCut); got != 1 {
		t.Errorf("cut: %v", got)
	}
	if got := f.value("s3csi_usage_list_requests_total", ""); got != 3 {
		t.Errorf("%v requests", got)
	}
}

func TestFailuresAreTriedAgainWithPauses(t *testing.T) {
	f := newFixture(t)
	f.status["list"] = http.StatusForbidden
	began := f.now
	var tries []time.Duration
	for f.now.Sub(began) < 24*time.Hour {
		f.publish()
		if f.asked["list"] > 0 {
			tries = append(tries, f.now.Sub(began).Round(10*time.Minute))
			f.asked["list"] = 0
		}
		if f.now.Sub(began) > 2*time.Hour && f.now.Sub(began) < 2*time.Hour+2*time.Minute {
			f.restart()
		}
		f.now = f.now.Add(time.Minute)
	}
	if want := "[0s 10m0s 30m0s 1h10m0s 2h30m0s 5h10m0s 10h30m0s 16h30m0s 22h30m0s]"; fmt.Sprint(tries) != want {
		t.Errorf("tried at %v, want %s", tries, want)
	}
	f.status["list"] = 0
	f.now = f.now.Add(6 * time.Hour)
	f.publish()
	f.measured("when it is possible again", mount.Usage{Bytes: 7, Objects: 2, CapacityBytes: 100})
	f.session = errors.New("no session")
	f.now = f.now.Add(7 * time.Hour)
	f.publish()
	f.lists("without a session", 1)
	f.measured("without a session", mount.Usage{Bytes: 7, Objects: 2, CapacityBytes: 100})
}

// A driver that is killed while it lists does not list again as soon as it runs.
func TestAnInterruptedMeasurementIsNotRepeatedAtOnce(t *testing.T) {
	f := newFixture(t)
	ctx, cancel := context.WithCancel(t.Context())
	f.publications = []state.Publication{{VolumeID: handle}}
	f.Observe(mount.Request{VolumeID: handle, Attributes: volume.Attributes{Usage: six}}, mount.Spec{Backend: "default", Bucket: "bucket", Prefix: "v/"})
	f.listing = cancel
	for _, e := range f.next() {
		f.visit(ctx, e)
	}
	f.listing = nil
	f.restart()
	f.lists("the first driver", 1)
	f.publish()
	f.lists("the second driver", 0)
	f.now = f.now.Add(retryAfter)
	f.publish()
	f.lists("later", 1)
	f.measured("later", mount.Usage{Bytes: 7, Objects: 2, CapacityBytes: 100})
}

func TestNothingIsMeasuredWhereTheOperatorTurnedItOff(t *testing.T) {
	f := newFixture(t)
	f.publish()
	f.lists("on", 1)
	f.limit = 0
	f.restart()
	f.publish()
	if _, ok := f.Of(handle); ok || len(f.entries) > 0 {
		t.Errorf("reported: %t, %v", ok, f.entries)
	}
}

func TestRunMeasuresAndEnds(t *testing.T) {
	f := newFixture(t)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { f.Run(ctx); close(ended) }()
	f.publications = []state.Publication{{VolumeID: handle}}
	f.Observe(mount.Request{VolumeID: handle, Attributes: volume.Attributes{Usage: six}}, mount.Spec{Backend: "default", Bucket: "bucket", Prefix: "v/"})
	for {
		if _, ok := f.Of(handle); ok {
			break
		}
		time.Sleep(time.Millisecond)
	}
	cancel()
	<-ended
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(f.Collectors()...)
	if families, err := registry.Gather(); err != nil || len(families) != 6 {
		t.Errorf("%d families, %v", len(families), err)
	}
}
