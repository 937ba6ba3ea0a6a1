package provision_test

import (
	"bytes"
	"cmp"
	"crypto/md5"
	"encoding/xml"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"
)

// service is an S3 service in memory, without locks: it carries out one request at a time.
type service struct {
	buckets  map[string]*bucket
	pageSize int
	dropTags bool // at the creation of a bucket
	// copies is what the service does with the condition that the target of a copy does not exist.
	copies conditions
	seq    int // counts changes
	past   map[string][]point
	by     *process // whose request is carried out; nil: the test's own
	// object is called after the current object of a key was written or deleted, tags after the tags of a bucket changed or the bucket was removed.
	object func(bucket, key string)
	tags   func(bucket string)
}

type conditions int

const (
	honoured conditions = iota
	refused
	ignored
)

type bucket struct {
	tags      map[string]string
	versioned bool
	objects   map[string][]object // versions of a key, the newest one last
	uploads   map[string]*upload
}

type object struct {
	version  string
	body     string
	etag     string // "": a delete marker
	at       time.Time
	archived bool
}

type upload struct {
	key  string
	body string // of its only part
}

// point is an object at a time; etag is "" if there was none.
type point struct {
	seq  int
	at   time.Time
	etag string
}

func newService() *service {
	return &service{buckets: map[string]*bucket{}, pageSize: 1000, past: map[string][]point{}, object: func(string, string) {}, tags: func(string) {}}
}

func (s *service) make(name string, tags map[string]string) *bucket {
	b := &bucket{tags: tags, objects: map[string][]object{}, uploads: map[string]*upload{}}
	s.buckets[name] = b
	s.seq++
	s.tags(name)
	return b
}

// get returns the current object of a key.
func (b *bucket) get(key string) (object, bool) {
	list := b.objects[key]
	if len(list) == 0 || list[len(list)-1].etag == "" {
		return object{}, false
	}
	return list[len(list)-1], true
}

func (b *bucket) find(key, version string) (object, bool) {
	if version == "" {
		return b.get(key)
	}
	i := slices.IndexFunc(b.objects[key], func(o object) bool { return o.version == version })
	if i < 0 {
		return object{}, false
	}
	return b.objects[key][i], b.objects[key][i].etag != ""
}

// below returns the keys of the current objects below a prefix, in order.
func (b *bucket) below(prefix string) (keys []string) {
	for key := range b.objects {
		if _, ok := b.get(key); ok && strings.HasPrefix(key, prefix) {
			keys = append(keys, key)
		}
	}
	slices.Sort(keys)
	return keys
}

func (s *service) put(name, key, body string) object {
	return s.add(name, key, object{body: body, etag: fmt.Sprintf(`"%x"`, md5.Sum([]byte(body)))})
}

func (s *service) add(name, key string, o object) object {
	b := s.buckets[name]
	s.seq++
	o.version, o.at = "null", time.Now()
	if b.versioned {
		o.version = fmt.Sprintf("v%06d", s.seq)
		b.objects[key] = append(b.objects[key], o)
	} else {
		b.objects[key] = []object{o}
	}
	s.changed(name, key, o.etag)
	return o
}

func (s *service) changed(name, key, etag string) {
	s.past[name+"/"+key] = append(s.past[name+"/"+key], point{s.seq, time.Now(), etag})
	s.object(name, key)
}

// remove deletes an object, or one version of it.
func (s *service) remove(name, key, version string) (marker object) {
	b := s.buckets[name]
	before, was := b.get(key)
	switch {
	case version != "":
		b.objects[key] = slices.DeleteFunc(b.objects[key], func(o object) bool { return o.version == version })
	case b.versioned:
		return s.add(name, key, object{})
	default:
		delete(b.objects, key)
	}
	if len(b.objects[key]) == 0 {
		delete(b.objects, key)
	}
	if now, is := b.get(key); is != was || now.version != before.version {
		s.seq++
		s.changed(name, key, now.etag)
	}
	return object{}
}

// answer is what the service answers: a code of an error, or a body.
type answer struct {
	status int
	code   string
	header http.Header
	body   string
}

func fails(status int, code string) answer { return answer{status: status, code: code} }

func says(format string, args ...any) answer { return answer{body: fmt.Sprintf(format, args...)} }

func (a answer) response(r *http.Request) *http.Response {
	h := http.Header{"X-Amz-Request-Id": {"TEST"}}
	for k, v := range a.header {
		h[k] = v
	}
	if a.code != "" && r.Method != http.MethodHead {
		a.body = "<Error><Code>" + a.code + "</Code><RequestId>TEST</RequestId></Error>"
	}
	if h.Get("Content-Length") == "" {
		h.Set("Content-Length", strconv.Itoa(len(a.body)))
	}
	body := io.NopCloser(strings.NewReader(a.body))
	return &http.Response{StatusCode: cmp.Or(a.status, http.StatusOK), Header: h, Body: body, ContentLength: int64(len(a.body)), Request: r}
}

// do carries out a request.
func (s *service) do(operation string, r *http.Request, body []byte) answer {
	name, key, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/"), "/")
	q := r.URL.Query()
	if operation == "ListBuckets" {
		list := ""
		for _, name := range slices.Sorted(maps.Keys(s.buckets)) {
			list += "<Bucket><Name>" + name + "</Name></Bucket>"
		}
		return says("<ListAllMyBucketsResult><Buckets>%s</Buckets></ListAllMyBucketsResult>", list)
	}
	b := s.buckets[name]
	if operation == "CreateBucket" {
		if b != nil {
			return fails(http.StatusConflict, "BucketAlreadyOwnedByYou")
		}
		tags := readTags(body)
		if s.dropTags {
			tags = nil
		}
		s.make(name, tags)
		return answer{}
	}
	if b == nil {
		return fails(http.StatusNotFound, "NoSuchBucket")
	}
	if key == "" {
		return s.doBucket(operation, name, b, q, body)
	}
	return s.doObject(operation, name, b, key, r, q, body)
}

func readTags(body []byte) map[string]string {
	var in struct {
		Tags []struct{ Key, Value string } `xml:"TagSet>Tag"`
		New  []struct{ Key, Value string } `xml:"Tags>Tag"` // of CreateBucket
	}
	if err := xml.Unmarshal(body, &in); err != nil && len(body) > 0 {
		panic(err)
	}
	tags := map[string]string{}
	for _, t := range append(in.Tags, in.New...) {
		tags[t.Key] = t.Value
	}
	return tags
}

func (s *service) doBucket(operation, name string, b *bucket, q url.Values, body []byte) answer {
	switch operation {
	case "HeadBucket":
		return answer{}
	case "DeleteBucket":
		if len(b.objects)+len(b.uploads) > 0 {
			return fails(http.StatusConflict, "BucketNotEmpty")
		}
		delete(s.buckets, name)
		s.seq++
		s.tags(name)
		return answer{status: http.StatusNoContent}
	case "GetBucketVersioning":
		return says("<VersioningConfiguration><Status>%s</Status></VersioningConfiguration>", map[bool]string{true: "Enabled"}[b.versioned])
	case "GetObjectLockConfiguration":
		return fails(http.StatusNotFound, "ObjectLockConfigurationNotFoundError")
	case "GetBucketTagging":
		if len(b.tags) == 0 {
			return fails(http.StatusNotFound, "NoSuchTagSet")
		}
		list := ""
		for _, k := range slices.Sorted(maps.Keys(b.tags)) {
			list += "<Tag><Key>" + k + "</Key><Value>" + b.tags[k] + "</Value></Tag>"
		}
		return says("<Tagging><TagSet>%s</TagSet></Tagging>", list)
	case "PutBucketTagging":
		b.tags = readTags(body)
		s.seq++
		s.tags(name)
		return answer{status: http.StatusNoContent}
	case "DeleteObjects":
		var in struct {
			Object []struct{ Key, VersionId string } //nolint:revive // the names of the elements
		}
		if err := xml.Unmarshal(body, &in); err != nil {
			panic(err)
		}
		for _, o := range in.Object {
			s.remove(name, o.Key, o.VersionId)
		}
		return says("<DeleteResult></DeleteResult>")
	case "ListObjectsV2":
		return s.list(b, q)
	case "ListObjectVersions":
		return s.listVersions(b, q)
	case "ListMultipartUploads":
		var items []item
		for id, u := range b.uploads {
			items = append(items, item{u.key, id, fmt.Sprintf("<Upload><Key>%s</Key><UploadId>%s</UploadId></Upload>", url.QueryEscape(u.key), id)})
		}
		page, last := s.page(items, q, q.Get("key-marker"), q.Get("upload-id-marker"))
		const result = "ListMultipartUploadsResult"
		return says("<%s><EncodingType>url</EncodingType>%s<NextUploadIdMarker>%s</NextUploadIdMarker></%[1]s>", result, page, last)
	}
	panic("the service has no " + operation)
}

// item is an element of a listing, after those of smaller keys and ids.
type item struct{ key, id, text string }

// page returns the items below the prefix after a position, as many as a page has, with its own end; last is the last one's id.
func (s *service) page(items []item, q url.Values, afterKey, afterID string) (text, last string) {
	items = slices.DeleteFunc(items, func(i item) bool {
		return !strings.HasPrefix(i.key, q.Get("prefix")) || afterKey != "" && (i.key < afterKey || i.key == afterKey && (afterID == "" || i.id <= afterID))
	})
	slices.SortFunc(items, func(a, b item) int { return cmp.Or(cmp.Compare(a.key, b.key), cmp.Compare(a.id, b.id)) })
	size := s.pageSize
	if q.Has("versions") {
		size = 1000 // the driver expects the versions of its test objects on one page
	}
	if n, err := strconv.Atoi(q.Get("max-keys")); err == nil {
		size = min(size, n)
	}
	for _, i := range items[:min(size, len(items))] {
		text += i.text
	}
	if len(items) > size {
		end := items[size-1]
		next := url.QueryEscape(end.key)
		text += "<IsTruncated>true</IsTruncated><NextKeyMarker>" + next + "</NextKeyMarker><NextContinuationToken>" + next + "</NextContinuationToken>"
		last = end.id
	}
	return text, last
}

func (s *service) list(b *bucket, q url.Values) answer {
	var items []item
	prefix, delimiter := q.Get("prefix"), q.Get("delimiter")
	for _, key := range b.below(prefix) {
		if i := strings.Index(key[len(prefix):], "/"); delimiter != "" && i >= 0 {
			common := key[:len(prefix)+i+1]
			if len(items) == 0 || items[len(items)-1].key != common {
				items = append(items, item{key: common, text: "<CommonPrefixes><Prefix>" + url.QueryEscape(common) + "</Prefix></CommonPrefixes>"})
			}
			continue
		}
		o, _ := b.get(key)
		text := fmt.Sprintf("<Contents><Key>%s</Key><ETag>%s</ETag><Size>%d</Size></Contents>", url.QueryEscape(key), escape(o.etag), len(o.body))
		items = append(items, item{key: key, text: text})
	}
	after := q.Get("start-after")
	if token, err := url.QueryUnescape(q.Get("continuation-token")); err == nil && token != "" {
		after = token
	}
	page, _ := s.page(items, q, after, "")
	return says("<ListBucketResult><EncodingType>url</EncodingType>%s</ListBucketResult>", page)
}

func (s *service) listVersions(b *bucket, q url.Values) answer {
	var items []item
	place := func(version string) string { // the newest one comes first
		n, _ := strconv.Atoi(strings.TrimPrefix(version, "v"))
		return fmt.Sprintf("%06d", 999999-n)
	}
	for key, list := range b.objects {
		for i, o := range list {
			kind := "Version"
			if o.etag == "" {
				kind = "DeleteMarker"
			}
			text := fmt.Sprintf("<%s><Key>%s</Key><VersionId>%s</VersionId><ETag>%s</ETag><Size>%d</Size><LastModified>%s</LastModified><IsLatest>%t</IsLatest></%[1]s>",
				kind, url.QueryEscape(key), o.version, escape(o.etag), len(o.body), o.at.UTC().Format(time.RFC3339Nano), i == len(list)-1)
			items = append(items, item{key, place(o.version), text})
		}
	}
	page, last := s.page(items, q, q.Get("key-marker"), q.Get("version-id-marker"))
	return says("<ListVersionsResult><EncodingType>url</EncodingType>%s<NextVersionIdMarker>%s</NextVersionIdMarker></ListVersionsResult>", page, last)
}

func escape(s string) string {
	var b bytes.Buffer
	_ = xml.EscapeText(&b, []byte(s))
	return b.String()
}

func (s *service) doObject(operation, name string, b *bucket, key string, r *http.Request, q url.Values, body []byte) answer {
	now, there := b.get(key)
	// A condition that does not hold, of operations that write the key.
	conflict := r.Header.Get("If-None-Match") == "*" && there || r.Header.Get("If-Match") != "" && there && r.Header.Get("If-Match") != now.etag
	switch operation {
	case "GetObject", "HeadObject":
		o, ok := b.find(key, q.Get("versionId"))
		if !ok {
			return fails(http.StatusNotFound, "NoSuchKey")
		}
		if want := r.Header.Get("If-Match"); want != "" && want != o.etag {
			return fails(http.StatusPreconditionFailed, "PreconditionFailed")
		}
		a := answer{header: http.Header{"Etag": {o.etag}, "Content-Length": {strconv.Itoa(len(o.body))}}}
		if operation == "GetObject" {
			a.body = o.body
		}
		return a
	case "PutObject":
		if conflict {
			return fails(http.StatusPreconditionFailed, "PreconditionFailed")
		}
		if r.Header.Get("If-Match") != "" && !there {
			return fails(http.StatusNotFound, "NoSuchKey")
		}
		return s.wrote(b, s.put(name, key, string(body)), "")
	case "DeleteObject":
		marker := s.remove(name, key, q.Get("versionId"))
		a := answer{status: http.StatusNoContent, header: http.Header{}}
		if marker.version != "" {
			a.header = http.Header{"X-Amz-Version-Id": {marker.version}, "X-Amz-Delete-Marker": {"true"}}
		}
		return a
	case "CopyObject":
		if r.Header.Get("If-None-Match") != "" {
			switch s.copies {
			case refused:
				return fails(http.StatusNotImplemented, "NotImplemented")
			case ignored:
				conflict = false
			}
		}
		from, a := s.source(r)
		switch {
		case a.code != "":
			return a
		case conflict:
			return fails(http.StatusPreconditionFailed, "PreconditionFailed")
		}
		o := s.put(name, key, from.body)
		return s.wrote(b, o, "<CopyObjectResult><ETag>"+escape(o.etag)+"</ETag></CopyObjectResult>")
	case "CreateMultipartUpload":
		s.seq++
		id := fmt.Sprintf("u%06d", s.seq)
		b.uploads[id] = &upload{key: key}
		return says("<InitiateMultipartUploadResult><UploadId>%s</UploadId></InitiateMultipartUploadResult>", id)
	}
	u := b.uploads[q.Get("uploadId")]
	if u == nil {
		return fails(http.StatusNotFound, "NoSuchUpload")
	}
	switch operation {
	case "UploadPartCopy":
		from, a := s.source(r)
		if a.code != "" {
			return a
		}
		u.body = from.body
		return says("<CopyPartResult><ETag>%s</ETag></CopyPartResult>", escape(from.etag))
	case "CompleteMultipartUpload":
		if conflict && s.copies != ignored {
			return fails(http.StatusPreconditionFailed, "PreconditionFailed")
		}
		delete(b.uploads, q.Get("uploadId"))
		o := s.put(name, key, u.body)
		return s.wrote(b, o, "<CompleteMultipartUploadResult><ETag>"+escape(o.etag)+"</ETag></CompleteMultipartUploadResult>")
	case "AbortMultipartUpload":
		delete(b.uploads, q.Get("uploadId"))
		return answer{status: http.StatusNoContent}
	}
	panic("the service has no " + operation)
}

func (s *service) wrote(b *bucket, o object, body string) answer {
	a := answer{header: http.Header{"Etag": {o.etag}}, body: body}
	if b.versioned {
		a.header.Set("X-Amz-Version-Id", o.version)
	}
	return a
}

// source returns the object that a request copies.
func (s *service) source(r *http.Request) (object, answer) {
	place, version, _ := strings.Cut(r.Header.Get("X-Amz-Copy-Source"), "?versionId=")
	place, err := url.PathUnescape(place)
	if err != nil {
		panic(err)
	}
	name, key, _ := strings.Cut(place, "/")
	b := s.buckets[name]
	if b == nil {
		return object{}, fails(http.StatusNotFound, "NoSuchBucket")
	}
	o, ok := b.find(key, version)
	switch want := r.Header.Get("X-Amz-Copy-Source-If-Match"); {
	case !ok:
		return o, fails(http.StatusNotFound, "NoSuchKey")
	case want != "" && want != o.etag:
		return o, fails(http.StatusPreconditionFailed, "PreconditionFailed")
	case o.archived:
		return o, fails(http.StatusForbidden, "InvalidObjectState")
	}
	return o, answer{}
}
