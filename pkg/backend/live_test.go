package backend

import (
	"context"
	"encoding/pem"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

const good = "backends: {minio: {endpoint: 'http://127.0.0.1:1'}}"

// liveFile is a config file in a directory of its own, and the Live that reads it.
type liveFile struct {
	t    *testing.T
	path string
	*Live
	registry *prometheus.Registry
}

func newLiveFile(t *testing.T, content string) *liveFile {
	t.Helper()
	f := &liveFile{t: t, path: filepath.Join(t.TempDir(), "config.yaml"), registry: prometheus.NewRegistry()}
	f.write(content)
	f.open()
	return f
}

// open reads the file as a driver does when it starts, and then runs until the test ends.
func (f *liveFile) open() {
	f.t.Helper()
	var err error
	if f.Live, err = liveEvery(2*time.Millisecond, f.path, "", ""); err != nil {
		f.t.Fatal(err)
	}
	if err := f.Register(f.registry); err != nil {
		f.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(f.t.Context())
	ended := make(chan error, 1)
	go func() { ended <- f.Run(ctx) }()
	f.t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			f.t.Errorf("Run ended with %v", err)
		}
	})
}

// write replaces the file.
func (f *liveFile) write(content string) {
	f.t.Helper()
	if err := os.WriteFile(f.path+".new", []byte(content), 0o600); err != nil {
		f.t.Fatal(err)
	}
	if err := os.Rename(f.path+".new", f.path); err != nil {
		f.t.Fatal(err)
	}
}

// value is that of a metric, by its name and the values of its labels.
func (f *liveFile) value(name string, labels ...string) float64 {
	f.t.Helper()
	families, err := f.registry.Gather()
	if err != nil {
		f.t.Fatal(err)
	}
	for _, family := range families {
		for _, m := range family.GetMetric() {
			var values []string
			for _, l := range m.GetLabel() {
				values = append(values, l.GetValue())
			}
			if family.GetName() == "s3csi_config_"+name && slices.Equal(values, labels) {
				return m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	f.t.Fatalf("there is no metric %s %q", name, labels)
	return 0
}

// await asks again and again until it is so.
func await(t *testing.T, what string, so func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !so(); {
		if time.Now().After(end) {
			t.Fatalf("timed out waiting until %s", what)
		}
		time.Sleep(time.Millisecond)
	}
}

func (f *liveFile) has(name, endpoint string) func() bool {
	return func() bool {
		b, err := f.Backend(name)
		return err == nil && b.Endpoint == endpoint
	}
}

func TestAChangedConfigFileIsInForceSoon(t *testing.T) {
	f := newLiveFile(t, good)
	changed := f.Changed()
	before := f.Config()
	f.write("backends: {minio: {endpoint: 'http://127.0.0.1:2'}, more: {}}")
	<-changed
	if !f.has("minio", "http://127.0.0.1:2")() {
		t.Error("the new config is not in force when it is said to be")
	}
	if _, err := f.Backend("more"); err != nil {
		t.Error(err)
	}
	if b, _ := before.Backend("minio"); b.Endpoint != "http://127.0.0.1:1" {
		t.Error("a config that was given out changed")
	}
	select {
	case <-f.Changed():
		t.Error("the next change is told before it is there")
	default:
	}
	await(t, "the change is counted", func() bool {
		return f.value("reloads_total", "success") == 1 && f.value("last_reload_successful") == 1
	})

	f.write("backends: {more: {}}")
	await(t, "a backend that is not configured any more is refused", func() bool { _, err := f.Backend("minio"); return fault.Is(err, fault.Precondition) })
	_, err := f.Backend("minio")
	wantText(t, err, `"minio"`, "default, more")
}

// Kubernetes mounts a ConfigMap as links into a directory behind a link that is replaced at once.
func TestAConfigMapThatIsReplacedBehindItsLinksIsRead(t *testing.T) {
	dir := t.TempDir()
	version := func(name, content string) {
		t.Helper()
		check(t, os.Mkdir(filepath.Join(dir, name), 0o755))
		check(t, os.WriteFile(filepath.Join(dir, name, "config.yaml"), []byte(content), 0o600))
		check(t, os.Symlink(name, filepath.Join(dir, "..data_tmp")))
		check(t, os.Rename(filepath.Join(dir, "..data_tmp"), filepath.Join(dir, "..data")))
	}
	version("..1", good)
	check(t, os.Symlink("..data/config.yaml", filepath.Join(dir, "config.yaml")))
	f := &liveFile{t: t, path: filepath.Join(dir, "config.yaml"), registry: prometheus.NewRegistry()}
	f.open()
	version("..2", "backends: {minio: {endpoint: 'http://127.0.0.1:2'}}")
	check(t, os.RemoveAll(filepath.Join(dir, "..1")))
	await(t, "the new ConfigMap is in force", f.has("minio", "http://127.0.0.1:2"))
}

func TestAConfigFileThatCannotBeUsedChangesNothing(t *testing.T) {
	f := newLiveFile(t, good)
	for name, spoil := range map[string]func(){
		"broken":        func() { f.write("backends: {minio: {endpoint: 'http://127.0.0.1:2', regoin: x}}") },
		"no YAML":       func() { f.write("backends: [") },
		"missing CA":    func() { f.write("backends: {minio: {endpoint: 'https://127.0.0.1:2', caFile: /nonexistent/ca.pem}}") },
		"a directory":   func() { check(t, os.Remove(f.path)); check(t, os.Mkdir(f.path, 0o755)) },
		"another error": func() { f.write("backends: {minio: {endpoint: 'ftp://127.0.0.1:2'}}") },
		"gone":          func() { check(t, os.Remove(f.path)) },
	} {
		t.Run(name, func(t *testing.T) {
			changed, config := f.Changed(), f.Config()
			failures := f.value("reloads_total", "failure") // putting a file back may look like one that is gone
			spoil()
			await(t, "the failure is told", func() bool {
				return f.value("last_reload_successful") == 0 && f.value("reloads_total", "failure") > failures
			})
			if f.Config() != config || !f.has("minio", "http://127.0.0.1:1")() {
				t.Error("another config is in force")
			}
			_ = os.Remove(f.path) // a directory is not replaced by a file
			f.write("# the same again\n" + good)
			await(t, "the good file is seen", func() bool { return f.value("last_reload_successful") == 1 })
			if f.Config() != config {
				t.Error("the same config counts as another one")
			}
			select {
			case <-changed:
				t.Error("a change is told where there is none")
			default:
			}
		})
	}
	f.write("backends: {minio: {endpoint: 'http://127.0.0.1:3'}}")
	await(t, "a corrected file is in force", f.has("minio", "http://127.0.0.1:3"))
	await(t, "the change is counted", func() bool { return f.value("reloads_total", "success") == 1 })
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestARefusedConfigFileIsReportedOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config.yaml")
	check(t, os.WriteFile(path, []byte(good), 0o600))
	l, err := liveEvery(time.Millisecond, path, "", "")
	check(t, err)
	f := &liveFile{t: t, path: path, Live: l, registry: prometheus.NewRegistry()}
	check(t, l.Register(f.registry))
	f.write("backends: [")
	refused := ""
	for range 5 {
		refused = l.reload(t.Context(), refused)
	}
	if refused == "" || f.value("reloads_total", "failure") != 1 {
		t.Errorf("%v failures, %q", f.value("reloads_total", "failure"), refused)
	}
	f.write("backends: {A: {}}")
	if again := l.reload(t.Context(), refused); again == refused || f.value("reloads_total", "failure") != 2 {
		t.Errorf("another reason: %v failures, %q", f.value("reloads_total", "failure"), again)
	}
	f.write("")
	if refused = l.reload(t.Context(), refused); refused != "" || f.value("last_reload_successful") != 1 || f.value("reloads_total", "success") != 1 {
		t.Errorf("an empty file is a good one: %q", refused)
	}
}

// A file that is written in place is never taken half written: what is new counts when it is read twice.
func TestAFileThatIsBeingWrittenIsNotTaken(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config.yaml")
	const interval = 500 * time.Millisecond
	// A busy machine writes before the first reading, or after the second: then nothing was asked.
	await(t, "the file is written between the two readings", func() bool {
		check(t, os.WriteFile(path, []byte(good), 0o600))
		l, err := liveEvery(interval, path, "", "")
		check(t, err)
		check(t, os.WriteFile(path, nil, 0o600)) // truncated: a good config by itself
		looked := make(chan time.Duration, 1)
		began := time.Now()
		go func() {
			since := time.Now()
			l.reload(t.Context(), "")
			looked <- time.Since(since)
		}()
		time.Sleep(interval / 5)
		check(t, os.WriteFile(path, []byte(good), 0o600))
		written := time.Since(began)
		if took := <-looked; took < interval || written >= interval {
			return false
		}
		if _, err := l.Backend("minio"); err != nil {
			t.Error(err)
		}
		return true
	})
}

func TestANewCertificateBehindTheSameNameIsAChange(t *testing.T) {
	first, second := httptest.NewTLSServer(nil), httptest.NewTLSServer(nil)
	defer first.Close()
	defer second.Close()
	one := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: first.Certificate().Raw})
	ca := filepath.Join(t.TempDir(), "ca.pem")
	check(t, os.WriteFile(ca, one, 0o600))
	f := newLiveFile(t, "backends: {minio: {endpoint: 'https://127.0.0.1:1', caFile: '"+ca+"'}}")
	before, err := f.Backend("minio")
	check(t, err)
	digest := before.MountDigest()
	changed := f.Changed()
	check(t, os.WriteFile(ca+".new", slices.Concat(one, []byte("# and no more\n")), 0o600))
	check(t, os.Rename(ca+".new", ca))
	<-changed
	after, err := f.Backend("minio")
	check(t, err)
	if now := after.MountDigest(); now == digest || after.Revision() == before.Revision() {
		t.Errorf("digest %s, was %s", now, digest)
	}
	if old := before.MountDigest(); old != digest {
		t.Errorf("the digest of what was configured changed: %s", old)
	}
	if text := before.CA(); text != string(one) {
		t.Errorf("the CA of what was configured changed: %q", text)
	}
}

func TestWhatCannotBeUsedAtStartIsNotStartedWith(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config.yaml")
	if _, err := NewLive(path, "", ""); !fault.Is(err, fault.Precondition) {
		t.Errorf("no file: %v", err)
	}
	check(t, os.WriteFile(path, []byte("backends: {A: {}}"), 0o600))
	if _, err := NewLive(path, "", ""); !fault.Is(err, fault.Invalid) {
		t.Errorf("a broken file: %v", err)
	}
	if _, err := NewLive("", "", "ftp://a"); !fault.Is(err, fault.Invalid) {
		t.Errorf("a broken environment: %v", err)
	}
}

func TestWithoutAFileNothingChanges(t *testing.T) {
	l, err := liveEvery(time.Millisecond, "", "eu-west-1", "")
	check(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := l.Run(ctx); err != nil || ctx.Err() == nil {
		t.Errorf("Run ended with %v", err)
	}
	if b, err := l.Backend("default"); err != nil || b.Region != "eu-west-1" {
		t.Errorf("%+v, %v", b, err)
	}
}

// What was learnt at an old endpoint, and connections to it, are of no use for the new one.
func TestNothingOfAnOldEndpointIsUsedForTheNewOne(t *testing.T) {
	hermetic(t)
	serveWith := func(region string) (*fakeS3, *httptest.Server) {
		f := &fakeS3{answer: func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("X-Amz-Bucket-Region", region)
			switch {
			case !strings.Contains(r.Header.Get("Authorization"), "/"+region+"/s3/"):
				refuse(w, r, 400, "AuthorizationHeaderMalformed")
			case r.URL.Query().Has("versioning"):
				say(w, `<VersioningConfiguration/>`)
			case r.URL.Query().Has("object-lock"):
				refuse(w, r, 404, "ObjectLockConfigurationNotFoundError")
			}
		}}
		server := httptest.NewServer(f)
		t.Cleanup(server.Close)
		return f, server
	}
	oldS3, oldServer := serveWith("eu-west-1")
	newS3, newServer := serveWith("eu-west-2")
	config := func(s *httptest.Server, more string) string {
		return fmt.Sprintf("backends: {fake: {endpoint: '%s', expectedBucketOwner: '111111111111'%s}}", s.URL, more)
	}
	f := newLiveFile(t, config(oldServer, ""))
	clients, err := NewClients(f.Live, withoutWaiting())
	check(t, err)
	defer clients.Close()
	buckets := newTestBuckets(t, clients, nil)
	ask := func() BucketInfo {
		t.Helper()
		be, err := f.Backend("fake")
		check(t, err)
		info, err := buckets.Validate(bounded(t), be, testKeys, BucketInfo{Name: "b"})
		check(t, err)
		_, err = buckets.Versioning(bounded(t), be, testKeys, info)
		check(t, err)
		_, err = buckets.Retention(bounded(t), be, testKeys, info)
		check(t, err)
		return info
	}
	if info := ask(); info.Region != "eu-west-1" || ask() != info {
		t.Errorf("%+v", info)
	}
	asked := len(oldS3.requests())
	old, err := f.Backend("fake")
	check(t, err)

	f.write(config(newServer, ""))
	await(t, "the new endpoint is in force", f.has("fake", newServer.URL))
	if info := ask(); info.Region != "eu-west-2" {
		t.Errorf("%+v", info)
	}
	if got := len(oldS3.requests()); got != asked || len(newS3.requests()) == 0 {
		t.Errorf("the old endpoint got %d requests more", got-asked)
	}
	// Work that began with the old one is not led astray.
	client, err := clients.S3(bounded(t), old, testKeys, "eu-west-1")
	check(t, err)
	check(t, operations["HeadBucket"](bounded(t), client))
	if got := len(oldS3.requests()); got != asked+1 {
		t.Errorf("the old endpoint got %d requests", got-asked)
	}

	// However often it changes, no more is kept than there is. The default backend's is one of them.
	for i := range 20 {
		f.write(config(newServer, fmt.Sprintf(", region: r-%d", i)))
		await(t, "the change is in force", func() bool { b, err := f.Backend("fake"); return err == nil && b.Region == fmt.Sprintf("r-%d", i) })
		ask()
	}
	clients.servicesMu.Lock()
	defer clients.servicesMu.Unlock()
	if n := len(clients.services); n > 3 {
		t.Errorf("clients keep connections of %d backends", n)
	}
}

func TestTheConfigMayChangeUnderLoad(t *testing.T) {
	_, _, be := serve(t, ok, "")
	endpoint := be.Endpoint
	f := newLiveFile(t, "backends: {fake: {endpoint: '"+endpoint+"'}}")
	clients, err := NewClients(f.Live, withoutWaiting())
	check(t, err)
	defer clients.Close()
	buckets := newTestBuckets(t, clients, nil)
	ctx, cancel := context.WithCancel(bounded(t))
	var group sync.WaitGroup
	for range 4 {
		group.Go(func() {
			for ctx.Err() == nil {
				be, err := f.Backend("fake")
				if err == nil {
					_, err = buckets.Validate(ctx, be, testKeys, BucketInfo{Name: "b"})
				}
				if err != nil && ctx.Err() == nil {
					t.Error(err)
					return
				}
			}
		})
	}
	for i := range 20 {
		changed := f.Changed()
		f.write(fmt.Sprintf("backends: {fake: {endpoint: '%s', region: r-%d}}", endpoint, i))
		<-changed
	}
	cancel()
	group.Wait()
}

// liveEvery is NewLive with an interval.
func liveEvery(interval time.Duration, path, region, endpoint string) (*Live, error) {
	l, err := NewLive(path, region, endpoint)
	if err == nil {
		l.interval = interval
	}
	return l, err
}
