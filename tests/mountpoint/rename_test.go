//go:build linux

package mountpoint

import (
	"encoding/xml"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
)

// maxCopy is the size of the largest object that one CopyObject, or one part of a copy, can have in S3.
const maxCopy = 5 << 30

// sizes is an S3 service that stores the sizes of objects, not their content, and refuses what S3 refuses.
type sizes struct {
	*httptest.Server
	refuseParts bool  // UploadPartCopy is not implemented
	loses       int64 // bytes that are missing at the end of every copy
	pretends    bool  // copies succeed and change nothing

	mu      sync.Mutex
	objects map[string]int64  // by key
	etags   map[string]string // likewise
	uploads map[string]string
	parts   map[string]map[int]span
	log     []string // changes, in order
}

// span is a range of bytes, without its end.
type span struct{ from, to int64 }

func newSizes(t *testing.T, objects map[string]int64) *sizes {
	t.Helper()
	s := &sizes{objects: objects, etags: map[string]string{}, uploads: map[string]string{}, parts: map[string]map[int]span{}}
	for key := range objects {
		s.etags[key] = strconv.Quote(key)
	}
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		defer s.mu.Unlock()
		key, ok := strings.CutPrefix(r.URL.Path, "/"+bucket+"/")
		if !ok || key == "" {
			s.list(w, r)
			return
		}
		s.object(w, r, key)
	}))
	t.Cleanup(s.Close)
	return s
}

type contents struct {
	Key, LastModified, ETag string
	Size                    int64
}

var modified = time.Now().Add(-time.Hour).UTC()

func (s *sizes) list(w http.ResponseWriter, r *http.Request) {
	var result struct {
		XMLName     xml.Name `xml:"ListBucketResult"`
		IsTruncated bool
		Contents    []contents
	}
	for key, size := range s.objects {
		if r.URL.Query().Get("max-keys") != "0" && strings.HasPrefix(key, r.URL.Query().Get("prefix")) {
			result.Contents = append(result.Contents, contents{Key: key, LastModified: modified.Format(time.RFC3339), ETag: s.etags[key], Size: size})
		}
	}
	answer(w, result)
}

func answer(w http.ResponseWriter, result any) {
	w.Header().Set("Content-Type", "application/xml")
	_, _ = w.Write([]byte(xml.Header))
	_ = xml.NewEncoder(w).Encode(result)
}

func refuseWith(w http.ResponseWriter, status int, code string) {
	w.Header().Set("Content-Type", "application/xml")
	w.WriteHeader(status)
	fmt.Fprintf(w, "<Error><Code>%s</Code><Message>refused by the test</Message></Error>", code)
}

func (s *sizes) object(w http.ResponseWriter, r *http.Request, key string) {
	query := r.URL.Query()
	id := query.Get("uploadId")
	source := strings.TrimPrefix(strings.TrimPrefix(r.Header.Get("X-Amz-Copy-Source"), "/"), bucket+"/")
	size, exists := s.objects[key]
	switch {
	case r.Method == http.MethodHead && !exists:
		w.WriteHeader(http.StatusNotFound)
	case r.Method == http.MethodHead:
		w.Header().Set("Content-Length", strconv.FormatInt(size, 10))
		w.Header().Set("Etag", s.etags[key])
		w.Header().Set("Last-Modified", modified.Format(http.TimeFormat))
	case r.Method == http.MethodPost && query.Has("uploads"):
		id = fmt.Sprintf("upload-%d", len(s.uploads))
		s.uploads[id], s.parts[id] = key, map[int]span{}
		s.log = append(s.log, "create upload of "+key)
		answer(w, struct {
			XMLName     xml.Name `xml:"InitiateMultipartUploadResult"`
			Bucket, Key string
			ID          string `xml:"UploadId"`
		}{Bucket: bucket, Key: key, ID: id})
	case r.Method == http.MethodPut && source != "" && id != "":
		s.part(w, r, id, source)
	case r.Method == http.MethodPut && source != "":
		if s.objects[source] > maxCopy {
			s.log = append(s.log, "refused copy of "+source)
			refuseWith(w, http.StatusBadRequest, "InvalidRequest")
			return
		}
		s.log = append(s.log, "copy of "+source+" to "+key)
		if !s.pretends {
			s.objects[key], s.etags[key] = s.objects[source]-s.loses, s.etags[source]
		}
		answer(w, struct {
			XMLName            xml.Name `xml:"CopyObjectResult"`
			ETag, LastModified string
		}{ETag: `"copy"`, LastModified: modified.Format(time.RFC3339)})
	case r.Method == http.MethodPost && id != "":
		s.complete(w, key, id)
	case r.Method == http.MethodDelete && id != "":
		s.log = append(s.log, "abort upload of "+key)
		w.WriteHeader(http.StatusNoContent)
	case r.Method == http.MethodDelete:
		delete(s.objects, key)
		s.log = append(s.log, "delete "+key)
		w.WriteHeader(http.StatusNoContent)
	default:
		refuseWith(w, http.StatusNotImplemented, "NotImplemented")
	}
}

func (s *sizes) part(w http.ResponseWriter, r *http.Request, id, source string) {
	number, err := strconv.Atoi(r.URL.Query().Get("partNumber"))
	bytes := regexp.MustCompile(`^bytes=(\d+)-(\d+)$`).FindStringSubmatch(r.Header.Get("X-Amz-Copy-Source-Range"))
	if s.refuseParts || err != nil || bytes == nil {
		refuseWith(w, http.StatusNotImplemented, "NotImplemented")
		return
	}
	from, _ := strconv.ParseInt(bytes[1], 10, 64)
	last, _ := strconv.ParseInt(bytes[2], 10, 64)
	if last >= s.objects[source] || last < from || last-from >= maxCopy {
		refuseWith(w, http.StatusBadRequest, "InvalidArgument")
		return
	}
	s.parts[id][number] = span{from, last + 1}
	answer(w, struct {
		XMLName            xml.Name `xml:"CopyPartResult"`
		ETag, LastModified string
	}{ETag: `"part"`, LastModified: modified.Format(time.RFC3339)})
}

// complete makes an object of the parts, which must follow each other.
func (s *sizes) complete(w http.ResponseWriter, key, id string) {
	var size int64
	for number := 1; number <= len(s.parts[id]); number++ {
		if part, ok := s.parts[id][number]; !ok || part.from != size {
			refuseWith(w, http.StatusBadRequest, "InvalidPart")
			return
		}
		size = s.parts[id][number].to
	}
	s.objects[key], s.etags[key] = size-s.loses, `"whole"`
	s.log = append(s.log, "complete upload of "+key)
	answer(w, struct {
		XMLName           xml.Name `xml:"CompleteMultipartUploadResult"`
		Bucket, Key, ETag string
	}{Bucket: bucket, Key: key, ETag: `"whole"`})
}

func (s *sizes) state() (objects map[string]int64, log []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.objects), slices.Clone(s.log)
}

// S3 copies at most 5 GiB with one request. Larger files are renamed by a copy in parts, and the original is removed last.
func TestFilesOfAnySizeAreRenamed(t *testing.T) {
	own(t)
	for name, tt := range map[string]struct {
		size        int64
		over        int64 // size of the file that has the new name
		refuseParts bool
		loses       int64
		pretends    bool
		moved       bool
		log         []string
	}{
		"small":        {size: 1 << 20, moved: true, log: []string{"copy of volume/old to volume/new", "delete volume/old"}},
		"over another": {size: 3, over: 3, moved: true, log: []string{"copy of volume/old to volume/new", "delete volume/old"}},
		"5 GiB":        {size: maxCopy, moved: true, log: []string{"create upload of volume/new", "complete upload of volume/new", "delete volume/old"}},
		"6 GiB":        {size: 6<<30 + 1, moved: true, log: []string{"create upload of volume/new", "complete upload of volume/new", "delete volume/old"}},
		"5 TiB":        {size: 5 << 40, moved: true, log: []string{"create upload of volume/new", "complete upload of volume/new", "delete volume/old"}},
		"no copies in parts": {
			size: 6 << 30, refuseParts: true, log: []string{"create upload of volume/new", "abort upload of volume/new"},
		},
		"a copy that changes nothing": {size: 3, over: 3, pretends: true, log: []string{"copy of volume/old to volume/new"}},
		"a copy that lacks a byte": {
			size: 6 << 30, loses: 1, log: []string{"create upload of volume/new", "complete upload of volume/new"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			objects := map[string]int64{"volume/old": tt.size}
			if tt.over > 0 {
				objects["volume/new"] = tt.over
			}
			s := newSizes(t, objects)
			s.refuseParts, s.loses, s.pretends = tt.refuseParts, tt.loses, tt.pretends
			m := mount(t, invocation(t, s.URL, "us-east-1"), newEndpoint(t, credentials.Keys{AccessKeyID: "a", SecretAccessKey: "b"}), nil)
			err := os.Rename(m.at("old"), m.at("new"))
			objects, log := s.state()
			if !slices.Equal(log, tt.log) {
				t.Errorf("the changes are %q, want %q", log, tt.log)
			}
			if !tt.moved {
				want(t, "rename", err, syscall.EIO)
				if objects["volume/old"] != tt.size {
					t.Error("the original is lost")
				}
				m.unmount(t)
				if !strings.Contains(m.stderr.String(), "volume/old") {
					t.Error("the log does not name the file")
				}
				return
			}
			want(t, "rename", err, 0)
			if size, ok := objects["volume/new"]; len(objects) != 1 || !ok || size != tt.size {
				t.Errorf("the objects are %v", objects)
			}
			if st, err := os.Stat(m.at("new")); err != nil || st.Size() != tt.size {
				t.Errorf("stat: %v, %v", st, err)
			}
			m.unmount(t)
		})
	}
}

// A copy in the service has the bucket's default encryption. Programs that get EXDEV write the file again, with that of the volume.
func TestFilesOfAVolumeWithItsOwnEncryptionAreNotRenamed(t *testing.T) {
	own(t)
	s := newSizes(t, map[string]int64{"volume/old": 3})
	in := invocation(t, s.URL, "us-east-1")
	in.Options = options(t, "sse=aws:kms")
	m := mount(t, in, newEndpoint(t, credentials.Keys{AccessKeyID: "a", SecretAccessKey: "b"}), nil)
	want(t, "rename", os.Rename(m.at("old"), m.at("new")), syscall.EXDEV)
	if objects, log := s.state(); len(log) != 0 {
		t.Errorf("the objects are %v after %q", objects, log)
	}
	m.unmount(t)
}

// An empty file is stored when the kernel releases it, a moment after the program has closed it. A rename waits for that, but not for
// a program that has the file open.
func TestAnEmptyFileIsRenamedAtOnce(t *testing.T) {
	b := newOwnBench(t)
	m := mount(t, b.invocation(t), b.keys, nil)
	var writers sync.WaitGroup
	for w := range 8 { // a look-up of one file is answered while others are stored
		writers.Go(func() {
			for i := range 20 {
				name := fmt.Sprintf("%d-%d", w, i)
				want(t, "write", overwrite(m.at(name+".tmp"), ""), 0)
				want(t, "rename", os.Rename(m.at(name+".tmp"), m.at(name)), 0)
				_, err := os.Stat(m.at(name))
				want(t, "stat", err, 0)
				if _, ok := b.get(t, "volume/"+name); !ok {
					t.Errorf("%s is not stored", name)
				}
			}
		})
	}
	writers.Wait()
	open, err := os.Create(m.at("open"))
	if err != nil {
		t.Fatal(err)
	}
	want(t, "rename of an open file", os.Rename(m.at("open"), m.at("renamed")), syscall.EPERM)
	want(t, "close", open.Close(), 0)
	m.unmount(t)
}
