package backend

import (
	"bytes"
	"encoding/xml"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

func TestListing_OnlyThatOfS3IsOne(t *testing.T) {
	key := func(text string) string {
		return `<?xml version="1.0"?><ListBucketResult><Contents><Key>` + text + `</Key></Contents></ListBucketResult>`
	}
	for name, c := range map[string]struct {
		body string
		kind fault.Kind // Unknown: none
		key  string
	}{
		"empty body":           {"", fault.Unavailable, ""},
		"page of a proxy":      {"<!DOCTYPE html><html><body><br></body></html>", fault.Unavailable, ""},
		"JSON":                 {"{}", fault.Unavailable, ""},
		"other result":         {"<ListAllMyBucketsResult/>", fault.Unavailable, ""},
		"cut":                  {key("a")[:60], fault.Unavailable, ""},
		"endless":              {key(strings.Repeat("a", 16<<20)), fault.Unavailable, ""},
		"listing":              {key("a&#13;b&amp;"), fault.Unknown, "a\rb&"},
		"control character":    {key("a\x01b"), fault.Unknown, "a\ufffdb"},
		"reference":            {key("a&#x1;b&#31;c&#xFFFE;&#x10FFFF;&#x1F600;"), fault.Unknown, "a\ufffdb\ufffdc\ufffd\U0010ffff\U0001f600"},
		"not UTF-8":            {key("a\xffb"), fault.Unknown, "a\ufffdb"},
		"error of a slow list": {"<Error><Code>SlowDown</Code></Error>", fault.Unavailable, ""},
	} {
		_, clients, be := serve(t, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/xml")
			_, _ = io.WriteString(w, c.body)
		}, "")
		client, err := clients.S3(bounded(t), be, testKeys, "")
		check(t, err)
		out, err := client.ListObjectsV2(bounded(t), &s3.ListObjectsV2Input{Bucket: aws.String("bucket")})
		switch {
		case c.kind != fault.Unknown:
			if got := fault.KindOf(Classify(err, "list")); err == nil || got != c.kind {
				t.Errorf("%s: %v of kind %v", name, err, got)
			}
		case err != nil || len(out.Contents) != 1 || *out.Contents[0].Key != c.key:
			t.Errorf("%s: %+v, %v", name, out, err)
		}
	}
}

func TestClients_WithoutHeaderTimeoutAServiceMayBeSilent(t *testing.T) {
	_, clients, be := serve(t, func(w http.ResponseWriter, r *http.Request) {
		select {
		case <-time.After(500 * time.Millisecond):
			ok(w, r)
		case <-r.Context().Done():
		}
	}, "", withSilence(100*time.Millisecond))
	client, err := clients.S3(bounded(t), be, testKeys, "")
	check(t, err)
	if _, err := client.HeadBucket(bounded(t), &s3.HeadBucketInput{Bucket: aws.String("bucket")}); err == nil {
		t.Error("a silent service was waited for")
	}
	if _, err := client.HeadBucket(WithoutHeaderTimeout(bounded(t)), &s3.HeadBucketInput{Bucket: aws.String("bucket")}); err != nil {
		t.Error(err)
	}
}

// A key that XML cannot express makes no listing unreadable.
func FuzzListing_AnyKeyCanBeRead(f *testing.F) {
	for _, key := range []string{"a", "\x01", "\ufffe", "\xff", "&#x0;&#0;", "&#xFFFF;", "&#x00001F;", "\r\n\t", "]]>"} {
		f.Add([]byte(key))
	}
	f.Fuzz(func(t *testing.T, key []byte) {
		var text bytes.Buffer
		for _, b := range key {
			if b == '<' || b == '>' || b == '&' {
				fmt.Fprintf(&text, "&#x%X;", b)
			} else {
				text.WriteByte(b)
			}
		}
		for _, raw := range [][]byte{text.Bytes(), fmt.Appendf(nil, "&#%d;&#x%x;", len(key)%70000, len(key)%70000)} {
			var listing struct{ Key string }
			if err := xml.Unmarshal(expressible(fmt.Appendf(nil, "<a><Key>%s</Key></a>", raw)), &listing); err != nil {
				t.Errorf("%q: %v", raw, err)
			}
		}
	})
}
