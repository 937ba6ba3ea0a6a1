package controller

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/copier"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
	"github.com/s3-csi/s3-csi-driver/tests/internal/faultproxy"
)

// behind is the same server and bucket, behind a proxy with a quirk. The test's own requests do not pass it.
func (e *env) behind(quirk faultproxy.Quirk) *env {
	e.t.Helper()
	proxy, err := faultproxy.Start(e.endpoint)
	if err != nil {
		e.t.Fatal(err)
	}
	e.t.Cleanup(func() {
		if err := proxy.Stop(); err != nil {
			e.t.Error(err)
		}
	})
	proxy.Set(faultproxy.Faults{Quirk: quirk})
	other := *e
	other.endpoint = proxy.Endpoint()
	return &other
}

func contentOf(id volume.ID) volume.Content { return volume.Content{Volume: id} }

// A name that copies or listings get wrong is refused by name, in snapshots and clones alike.
func TestSnapshot_MisnamedObjectsAreRefusedByName(t *testing.T) {
	one(t, func(t *testing.T, e *env) {
		for name, c := range map[string]struct {
			quirk faultproxy.Quirk
			keys  []string
			kind  fault.Kind
			word  string
		}{
			"copies lose plus":   {faultproxy.FindsNoSource("%2B"), []string{"a+b", "c"}, fault.Precondition, `"a+b"`},
			"copies lose spaces": {faultproxy.FindsNoSource("%20"), []string{"a b", "c"}, fault.Precondition, `"a b"`},
			// The names of what was copied are wrong, too, so that the driver does not delete it.
			"encoded silently":         {faultproxy.EncodesSilently(), []string{"a+b", "c"}, fault.Unavailable, `"a%2Bb"`},
			"encoding claimed":         {faultproxy.ClaimsEncoding(), []string{"a+b", "c"}, fault.Precondition, `"a b"`},
			"encoding claimed, broken": {faultproxy.ClaimsEncoding(), []string{"50%", "c"}, fault.Precondition, `50%"`},
			"another name":             {faultproxy.Replaces("good", "goof"), []string{"good", "c"}, fault.Precondition, `"goof"`},
			"control characters":       {nil, []string{"a\x01", "b\r", "c"}, fault.Precondition, `"a\ufffd"`},
			"unsorted":                 {faultproxy.Unsorted(), []string{"a", "b"}, fault.Unsupported, "order of keys"},
		} {
			t.Run(name, func(t *testing.T) {
				e := e.in(e.bucket)
				e.t = t
				plain := e.process()
				source := strings.ReplaceAll(strings.ReplaceAll(name, " ", "-"), ",", "")
				id := plain.create(source)
				for _, key := range c.keys {
					e.write(id.Prefix+key, "content")
				}
				p := plain
				if c.quirk != nil {
					p = e.behind(c.quirk).process()
				}
				_, err := p.trySnapshot("of-"+source, id)
				e.want(err, c.kind, c.word)
				if _, err = p.tryFrom("clone-"+source, contentOf(id)); err == nil || !strings.Contains(err.Error(), c.word) {
					t.Errorf("clone: %v", err)
				}
			})
		}
	})
}

// The versions of a snapshot of one time are refused as its objects are.
func TestSnapshot_MisnamedVersionsAreRefusedByName(t *testing.T) {
	on(t, targets[1:], func(t *testing.T, e *env) { // versitygw has no snapshots of one time
		e.setVersioning(e.bucket, types.BucketVersioningStatusEnabled)
		id := e.process().create("v")
		e.put(id.Prefix+"a+b", id.Prefix+"c")
		_, err := e.behind(faultproxy.FindsNoSource("%2B")).process().trySnapshot("s", id, "consistency", "time")
		e.want(err, fault.Precondition, `"a+b"`, "HEAD finds it")
	})
}

// Every name that a server can hold is in a snapshot, in the volumes made of it, and gone after a deletion.
func TestSnapshot_NamesOfAllKindsAreKept(t *testing.T) {
	names := []string{
		"plus+plus", "space space", "percent%25", "100%", "a&b=c?d#e", "ü", "u\u0308", "\u1112\u1161\u11ab", "emoji😀", "dir/",
		"d//double", "dot/./x", "up/../x", "\x01", "tab\tx", "cr\rx", "lf\nx",
		"\x7f", "\u0085", "\ufffd", "\ufffe", "quote'\"", "<angle>", "back\\slash", "star*", " lead", "trail ", "$(x)",
		strings.Repeat("k", 200) + "/" + strings.Repeat("l", 200),
		strings.TrimSuffix(strings.Repeat(strings.Repeat("m", 199)+"/", 5), "/"),
	}
	each(t, func(t *testing.T, e *env) {
		p := e.process()
		id := p.create("v")
		kept := []string{}
		for _, name := range names {
			if e.name == "versitygw" && strings.ContainsAny(name, "\x01\t\r\n\x7f\ufffd\ufffe") {
				t.Logf("%q: listings of this server have U+FFFD instead, or the name is refused", name)
				continue
			}
			key, body := id.Prefix+name, "content of "+name
			if strings.HasSuffix(name, "/") {
				body = ""
			}
			if _, err := e.s3.PutObject(e.ctx(), &s3.PutObjectInput{Bucket: &e.bucket, Key: &key, Body: strings.NewReader(body)}); err != nil {
				t.Logf("%q: the server does not hold it: %v", name, err)
				continue
			}
			kept = append(kept, name)
		}
		s := p.snapshot("s", id)
		for _, made := range []volume.ID{p.restored("of-the-snapshot", volume.Content{Snapshot: s.ID}), p.restored("of-the-volume", contentOf(id))} {
			for _, name := range kept {
				if have, want := e.object(made.Prefix+name), e.object(id.Prefix+name); have != want {
					t.Errorf("%s%q is %q, want %q", made.Prefix, name, have, want)
				}
			}
			p.delete(made)
		}
		p.deleteSnapshot(s.ID)
		p.delete(id)
		for _, prefix := range []string{"v/", "of-the-snapshot/", "of-the-volume/", ".s3-csi/snapshots/s@1"} {
			e.same(prefix, e.keysBelow(prefix), nil)
		}
	})
}

func TestDelete_MisnamedObjectsAreNamed(t *testing.T) {
	one(t, func(t *testing.T, e *env) {
		for name, c := range map[string]struct {
			quirk   faultproxy.Quirk
			kind    fault.Kind
			words   []string
			removed bool // all
		}{
			"silent":   {faultproxy.EncodesSilently(), fault.Busy, []string{`"silent/a%2Bb"`, `"silent/50%25"`, "no such objects", "3 objects removed"}, false},
			"claimed":  {faultproxy.ClaimsEncoding(), fault.Precondition, []string{`50%`}, false},
			"other":    {faultproxy.Replaces("plain", "plane"), fault.Busy, []string{`"other/plane"`, "no such objects"}, false},
			"repeated": {faultproxy.RepeatsToken(), fault.Busy, []string{"unreliable"}, false},
			"unsorted": {faultproxy.Unsorted(), fault.Unknown, nil, true},
		} {
			id := e.process().create(name)
			neighbours := []string{name + "-a/a+b", name + "0"}
			e.put(append(neighbours, id.Prefix+"a+b", id.Prefix+"50%", id.Prefix+"plain")...)
			err := e.behind(c.quirk).process().tryDelete(id)
			if c.removed {
				if err != nil {
					t.Errorf("%s: %v", name, err)
				}
			} else {
				e.want(err, c.kind, c.words...)
				e.state(name, "deleting")
			}
			e.same(name+": neighbours", e.keysBelow(name+"-a/"), neighbours[:1])
			e.process().delete(id)
			e.same(name, e.keysBelow(id.Prefix), nil)
		}
	})
}

// A page of a proxy is no listing: nothing is complete because nothing is in it.
func TestDelete_AnswersThatAreNoListingsProveNothing(t *testing.T) {
	one(t, func(t *testing.T, e *env) {
		for i, body := range []string{"", "<html><body>OK</body></html>"} {
			id := e.process().create(fmt.Sprint("v", i))
			e.put(id.Prefix + "a")
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
			defer cancel()
			p := e.behind(faultproxy.ListsAs(body)).process()
			if err := p.Delete(ctx, provision.DeleteRequest{ID: id, Keys: e.keys}); err == nil {
				t.Errorf("%q: the deletion is complete", body)
			}
			if _, err := p.ask("new"); !fault.Is(err, fault.Unavailable) {
				t.Errorf("%q: a place without a listing is free: %v", body, err)
			}
			p.kill()
			e.same("data", e.keysBelow(id.Prefix), []string{id.Prefix + "a"})
		}
	})
}

// An unfinished upload whose name is wrong in the listing cannot be aborted.
func TestDelete_MisnamedUploadsAreNamed(t *testing.T) {
	one(t, func(t *testing.T, e *env) {
		p := e.process()
		id := p.create("v")
		e.upload(id.Prefix + "a\x01")
		e.want(p.tryDelete(id), fault.Busy, "unfinished upload", `v/a\ufffd`, "1 unfinished upload aborted")
		e.state("v", "deleting")
	})
}

func TestCopy_SuccessIsProven(t *testing.T) {
	one(t, func(t *testing.T, e *env) {
		e.put("from/a", "from/b")
		for name, c := range map[string]struct {
			quirk faultproxy.Quirk
			kind  fault.Kind
		}{
			"not made": {faultproxy.CopiesNothing(`<CopyObjectResult><ETag>"d41d8cd98f00b204e9800998ecf8427e"</ETag></CopyObjectResult>`), fault.Precondition},
			"no body":  {faultproxy.CopiesNothing(""), fault.Unavailable},
			"html":     {faultproxy.CopiesNothing("<html></html>"), fault.Unavailable},
		} {
			p := e.behind(c.quirk).process().copying()
			task := p.task()
			task.Manifest = "manifest-" + name + "/"
			_, err := p.run(task)
			if !fault.Is(err, c.kind) {
				t.Errorf("%s: %v", name, err)
			}
		}
		p := e.behind(faultproxy.HidesCopies()).process().copying()
		task := p.task()
		task.Manifest = "other/"
		if _, err := p.run(task); err != nil {
			t.Fatal(err)
		}
		e.copied("from/", "to/")
	})
}

// An object that is deleted while it is copied is not in the copy, and is counted.
func TestCopy_DeletedObjectsAreCounted(t *testing.T) {
	each(t, func(t *testing.T, e *env) {
		p := e.process()
		id := p.create("v")
		e.put(id.Prefix+"a", id.Prefix+"b")
		p.hooks.set(func(h *hooks) {
			h.before = func(_ int, operation string) error {
				if operation == "CopyObject" {
					e.remove(id.Prefix + "a")
				}
				return nil
			}
		})
		s := p.snapshot("s", id)
		e.same("the snapshot", e.keysBelow(s.ID.Data()), []string{s.ID.Data() + "b"})
		if r := e.object(".s3-csi/snapshots/s"); !strings.Contains(r, `"changed": 1`) {
			t.Error(r)
		}
	})
}

func TestCopy_SlowServiceGetsSmallerParts(t *testing.T) {
	one(t, func(t *testing.T, e *env) {
		const size = 40 << 20
		e.write("from/large", strings.Repeat("0123456789abcdef", size/16))
		var slow faultproxy.SlowCopies
		p := e.behind(slow.Quirk(200*time.Millisecond, size)).process().copying(func(o *copier.Options) { o.Bound = 4 * time.Second })
		if _, err := p.run(p.task()); err != nil {
			t.Fatal(err)
		}
		e.copied("from/", "to/")
		left := slow.Left.Load()
		if left == 0 || slow.Done.Load() < 4 {
			t.Errorf("%d copies were too slow, %d were not", left, slow.Done.Load())
		}
		task := p.task()
		task.Target.Prefix, task.Manifest = "again/", "manifest2/"
		if _, err := p.run(task); err != nil {
			t.Fatal(err)
		}
		if now := slow.Left.Load(); now != left {
			t.Errorf("the next copy was too slow again, %d times", now-left)
		}
	})
}

// What a service refuses of copies in parts is left out, where that is safe.
func TestCopy_RefusedPartsHaveASubstitute(t *testing.T) {
	one(t, func(t *testing.T, e *env) {
		e.write("from/large", strings.Repeat("0123456789abcdef", 6<<20/16))
		e.write("from/small", "small")
		for name, c := range map[string]struct {
			answer func(operation string, h http.Header) *http.Response
			kind   fault.Kind // Unknown: none
		}{
			"conditions, 501": {func(o string, h http.Header) *http.Response {
				if strings.HasSuffix(o, "Copy") && h.Get("X-Amz-Copy-Source-If-Match") != "" {
					return refusal(501, "NotImplemented")
				}
				return nil
			}, fault.Unknown},
			"conditions, 400": {func(_ string, h http.Header) *http.Response {
				if h.Get("X-Amz-Copy-Source-If-Match") != "" || h.Get("If-None-Match") != "" && h.Get("X-Amz-Copy-Source") != "" {
					return refusal(400, "InvalidRequest")
				}
				return nil
			}, fault.Unknown},
			"parts": {func(o string, _ http.Header) *http.Response {
				if o == "UploadPartCopy" {
					return refusal(501, "NotImplemented")
				}
				return nil
			}, fault.Unknown},
			"all copies": {func(o string, _ http.Header) *http.Response {
				if o == "UploadPartCopy" || o == "CopyObject" {
					return refusal(501, "NotImplemented")
				}
				return nil
			}, fault.Unsupported},
			"the upload is gone": {func(o string, _ http.Header) *http.Response {
				if o == "UploadPartCopy" {
					return refusal(404, "NoSuchUpload")
				}
				return nil
			}, fault.Busy},
		} {
			p := e.process().copying(func(o *copier.Options) { o.Threshold = 5 << 20 })
			p.answers(c.answer)
			task := p.task()
			task.Target.Prefix, task.Manifest = "to-"+name+"/", "manifest-"+name+"/"
			_, err := p.run(task)
			switch {
			case c.kind != fault.Unknown:
				if !fault.Is(err, c.kind) {
					t.Errorf("%s: %v", name, err)
				}
			case err != nil:
				t.Errorf("%s: %v", name, err)
			default:
				e.copied("from/", task.Target.Prefix)
			}
		}
	})
}

// A source that changes while it is copied without a condition is copied again.
func TestCopy_WithoutConditionsNoticesAChange(t *testing.T) {
	one(t, func(t *testing.T, e *env) {
		e.write("from/a", "first")
		p := e.process().copying()
		var changed atomic.Bool
		p.answers(func(o string, h http.Header) *http.Response {
			if o != "CopyObject" {
				return nil
			}
			if h.Get("X-Amz-Copy-Source-If-Match") != "" || h.Get("If-None-Match") != "" {
				return refusal(501, "NotImplemented")
			}
			if !changed.Swap(true) {
				e.write("from/a", "other")
			}
			return nil
		})
		totals, err := p.run(p.task())
		if err != nil || totals.Changed != 1 {
			t.Fatal(totals, err)
		}
		e.copied("from/", "to/")
	})
}

func TestDelete_RefusedMultiDeleteFallsBack(t *testing.T) {
	one(t, func(t *testing.T, e *env) {
		for i, refused := range []func() *http.Response{
			func() *http.Response { return refusal(400, "MalformedXML") },
			func() *http.Response { return refusal(400, "InvalidArgument") },
			func() *http.Response { return refusal(400, "MissingContentMD5") },
			func() *http.Response { return answer(400, "") },
			func() *http.Response { return refusal(405, "MethodNotAllowed") },
			func() *http.Response { return refusal(501, "NotImplemented") },
		} {
			p := e.process()
			var asked atomic.Int64
			p.answers(func(o string, _ http.Header) *http.Response {
				switch o {
				case "DeleteObjects":
					asked.Add(1)
					return refused()
				case "ListMultipartUploads":
					return refused()
				}
				return nil
			})
			for _, name := range []string{"a", "b"} {
				id := p.create(fmt.Sprint(name, i))
				e.put(numbered(id.Prefix, 5)...)
				p.delete(id)
				e.same("data", e.keysBelow(id.Prefix), nil)
			}
			if asked.Load() != 1 {
				t.Errorf("%d: the service was asked %d times", i, asked.Load())
			}
		}
		p := e.process()
		id := p.create("v")
		e.put(id.Prefix + "a")
		p.refuse(400, "MalformedXML", "DeleteObjects", "DeleteObject")
		if err := p.tryDelete(id); err == nil {
			t.Error("a deletion without any deletion is complete")
		}
	})
}

// A busy service ends neither a copy nor a deletion, whatever it answers and to which request.
func TestRun_ThrottledRequestsAreRepeated(t *testing.T) {
	one(t, func(t *testing.T, e *env) {
		for i, refused := range []func() *http.Response{
			func() *http.Response { return refusal(429, "QuotaOfRequests") },
			func() *http.Response { return answer(429, "slow down") },
			func() *http.Response { return refusal(503, "SlowDown") },
		} {
			p := e.process()
			id := p.create(fmt.Sprint("v", i))
			e.put(numbered(id.Prefix, 3)...)
			// More than the SDK repeats by itself; each of the others makes all wait longer.
			times := map[string]int{"GetObject": 4, "PutObject": 4, "CreateMultipartUpload": 4, "ListMultipartUploads": 4, "HeadObject": 1, "CopyObject": 1,
				"ListObjectsV2": 1, "DeleteObjects": 1}
			throttled := func(from string) {
				seen := map[string]int{}
				var began bool
				p.hooks.set(func(h *hooks) {
					h.answer = func(o string, _ http.Header) *http.Response { // under the lock of hooks
						h.mu.Lock()
						defer h.mu.Unlock()
						began = began || o == from
						if seen[o]++; !began || seen[o] > times[o] {
							return nil
						}
						return refused()
					}
				})
			}
			throttled("CopyObject")
			s, err := p.askSnapshot(fmt.Sprint("s", i), id)
			if err != nil || !s.Ready {
				t.Fatalf("%d: snapshot: %+v, %v", i, s, err)
			}
			throttled("PutObject") // the record says deleting
			if err := p.tryDelete(id); err != nil {
				t.Errorf("%d: deletion: %v", i, err)
			}
			if sent := p.hooks.sent(); !slices.Contains(sent, "ListMultipartUploads") {
				t.Error(sent)
			}
		}
	})
}

func TestRecords_WritesAreProven(t *testing.T) {
	one(t, func(t *testing.T, e *env) {
		p := e.process()
		p.create("first") // the service is tested
		p.answers(func(o string, _ http.Header) *http.Response {
			if o == "PutObject" {
				return answer(200, "<html></html>")
			}
			return nil
		})
		err := p.tryCreate("lost")
		if err == nil || e.record("lost") != "" {
			t.Errorf("a volume without a record: %v", err)
		}
		e.notFinal("lost", err)
		p.answers(nil)
		p.hooks.set(func(h *hooks) {
			h.edit = func(o string, r *http.Response) {
				if o == "PutObject" {
					r.Header.Del("ETag")
				}
			}
		})
		id := p.create("v")
		e.put(id.Prefix + "a")
		p.delete(id)
		e.state("v", "deleted")
	})
}

// A record that is lost during a deletion does not make it complete.
func TestDelete_LostRecordIsNotTheEnd(t *testing.T) {
	one(t, func(t *testing.T, e *env) {
		p := e.process()
		id := p.create("v")
		e.put(id.Prefix + "a")
		p.answers(func(o string, _ http.Header) *http.Response {
			if o == "PutObject" { // the record changes, so that it is read again
				e.remove(".s3-csi/volumes/v")
				return refusal(412, "PreconditionFailed")
			}
			return nil
		})
		e.want(p.tryDelete(id), fault.Precondition, "nothing is deleted")
		e.same("data", e.keysBelow(id.Prefix), []string{id.Prefix + "a"})
	})
}
