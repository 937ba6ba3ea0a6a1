package check

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"hash/crc64"
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
	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
)

const (
	// objectName is the test object of most probes.
	objectName = "object"
	// partSize is the smallest part that may have a successor.
	partSize = 5 << 20
	// maxParts is the number of parts that an object can have.
	maxParts = 10000
	// nvme is the polynomial of CRC64NVME, reversed.
	nvme = 0x9a6c9329ac4bc9b5
)

// facts are what an answer says about an object.
type facts struct {
	etag *string
	size *int64
	time *time.Time
}

// compare returns an error unless the answer of a request has all facts, and those of the object that was stored.
func (f facts) compare(request string, etag *string, size int) error {
	switch {
	case aws.ToString(f.etag) == "":
		return fmt.Errorf("the answer to %s has no ETag", request)
	case f.size == nil:
		return fmt.Errorf("the answer to %s has no length", request)
	case f.time == nil || f.time.IsZero():
		return fmt.Errorf("the answer to %s has no Last-Modified", request)
	case *f.size != int64(size):
		return fmt.Errorf("the answer to %s has the length %d, not %d", request, *f.size, size)
	case strings.Trim(*f.etag, `"`) != strings.Trim(aws.ToString(etag), `"`):
		return fmt.Errorf("the answer to %s has the ETag %s, that to the upload %s", request, *f.etag, aws.ToString(etag))
	}
	return nil
}

// metadata stores an object twice and compares what HEAD, GET and listings report, as clients do.
func (r *run) metadata(ctx context.Context) error {
	key := r.prefix + "metadata"
	for _, data := range []string{content, content + content} {
		etag, err := r.send(ctx, r.client, r.putInput(key, data))
		if err != nil {
			return backend.Classify(err, "write "+key)
		}
		if aws.ToString(etag) == "" {
			return errors.New("the answer to PutObject has no ETag")
		}
		if err := r.sameEverywhere(ctx, key, etag, len(data)); err != nil {
			return err
		}
	}
	return nil
}

func (r *run) sameEverywhere(ctx context.Context, key string, etag *string, size int) error {
	head, err := r.client.HeadObject(ctx, &s3.HeadObjectInput{Bucket: &r.info.Name, Key: &key, ChecksumMode: types.ChecksumModeEnabled})
	if err != nil {
		return backend.Classify(err, "head "+key)
	}
	if err := (facts{head.ETag, head.ContentLength, head.LastModified}).compare("HeadObject", etag, size); err != nil {
		return err
	}
	get, err := r.client.GetObject(ctx, &s3.GetObjectInput{Bucket: &r.info.Name, Key: &key})
	if err != nil {
		return backend.Classify(err, "read "+key)
	}
	get.Body.Close()
	if err := (facts{get.ETag, get.ContentLength, get.LastModified}).compare("GetObject", etag, size); err != nil {
		return err
	}
	list, err := r.client.ListObjectsV2(ctx, &s3.ListObjectsV2Input{Bucket: &r.info.Name, Prefix: &key})
	if err != nil {
		return backend.Classify(err, "list "+key)
	}
	for _, o := range list.Contents {
		if aws.ToString(o.Key) == key {
			return facts{o.ETag, o.Size, o.LastModified}.compare("ListObjectsV2", etag, size)
		}
	}
	return fmt.Errorf("%s is missing in a listing after it was written", key)
}

// empty stores an empty object.
func (r *run) empty(ctx context.Context) error {
	key := r.prefix + "empty"
	etag, err := r.send(ctx, r.client, r.putInput(key, ""))
	if err != nil {
		return backend.Classify(err, "write an empty object")
	}
	return r.sameEverywhere(ctx, key, etag, 0)
}

// ranges reads from an offset, and the end.
func (r *run) ranges(ctx context.Context) error {
	total := len(content)
	for _, tc := range []struct {
		ask         string
		first, last int
	}{{"bytes=5-20", 5, 20}, {"bytes=-7", total - 7, total - 1}, {fmt.Sprintf("bytes=10-%d", 1<<20), 10, total - 1}} {
		out, err := r.client.GetObject(ctx, &s3.GetObjectInput{Bucket: &r.info.Name, Key: aws.String(r.prefix + objectName), Range: &tc.ask})
		if err != nil {
			return backend.Classify(err, "read a part of an object")
		}
		data, err := io.ReadAll(io.LimitReader(out.Body, int64(total)+1))
		out.Body.Close()
		if err != nil {
			return backend.Classify(err, "read a part of an object")
		}
		if want := fmt.Sprintf("bytes %d-%d/%d", tc.first, tc.last, total); aws.ToString(out.ContentRange) != want || string(data) != content[tc.first:tc.last+1] {
			return fmt.Errorf("a request for the range %s of %d bytes has an answer of %d bytes with the Content-Range %q", tc.ask, total, len(data), aws.ToString(out.ContentRange))
		}
	}
	return nil
}

// holds sends a request under a condition that holds, and under one that does not.
func holds(etag *string, request func(etag *string) error) error {
	if err := request(etag); err != nil {
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

func (r *run) etag(ctx context.Context, key string) (*string, error) {
	out, err := r.client.HeadObject(ctx, &s3.HeadObjectInput{Bucket: &r.info.Name, Key: &key})
	if err != nil {
		return nil, backend.Classify(err, "head "+key)
	}
	return out.ETag, nil
}

func (r *run) conditionalReads(ctx context.Context) error {
	etag, err := r.etag(ctx, r.prefix+objectName)
	if err != nil {
		return err
	}
	return holds(etag, func(etag *string) error {
		out, err := r.client.GetObject(ctx, &s3.GetObjectInput{Bucket: &r.info.Name, Key: aws.String(r.prefix + objectName), IfMatch: etag})
		if err == nil {
			out.Body.Close()
		}
		return err
	})
}

func (r *run) conditionalCopies(ctx context.Context) error {
	etag, err := r.etag(ctx, r.prefix+objectName)
	if err != nil {
		return err
	}
	return holds(etag, func(etag *string) error { return r.copyTo(ctx, r.prefix+copiesDir+objectName, objectName, etag) })
}

// upload is a multipart upload of the check.
type upload struct {
	r    *run
	key  string
	id   *string
	sums checksum // of parts, in trailers; zero: none
	next int32    // the number of the next part
	done []types.CompletedPart
}

func (r *run) newUpload(ctx context.Context, name string, sums checksum) (*upload, error) {
	u := &upload{r: r, key: r.prefix + name, sums: sums, next: 1}
	in := &s3.CreateMultipartUploadInput{Bucket: &r.info.Name, Key: &u.key, ChecksumAlgorithm: sums.algorithm}
	if sums.whole {
		in.ChecksumType = types.ChecksumTypeFullObject
	}
	r.wrote[buckets.Object{Key: u.key}] = true
	out, err := r.client.CreateMultipartUpload(ctx, in)
	if err != nil {
		return nil, backend.Classify(err, "create a multipart upload")
	}
	u.id = out.UploadId
	return u, nil
}

func (u *upload) number() *int32 {
	u.next++
	return aws.Int32(u.next - 1)
}

func (u *upload) part(ctx context.Context, data []byte) error {
	in := &s3.UploadPartInput{Bucket: &u.r.info.Name, Key: &u.key, UploadId: u.id, PartNumber: u.number(), Body: bytes.NewReader(data)}
	out, err := u.r.client.UploadPart(ctx, in, u.sums.trailing)
	if err != nil {
		return backend.Classify(err, "upload a part")
	}
	if aws.ToString(out.ETag) == "" {
		return errors.New("the answer to UploadPart has no ETag")
	}
	part := types.CompletedPart{PartNumber: in.PartNumber, ETag: out.ETag}
	u.sums.set(&part, data)
	u.done = append(u.done, part)
	return nil
}

func (u *upload) copyPart(ctx context.Context, from string, etag *string, bytes string) error {
	in := &s3.UploadPartCopyInput{Bucket: &u.r.info.Name, Key: &u.key, UploadId: u.id, PartNumber: u.number(), CopySource: u.r.source(from), CopySourceIfMatch: etag, CopySourceRange: &bytes}
	out, err := u.r.client.UploadPartCopy(ctx, in)
	if err != nil {
		return backend.Classify(err, fmt.Sprintf("copy a part of the object with the name %q", from))
	}
	if out.CopyPartResult == nil || aws.ToString(out.CopyPartResult.ETag) == "" {
		return errors.New("the answer to UploadPartCopy has no ETag")
	}
	u.done = append(u.done, types.CompletedPart{PartNumber: in.PartNumber, ETag: out.CopyPartResult.ETag})
	return nil
}

// complete completes the upload and reads the object.
func (u *upload) complete(ctx context.Context, want []byte) error {
	in := &s3.CompleteMultipartUploadInput{Bucket: &u.r.info.Name, Key: &u.key, UploadId: u.id, MultipartUpload: &types.CompletedMultipartUpload{Parts: u.done}}
	if u.sums.whole {
		in.ChecksumType, in.ChecksumCRC64NVME = types.ChecksumTypeFullObject, u.sums.of(want)
	}
	out, err := u.r.client.CompleteMultipartUpload(ctx, in)
	if err != nil {
		return backend.Classify(err, "complete a multipart upload")
	}
	u.id = nil
	u.r.noteVersion(u.key, out.VersionId)
	etag := out.ETag
	if aws.ToString(etag) == "" {
		if etag, err = u.r.etag(ctx, u.key); err != nil {
			return err
		}
	}
	if err := u.r.sameEverywhere(ctx, u.key, etag, len(want)); err != nil {
		return err
	}
	if err := u.r.get(ctx, u.r.client, u.key, string(want)); err != nil {
		return backend.Classify(err, "read an object that was uploaded in parts")
	}
	if aws.ToString(out.ETag) == "" {
		return warning{errors.New("the answer to CompleteMultipartUpload has no ETag, so each upload takes another request")}
	}
	return nil
}

// abort aborts the upload unless it was completed.
func (u *upload) abort(ctx context.Context) error {
	if u.id == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupBound)
	defer cancel()
	_, err := u.r.client.AbortMultipartUpload(ctx, &s3.AbortMultipartUploadInput{Bucket: &u.r.info.Name, Key: &u.key, UploadId: u.id})
	return backend.Classify(err, "abort a multipart upload")
}

// multipart uploads an object of two parts, and aborts another upload.
func (r *run) multipart(ctx context.Context) (err error) {
	data := bytes.Repeat([]byte(content), partSize/len(content)+2)
	u, err := r.newUpload(ctx, "multipart", checksum{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, u.abort(ctx)) }()
	for _, part := range [][]byte{data[:partSize], data[partSize:]} {
		if err := u.part(ctx, part); err != nil {
			return err
		}
	}
	if err := u.complete(ctx, data); err != nil {
		return err
	}
	u, err = r.newUpload(ctx, "aborted", checksum{})
	return err
}

// manyParts uploads a part with the largest number that S3 has.
func (r *run) manyParts(ctx context.Context) error {
	u, err := r.newUpload(ctx, "many", checksum{})
	if err != nil {
		return err
	}
	defer func() { _ = u.abort(ctx) }() // multipart reports its errors
	u.next = maxParts
	return u.part(ctx, []byte(content))
}

// partCopies copies a part of an object whose name needs encoding.
func (r *run) partCopies(ctx context.Context) (err error) {
	const from, name = "from/a+b c", "parts"
	if err := r.put(ctx, r.client, r.prefix+from, content); err != nil {
		return backend.Classify(err, "write "+from)
	}
	etag, err := r.etag(ctx, r.prefix+from)
	if err != nil {
		return err
	}
	u, err := r.newUpload(ctx, name, checksum{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, u.abort(ctx)) }()
	if err := u.copyPart(ctx, from, etag, "bytes=5-20"); err != nil {
		return err
	}
	return u.complete(ctx, []byte(content[5:21]))
}

// checksums uploads like mountpoint-s3: with checksums in trailers.
func (r *run) checksums(ctx context.Context) (err error) {
	sums := checksumOf(r.Checksums)
	key := r.prefix + "checksum"
	if _, err := r.send(ctx, r.client, r.putInput(key, content), sums.trailing); err != nil {
		return backend.Classify(err, "write an object with its checksum in a trailer")
	}
	if err := r.get(ctx, r.client, key, content); err != nil {
		return backend.Classify(err, "read an object that was written with a trailer")
	}
	in := r.putInput(r.prefix+"checksum-empty", "")
	in.ChecksumAlgorithm = sums.algorithm
	if _, err := r.send(ctx, r.client, in); err != nil {
		return backend.Classify(err, "write an empty object with a checksum")
	}
	u, err := r.newUpload(ctx, "checksum-parts", sums)
	if err != nil {
		return fmt.Errorf("with checksums: %w", err)
	}
	defer func() { err = errors.Join(err, u.abort(ctx)) }()
	if err := u.part(ctx, []byte(content)); err != nil {
		return fmt.Errorf("with a checksum in a trailer: %w", err)
	}
	if err := u.complete(ctx, []byte(content)); err != nil {
		return fmt.Errorf("with checksums: %w", err)
	}
	return nil
}

// checksum is an algorithm of the option upload-checksums of mountpoint-s3.
type checksum struct {
	algorithm types.ChecksumAlgorithm
	whole     bool // an object in parts has one checksum
}

func checksumOf(option string) checksum {
	if option == "crc64nvme" {
		return checksum{types.ChecksumAlgorithmCrc64nvme, true}
	}
	return checksum{algorithm: types.ChecksumAlgorithmCrc32c}
}

func (c checksum) of(data []byte) *string {
	sum := binary.BigEndian.AppendUint32(nil, crc32.Checksum(data, crc32.MakeTable(crc32.Castagnoli)))
	if c.whole {
		sum = binary.BigEndian.AppendUint64(nil, crc64.Checksum(data, crc64.MakeTable(nvme)))
	}
	return aws.String(base64.StdEncoding.EncodeToString(sum))
}

func (c checksum) set(part *types.CompletedPart, data []byte) {
	switch {
	case c.whole:
		part.ChecksumCRC64NVME = c.of(data)
	case c.algorithm != "":
		part.ChecksumCRC32C = c.of(data)
	}
}

// trailing sends a body in chunks that are not signed, with the checksum after them, which the SDK only does over TLS (SigV4, "Calculating
// the signature: transferring payload in multiple chunks with trailing headers").
func (c checksum) trailing(o *s3.Options) {
	if c.algorithm == "" {
		return
	}
	send := middleware.BuildMiddlewareFunc("Trailer", func(ctx context.Context, in middleware.BuildInput, next middleware.BuildHandler) (out middleware.BuildOutput, metadata middleware.Metadata, err error) {
		req, ok := in.Request.(*smithyhttp.Request)
		if !ok {
			return out, metadata, fmt.Errorf("unexpected request %T", in.Request)
		}
		data, err := io.ReadAll(req.GetStream())
		if err != nil {
			return out, metadata, err
		}
		name := "x-amz-checksum-" + strings.ToLower(string(c.algorithm))
		body := fmt.Sprintf("%x\r\n%s\r\n0\r\n%s:%s\r\n\r\n", len(data), data, name, *c.of(data))
		if req, err = req.SetStream(strings.NewReader(body)); err != nil {
			return out, metadata, err
		}
		req.ContentLength = int64(len(body))
		req.Header.Set("Content-Encoding", "aws-chunked")
		req.Header.Set("X-Amz-Decoded-Content-Length", strconv.Itoa(len(data)))
		req.Header.Set("X-Amz-Trailer", name)
		in.Request = req
		return next.HandleBuild(v4.SetPayloadHash(ctx, "STREAMING-UNSIGNED-PAYLOAD-TRAILER"), in)
	})
	o.APIOptions = append(o.APIOptions, func(s *middleware.Stack) error { return s.Build.Add(send, middleware.After) })
}
