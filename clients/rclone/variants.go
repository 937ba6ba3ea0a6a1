package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync"

	awss3 "github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"
	smithyhttp "github.com/aws/smithy-go/transport/http"
	"github.com/rclone/rclone/fs"
)

// variants are two of rclone's S3 file systems, of which that is used whose listings have the names of the objects.
//
// One asks for encoded keys, because a key with a control character would make a directory unreadable. It decodes the keys of the
// response in any case. But some services, such as versitygw, ignore the request parameter: "a+b" would be listed as "a b", and "100%"
// not at all. The first listing finds out whether the service encodes keys. If it does not, everything after that uses the other
// file system: each has credentials of its own, and those of the one that lists are as fresh as can be if the helper crashes.
type variants struct {
	fs.Fs   // asks for encoded keys
	asIs    func() (fs.Fs, error)
	encodes func(context.Context) (bool, error)

	mu    sync.Mutex
	right fs.Fs // nil: not known yet
}

// current returns the file system for all but listings.
func (v *variants) current() fs.Fs {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.right != nil {
		return v.right
	}
	return v.Fs
}

func (v *variants) Features() *fs.Features {
	features := *v.Fs.Features()
	features.Copy = func(ctx context.Context, src fs.Object, name string) (fs.Object, error) {
		return v.current().Features().Copy(ctx, src, name)
	}
	features.PutStream = func(ctx context.Context, in io.Reader, src fs.ObjectInfo, options ...fs.OpenOption) (fs.Object, error) {
		return v.current().Features().PutStream(ctx, in, src, options...)
	}
	return &features
}

func (v *variants) NewObject(ctx context.Context, name string) (fs.Object, error) {
	return v.current().NewObject(ctx, name)
}

func (v *variants) Put(ctx context.Context, in io.Reader, src fs.ObjectInfo, options ...fs.OpenOption) (fs.Object, error) {
	return v.current().Put(ctx, in, src, options...)
}

func (v *variants) Mkdir(ctx context.Context, dir string) error { return v.current().Mkdir(ctx, dir) }

func (v *variants) Rmdir(ctx context.Context, dir string) error { return v.current().Rmdir(ctx, dir) }

func (v *variants) List(ctx context.Context, dir string) (fs.DirEntries, error) {
	right, err := v.find(ctx)
	if err != nil {
		return nil, err
	}
	return right.List(ctx, dir)
}

func (v *variants) find(ctx context.Context) (fs.Fs, error) {
	v.mu.Lock()
	right := v.right
	v.mu.Unlock()
	if right != nil {
		return right, nil
	}
	encodes, err := v.encodes(ctx) // maybe more than once at a time: an upload must not wait for it
	if err != nil {
		return nil, err
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	switch {
	case v.right != nil:
	case encodes:
		v.right = v.Fs
	default:
		asIs, err := v.asIs()
		if err != nil {
			return nil, err
		}
		v.right = asIs
	}
	return v.right, nil
}

// encodesKeys reports whether the service encodes keys in listings when it is asked to.
func (h *heads) encodesKeys(ctx context.Context) (bool, error) {
	prefix, one := h.key(""), int32(1)
	list, err := h.client.ListObjectsV2(ctx, &awss3.ListObjectsV2Input{
		Bucket: &h.bucket, Prefix: &prefix, MaxKeys: &one, EncodingType: types.EncodingTypeUrl,
	})
	var answer *smithyhttp.ResponseError
	if errors.As(err, &answer) && answer.HTTPStatusCode() == http.StatusNotFound {
		return false, fs.ErrorDirNotFound // itself, as from rclone's listings: the VFS compares
	}
	if err != nil {
		return false, fmt.Errorf("asking the service whether it encodes keys in listings: %w", err)
	}
	return list.EncodingType == types.EncodingTypeUrl, nil
}
