package check

import (
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"

	"github.com/s3-csi/s3-csi-driver/tests/internal/faultproxy"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"

	checks "github.com/s3-csi/s3-csi-driver/pkg/check"
)

// The services that are imitated.
var (
	of       = faultproxy.Of
	refusing = faultproxy.Refusing
	changing = faultproxy.Changing
)

func has(header string) func(*http.Request) bool {
	return func(r *http.Request) bool { return r.Header.Get(header) != "" }
}

func keyHas(text string) func(*http.Request) bool {
	return func(r *http.Request) bool { return strings.Contains(r.URL.Path, text) }
}

func without(header string) func(*http.Request, *faultproxy.Answer) {
	return func(_ *http.Request, a *faultproxy.Answer) { a.Header.Del(header) }
}

func replacing(pattern, by string) func(*http.Request, *faultproxy.Answer) {
	return func(_ *http.Request, a *faultproxy.Answer) { a.Replace(pattern, by) }
}

// onStatus changes the status of an answer: a condition that is ignored.
func onStatus(from, to int, body string) func(*http.Request, *faultproxy.Answer) {
	return func(_ *http.Request, a *faultproxy.Answer) {
		if a.Status == from {
			a.Status, a.Body = to, []byte(body)
			a.Header.Set("ETag", `"00112233445566778899aabbccddeeff"`)
		}
	}
}

// repeating answers with the first token of a listing again.
func repeating() faultproxy.Quirk {
	var mu sync.Mutex
	first := ""
	return changing(of("ListObjectsV2"), func(_ *http.Request, a *faultproxy.Answer) {
		_, rest, found := strings.Cut(string(a.Body), "<NextContinuationToken>")
		if !found {
			return
		}
		mu.Lock()
		defer mu.Unlock()
		if first == "" {
			first, _, _ = strings.Cut(rest, "<")
		}
		a.Replace("<NextContinuationToken>.*?</NextContinuationToken>", "<NextContinuationToken>"+first+"</NextContinuationToken>")
	})
}

// endless lists pages without end, each with keys that do not exist.
func endless() faultproxy.Quirk {
	var mu sync.Mutex
	pages := 0
	return changing(of("ListObjectsV2").When(func(r *http.Request) bool {
		return r.URL.Query().Has("delimiter") || strings.Contains(r.URL.Query().Get("prefix"), "names/")
	}),
		func(r *http.Request, a *faultproxy.Answer) {
			mu.Lock()
			defer mu.Unlock()
			pages++
			var contents strings.Builder
			for i := range 1000 {
				fmt.Fprintf(&contents, `<Contents><Key>%s%d-%d</Key><Size>1</Size><ETag>"x"</ETag><LastModified>2026-01-01T00:00:00Z</LastModified></Contents>`,
					r.URL.Query().Get("prefix"), pages, i)
			}
			a.Body = fmt.Appendf(nil, `<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>%d</NextContinuationToken>%s</ListBucketResult>`, pages,
				contents.String())
		})
}

// reversed lists each page backwards.
func reversed(_ *http.Request, a *faultproxy.Answer) {
	text := string(a.Body)
	first, last := strings.Index(text, "<Contents>"), strings.LastIndex(text, "</Contents>")
	if first < 0 || last < 0 {
		return
	}
	last += len("</Contents>")
	parts := strings.SplitAfter(text[first:last], "</Contents>")
	var turned string
	for _, part := range parts {
		turned = part + turned
	}
	a.Body = []byte(text[:first] + turned + text[last:])
}

// once is a quirk for the first request that matches.
func once(which faultproxy.Which, quirk func(faultproxy.Which) faultproxy.Quirk) faultproxy.Quirk {
	var first atomic.Bool
	condition := which.If
	return quirk(which.When(func(r *http.Request) bool { return condition(r) && first.CompareAndSwap(false, true) }))
}

func dated(by time.Duration) faultproxy.Quirk {
	return changing(of(http.MethodGet), func(_ *http.Request, a *faultproxy.Answer) {
		a.Header.Set("Date", time.Now().Add(by).UTC().Format(http.TimeFormat))
	})
}

// Each quirk of a service makes the check fail, or warn if the driver works around it, with the row of the operation and the setting that helps.
func TestCheck_FindsWhatAServiceCannotDo(t *testing.T) {
	const (
		fails = true
		warns = false
	)
	g := newGateway(t)
	c := client(g.Endpoint(), g.Region(), g.Keys())
	uploads := of("PutObject", "UploadPart", "CreateMultipartUpload")
	for name, tc := range map[string]struct {
		quirk   faultproxy.Quirk
		row     string
		needed  bool
		setting string
	}{
		"multi-delete 501": {refusing(of("DeleteObjects"), 501, "NotImplemented"), "multiDelete", warns, ""},
		"multi-delete 405": {refusing(of("DeleteObjects"), 405, "MethodNotAllowed"), "multiDelete", warns, ""},
		"multi-delete 400": {refusing(of("DeleteObjects"), 400, "MalformedXML"), "multiDelete", warns, ""},
		"multi-delete refuses keys": {changing(of("DeleteObjects"), replacing("</DeleteResult>",
			"<Error><Key>names/a+b</Key><Code>NoSuchKey</Code></Error></DeleteResult>")), "multiDelete", fails, ""},
		"multi-delete does nothing": {faultproxy.Swallowing(of("DeleteObjects"), 200, "<DeleteResult></DeleteResult>"), "multiDelete", fails, ""},
		"delete is forbidden": {once(of("DeleteObject").When(keyHas("copies/names/a+b")),
			func(w faultproxy.Which) faultproxy.Quirk { return refusing(w, 403, "AccessDenied") }), "deletes", fails, ""},
		"delete does nothing": {once(of("DeleteObject").When(keyHas("copies/names/a b")),
			func(w faultproxy.Which) faultproxy.Quirk { return faultproxy.Swallowing(w, 204, "") }), "deletes", fails, ""},
		"copy 501":              {refusing(of("CopyObject"), 501, "NotImplemented"), "copies", fails, ""},
		"copy loses plus signs": {refusing(of("CopyObject").When(keyHas("+")), 404, "NoSuchKey"), "copies", fails, ""},
		"copy loses UTF-8":      {refusing(of("CopyObject").When(keyHas("\u65e5")), 400, "InvalidArgument"), "copies", fails, ""},
		"copy does nothing": {faultproxy.Swallowing(of("CopyObject"), 200, `<CopyObjectResult><ETag>"x"</ETag></CopyObjectResult>`), "copies", fails,
			""},
		"copy fails after 200":       {faultproxy.Swallowing(of("CopyObject"), 200, `<Error><Code>InternalError</Code></Error>`), "copies", fails, ""},
		"copy of parts 501":          {refusing(of("UploadPartCopy"), 501, "NotImplemented"), "partCopies", fails, ""},
		"copy of parts without ETag": {changing(of("UploadPartCopy"), replacing("<ETag>.*</ETag>", "")), "partCopies", fails, ""},
		"copy condition 501": {refusing(of("CopyObject").When(has("X-Amz-Copy-Source-If-Match")), 501, "NotImplemented"), "conditionalCopies", fails,
			""},
		"copy condition ignored": {changing(of("CopyObject"), onStatus(412, 200, `<CopyObjectResult><ETag>"x"</ETag></CopyObjectResult>`)),
			"conditionalCopies", fails, ""},
		"a repeated token": {repeating(), "pagination", fails, ""},
		"an empty token": {changing(of("ListObjectsV2"), replacing("<NextContinuationToken>.*</NextContinuationToken>",
			"<NextContinuationToken></NextContinuationToken>")), "pagination", fails, ""},
		"no token": {changing(of("ListObjectsV2"), replacing("<NextContinuationToken>.*</NextContinuationToken>", "")), "pagination", fails,
			""},
		"an endless listing": {endless(), "pagination", fails, ""},
		"a listing without a key": {changing(of("ListObjectsV2"), replacing(`(?s)<Contents>.{0,200}?<Key>[^<]*case</Key>.*?</Contents>`, "")), "pagination",
			fails, ""},
		"listings end early": {changing(of("ListObjectsV2"), replacing("<IsTruncated>true</IsTruncated>", "<IsTruncated>false</IsTruncated>")),
			"pagination", fails, ""},
		"max-keys is refused": {refusing(of("ListObjectsV2").When(func(r *http.Request) bool { return r.URL.Query().Get("max-keys") == "3" }), 400,
			"InvalidArgument"), "pagination", fails, ""},
		"unsorted listings": {changing(of("ListObjectsV2"), reversed), "listingOrder", fails, ""},
		"encoding only claimed": {changing(of("ListObjectsV2"), replacing("<EncodingType></EncodingType>", "<EncodingType>url</EncodingType>")),
			"listingNames", fails, ""},
		"encoding not claimed": {changing(of("ListObjectsV2"), replacing("names/a/c d<", "names/a/c%20d<")), "listingNames", fails, ""},
		"no common prefixes":   {changing(of("ListObjectsV2"), replacing("(?s)<CommonPrefixes>.*?</CommonPrefixes>", "")), "directories", fails, ""},
		"a header of listings is refused": {refusing(of("ListObjectsV2").When(has("X-Amz-Optional-Object-Attributes")), 501, "NotImplemented"), "directories", fails,
			""},
		"listings without ETags": {changing(of("ListObjectsV2"), replacing("<ETag>.*?</ETag>", "")), "metadata", fails, ""},
		"trailers 501":           {refusing(uploads.When(has("X-Amz-Trailer")), 501, "NotImplemented"), "checksums", fails, "upload-checksums=off"},
		"trailers of parts":      {refusing(of("UploadPart").When(has("X-Amz-Trailer")), 400, "InvalidRequest"), "checksums", fails, "upload-checksums=off"},
		"trailers are stored": {changing(of("GetObject").When(keyHas("/checksum")), replacing("(?s)^(.*)$", "37\r\n${1}\r\n0\r\n")), "checksums", fails,
			"upload-checksums=off"},
		"checksums of uploads": {refusing(of("CreateMultipartUpload").When(has("X-Amz-Checksum-Algorithm")), 400, "InvalidArgument"), "checksums", fails,
			"upload-checksums=off"},
		"checksums of empty objects": {refusing(of("PutObject").When(has("X-Amz-Checksum-Crc32c")), 400, "InvalidArgument"), "checksums", fails,
			"upload-checksums=off"},
		"no multipart uploads": {refusing(of("CreateMultipartUpload"), 403, "AccessDenied"), "multipart", fails, ""},
		"no second part": {refusing(of("UploadPart").When(func(r *http.Request) bool { return r.URL.Query().Get("partNumber") == "2" }), 400,
			"InvalidArgument"), "multipart", fails, ""},
		"complete without ETag": {changing(of("CompleteMultipartUpload"), replacing("<ETag>.*</ETag>", "")), "multipart", warns, ""},
		"parts without ETag":    {changing(of("UploadPart"), without("ETag")), "multipart", fails, ""},
		"at most 1000 parts": {refusing(of("UploadPart").When(func(r *http.Request) bool { return len(r.URL.Query().Get("partNumber")) > 3 }), 400,
			"InvalidArgument"), "manyParts", warns, "part-size"},
		"complete fails after 200": {faultproxy.Swallowing(of("CompleteMultipartUpload"), 200, `<Error><Code>InvalidPart</Code></Error>`), "multipart", fails,
			""},
		"no abort":                     {refusing(of("AbortMultipartUpload").When(keyHas("/aborted")), 501, "NotImplemented"), "multipart", fails, ""},
		"ranges are ignored":           {faultproxy.Forgetting("Range"), "ranges", fails, ""},
		"ranges 501":                   {refusing(of("GetObject").When(has("Range")), 501, "NotImplemented"), "ranges", fails, ""},
		"ranges without Content-Range": {changing(of("GetObject"), without("Content-Range")), "ranges", fails, ""},
		"If-Match of reads 501":        {refusing(of("GetObject").When(has("If-Match")), 501, "NotImplemented"), "conditionalReads", fails, ""},
		"If-Match of reads is ignored": {faultproxy.Forgetting("If-Match"), "conditionalReads", fails, ""},
		"If-Match of writes 501": {refusing(of("PutObject").When(has("If-Match")), 501, "NotImplemented"), "conditionalWrites", fails,
			"singleController: true"},
		"If-None-Match of writes 400": {refusing(of("PutObject").When(has("If-None-Match")), 400, "InvalidArgument"), "conditionalWrites", fails,
			"singleController: true"},
		"conditional writes are ignored": {changing(of("PutObject"), onStatus(412, 200, "")), "conditionalWrites", fails, "singleController: true"},
		"HEAD without length":            {changing(of("HeadObject"), without("Content-Length")), "metadata", fails, ""},
		"no ETag of PUT":                 {changing(of("PutObject"), without("ETag")), "metadata", fails, ""},
		"no ETag of HEAD":                {changing(of("HeadObject"), without("ETag")), "metadata", fails, ""},
		"ETags change": {changing(of("HeadObject"), func(_ *http.Request, a *faultproxy.Answer) {
			a.Header.Set("ETag", fmt.Sprintf(`"%d"`, time.Now().UnixNano()))
		}), "metadata", fails, ""},
		"no Last-Modified": {changing(of("HeadObject", "GetObject"), without("Last-Modified")), "metadata", fails, ""},
		"no empty objects": {refusing(of("PutObject").When(func(r *http.Request) bool { return r.ContentLength == 0 }), 411, "MissingContentLength"),
			"emptyObjects", fails, ""},
		"names in ASCII only":    {refusing(of("PutObject").When(keyHas("\u65e5")), 400, "InvalidObjectName"), "names", fails, ""},
		"no difference of cases": {changing(of("GetObject").When(keyHas("names/CASE")), replacing("CASE", "case")), "names", fails, ""},
		"HEAD of a missing key":  {refusing(of("HeadObject").When(keyHas("/missing-")), 403, "AccessDenied"), "missingKey", fails, ""},
		"max-keys=0 is refused": {refusing(of("ListObjectsV2").When(func(r *http.Request) bool { return r.URL.Query().Get("max-keys") == "0" }), 400,
			"InvalidArgument"), "emptyListing", fails, "client: rclone"},
		"bucket tags 501":             {refusing(of("GetBucketTagging", "PutBucketTagging"), 501, "NotImplemented"), "bucketTags", warns, "bucketName"},
		"no listing of uploads":       {refusing(of("ListMultipartUploads"), 501, "NotImplemented"), "uploadListing", warns, ""},
		"another region":              {refusing(of("CreateBucket"), 400, "IllegalLocationConstraintException"), "createBucket", warns, "region"},
		"path addressing":             {refusing(faultproxy.Which{}, 403, "SecondLevelDomainForbidden"), "createBucket", warns, "addressing: virtual"},
		"clocks differ by 10 minutes": {dated(10 * time.Minute), "clock", warns, ""},
		"clocks differ by 20 minutes": {dated(-20 * time.Minute), "clock", fails, ""},
		"control characters are lost": {changing(of("ListObjectsV2"), replacing("\ufffd", "?")), "controlNames", warns, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := rigtest.Proxy(t, g.Endpoint())
			p.Set(faultproxy.Faults{Quirk: tc.quirk})
			r := run(t, g.user, fmt.Sprintf("  lab: {endpoint: %q, region: %s}\n", p.Endpoint(), g.Region()), "--create-bucket")
			got := row(t, r, tc.row)
			if got.Result == checks.Yes || got.Needed != tc.needed || got.Setting != tc.setting || got.Why == "" {
				t.Errorf("%+v", got)
			}
			if tc.setting != "" && !strings.Contains(got.Advice, tc.setting) {
				t.Errorf("the advice does not have the setting: %+v", got)
			}
			if tc.needed && (r.OK || r.code != 1) {
				t.Errorf("exit code %d", r.code)
			}
			t.Logf("%s\n%+v", table(r.Sections[0]), got)
		})
	}
	t.Cleanup(func() { nothingLeft(t, c) })
}

// The other form of a bucket's address is tried where one does not work. An HTTP proxy resolves all names.
func TestCheck_NamesTheAddressingThatWorks(t *testing.T) {
	t.Parallel()
	g := newGateway(t)
	const bucket = "addressed"
	if _, err := client(g.Endpoint(), g.Region(), g.Keys()).CreateBucket(t.Context(), &s3.CreateBucketInput{Bucket: aws.String(bucket)}); err != nil {
		t.Fatal(err)
	}
	p := rigtest.Proxy(t, g.Endpoint())
	backend := func(addressing string) string {
		return fmt.Sprintf("  lab: {endpoint: http://s3.example, region: %s, addressing: %s, proxy: {url: %q}}\n", g.Region(), addressing, p.Endpoint())
	}
	inHost := func(r *http.Request) bool { return strings.HasPrefix(r.Host, bucket+".") }
	t.Run("path only", func(t *testing.T) {
		got := row(t, run(t, g.user, backend("virtual"), "--bucket="+bucket), "bucket")
		if got.Result != checks.No || got.Setting != "addressing: path" || !got.Needed {
			t.Errorf("%+v", got)
		}
	})
	t.Run("virtual only", func(t *testing.T) {
		p.Set(faultproxy.Faults{Quirk: func(w http.ResponseWriter, r *http.Request, forward http.Handler) {
			switch {
			case inHost(r):
				_, _ = w.Write([]byte("<ListBucketResult><Name>" + bucket + "</Name></ListBucketResult>"))
			case r.URL.Path == "/":
				forward.ServeHTTP(w, r)
			default:
				faultproxy.Refuse(w, r, http.StatusForbidden, "Forbidden", "Put the bucket into the host name.")
			}
		}})
		got := row(t, run(t, g.user, backend("path"), "--bucket="+bucket), "bucket")
		if got.Result != checks.No || got.Setting != "addressing: virtual" || !got.Needed {
			t.Errorf("%+v", got)
		}
	})
}

// The options and the client of volumes decide whether checksums are needed.
func TestCheck_ChecksumsAreNeededByTheirClientOnly(t *testing.T) {
	t.Parallel()
	g := newGateway(t)
	p := rigtest.Proxy(t, g.Endpoint())
	p.Set(faultproxy.Faults{Quirk: refusing(of("PutObject", "UploadPart").When(has("X-Amz-Trailer")), 501, "NotImplemented")})
	for name, tc := range map[string]struct {
		more   string
		flags  []string
		needed bool
	}{
		"mountpoint-s3":            {"", nil, true},
		"without checksums":        {"", []string{"--mount-options=allow-delete=false,upload-checksums=off"}, false},
		"another algorithm":        {"", []string{"--mount-options=upload-checksums=crc64nvme"}, true},
		"rclone by default":        {"", []string{"--default-client=rclone"}, false},
		"rclone of the backend":    {", defaultClient: rclone", nil, false},
		"mountpoint-s3 of backend": {", defaultClient: mountpoint-s3", []string{"--default-client=rclone"}, true},
	} {
		t.Run(name, func(t *testing.T) {
			r := run(t, g.user, fmt.Sprintf("  lab: {endpoint: %q, region: %s%s}\n", p.Endpoint(), g.Region(), tc.more), append(tc.flags, "--create-bucket")...)
			if got := row(t, r, "checksums"); got.Result != checks.No || got.Needed != tc.needed || r.OK == tc.needed {
				t.Errorf("ok %t, %+v", r.OK, got)
			}
		})
	}
}
