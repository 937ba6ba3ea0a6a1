package backend

import (
	"bytes"
	"context"
	"encoding/xml"
	"io"
	"net/http"

	"github.com/aws/smithy-go/middleware"
	smithyhttp "github.com/aws/smithy-go/transport/http"
)

// regionHeader has the region of the bucket in all answers of S3.
const regionHeader = "X-Amz-Bucket-Region"

// maxErrorBody bounds the part of an error's body that is read, in bytes.
const maxErrorBody = 64 << 10

// inRegion calls try for info, and again if the service says that the bucket is in another region. try returns the region that an
// answer names. On success the region in the result is the one to use.
func (b *Buckets) inRegion(be Backend, info BucketInfo, try func(BucketInfo) (string, error)) (BucketInfo, error) {
	named, err := try(info)
	if err != nil {
		other := movedTo(err, info.Region)
		if other == "" {
			return info, err
		}
		info.Region = other
		if named, err = try(info); err != nil {
			return info, err
		}
	}
	// The region of a successful request is right, except on AWS, where a bucket may answer in another region. Other services
	// may set the header to anything.
	if be.AWS() && regionName.MatchString(named) {
		info.Region = named
	}
	return info, nil
}

// movedTo returns the region that an error of a request in region names for the bucket, or "".
func movedTo(err error, region string) string {
	a, ok := answered(err)
	if !ok || a.region() == region {
		return ""
	}
	switch a.status {
	case http.StatusMovedPermanently, http.StatusTemporaryRedirect, http.StatusPermanentRedirect, http.StatusBadRequest, http.StatusForbidden:
		return a.region()
	}
	return ""
}

// nameRegion sets the header if a service names a bucket's region only in an error's body, from which the SDK reads no more than
// code and message.
func nameRegion(s *middleware.Stack) error {
	return s.Deserialize.Add(middleware.DeserializeMiddlewareFunc("NameRegion", func(ctx context.Context, in middleware.DeserializeInput, next middleware.DeserializeHandler) (middleware.DeserializeOutput, middleware.Metadata, error) {
		out, metadata, err := next.HandleDeserialize(ctx, in)
		resp, ok := out.RawResponse.(*smithyhttp.Response)
		if err != nil || !ok || resp.StatusCode != http.StatusBadRequest || resp.Header.Get(regionHeader) != "" {
			return out, metadata, err
		}
		body, readErr := io.ReadAll(io.LimitReader(resp.Body, maxErrorBody))
		var named struct {
			Code   string `xml:"Code"`
			Region string `xml:"Region"`
		}
		if readErr == nil && xml.Unmarshal(body, &named) == nil && named.Code == "AuthorizationHeaderMalformed" && named.Region != "" {
			resp.Header.Set(regionHeader, named.Region)
		}
		// Put what was read before the rest, or before the error that ended it.
		resp.Body = struct {
			io.Reader
			io.Closer
		}{io.MultiReader(bytes.NewReader(body), resp.Body), resp.Body}
		return out, metadata, err
	}), middleware.After)
}
