package controller

import (
	"context"
	"io"
	"maps"
	"net/http"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/copier"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/records"
)

// copying is a process that copies.
type copying struct {
	*process
	copier *copier.Copier
	store  *records.Store
	bucket buckets.Bucket
}

func (p *process) copying(options ...func(*copier.Options)) copying {
	p.e.t.Helper()
	be, err := p.e.config("").Backend("lab")
	if err != nil {
		p.e.t.Fatal(err)
	}
	opener := buckets.NewOpener(p.clients, p.buckets, time.Now)
	b, err := opener.Open(p.e.ctx(), be, p.e.keys, p.e.bucket, "")
	if err != nil {
		p.e.t.Fatal(err)
	}
	if _, err := opener.Conditional(p.e.ctx(), b); err != nil { // once per bucket, so that counts are of the copy alone
		p.e.t.Fatal(err)
	}
	if err := opener.UploadsBelow(p.e.ctx(), b, "none/", func(string, string) error { return nil }); err != nil {
		p.e.t.Fatal(err)
	}
	store := records.NewStore(records.Owner{Driver: "d"}, opener, time.Now)
	o := copier.Options{Store: store, Uploads: opener, Workers: 8}
	for _, option := range options {
		option(&o)
	}
	return copying{p, copier.New(o), store, b}
}

// task copies from/ to to/.
func (c copying) task() copier.Task {
	return copier.Task{
		Source: copier.Current{Of: copier.Place{Bucket: c.bucket, Prefix: "from/"}}, Target: copier.Place{Bucket: c.bucket,
			Prefix: "to/"}, Manifest: "manifest/", Progress: &copier.Progress{},
	}
}

func (c copying) run(task copier.Task) (copier.Totals, error) {
	ctx, cancel := context.WithTimeout(c.life, 10*time.Minute)
	defer cancel()
	return c.copier.Copy(ctx, task)
}

// contents are the texts of the objects below a prefix.
func (e *env) contents(prefix string) map[string]string {
	e.t.Helper()
	m := map[string]string{}
	for _, key := range e.keysBelow(prefix) {
		m[strings.TrimPrefix(key, prefix)] = e.object(key)
	}
	return m
}

func (e *env) object(key string) string {
	e.t.Helper()
	out, err := e.s3.GetObject(e.ctx(), &s3.GetObjectInput{Bucket: &e.bucket, Key: &key})
	if err != nil {
		e.t.Fatal(err)
	}
	defer out.Body.Close()
	text, err := io.ReadAll(out.Body)
	if err != nil {
		e.t.Fatal(err)
	}
	return string(text)
}

func (e *env) write(key, text string) {
	e.t.Helper()
	if _, err := e.s3.PutObject(e.ctx(), &s3.PutObjectInput{Bucket: &e.bucket, Key: &key, Body: strings.NewReader(text)}); err != nil {
		e.t.Fatal(err)
	}
}

// copied fails the test unless the two prefixes have the same objects.
func (e *env) copied(from, to string) {
	e.t.Helper()
	if have, want := e.contents(to), e.contents(from); !maps.Equal(have, want) {
		e.t.Errorf("%s differs from %s: %v, want %v", to, from, have, want)
	}
}

func TestACopyHasWhatTheSourceHas(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		// Keys whose order differs from that of files in directories, and those that need escapes.
		keys := []string{"from/a", "from/a-b", "from/a.b/c", "from/a0", "from/d/", "from/d/e/f", "from/ä ö", "from/a+b", "from/a%20b", "from/a&b=c?d#e",
			"from/Z", "from/😀", "from/x/y/z/1"}
		if e.name == "versitygw" { // one name cannot be a file and a directory
			keys = append(keys, "from/b/x")
		} else {
			keys = append(keys, "from/b/x", "from/c-d", "from/c/d")
		}
		for _, key := range keys {
			if strings.HasSuffix(key, "/") {
				e.put(key)
			} else {
				e.write(key, "content of "+key)
			}
		}
		e.put("from2/other", "fro")
		tagged := "from/tagged"
		_, err := e.s3.PutObject(e.ctx(), &s3.PutObjectInput{
			Bucket: &e.bucket, Key: &tagged, Body: strings.NewReader("x"), ContentType: aws.String("text/x-test"), Metadata: map[string]string{"mtime": "12"}, Tagging: aws.String("a=b&c=d+e"),
		})
		if err != nil {
			t.Fatal(err)
		}
		c := e.process().copying()
		totals, err := c.run(c.task())
		if err != nil {
			t.Fatal(err)
		}
		e.copied("from/", "to/")
		bytes := int64(0)
		for _, text := range e.contents("from/") {
			bytes += int64(len(text))
		}
		if want := (copier.Totals{Objects: int64(len(keys) + 1), Bytes: bytes}); totals != want {
			t.Errorf("totals %+v, want %+v", totals, want)
		}
		e.likeTagged("to/tagged")
		// A copy of the copy, by its manifest.
		task := c.task()
		task.Source = copier.Copied{Of: task.Target, Manifest: "manifest/", Store: c.store}
		task.Target.Prefix, task.Manifest = "again/", "manifest2/"
		e.write("to/extra", "not in the manifest")
		if again, err := c.run(task); err != nil || again != totals {
			t.Errorf("copying the copy: %+v, %v", again, err)
		}
		e.copied("from/", "again/")
	})
}

func (e *env) likeTagged(key string) {
	e.t.Helper()
	head, err := e.s3.HeadObject(e.ctx(), &s3.HeadObjectInput{Bucket: &e.bucket, Key: &key})
	if err != nil {
		e.t.Fatal(err)
	}
	if aws.ToString(head.ContentType) != "text/x-test" || head.Metadata["mtime"] != "12" {
		e.t.Errorf("the metadata of %s are %q, %v", key, aws.ToString(head.ContentType), head.Metadata)
	}
	tags, err := e.s3.GetObjectTagging(e.ctx(), &s3.GetObjectTaggingInput{Bucket: &e.bucket, Key: &key})
	if err != nil {
		e.t.Fatal(err)
	}
	have := map[string]string{}
	for _, tag := range tags.TagSet {
		have[*tag.Key] = *tag.Value
	}
	if !maps.Equal(have, map[string]string{"a": "b", "c": "d e"}) {
		e.t.Errorf("the tags of %s are %v", key, have)
	}
}

func TestLargeObjectsAreCopiedInParts(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		text := strings.Repeat("0123456789abcdef", 11<<20/16) + "end"
		key := "from/tagged"
		_, err := e.s3.PutObject(e.ctx(), &s3.PutObjectInput{
			Bucket: &e.bucket, Key: &key, Body: strings.NewReader(text), ContentType: aws.String("text/x-test"), Metadata: map[string]string{"mtime": "12"}, Tagging: aws.String("a=b&c=d+e"),
		})
		if err != nil {
			t.Fatal(err)
		}
		e.write("from/small", "x")
		e.upload("to/left-behind")
		c := e.process().copying(func(o *copier.Options) { o.Threshold = 5 << 20 })
		c.hooks.reset()
		if _, err := c.run(c.task()); err != nil {
			t.Fatal(err)
		}
		if n := count(c.hooks.sent(), "UploadPartCopy"); n != 3 {
			t.Errorf("%d parts", n)
		}
		e.copied("from/", "to/")
		e.likeTagged("to/tagged")
		e.same("unfinished uploads", e.uploads(), []string{})
	})
}

func count(list []string, what string) (n int) {
	for _, s := range list {
		if s == what {
			n++
		}
	}
	return n
}

// small makes pages of three keys.
func (c copying) small() {
	c.hooks.set(func(h *hooks) { h.pageSize = 3 })
}

func rebased(keys []string, from, to string) []string {
	list := make([]string, len(keys))
	for i, key := range keys {
		list[i] = to + strings.TrimPrefix(key, from)
	}
	return list
}

func TestWhatCannotBeCopiedIsNamed(t *testing.T) {
	one(t, func(t *testing.T, e *env) {
		e.put(numbered("from/", 10)...)
		for code, c := range map[string]struct {
			status int
			kind   fault.Kind
		}{
			"AccessDenied": {403, fault.Denied}, "InvalidObjectState": {403, fault.Precondition}, "KMS.DisabledException": {400,
				fault.Precondition}, "InvalidRequest": {400, fault.Precondition},
		} {
			p := e.process().copying()
			p.refuse(c.status, code, "CopyObject")
			_, err := p.run(p.task())
			e.want(err, c.kind, `"d0`, "from/", code)
		}
	})
}

func TestABusyServiceSlowsACopyDown(t *testing.T) {
	one(t, func(t *testing.T, e *env) {
		e.put(numbered("from/", 10)...)
		p := e.process().copying()
		p.refuseFirst(3, 503, "SlowDown", "CopyObject", "ListObjectsV2", "PutObject")
		if _, err := p.run(p.task()); err != nil {
			t.Fatal(err)
		}
		e.copied("from/", "to/")
	})
}

// Also what an earlier run copied of a later page stays as it is.
func TestACopyReplacesNothingAtItsTarget(t *testing.T) {
	for name, prepare := range map[string]func(p copying){
		"a service that honours conditions": func(p copying) {
			p.answers(func(operation string, h http.Header) *http.Response { // neither server does
				_, key, _ := strings.Cut(h.Get("X-Amz-Copy-Source"), "/")
				if key, found := strings.CutPrefix(key, "from/"); operation == "CopyObject" && (!found || len(p.e.keysBelow("to/"+key)) > 0) {
					return refusal(412, "PreconditionFailed")
				}
				return nil
			})
		},
		"a service that refuses conditions": func(p copying) {
			p.answers(func(operation string, h http.Header) *http.Response {
				if operation == "CopyObject" && h.Get("If-None-Match") != "" {
					return refusal(501, "NotImplemented")
				}
				return nil
			})
		},
		"a service that ignores conditions": func(copying) {},
	} {
		t.Run(name, func(t *testing.T) {
			each(t, func(t *testing.T, e *env) {
				e.put(numbered("from/", 20)...)
				want := e.contents("from/")
				for _, key := range []string{"d02/f00009", "d06/f00013"} {
					e.write("to/"+key, "earlier")
					want[key] = "earlier"
				}
				p := e.process().copying()
				p.small()
				prepare(p)
				totals, err := p.run(p.task())
				if err != nil || totals.Objects != 20 {
					t.Fatal(totals, err)
				}
				if have := e.contents("to/"); !maps.Equal(have, want) {
					t.Errorf("%v, want %v", have, want)
				}
			})
		})
	}
}

// While the last object of a page is copied, those of the next page are. The manifest has no page before all of it is copied.
func TestThePagesOfACopyOverlap(t *testing.T) {
	one(t, func(t *testing.T, e *env) {
		e.put(numbered("from/", 9)...)
		p := e.process().copying(func(o *copier.Options) { o.Workers = 2 })
		p.small()
		gate := make(chan struct{})
		p.answers(func(operation string, h http.Header) *http.Response {
			if operation == "CopyObject" && strings.HasSuffix(h.Get("X-Amz-Copy-Source"), "from/d01/f00001") { // the third one
				<-gate
			}
			return nil
		})
		done := make(chan error, 1)
		go func() {
			_, err := p.run(p.task())
			done <- err
		}()
		for late := time.Now().Add(time.Minute); len(e.keysBelow("to/")) < 5; time.Sleep(10 * time.Millisecond) {
			if time.Now().After(late) {
				t.Fatal("the next page waits")
			}
		}
		e.same("the manifest", e.keysBelow("manifest/"), nil)
		close(gate)
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		e.copied("from/", "to/")
		if pages := e.keysBelow("manifest/"); len(pages) != 3 {
			t.Errorf("the manifest has %q", pages)
		}
	})
}

func TestACopyAboveItsLimitsIsRefused(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		e.put(numbered("from/", 10)...)
		p := e.process().copying()
		for _, limits := range []copier.Limits{{Objects: 9}, {Bytes: 9}} {
			_, err := p.copier.Count(e.ctx(), p.task().Source, limits)
			e.want(err, fault.OutOfRange, "10 objects", "10 bytes", "requests")
			task := p.task()
			task.Limits = limits
			_, err = p.run(task)
			e.want(err, fault.OutOfRange, "10 objects", "requests")
		}
		if totals, err := p.copier.Count(e.ctx(), p.task().Source, copier.Limits{Objects: 10, Bytes: 10}); err != nil || totals.Objects != 10 {
			t.Errorf("%+v, %v", totals, err)
		}
	})
}

// bareLoop copies objects as a program would that has only the SDK, with as many requests in flight.
func (c copying) bareLoop(from, to string) (took time.Duration) {
	c.e.t.Helper()
	began := time.Now()
	next := make(chan string, 1000)
	var wg sync.WaitGroup
	for range provision.DefaultCopyWorkers {
		wg.Go(func() {
			for key := range next {
				_, err := c.bucket.Client.CopyObject(c.life, &s3.CopyObjectInput{Bucket: c.bucket.Name(), Key: aws.String(to + key),
					CopySource: aws.String(c.e.bucket + "/" + key)})
				if err != nil {
					c.e.t.Error(err)
				}
			}
		})
	}
	pages := s3.NewListObjectsV2Paginator(c.bucket.Client, &s3.ListObjectsV2Input{Bucket: c.bucket.Name(), Prefix: &from})
	for pages.HasMorePages() {
		page, err := pages.NextPage(c.life)
		if err != nil {
			c.e.t.Error(err)
			break
		}
		for _, o := range page.Contents {
			next <- *o.Key
		}
	}
	close(next)
	wg.Wait()
	return time.Since(began)
}

// The number of requests and the memory of a copy of many objects. S3CSI_COPY_OBJECTS is for measurements, which also compare with a
// loop over the SDK.
func TestACopyNeedsFewRequestsAndLittleMemory(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		objects := 1200
		if s := os.Getenv("S3CSI_COPY_OBJECTS"); s != "" {
			var err error
			if objects, err = strconv.Atoi(s); err != nil {
				t.Fatal(err)
			}
		}
		e.put(numbered("from/", objects)...)
		p := e.process().copying()
		p.hooks.reset()
		var most atomic.Uint64
		task := p.task()
		task.Still = func(context.Context) error {
			runtime.GC()
			var m runtime.MemStats
			runtime.ReadMemStats(&m)
			most.Store(max(most.Load(), m.HeapAlloc))
			return nil
		}
		began := time.Now()
		if _, err := p.run(task); err != nil {
			t.Fatal(err)
		}
		took := time.Since(began)
		pages := (objects + 999) / 1000
		sent := len(p.hooks.sent())
		t.Logf("%d objects in %s (%.0f/s), %d requests, %d MiB of heap", objects, took, float64(objects)/took.Seconds(), sent, most.Load()>>20)
		if limit := float64(objects+pages) * 1.05; float64(sent) > limit {
			t.Errorf("%d requests, at most %.0f are allowed", sent, limit)
		}
		if os.Getenv("S3CSI_COPY_OBJECTS") != "" {
			bare := p.bareLoop("from/", "bare/")
			t.Logf("a bare loop: %s (%.0f/s); the copier's rate is %.2f of it", bare, float64(objects)/bare.Seconds(), bare.Seconds()/took.Seconds())
		}
		e.same("keys", e.keysBelow("to/"), rebased(e.keysBelow("from/"), "from/", "to/"))
	})
}
