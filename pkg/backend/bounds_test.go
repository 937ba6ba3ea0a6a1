package backend

import (
	"compress/gzip"
	"io"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/sts"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// endless answers with a beginning and then with a text again and again until the client goes or limit bytes were sent.
func endless(status int, begin, text string, limit int) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(status)
		_, err := io.WriteString(w, begin)
		for sent := 0; err == nil && sent < limit; {
			var n int
			n, err = io.WriteString(w, strings.Repeat(text, 1+(64<<10)/len(text)))
			sent += n
		}
	}
}

// allocated returns how many bytes a function allocated, which is more than it ever held.
func allocated(do func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	do()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

const (
	listing  = `<?xml version="1.0"?><ListBucketResult>`
	refusal  = `<?xml version="1.0"?><Error><Code>AccessDenied</Code><Message>`
	complete = fault.Kind(100)
	// sent is what a hostile service sends at most, in bytes, so that a test without bounds ends.
	sent = 16 << 20
)

func TestAnswers_WithoutEndTakeLittleMemory(t *testing.T) {
	gzipped := func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Encoding", "gzip")
		z := gzip.NewWriter(w)
		_, _ = io.WriteString(z, listing)
		for range sent / (1 << 20) {
			_, _ = io.WriteString(z, strings.Repeat(" ", 1<<20))
		}
		_ = z.Close()
	}
	for name, c := range map[string]struct {
		answer http.HandlerFunc
		kind   fault.Kind
	}{
		"listing":             {endless(200, listing, "<Contents><Key>some-key</Key><Size>1</Size></Contents>", sent), fault.Unavailable},
		"empty entries":       {endless(200, listing, "<Contents/>", sent), fault.Unavailable},
		"text":                {endless(200, listing+"<Contents><Key>", "x", sent), fault.Unavailable},
		"text without XML":    {endless(200, "", "x", sent), fault.Unavailable},
		"white space":         {endless(200, listing, " ", sent), fault.Unavailable},
		"white space at once": {endless(200, "", " ", sent), fault.Unavailable},
		"white space after":   {endless(200, listing+"</ListBucketResult>", " ", sent), complete}, // read or refused
		"nested":              {endless(200, listing, "<a>", sent), fault.Unavailable},
		"attributes":          {endless(200, listing+"<Contents", ` b=">"`, sent), fault.Unavailable},
		"comment":             {endless(200, listing+"<!--", "x", sent), fault.Unavailable},
		"gzip":                {gzipped, fault.Unavailable},
		"refusal":             {endless(403, refusal, "x", sent), fault.Denied},
		"refusal in spaces":   {endless(403, "", " ", sent), fault.Denied},
		"nested refusal":      {endless(403, refusal, "<a>", sent), fault.Denied},
		"bad request":         {endless(400, refusal, "x", sent), fault.Precondition},
		"header": {func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("X-Amz-Long", strings.Repeat("x", 8<<20))
		}, fault.Unavailable},
	} {
		t.Run(name, func(t *testing.T) {
			_, clients, be := serve(t, c.answer, "")
			client, err := clients.S3(bounded(t), be, testKeys, "")
			check(t, err)
			for operation, send := range map[string]func() error{
				"a listing of one": func() error {
					_, err := client.ListObjectsV2(bounded(t), &s3.ListObjectsV2Input{Bucket: new("b"), MaxKeys: aws.Int32(1)})
					return err
				},
				"a listing": func() error {
					_, err := client.ListObjectsV2(bounded(t), &s3.ListObjectsV2Input{Bucket: new("b")})
					return err
				},
				"a copy": func() error {
					_, err := client.CopyObject(bounded(t), &s3.CopyObjectInput{Bucket: new("b"), Key: new("k"), CopySource: new("b/x")})
					return err
				},
			} {
				took := allocated(func() { err = Classify(send(), "reading") })
				if took > 200<<20 {
					t.Errorf("%s allocated %d MiB", operation, took>>20)
				}
				if kind := fault.KindOf(err); kind != c.kind && c.kind != complete && !strings.HasSuffix(operation, "copy") {
					t.Errorf("%s: kind %v, want %v: %v", operation, kind, c.kind, err)
				}
			}
		})
	}
}

func TestAnswers_OfTheTokenServiceWithoutEndTakeLittleMemory(t *testing.T) {
	for name, answer := range map[string]http.HandlerFunc{
		"result":  endless(200, "<GetCallerIdentityResponse><GetCallerIdentityResult>", "<a>", sent),
		"refusal": endless(403, "<ErrorResponse><Error><Code>", "x", sent),
	} {
		_, clients, be := serve(t, answer, "")
		client, err := clients.STS(bounded(t), be, testKeys)
		check(t, err)
		took := allocated(func() { _, err = client.GetCallerIdentity(bounded(t), &sts.GetCallerIdentityInput{}) })
		if err == nil || took > 100<<20 {
			t.Errorf("%s: allocated %d MiB, %v", name, took>>20, err)
		}
	}
}

func TestAnswers_OfCredentialServicesWithoutEndTakeLittleMemory(t *testing.T) {
	var asked atomic.Int32
	for name, answer := range map[string]http.HandlerFunc{
		"result":  endless(200, `{"AccessKeyId":"`, "x", sent),
		"refusal": endless(403, "", "x", sent),
	} {
		for variable, path := range map[string]string{"AWS_CONTAINER_CREDENTIALS_FULL_URI": "/credentials", "AWS_EC2_METADATA_SERVICE_ENDPOINT": ""} {
			_, clients, _ := serve(t, ok, "")
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				asked.Add(1)
				answer(w, r)
			}))
			t.Setenv("AWS_EC2_METADATA_DISABLED", "false")
			t.Setenv(variable, server.URL+path)
			var err error
			took := allocated(func() { _, err = clients.DriverKeys(bounded(t)) })
			if err == nil || took > 100<<20 {
				t.Errorf("%s of %s: allocated %d MiB, %v", name, variable, took>>20, err)
			}
			if asked.Swap(0) == 0 {
				t.Errorf("%s was not asked", variable)
			}
			t.Setenv(variable, "")
			server.Close()
		}
	}
}

// Objects may be of any size: their readers have bounds of their own.
func TestAnswers_ContentOfObjectsHasNoBound(t *testing.T) {
	_, clients, be := serve(t, endless(200, "", strings.Repeat(`<"`, 1<<10), 16<<20), "")
	client, err := clients.S3(bounded(t), be, testKeys, "")
	check(t, err)
	out, err := client.GetObject(bounded(t), &s3.GetObjectInput{Bucket: new("b"), Key: new("k")})
	check(t, err)
	defer out.Body.Close()
	if n, err := io.Copy(io.Discard, out.Body); n < 16<<20 || err != nil {
		t.Errorf("read %d bytes, %v", n, err)
	}
}

// The longest keys in the longest encoding, a thousand of them.
func TestAnswers_LongestListingIsRead(t *testing.T) {
	entry := "<Contents><Key>" + strings.Repeat("&#xd;",
		1024) + "</Key><ETag>&quot;d41d8cd98f00b204e9800998ecf8427e&quot;</ETag><Size>1</Size><StorageClass>STANDARD</StorageClass>" +
		"<Owner><ID>" + strings.Repeat("a", 64) + "</ID><DisplayName>somebody</DisplayName></Owner><LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
	_, clients, be := serve(t, func(w http.ResponseWriter, _ *http.Request) {
		say(w, "%s", listing+strings.Repeat(entry, 1000)+"</ListBucketResult>")
	}, "")
	client, err := clients.S3(bounded(t), be, testKeys, "")
	check(t, err)
	if out, err := client.ListObjectsV2(bounded(t), &s3.ListObjectsV2Input{Bucket: new("b")}); err != nil || len(out.Contents) != 1000 {
		t.Errorf("got %v, %v", out, err)
	}
}

func TestThrottling_IsRepeatedUnderAnyCode(t *testing.T) {
	for _, code := range []string{"SlowDown", "TooManyRequests", "Whatever", "AccessDenied", "NoSuchKey", ""} {
		for name, send := range operations {
			var asked atomic.Int32
			_, clients, be := serve(t, func(w http.ResponseWriter, r *http.Request) {
				switch {
				case asked.Add(1) > 1:
					ok(w, r)
				case code == "":
					w.WriteHeader(http.StatusTooManyRequests)
				default:
					refuse(w, r, http.StatusTooManyRequests, code)
				}
			}, "")
			client, err := clients.S3(bounded(t), be, testKeys, "")
			check(t, err)
			if err := send(bounded(t), client); !fault.Is(Classify(err, "x"), fault.Unavailable) || IsNotFound(err) || IsUnsupported(err) {
				t.Errorf("%s once, code %q: %v", name, code, err)
			}
			asked.Store(0)
			_, err = client.HeadBucket(bounded(t), &s3.HeadBucketInput{Bucket: new("b")})
			if err != nil || asked.Load() != 2 {
				t.Errorf("code %q: %d requests, %v", code, asked.Load(), err)
			}
		}
	}
}

func TestThrottling_OfCredentialServicesIsRepeated(t *testing.T) {
	var asked, refuse atomic.Int32
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if asked.Add(1) <= refuse.Load() {
			w.WriteHeader(http.StatusTooManyRequests)
			return
		}
		say(w, `{"AccessKeyId":"A","SecretAccessKey":"B","Token":"C"}`)
	}))
	defer server.Close()
	for times, want := range map[int32]fault.Kind{1: fault.Unknown, 100: fault.Unavailable} {
		_, clients, _ := serve(t, ok, "")
		t.Setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", server.URL)
		asked.Store(0)
		refuse.Store(times)
		keys, err := clients.DriverKeys(bounded(t))
		if fault.KindOf(err) != want || (err == nil) != (keys.AccessKeyID == "A") || asked.Load() < 2 {
			t.Errorf("refused %d times: %v, after %d requests", times, err, asked.Load())
		}
	}
}
