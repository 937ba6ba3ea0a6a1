package controller

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	smithyhttp "github.com/aws/smithy-go/transport/http"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/provision"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/records"
	"github.com/s3-csi/s3-csi-driver/tests/internal/pressure"
)

// pretended is as much of an S3 service, in memory, as a deletion of an empty volume needs. Each request takes latency.
type pretended struct {
	latency time.Duration

	mu      sync.Mutex
	objects map[string]string // by path
	etags   map[string]string
	uploads map[string]bool // keys
	writes  int
}

func (s *pretended) put(path, body string) string {
	s.writes++
	s.objects[path], s.etags[path] = body, fmt.Sprintf(`"%032d"`, s.writes)
	return s.etags[path]
}

func (s *pretended) serve(operation string, r *smithyhttp.Request) *http.Response {
	time.Sleep(s.latency)
	s.mu.Lock()
	defer s.mu.Unlock()
	path, query := r.URL.Path, r.URL.Query()
	_, key, _ := strings.Cut(strings.TrimPrefix(path, "/"), "/")
	body, exists := s.objects[path]
	switch operation {
	case "HeadBucket":
		return answer(http.StatusOK, "")
	case "GetObject":
		if !exists {
			return refusal(http.StatusNotFound, "NoSuchKey")
		}
		out := answer(http.StatusOK, body)
		out.Header.Set("ETag", s.etags[path])
		return out
	case "PutObject":
		if match := r.Header.Get("If-Match"); exists && r.Header.Get("If-None-Match") != "" || match != "" && match != s.etags[path] {
			return refusal(http.StatusPreconditionFailed, "PreconditionFailed")
		}
		data, err := io.ReadAll(r.GetStream())
		if err != nil {
			return refusal(http.StatusBadRequest, "IncompleteBody")
		}
		out := answer(http.StatusOK, "")
		out.Header.Set("ETag", s.put(path, string(data)))
		return out
	case "DeleteObject":
		delete(s.objects, path)
		return answer(http.StatusNoContent, "")
	case "ListObjectsV2":
		return answer(http.StatusOK, `<ListBucketResult/>`)
	case "CreateMultipartUpload":
		s.uploads[key] = true
		return answer(http.StatusOK, `<InitiateMultipartUploadResult><UploadId>1</UploadId></InitiateMultipartUploadResult>`)
	case "AbortMultipartUpload":
		delete(s.uploads, key)
		return answer(http.StatusNoContent, "")
	case "ListMultipartUploads":
		list := ""
		for key := range s.uploads {
			if strings.HasPrefix(key, query.Get("prefix")) {
				list += `<Upload><Key>` + key + `</Key><UploadId>1</UploadId></Upload>`
			}
		}
		return answer(http.StatusOK, `<ListMultipartUploadsResult>`+list+`</ListMultipartUploadsResult>`)
	}
	return refusal(http.StatusNotImplemented, "NotImplemented")
}

// The clock is the bubble's: nothing but requests, pauses and queues takes time.
func TestAThousandEmptyVolumesTakeTheTimeOfTheirRequests(t *testing.T) {
	const volumes, atOnce, latency = 1000, 32, 30 * time.Millisecond
	synctest.Test(t, func(t *testing.T) {
		service := &pretended{latency: latency, objects: map[string]string{}, etags: map[string]string{}, uploads: map[string]bool{}}
		e := &env{target: target{endpoint: "http://192.0.2.1", region: "us-east-1", keys: credentials.Keys{AccessKeyID: "test", SecretAccessKey: "test"}}, t: t, bucket: "bucket"}
		p := e.process(func(o *processOptions) { o.runs, o.workers = provision.DefaultRuns, provision.DefaultWorkers })
		p.hooks.set(func(h *hooks) { h.serve = service.serve })
		names := make(chan string, volumes)
		add := func(name string) {
			params := e.params(name)
			record, err := json.Marshal(records.New(records.Owner{Driver: "s3.csi.driver", Cluster: "test"}, name, params.ID(name, 1), params, time.Now()))
			if err != nil {
				t.Fatal(err)
			}
			service.put("/bucket/"+records.Key(name), string(record))
		}
		add("warm")
		p.delete(e.params("warm").ID("warm", 1))
		for i := range volumes {
			name := fmt.Sprint("v-", i)
			add(name)
			names <- name
		}
		close(names)
		began := pressure.Now()
		if err := errors.Join(race(atOnce, func(int) (err error) {
			for name := range names {
				err = errors.Join(err, p.tryDelete(e.params(name).ID(name, 1)))
			}
			return err
		})...); err != nil {
			t.Fatal(err)
		}
		if total := began.Since(); total > 150*latency {
			t.Errorf("%d deletions, %d at a time, took %v: %.0f times as long as one request, want 150", volumes, atOnce, total, float64(total)/float64(latency))
		} else {
			t.Logf("%.0f times as long as one request", float64(total)/float64(latency))
		}
		for path, body := range service.objects {
			if strings.HasPrefix(path, "/bucket/.s3-csi/volumes/") && !strings.Contains(body, `"state": "deleted"`) {
				t.Errorf("%s: %s", path, body)
			}
		}
	})
}
