package main

import (
	"context"
	"fmt"
	"sync"

	awss3 "github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"
	"github.com/rclone/rclone/fs"
)

// listings lists the names that objects have.
//
// rclone asks for encoded keys, because a key with a control character would make a directory unreadable. It decodes the keys of the
// response in any case. But some services, such as versitygw, ignore the request parameter: "a+b" would be listed as "a b", and "100%"
// not at all. So the first listing finds out whether the service encodes keys.
type listings struct {
	fs.Fs   // asks for encoded keys
	asIs    func() (fs.Fs, error)
	encodes func(context.Context) (bool, error)

	mu    sync.Mutex
	right fs.Fs // Fs or that of asIs; nil: not known yet
}

func (l *listings) List(ctx context.Context, dir string) (fs.DirEntries, error) {
	right, err := l.find(ctx)
	if err == nil {
		return right.List(ctx, dir)
	}
	if entries, err := l.Fs.List(ctx, dir); err != nil { // rclone knows the kinds of errors
		return entries, err
	}
	return nil, err
}

func (l *listings) find(ctx context.Context) (fs.Fs, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.right != nil {
		return l.right, nil
	}
	encodes, err := l.encodes(ctx)
	if err != nil {
		return nil, fmt.Errorf("asking the service whether it encodes keys in listings: %w", err)
	}
	right := l.Fs
	if !encodes {
		if right, err = l.asIs(); err != nil {
			return nil, err
		}
	}
	l.right = right
	return right, nil
}

// encodesKeys reports whether the service encodes keys in listings when it is asked to.
func (h *heads) encodesKeys(ctx context.Context) (bool, error) {
	prefix, one := h.key(""), int32(1)
	list, err := h.client.ListObjectsV2(ctx, &awss3.ListObjectsV2Input{
		Bucket: &h.bucket, Prefix: &prefix, MaxKeys: &one, EncodingType: types.EncodingTypeUrl,
	})
	if err != nil {
		return false, err
	}
	return list.EncodingType == types.EncodingTypeUrl, nil
}
