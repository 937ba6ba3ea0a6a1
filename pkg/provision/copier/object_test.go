package copier

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/s3"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
)

// busy is a service that throttles all requests.
type busy struct{ requests atomic.Int64 }

func (b *busy) RoundTrip(r *http.Request) (*http.Response, error) {
	b.requests.Add(1)
	return &http.Response{
		StatusCode: http.StatusServiceUnavailable, Header: http.Header{"Content-Type": {"application/xml"}}, Request: r,
		Body: io.NopCloser(strings.NewReader("<Error><Code>SlowDown</Code></Error>")),
	}, nil
}

// A request that is repeated can come long after the check that the copy is still wanted. By then another process may have taken over, and
// waits no longer than Lag.
func TestCopy_RequestsAreNotRepeatedWhenTheCopyIsNoLongerWanted(t *testing.T) {
	service := &busy{}
	place := Place{Prefix: "p/", Bucket: buckets.Bucket{Info: backend.BucketInfo{Name: "bucket"}, Client: s3.New(s3.Options{
		Region: "us-east-1", BaseEndpoint: aws.String("http://127.0.0.1:1"), UsePathStyle: true, HTTPClient: &http.Client{Transport: service},
		Credentials: credentials.NewStaticCredentialsProvider("a", "b", ""),
	})}}
	taken := fault.Errorf(fault.Busy, "another process copies")
	r := New(Options{Workers: 1, CheckEvery: time.Nanosecond}).newRun(Task{
		Source: Current{place}, Target: place, Progress: &Progress{},
		Still: func(context.Context) error {
			if service.requests.Load() > 0 {
				return taken
			}
			return nil
		},
	})
	if err := r.requests.checkOnce(t.Context()); err != nil {
		t.Fatal(err)
	}
	for name, o := range map[string]Object{"in one request": {Key: "a"}, "in parts": {Key: "a", Size: 2 * DefaultThreshold}} {
		service.requests.Store(0)
		if _, _, err := r.copyObject(t.Context(), o); !errors.Is(err, taken) || service.requests.Load() != 1 {
			t.Errorf("%s: %d requests, %v", name, service.requests.Load(), err)
		}
	}
}
