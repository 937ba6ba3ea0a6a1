package backend

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"
	"github.com/aws/smithy-go"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

func once(o *s3.Options) { o.RetryMaxAttempts = 1 }

// operations are what a test sends; the answers differ in having a body.
var operations = map[string]func(context.Context, *s3.Client) error{
	"HeadBucket": func(ctx context.Context, c *s3.Client) error {
		_, err := c.HeadBucket(ctx, &s3.HeadBucketInput{Bucket: new("bucket")}, once)
		return err
	},
	"HeadObject": func(ctx context.Context, c *s3.Client) error {
		_, err := c.HeadObject(ctx, &s3.HeadObjectInput{Bucket: new("bucket"), Key: new("k")}, once)
		return err
	},
	"GetObject": func(ctx context.Context, c *s3.Client) error {
		_, err := c.GetObject(ctx, &s3.GetObjectInput{Bucket: new("bucket"), Key: new("k")}, once)
		return err
	},
	"ListObjectsV2": func(ctx context.Context, c *s3.Client) error {
		_, err := c.ListObjectsV2(ctx, &s3.ListObjectsV2Input{Bucket: new("bucket")}, once)
		return err
	},
	"PutObject": func(ctx context.Context, c *s3.Client) error {
		_, err := c.PutObject(ctx, &s3.PutObjectInput{Bucket: new("bucket"), Key: new("k"), Body: strings.NewReader("x"), IfNoneMatch: new("*")}, once)
		return err
	},
}

func TestClassifyAnswersOfAService(t *testing.T) {
	type helper uint
	const (
		notFound helper = 1 << iota
		noBucket
		preconditionFailed
		conflict
		notImplemented
	)
	for _, c := range []struct {
		operation string
		status    int
		code      string
		kind      fault.Kind
		helpers   helper
		text      string
	}{
		{"HeadBucket", 404, "", fault.NotFound, notFound, "404 NotFound"},
		{"HeadObject", 404, "", fault.NotFound, notFound, "404"},
		{"HeadBucket", 403, "", fault.Denied, 0, "HEAD"},
		{"HeadObject", 403, "", fault.Denied, 0, "HEAD"},
		{"HeadBucket", 400, "", fault.Precondition, 0, "expired credentials"},
		{"ListObjectsV2", 400, "", fault.Precondition, 0, "https://"},
		{"ListObjectsV2", 403, "SecondLevelDomainForbidden", fault.Precondition, 0, "addressing: virtual"},
		{"PutObject", 400, "InvalidLocationConstraint", fault.Precondition, 0, "set region"},
		{"HeadBucket", 301, "", fault.Precondition, 0, "region"},
		{"HeadBucket", 503, "", fault.Unavailable, 0, "throttles requests"},
		{"GetObject", 404, "NoSuchKey", fault.NotFound, notFound, "NoSuchKey"},
		{"GetObject", 404, "NoSuchBucket", fault.NotFound, notFound | noBucket, "NoSuchBucket"},
		{"ListObjectsV2", 404, "NoSuchBucket", fault.NotFound, notFound | noBucket, "NoSuchBucket"},
		{"ListObjectsV2", 404, "InvalidAccessKeyId", fault.Unauthenticated, 0, "unknown to this service"},
		{"GetObject", 404, "NoSuchAnything", fault.NotFound, notFound, "NoSuchAnything"},
		{"ListObjectsV2", 403, "AccessDenied", fault.Denied, 0, "lack a permission"},
		{"ListObjectsV2", 403, "AllAccessDisabled", fault.Denied, 0, "AllAccessDisabled"},
		{"ListObjectsV2", 403, "InvalidAccessKeyId", fault.Unauthenticated, 0, "unknown to this service"},
		{"ListObjectsV2", 403, "SignatureDoesNotMatch", fault.Unauthenticated, 0, "secret access key"},
		{"ListObjectsV2", 400, "ExpiredToken", fault.Unauthenticated, 0, "expired"},
		{"ListObjectsV2", 400, "InvalidToken", fault.Unauthenticated, 0, "session token"},
		{"ListObjectsV2", 403, "RequestTimeTooSkewed", fault.Precondition, 0, "clock"},
		{"PutObject", 503, "SlowDown", fault.Unavailable, 0, "throttles requests"},
		{"PutObject", 503, "RequestLimitExceeded", fault.Unavailable, 0, "throttles requests"},
		{"PutObject", 400, "Throttling", fault.Unavailable, 0, "throttles requests"},
		{"PutObject", 429, "Whatever", fault.Unavailable, 0, "throttles requests"},
		{"PutObject", 500, "InternalError", fault.Unavailable, 0, "InternalError"},
		{"PutObject", 502, "", fault.Unavailable, 0, "502"},
		{"PutObject", 400, "RequestTimeout", fault.Unavailable, 0, "RequestTimeout"},
		{"PutObject", 412, "PreconditionFailed", fault.Busy, preconditionFailed, "first"},
		{"PutObject", 409, "ConditionalRequestConflict", fault.Busy, conflict, "in progress"},
		{"PutObject", 409, "OperationAborted", fault.Busy, conflict, "in progress"},
		{"PutObject", 301, "PermanentRedirect", fault.Precondition, 0, "region"},
		{"PutObject", 400, "AuthorizationHeaderMalformed", fault.Precondition, 0, "region"},
		{"PutObject", 501, "NotImplemented", fault.Unsupported, notImplemented, "does not support"},
		{"PutObject", 405, "MethodNotAllowed", fault.Unsupported, notImplemented, "does not support"},
		{"PutObject", 400, "KMS.DisabledException", fault.Precondition, 0, "KMS.DisabledException"},
		{"PutObject", 507, "XMinioStorageFull", fault.Exhausted, 0, "XMinioStorageFull"},
		{"PutObject", 409, "BucketAlreadyExists", fault.Exists, 0, "another account"},
	} {
		t.Run(fmt.Sprint(c.operation, c.status, c.code), func(t *testing.T) {
			_, clients, be := serve(t, func(w http.ResponseWriter, r *http.Request) { refuse(w, r, c.status, c.code) }, "")
			client, err := clients.S3(bounded(t), be, testKeys, "")
			check(t, err)
			err = Classify(operations[c.operation](bounded(t), client), "doing a thing with bucket b")
			if fault.KindOf(err) != c.kind {
				t.Errorf("kind %v, want %v: %v", fault.KindOf(err), c.kind, err)
			}
			wantText(t, err, "doing a thing with bucket b: ", "REQ1", c.text)
			// The helpers see through what callers wrap around.
			err = fmt.Errorf("outer: %w", Classify(err, "again"))
			if fault.KindOf(err) != c.kind {
				t.Errorf("the kind changed when it was classified again: %v", fault.KindOf(err))
			}
			var got helper
			for h, is := range map[helper]func(error) bool{notFound: IsNotFound, noBucket: IsNoSuchBucket, preconditionFailed: IsPreconditionFailed,
				conflict: IsConflict, notImplemented: IsNotImplemented} {
				if is(err) {
					got |= h
				}
			}
			if got != c.helpers {
				t.Errorf("helpers say %b, want %b", got, c.helpers)
			}
		})
	}
}

func TestIsUnsupported_AllRefusalsOfAConditionOrAnOptionalOperation(t *testing.T) {
	for _, c := range []struct {
		operation string
		status    int
		code      string
		want      bool
	}{
		{"PutObject", 501, "NotImplemented", true},
		{"PutObject", 501, "", true},
		{"PutObject", 405, "MethodNotAllowed", true},
		{"PutObject", 400, "NotImplemented", true},
		{"PutObject", 400, "InvalidArgument", true},
		{"PutObject", 400, "InvalidRequest", true},
		{"PutObject", 400, "MalformedXML", true},
		{"PutObject", 400, "UnsupportedOperation", true},
		{"PutObject", 400, "", true},
		{"HeadObject", 400, "", false},
		{"PutObject", 400, "ExpiredToken", false},
		{"PutObject", 400, "RequestTimeout", false},
		{"PutObject", 400, "Throttling", false},
		{"PutObject", 400, "BadDigest", false},
		{"PutObject", 400, "EntityTooLarge", false},
		{"PutObject", 400, "AuthorizationHeaderMalformed", false},
		{"PutObject", 400, "KMS.DisabledException", false},
		{"PutObject", 403, "AccessDenied", false},
		{"PutObject", 404, "NoSuchBucket", false},
		{"PutObject", 409, "ConditionalRequestConflict", false},
		{"PutObject", 412, "PreconditionFailed", false},
		{"PutObject", 429, "InvalidRequest", false},
		{"PutObject", 503, "SlowDown", false},
	} {
		_, clients, be := serve(t, func(w http.ResponseWriter, r *http.Request) { refuse(w, r, c.status, c.code) }, "")
		client, err := clients.S3(bounded(t), be, testKeys, "")
		check(t, err)
		err = Classify(operations[c.operation](bounded(t), client), "writing")
		if err == nil || IsUnsupported(err) != c.want {
			t.Errorf("%s %d %q: want %t: %v", c.operation, c.status, c.code, c.want, err)
		}
	}
	if IsUnsupported(nil) {
		t.Error("nil is not an error")
	}
}

func TestClassifyDoesNotTakeAWebServersAnswersForS3s(t *testing.T) {
	for name, answer := range map[string]http.HandlerFunc{
		"404 in plain text": http.NotFound,
		"404 in HTML": func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusNotFound)
			say(w, "<html><body>Not Found</body></html>")
		},
		"404 in bad XML": func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusNotFound)
			say(w, "<!DOCTYPE html><p>Not <br> Found")
		},
		"404 without a body": func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNotFound) },
		"200 in plain text":  func(w http.ResponseWriter, _ *http.Request) { say(w, "<it works") },
	} {
		t.Run(name, func(t *testing.T) {
			_, clients, be := serve(t, answer, "")
			client, err := clients.S3(bounded(t), be, testKeys, "")
			check(t, err)
			err = Classify(operations["ListObjectsV2"](bounded(t), client), "listing")
			if !fault.Is(err, fault.Unavailable) || IsNotFound(err) {
				t.Errorf("kind %v, absent %v: %v", fault.KindOf(err), IsNotFound(err), err)
			}
			wantText(t, err, "S3")
		})
	}
}

func TestClassifyNamesTheEndpointThatCannotBeReached(t *testing.T) {
	hermetic(t)
	tls := httptest.NewTLSServer(http.NotFoundHandler())
	defer tls.Close()
	plain := httptest.NewServer(http.NotFoundHandler())
	defer plain.Close()
	closed := httptest.NewServer(nil)
	closed.Close()
	hangup, err := net.Listen("tcp", "127.0.0.1:0")
	check(t, err)
	defer hangup.Close()
	go func() {
		for {
			conn, err := hangup.Accept()
			if err != nil {
				return
			}
			conn.Close()
		}
	}()
	for name, c := range map[string]struct {
		endpoint, text string
		mayArrive      bool // what was sent
	}{
		"refused":         {closed.URL, "connection refused", false},
		"unknown host":    {"http://no-such-host.invalid", "cannot resolve", false},
		"untrusted":       {tls.URL, "caFile", false},
		"http, not https": {strings.Replace(plain.URL, "http:", "https:", 1), "http://", false},
		"hangs up":        {"http://" + hangup.Addr().String(), "", true},
	} {
		t.Run(name, func(t *testing.T) {
			cfg, err := DefaultConfig("", c.endpoint)
			check(t, err)
			clients, be := newTestClients(t, cfg, "default")
			client, err := clients.S3(bounded(t), be, testKeys, "")
			check(t, err)
			err = Classify(operations["HeadBucket"](bounded(t), client), "checking")
			if !fault.Is(err, fault.Unavailable) {
				t.Errorf("kind %v: %v", fault.KindOf(err), err)
			}
			wantText(t, err, c.endpoint, c.text)
			if MayArrive(err) != c.mayArrive {
				t.Errorf("the request may arrive: %t", !c.mayArrive)
			}
		})
	}
}

func TestClassify_NamesTheDifferenceOfClocks(t *testing.T) {
	for _, c := range []struct {
		operation string
		status    int
		code      string
		off       time.Duration // of the service
		kind      fault.Kind
		text      string // "": no word of clocks
	}{
		{"HeadObject", 403, "", 20 * time.Minute, fault.Precondition, "behind"},
		{"HeadBucket", 403, "", -20 * time.Minute, fault.Precondition, "20m0s ahead"},
		{"GetObject", 403, "SignatureDoesNotMatch", -time.Hour, fault.Precondition, "1h0m0s ahead"},
		{"GetObject", 403, "RequestTimeTooSkewed", -time.Hour, fault.Precondition, "1h0m0s ahead"},
		{"GetObject", 403, "RequestTimeTooSkewed", 0, fault.Precondition, "clocks"},
		{"HeadObject", 403, "", 0, fault.Denied, ""},
		{"GetObject", 403, "SignatureDoesNotMatch", 0, fault.Unauthenticated, ""},
		{"GetObject", 403, "AccessDenied", time.Hour, fault.Denied, ""},
	} {
		_, clients, be := serve(t, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Date", time.Now().Add(c.off).UTC().Format(http.TimeFormat))
			refuse(w, r, c.status, c.code)
		}, "")
		client, err := clients.S3(bounded(t), be, testKeys, "")
		check(t, err)
		err = Classify(operations[c.operation](bounded(t), client), "reading")
		if !fault.Is(err, c.kind) || strings.Contains(err.Error(), "clocks") != (c.text != "") {
			t.Errorf("%+v: kind %v: %v", c, fault.KindOf(err), err)
		}
		wantText(t, err, c.text)
	}
}

func TestClassify_AnswersWithoutACodeNameTheStatus(t *testing.T) {
	_, clients, be := serve(t, func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusBadGateway)
		say(w, "<html>not XML")
	}, "")
	client, err := clients.S3(bounded(t), be, testKeys, "")
	check(t, err)
	err = Classify(operations["GetObject"](bounded(t), client), "reading")
	if !fault.Is(err, fault.Unavailable) {
		t.Errorf("kind %v", fault.KindOf(err))
	}
	wantText(t, err, "the service returned 502 Bad Gateway")
}

func TestClassify_SuggestsTLSForPlainEndpoints(t *testing.T) {
	hermetic(t)
	server := httptest.NewTLSServer(http.HandlerFunc(ok))
	defer server.Close()
	alert, err := net.Listen("tcp", "127.0.0.1:0") // answers as servers do that know nothing but TLS
	check(t, err)
	defer alert.Close()
	go func() {
		for {
			conn, err := alert.Accept()
			if err != nil {
				return
			}
			_, _ = conn.Write([]byte("\x15\x03\x01\x00\x02\x02\x46"))
			conn.Close()
		}
	}()
	for _, endpoint := range []string{strings.Replace(server.URL, "https:", "http:", 1), "http://" + alert.Addr().String()} {
		cfg, err := DefaultConfig("", endpoint)
		check(t, err)
		clients, be := newTestClients(t, cfg, "default")
		_, err = newTestBuckets(t, clients, nil).Validate(bounded(t), be, testKeys, BucketInfo{Name: "b"})
		wantText(t, err, adviceTLS)
	}
}

// A connection that fails in a way without a text of its own is explained like the others, with what is known of it.
func TestOtherFailuresOfConnectionsAreUnavailable(t *testing.T) {
	err := Classify(&url.Error{Op: "Get", URL: "http://s3.example/bucket", Err: errors.New("http: server closed idle connection")}, "reading")
	if !fault.Is(err, fault.Unavailable) {
		t.Errorf("kind %v: %v", fault.KindOf(err), err)
	}
	wantText(t, err, "the connection failed", "closed idle connection")
}

// A service that answered carries nothing out later, but one behind a proxy may.
func TestWhatWasAnsweredDoesNotArrive(t *testing.T) {
	for status, want := range map[int]bool{http.StatusServiceUnavailable: false, http.StatusForbidden: false, http.StatusBadGateway: true,
		http.StatusGatewayTimeout: true} {
		_, clients, be := serve(t, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(status) }, "")
		client, err := clients.S3(bounded(t), be, testKeys, "")
		check(t, err)
		err = Classify(operations["PutObject"](bounded(t), client), "writing")
		if err == nil || MayArrive(err) != want {
			t.Errorf("%d: %v; it may arrive: %t", status, err, !want)
		}
	}
	if MayArrive(nil) || MayArrive(fault.Errorf(fault.Denied, "no credentials")) {
		t.Error("what was not sent may arrive")
	}
}

func TestClassifyTellsTheCallersDeadlineFromTheNetworks(t *testing.T) {
	release := make(chan struct{})
	_, clients, be := serve(t, func(http.ResponseWriter, *http.Request) { <-release }, "")
	defer close(release)
	client, err := clients.S3(bounded(t), be, testKeys, "")
	check(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := Classify(operations["GetObject"](ctx, client), "reading"); !fault.Is(err, fault.Timeout) || !MayArrive(err) {
		t.Errorf("kind %v, may arrive: %t: %v", fault.KindOf(err), MayArrive(err), err)
	}
	if err := Classify(context.Canceled, "reading"); !fault.Is(err, fault.Timeout) {
		t.Errorf("kind %v: %v", fault.KindOf(err), err)
	}
	dial := &net.OpError{Op: "dial", Err: dialTimeoutError{}}
	if err := Classify(dial, "reading"); !fault.Is(err, fault.Unavailable) {
		t.Errorf("kind %v: %v", fault.KindOf(err), err)
	}
}

// Work in the background may have no deadline, so a service that stops in the middle of a response has to fail by itself.
func TestAResponseThatStopsInItsMiddleFails(t *testing.T) {
	stop := make(chan struct{})
	_, clients, be := serve(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", "1000")
		_, _ = io.WriteString(w, "<ListBucketResult>")
		_ = http.NewResponseController(w).Flush()
		<-stop
	}, "", withSilence(50*time.Millisecond))
	defer close(stop)
	client, err := clients.S3(bounded(t), be, testKeys, "")
	check(t, err)
	got, err := client.GetObject(bounded(t), &s3.GetObjectInput{Bucket: new("bucket"), Key: new("key")})
	check(t, err)
	defer got.Body.Close()
	_, err = io.ReadAll(got.Body)
	if err := Classify(err, "reading"); !fault.Is(err, fault.Unavailable) {
		t.Errorf("a body: kind %v: %v", fault.KindOf(err), err)
	}
	_, err = client.ListObjectsV2(bounded(t), &s3.ListObjectsV2Input{Bucket: new("bucket")})
	if err := Classify(err, "listing"); !fault.Is(err, fault.Unavailable) {
		t.Errorf("a listing: kind %v: %v", fault.KindOf(err), err)
	}
}

// dialTimeoutError is a dial timeout as package net makes it.
type dialTimeoutError struct{}

func (dialTimeoutError) Error() string        { return "i/o timeout" }
func (dialTimeoutError) Timeout() bool        { return true }
func (dialTimeoutError) Temporary() bool      { return true }
func (dialTimeoutError) Is(target error) bool { return target == context.DeadlineExceeded }

func TestClassifyWorksWithoutAnHTTPAnswer(t *testing.T) {
	if Classify(nil, "x") != nil || IsNotFound(nil) || IsConflict(nil) || IsPreconditionFailed(nil) || ErrorCode(nil) != "" {
		t.Error("nil is not an error")
	}
	for _, c := range []struct {
		err  error
		kind fault.Kind
	}{
		{&types.NotFound{}, fault.NotFound},
		{&types.NoSuchKey{}, fault.NotFound},
		{&smithy.GenericAPIError{Code: "AccessDenied"}, fault.Denied},
		{&smithy.GenericAPIError{Code: "InternalError"}, fault.Unavailable},
		{&smithy.GenericAPIError{Code: "OperationAborted"}, fault.Busy},
		{errors.New("odd"), fault.Unknown},
		{fault.Errorf(fault.Exhausted, "as it was"), fault.Exhausted},
	} {
		if got := fault.KindOf(Classify(c.err, "x")); got != c.kind {
			t.Errorf("%v: kind %v, want %v", c.err, got, c.kind)
		}
		if !errors.Is(Classify(c.err, "x"), c.err) {
			t.Errorf("%v: the chain is lost", c.err)
		}
	}
	if !IsNotFound(&types.NotFound{}) {
		t.Error("a NotFound is not found")
	}
}
