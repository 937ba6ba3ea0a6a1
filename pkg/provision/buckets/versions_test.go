package buckets

import (
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/s3"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// endless is the body of a listing that does not end. read is how much of it was read.
type endless struct{ read int }

func (e *endless) Read(p []byte) (int, error) {
	n := copy(p, strings.Repeat("<DeleteMarker></DeleteMarker>", len(p)/29+1))
	e.read += n
	return n, nil
}

func (e *endless) RoundTrip(r *http.Request) (*http.Response, error) {
	return &http.Response{
		StatusCode: http.StatusOK, Header: http.Header{"Content-Type": {"application/xml"}}, Request: r, ContentLength: -1,
		Body: io.NopCloser(io.MultiReader(strings.NewReader("<ListVersionsResult>"), e)),
	}, nil
}

func TestAnEndlessListingOfVersionsIsRefused(t *testing.T) {
	service := &endless{}
	b := Bucket{Info: backend.BucketInfo{Name: "bucket"}, Client: s3.New(s3.Options{
		Region: "us-east-1", BaseEndpoint: aws.String("http://127.0.0.1:1"), UsePathStyle: true, HTTPClient: &http.Client{Transport: service},
		Credentials: credentials.NewStaticCredentialsProvider("a", "b", ""),
	})}
	_, err := ListVersions(t.Context(), b, "v/", VersionsFrom{})
	if kind := fault.KindOf(backend.Classify(err, "listing")); kind != fault.Unavailable {
		t.Errorf("kind %d: %v", kind, err)
	}
	if service.read > 2*maxVersions {
		t.Errorf("%d bytes were read", service.read)
	}
}
