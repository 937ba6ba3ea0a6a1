package backend

import (
	"bytes"
	"context"
	"io"
	"strconv"
	"strings"

	"github.com/aws/smithy-go/middleware"
	smithyhttp "github.com/aws/smithy-go/transport/http"
)

// Bounds of what a service may answer with. The SDK reads answers into memory, except the content of objects.
const (
	// maxErrorBody bounds the body of an error, in bytes.
	maxErrorBody = 64 << 10
	// maxAnswer bounds other bodies, in bytes, and each entry of a listing adds maxEntry: a key has 1,024 bytes, escaped up to nine times as many.
	maxAnswer  = 1 << 20
	maxEntry   = 10 << 10
	maxEntries = 1000 // the default of services
	// maxHeaderBytes bounds the headers of a response.
	maxHeaderBytes = 256 << 10
	// maxMarks bounds the beginnings of tags and the quotes of attributes, which take many times their size in memory.
	maxMarks = 200000
)

// BoundAnswers bounds what is read of each response, except the content of objects, whose readers have bounds of their own.
func BoundAnswers(s *middleware.Stack) error {
	return s.Deserialize.Add(middleware.DeserializeMiddlewareFunc("BoundAnswers",
		func(ctx context.Context, in middleware.DeserializeInput, next middleware.DeserializeHandler) (middleware.DeserializeOutput, middleware.Metadata, error) {
			out, metadata, err := next.HandleDeserialize(ctx, in)
			if resp, ok := out.RawResponse.(*smithyhttp.Response); ok && resp.Body != nil {
				switch operation := middleware.GetOperationName(ctx); {
				case resp.StatusCode >= 300:
					resp.Body = &boundedBody{ReadCloser: resp.Body, left: maxErrorBody}
				case operation == "GetObject":
				case strings.HasPrefix(operation, "List"), operation == "DeleteObjects":
					resp.Body = &boundedBody{ReadCloser: resp.Body, left: maxAnswer + entries(in.Request)*maxEntry}
				default:
					resp.Body = &boundedBody{ReadCloser: resp.Body, left: maxAnswer}
				}
			}
			return out, metadata, err
		}), middleware.After)
}

// entries returns how many entries a request for a listing allows.
func entries(request any) int64 {
	if r, ok := request.(*smithyhttp.Request); ok {
		if n, err := strconv.ParseUint(r.URL.Query().Get("max-keys"), 10, 16); err == nil {
			return min(int64(n), maxEntries)
		}
	}
	return maxEntries
}

// answerTooLong is the error of reading a response that exceeds a bound.
type answerTooLong struct{ what string }

func (e *answerTooLong) Error() string { return "the response has too many " + e.what }

// boundedBody is a body that fails beyond a bound.
type boundedBody struct {
	io.ReadCloser
	left, marks int64
	err         error
}

// Read implements io.Reader.
func (b *boundedBody) Read(p []byte) (int, error) {
	if b.err != nil {
		return 0, b.err
	}
	n, err := b.ReadCloser.Read(p)
	b.left -= int64(n)
	for _, mark := range []byte(`<"'`) {
		b.marks += int64(bytes.Count(p[:n], []byte{mark}))
	}
	switch {
	case b.left < 0:
		b.err = &answerTooLong{"bytes"}
	case b.marks > maxMarks:
		b.err = &answerTooLong{"XML tags"}
	default:
		return n, err
	}
	return 0, b.err
}
