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

// regionHeader is where S3 names the region of a bucket, in answers of every kind.
const regionHeader = "X-Amz-Bucket-Region"

// maxErrorBody is how much of an error's body is looked at, in bytes.
const maxErrorBody = 64 << 10

// inRegion does try for info, and once more where the service says that the bucket is in another region. try gives the
// region that an answer names. On success the region in info is the one to use.
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
	// What worked is right, except on AWS, where a bucket may answer in a region that is not its own. Other services put
	// anything into that header.
	if be.AWS() && regionName.MatchString(named) {
		info.Region = named
	}
	return info, nil
}

// movedTo is the region that a refusal in region says the bucket is in, or "".
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

// nameRegion puts a bucket's region into the header where a service names it in an error's body only, from which the SDK
// takes no more than code and message.
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
		// What was read goes before what is left, or before the error that ended it.
		resp.Body = struct {
			io.Reader
			io.Closer
		}{io.MultiReader(bytes.NewReader(body), resp.Body), resp.Body}
		return out, metadata, err
	}), middleware.After)
}
