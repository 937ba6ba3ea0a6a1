package backend

import (
	"bytes"
	"context"
	"encoding/xml"
	"io"
	"regexp"

	awsmiddleware "github.com/aws/aws-sdk-go-v2/aws/middleware"
	"github.com/aws/smithy-go"
	"github.com/aws/smithy-go/middleware"
	smithyhttp "github.com/aws/smithy-go/transport/http"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// rootOf returns the root element of the responses to an operation, or "" if they have none that proves anything.
func rootOf(operation string) string {
	switch operation {
	case "ListObjectsV2":
		return "ListBucketResult"
	case "ListObjectVersions":
		return "ListVersionsResult"
	case "ListMultipartUploads":
		return "ListMultipartUploadsResult"
	case "ListBuckets":
		return "ListAllMyBucketsResult"
	case "GetBucketTagging":
		return "Tagging"
	}
	return ""
}

// readListings refuses a successful response that is not S3's, such as the page of a proxy or an empty body: the SDK would return it as a listing
// without objects, or as a bucket without tags. In listings it replaces what XML cannot express, because one such key makes the SDK refuse all.
func readListings(s *middleware.Stack) error {
	return s.Deserialize.Insert(middleware.DeserializeMiddlewareFunc("ReadListings", func(ctx context.Context, in middleware.DeserializeInput,
		next middleware.DeserializeHandler) (middleware.DeserializeOutput, middleware.Metadata, error) {
		out, metadata, err := next.HandleDeserialize(ctx, in)
		operation := awsmiddleware.GetOperationName(ctx)
		want := rootOf(operation)
		resp, ok := out.RawResponse.(*smithyhttp.Response)
		if err != nil || want == "" || !ok || resp.StatusCode/100 != 2 {
			return out, metadata, err
		}
		data, err := io.ReadAll(resp.Body) // bounded
		if err == nil {
			data = expressible(data)
			if root := rootElement(data); root != want && root != "Error" {
				err = fault.Errorf(fault.Unavailable,
					"the response to %s has the element %q instead of %q; check that the endpoint is an S3 service and that no proxy answers for it",
					operation, Clip(root, 40), want)
			}
		}
		if err != nil {
			return out, metadata, &smithy.DeserializationError{Err: err}
		}
		resp.Body = replacedBody{bytes.NewReader(data), resp.Body}
		return out, metadata, nil
	}), "OperationDeserializer", middleware.After)
}

// replacedBody is a body that was read, with another content.
type replacedBody struct {
	io.Reader
	io.Closer
}

// expressible replaces what XML cannot express.
func expressible(data []byte) []byte {
	return notXML.ReplaceAll(bytes.ToValidUTF8(data, []byte("\uFFFD")), []byte("\uFFFD"))
}

// notXML matches characters that XML cannot express, as they are and as references.
var notXML = regexp.MustCompile(`[\x00-\x08\x0b\x0c\x0e-\x1f\x{FFFE}\x{FFFF}]|` +
	`&#0*(?:[0-8]|1[124-9]|2[0-9]|3[01]|6553[45]);|&#x0*(?:[0-8bcefBCEF]|1[0-9a-fA-F]|[fF]{3}[efEF]);`)

// rootElement returns the name of the first element, or "" if there is none.
func rootElement(data []byte) string {
	d := xml.NewDecoder(bytes.NewReader(data))
	d.Strict = false
	for {
		token, err := d.Token()
		if err != nil {
			return ""
		}
		if start, ok := token.(xml.StartElement); ok {
			return start.Name.Local
		}
	}
}
