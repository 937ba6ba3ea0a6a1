package main

import (
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	awss3 "github.com/aws/aws-sdk-go-v2/service/s3"
)

// An objectVersion identifies the object that a file in the cache was made from. rclone stores it in the file's metadata, as the
// fingerprint "size,modification time,MD5"; "" means that there was no object. The forms below are not rclone's. rclone replaces
// them after the upload and does not compare them before.
type objectVersion string

const (
	// noObject means that there was no object. Unlike "", rclone does not replace it with an object that it finds later.
	noObject objectVersion = "none"
	// beforePrefix and a time mean any object that was stored before that time, or none.
	beforePrefix = "before:"
)

// storedBefore returns the version of any object that was stored before a time, or none.
func storedBefore(t time.Time) objectVersion {
	return objectVersion(beforePrefix + t.UTC().Format(time.RFC3339Nano))
}

// contentVersion returns the version of an object by its content.
func contentVersion(size int64, md5 string) objectVersion {
	return objectVersion(fmt.Sprintf("%d,,%s", size, md5))
}

// named reports whether the version is that of an object, not the absence of one.
func (v objectVersion) named() bool {
	return v != "" && v != noObject && !strings.HasPrefix(string(v), beforePrefix)
}

// remoteState is the state of an object according to a HEAD request.
type remoteState struct {
	exists   bool
	etag     string // with quotes
	size     int64
	md5      []string  // candidates for the MD5 of its content: rclone's metadata, and the ETag if it looks like one
	modified time.Time // according to the service, in full seconds
	mtime    time.Time // from rclone's metadata; zero if absent
}

var md5Form = regexp.MustCompile(`^[0-9a-f]{32}$`)

// Keys of rclone's metadata.
const (
	metaMtime = "mtime"     // seconds since 1970 with a fraction
	metaMD5   = "md5chksum" // base64
)

func stateOf(head *awss3.HeadObjectOutput) remoteState {
	s := remoteState{exists: true}
	if head.ETag != nil {
		s.etag = *head.ETag
	}
	if head.ContentLength != nil {
		s.size = *head.ContentLength
	}
	if head.LastModified != nil {
		s.modified = *head.LastModified
	}
	if etag := strings.Trim(strings.ToLower(s.etag), `"`); md5Form.MatchString(etag) {
		s.md5 = append(s.md5, etag)
	}
	for name, value := range head.Metadata {
		switch strings.ToLower(name) {
		case metaMD5:
			if sum, err := base64.StdEncoding.DecodeString(value); err == nil {
				s.md5 = append(s.md5, hex.EncodeToString(sum))
			}
		case metaMtime:
			if seconds, err := strconv.ParseFloat(value, 64); err == nil && math.Abs(seconds) < math.MaxInt64/1e9 {
				s.mtime = time.Unix(0, int64(seconds*1e9))
			}
		}
	}
	return s
}

func (s remoteState) hasMD5(sum string) bool { return slices.Contains(s.md5, sum) }

// is reports whether the current object is this version.
//
// If the version has an MD5, that is compared: rclone's own objects have one, and so does every object that was stored with one
// request. For other objects, the size and the time are compared.
func (s remoteState) is(v objectVersion) bool {
	switch {
	case v == "" || v == noObject:
		return !s.exists
	case strings.HasPrefix(string(v), beforePrefix):
		t, err := time.Parse(time.RFC3339Nano, strings.TrimPrefix(string(v), beforePrefix))
		return !s.exists || err == nil && !s.modified.IsZero() && !s.modified.Add(time.Second).After(t) // modified is truncated to seconds
	case !s.exists:
		return false
	}
	parts := strings.Split(string(v), ",")
	if len(parts) != 3 || parts[0] != strconv.FormatInt(s.size, 10) {
		return false
	}
	if parts[2] != "" {
		return s.hasMD5(parts[2])
	}
	const form = "2006-01-02 15:04:05.999999999 -0700 MST" // of time.Time.String
	t, err := time.Parse(form, parts[1])
	if err != nil {
		return false
	}
	if !s.mtime.IsZero() && t.Sub(s.mtime).Abs() < time.Millisecond {
		return true
	}
	return t.Truncate(time.Second).Equal(s.modified.Truncate(time.Second))
}
