package check

import (
	"bytes"
	"cmp"
	"context"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	v4 "github.com/aws/aws-sdk-go-v2/aws/signer/v4"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"
	"github.com/aws/smithy-go/middleware"
	smithyhttp "github.com/aws/smithy-go/transport/http"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
)

const (
	objectName = "object" // the test object of most probes
	partSize   = 5 << 20  // the smallest part that may have a successor, and maxParts the largest number of a part
	maxParts   = 10000
)

// metadata stores an object twice and compares what HEAD, GET and listings report, as clients do.
func (r *run) metadata(ctx context.Context) error {
	return cmp.Or(r.storeAndCompare(ctx, "metadata", content), r.storeAndCompare(ctx, "metadata", content+content))
}

func (r *run) empty(ctx context.Context) error { return r.storeAndCompare(ctx, "empty", "") }

func (r *run) storeAndCompare(ctx context.Context, name, data string) error {
	etag, err := r.send(ctx, r.client, r.putInput(r.prefix+name, data))
	if err != nil {
		return backend.Classify(err, "write an object of "+strconv.Itoa(len(data))+" bytes")
	}
	if aws.ToString(etag) == "" {
		return errors.New("the answer to PutObject has no ETag")
	}
	return r.compareAnswers(ctx, r.prefix+name, etag, len(data))
}

// compareAnswers returns an error unless all requests report the ETag and size of an object, and its time.
func (r *run) compareAnswers(ctx context.Context, key string, etag *string, size int) error {
	head, err := r.client.HeadObject(ctx, &s3.HeadObjectInput{Bucket: &r.info.Name, Key: &key, ChecksumMode: types.ChecksumModeEnabled})
	if err != nil {
		return backend.Classify(err, "head "+key)
	}
	get, err := r.client.GetObject(ctx, &s3.GetObjectInput{Bucket: &r.info.Name, Key: &key})
	if err != nil {
		return backend.Classify(err, "read "+key)
	}
	get.Body.Close()
	list, err := r.client.ListObjectsV2(ctx, &s3.ListObjectsV2Input{Bucket: &r.info.Name, Prefix: &key})
	if err != nil {
		return backend.Classify(err, "list "+key)
	}
	if len(list.Contents) != 1 || aws.ToString(list.Contents[0].Key) != key {
		return fmt.Errorf("%s is missing in a listing after it was written", key)
	}
	for _, answer := range []struct {
		to   string
		etag *string
		size *int64
		time *time.Time
	}{
		{"HeadObject", head.ETag, head.ContentLength, head.LastModified},
		{"GetObject", get.ETag, get.ContentLength, get.LastModified},
		{"ListObjectsV2", list.Contents[0].ETag, list.Contents[0].Size, list.Contents[0].LastModified},
	} {
		got, want := strings.Trim(aws.ToString(answer.etag), `"`), strings.Trim(*etag, `"`)
		switch {
		case got == "" || answer.size == nil || answer.time == nil:
			return fmt.Errorf("the answer to %s lacks the object's ETag, length or time", answer.to)
		case got != want || *answer.size != int64(size):
			return fmt.Errorf("an object of %d bytes with the ETag %s has %d bytes and the ETag %s in the answer to %s", size, want, *answer.size, got, answer.to)
		}
	}
	return nil
}

// ranges reads from an offset, and the end.
func (r *run) ranges(ctx context.Context) error {
	total := len(content)
	for _, part := range [][2]int{{5, 20}, {total - 7, total - 1}} {
		ask := fmt.Sprintf("bytes=%d-%d", part[0], part[1])
		if part[1] == total-1 {
			ask = fmt.Sprintf("bytes=-%d", total-part[0])
		}
		out, err := r.client.GetObject(ctx, &s3.GetObjectInput{Bucket: &r.info.Name, Key: aws.String(r.prefix + objectName), Range: &ask})
		if err != nil {
			return backend.Classify(err, "read a part of an object")
		}
		data, err := io.ReadAll(io.LimitReader(out.Body, int64(total)+1))
		out.Body.Close()
		if err != nil {
			return backend.Classify(err, "read a part of an object")
		}
		got := aws.ToString(out.ContentRange)
		if got != fmt.Sprintf("bytes %d-%d/%d", part[0], part[1], total) || string(data) != content[part[0]:part[1]+1] {
			return fmt.Errorf("the answer to the range %s of %d bytes has %d bytes and the Content-Range %q", ask, total, len(data), got)
		}
	}
	return nil
}

// tryConditions sends a request about the test object under a condition that holds, and under one that does not.
func (r *run) tryConditions(ctx context.Context, request func(etag *string) error) error {
	head, err := r.client.HeadObject(ctx, &s3.HeadObjectInput{Bucket: &r.info.Name, Key: aws.String(r.prefix + objectName)})
	if err == nil {
		err = request(head.ETag)
	}
	if err != nil {
		return backend.Classify(err, "send a request with a condition that holds")
	}
	switch err := request(aws.String(`"00000000000000000000000000000000"`)); {
	case err == nil:
		return errors.New("the service ignores the condition")
	case !backend.IsPreconditionFailed(err):
		return backend.Classify(err, "send a request with a condition that does not hold")
	}
	return nil
}

func (r *run) conditionalReads(ctx context.Context) error {
	return r.tryConditions(ctx, func(etag *string) error {
		out, err := r.client.GetObject(ctx, &s3.GetObjectInput{Bucket: &r.info.Name, Key: aws.String(r.prefix + objectName), IfMatch: etag})
		if err == nil {
			out.Body.Close()
		}
		return err
	})
}

func (r *run) conditionalCopies(ctx context.Context) error {
	return r.tryConditions(ctx, func(etag *string) error { return r.copyTo(ctx, r.prefix+copiesDir+objectName, objectName, etag) })
}

// sums is whether parts have checksums in trailers.
type sums bool

const (
	withoutSums sums = false
	withSums    sums = true
)

// upload is a multipart upload of the check.
type upload struct {
	r    *run
	key  string
	id   *string // nil: completed
	sums sums
	next int32
	done []types.CompletedPart
}

// inParts makes an upload, calls do with it, and aborts it unless do has completed it.
func (r *run) inParts(ctx context.Context, name string, with sums, do func(u *upload) error) error {
	if r.noParts {
		return fault.Errorf(fault.Unavailable, "multipart uploads do not work")
	}
	u := &upload{r: r, key: r.prefix + name, sums: with, next: 1}
	in := &s3.CreateMultipartUploadInput{Bucket: &r.info.Name, Key: &u.key}
	if with {
		in.ChecksumAlgorithm = types.ChecksumAlgorithmCrc32c
	}
	r.wrote[buckets.Object{Key: u.key}] = true
	out, err := r.client.CreateMultipartUpload(ctx, in)
	if err != nil {
		return backend.Classify(err, "create a multipart upload")
	}
	u.id = out.UploadId
	if err = do(u); u.id == nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupBound)
	defer cancel()
	_, abortErr := r.client.AbortMultipartUpload(ctx, &s3.AbortMultipartUploadInput{Bucket: &r.info.Name, Key: &u.key, UploadId: u.id})
	return cmp.Or(err, backend.Classify(abortErr, "abort a multipart upload"))
}

// add adds a part that was uploaded.
func (u *upload) add(part types.CompletedPart) error {
	part.PartNumber = aws.Int32(u.next)
	u.next++
	u.done = append(u.done, part)
	if aws.ToString(part.ETag) == "" {
		return errors.New("the answer to the upload of a part has no ETag")
	}
	return nil
}

func (u *upload) part(ctx context.Context, data []byte) error {
	in := &s3.UploadPartInput{Bucket: &u.r.info.Name, Key: &u.key, UploadId: u.id, PartNumber: &u.next, Body: bytes.NewReader(data)}
	var part types.CompletedPart
	var options []func(*s3.Options)
	if u.sums {
		options, part.ChecksumCRC32C = append(options, trailing), crc32c(data)
	}
	out, err := u.r.client.UploadPart(ctx, in, options...)
	if err != nil {
		return backend.Classify(err, "upload a part")
	}
	part.ETag = out.ETag
	return u.add(part)
}

// complete completes the upload and reads the object.
func (u *upload) complete(ctx context.Context, want []byte) error {
	in := &s3.CompleteMultipartUploadInput{Bucket: &u.r.info.Name, Key: &u.key, UploadId: u.id, MultipartUpload: &types.CompletedMultipartUpload{Parts: u.done}}
	out, err := u.r.client.CompleteMultipartUpload(ctx, in)
	if err != nil {
		return backend.Classify(err, "complete a multipart upload")
	}
	u.id = nil
	u.r.noteVersion(u.key, out.VersionId)
	if err := u.r.get(ctx, u.r.client, u.key, string(want)); err != nil {
		return backend.Classify(err, "read an object that was uploaded in parts")
	}
	if aws.ToString(out.ETag) == "" {
		return warningError{errors.New("the answer to CompleteMultipartUpload has no ETag, so each upload takes another request")}
	}
	return u.r.compareAnswers(ctx, u.key, out.ETag, len(want))
}

// multipart uploads an object of two parts, and aborts another upload.
func (r *run) multipart(ctx context.Context) error {
	data := bytes.Repeat([]byte(content), partSize/len(content)+2)
	err := r.inParts(ctx, "multipart", withoutSums, func(u *upload) error {
		if err := cmp.Or(u.part(ctx, data[:partSize]), u.part(ctx, data[partSize:])); err != nil {
			return err
		}
		return u.complete(ctx, data)
	})
	err = cmp.Or(r.inParts(ctx, "aborted", withoutSums, func(*upload) error { return nil }), err)
	r.noParts = err != nil && !isWarning(err)
	return err
}

// manyParts uploads a part with the largest number that S3 has.
func (r *run) manyParts(ctx context.Context) error {
	return r.inParts(ctx, "many", withoutSums, func(u *upload) error {
		u.next = maxParts
		return u.part(ctx, []byte(content))
	})
}

// partCopies copies a part of an object whose name needs encoding.
func (r *run) partCopies(ctx context.Context) error {
	const from = "from/a+b c"
	etag, err := r.send(ctx, r.client, r.putInput(r.prefix+from, content))
	if err != nil {
		return backend.Classify(err, "write "+from)
	}
	return r.inParts(ctx, "parts", withoutSums, func(u *upload) error {
		out, err := r.client.UploadPartCopy(ctx, &s3.UploadPartCopyInput{
			Bucket: &r.info.Name, Key: &u.key, UploadId: u.id, PartNumber: &u.next, CopySource: r.source(from), CopySourceIfMatch: etag,
			CopySourceRange: aws.String("bytes=5-20"),
		})
		if err != nil {
			return backend.Classify(err, fmt.Sprintf("copy a part of the object with the name %q", from))
		}
		var part types.CompletedPart
		if out.CopyPartResult != nil {
			part.ETag = out.CopyPartResult.ETag
		}
		if err := u.add(part); err != nil {
			return err
		}
		return u.complete(ctx, []byte(content[5:21]))
	})
}

// checksums uploads like mountpoint-s3: with checksums in trailers, and of an empty object in a header.
func (r *run) checksums(ctx context.Context) error {
	key := r.prefix + "checksum"
	_, err := r.send(ctx, r.client, r.putInput(key, content), trailing)
	if err == nil {
		err = r.get(ctx, r.client, key, content)
	}
	if err != nil {
		return backend.Classify(err, "store an object with its checksum in a trailer")
	}
	in := r.putInput(r.prefix+"checksum-empty", "")
	in.ChecksumAlgorithm = types.ChecksumAlgorithmCrc32c
	if _, err := r.send(ctx, r.client, in); err != nil {
		return backend.Classify(err, "store an empty object with its checksum")
	}
	err = r.inParts(ctx, "checksum-parts", withSums, func(u *upload) error {
		if err := u.part(ctx, []byte(content)); err != nil {
			return err
		}
		return u.complete(ctx, []byte(content))
	})
	if err != nil && !isWarning(err) { // multipart reports warnings
		return fmt.Errorf("with checksums: %w", err)
	}
	return nil
}

func crc32c(data []byte) *string {
	sum := binary.BigEndian.AppendUint32(nil, crc32.Checksum(data, crc32.MakeTable(crc32.Castagnoli)))
	return aws.String(base64.StdEncoding.EncodeToString(sum))
}

// trailing sends a body in chunks that are not signed, with their checksum after them, which the SDK does over TLS only (S3 API reference,
// "Signature calculations: including trailing headers").
func trailing(o *s3.Options) {
	send := middleware.BuildMiddlewareFunc("Trailer", func(ctx context.Context, in middleware.BuildInput, next middleware.BuildHandler) (
		out middleware.BuildOutput, metadata middleware.Metadata, err error,
	) {
		req, ok := in.Request.(*smithyhttp.Request)
		if !ok {
			return out, metadata, fmt.Errorf("unexpected request %T", in.Request)
		}
		data, err := io.ReadAll(req.GetStream())
		if err != nil {
			return out, metadata, err
		}
		body := fmt.Sprintf("%x\r\n%s\r\n0\r\nx-amz-checksum-crc32c:%s\r\n\r\n", len(data), data, *crc32c(data))
		if req, err = req.SetStream(strings.NewReader(body)); err != nil {
			return out, metadata, err
		}
		req.ContentLength = int64(len(body))
		req.Header.Set("Content-Encoding", "aws-chunked")
		req.Header.Set("X-Amz-Decoded-Content-Length", strconv.Itoa(len(data)))
		req.Header.Set("X-Amz-Trailer", "x-amz-checksum-crc32c")
		in.Request = req
		return next.HandleBuild(v4.SetPayloadHash(ctx, "STREAMING-UNSIGNED-PAYLOAD-TRAILER"), in)
	})
	o.APIOptions = append(o.APIOptions, func(s *middleware.Stack) error { return s.Build.Add(send, middleware.After) })
}
