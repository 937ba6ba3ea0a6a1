package backend

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/aws/aws-sdk-go-v2/service/s3"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// page is a page of a listing with objects of ten bytes, and the token of the next one; "": it is the last one.
func page(next string, keys ...string) string {
	body := fmt.Sprintf("<ListBucketResult><EncodingType>url</EncodingType><IsTruncated>%t</IsTruncated>", next != "")
	if next != "" {
		body += "<NextContinuationToken>" + next + "</NextContinuationToken>"
	}
	for _, key := range keys {
		body += "<Contents><Key>" + key + "</Key><Size>10</Size></Contents>"
	}
	return body + "</ListBucketResult>"
}

func TestCountObjects(t *testing.T) {
	for name, c := range map[string]struct {
		pages []string // in their order; "": no answer
		want  Count
		kind  fault.Kind
	}{
		"empty":                 {[]string{page("")}, Count{Pages: 1}, fault.Unknown},
		"two pages":             {[]string{page("t", "a", "b"), page("", "c")}, Count{Bytes: 30, Objects: 3, Pages: 2}, fault.Unknown},
		"the driver's own":      {[]string{page("", ".s3-csi%2Fa", ".s3-csi/b", ".s3-csi", "a+b")}, Count{Bytes: 20, Objects: 2, Pages: 1}, fault.Unknown},
		"too many pages":        {[]string{page("t", "a"), page("u", "b"), page("v", "c")}, Count{Bytes: 30, Objects: 3, Pages: 3, Cut: true}, fault.Unknown},
		"time is over":          {[]string{page("t", "a"), ""}, Count{Bytes: 10, Objects: 1, Pages: 1, Cut: true}, fault.Unknown},
		"time is over at once":  {[]string{""}, Count{}, fault.Timeout},
		"it repeats its marker": {[]string{page("t", "a"), page("t", "a")}, Count{Bytes: 20, Objects: 2, Pages: 2}, fault.Unavailable},
		"it names no next token": {[]string{strings.Replace(page("t", "a"), "<NextContinuationToken>t</NextContinuationToken>", "", 1)},
			Count{Bytes: 10, Objects: 1, Pages: 1}, fault.Unavailable},
	} {
		t.Run(name, func(t *testing.T) {
			n := 0
			ctx, cancel := context.WithCancelCause(bounded(t))
			defer cancel(nil)
			_, clients, be := serve(t, func(w http.ResponseWriter, r *http.Request) {
				body := c.pages[min(n, len(c.pages)-1)]
				n++
				if body == "" {
					cancel(context.DeadlineExceeded)
					<-r.Context().Done()
					return
				}
				say(w, "%s", body)
			}, "")
			var got Count
			_, err := newTestBuckets(t, clients, nil).With(ctx, be, Access{Keys: testKeys, Bucket: BucketInfo{Name: "b"}},
				func(ctx context.Context, client *s3.Client) (err error) {
					got, err = CountObjects(ctx, client, Listing{Bucket: "b", Except: ".s3-csi/", MaxPages: 3})
					return err
				})
			if err != nil {
				err = Classify(err, "listing")
			}
			if got != c.want || (err != nil) != (c.kind != fault.Unknown) || fault.KindOf(err) != c.kind {
				t.Errorf("%+v, kind %s: %v; want %+v", got, fault.KindOf(err), err, c.want)
			}
		})
	}
}

func TestWithFollowsTheRegion(t *testing.T) {
	f, clients, be := serve(t, func(w http.ResponseWriter, r *http.Request) {
		if !strings.Contains(r.Header.Get("Authorization"), "/eu-west-3/s3/") {
			w.Header().Set("X-Amz-Bucket-Region", "eu-west-3")
			refuse(w, r, 400, "AuthorizationHeaderMalformed")
			return
		}
		say(w, "%s", page("", "a"))
	}, "")
	var got Count
	access := Access{Keys: testKeys, Bucket: BucketInfo{Name: "b", Region: "us-east-1", Owner: "111122223333"}}
	info, err := newTestBuckets(t, clients, nil).With(bounded(t), be, access, func(ctx context.Context, client *s3.Client) (err error) {
		got, err = CountObjects(ctx, client, Listing{Bucket: "b", Prefix: "p/", MaxPages: 3})
		return err
	})
	if err != nil || info.Region != "eu-west-3" || info.Owner != "111122223333" || got.Objects != 1 {
		t.Errorf("%+v, %+v, %v", info, got, err)
	}
	for _, r := range f.asked() {
		if r.Header.Get("X-Amz-Expected-Bucket-Owner") != "111122223333" {
			t.Error("the owner is not expected")
		}
	}
}
