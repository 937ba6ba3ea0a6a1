package main

import (
	"bytes"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"
)

// The service has an upload at the moment of a rename, and rclone does not know yet.
func TestARenameWaitsForAnUploadThatTheServiceHas(t *testing.T) {
	t.Parallel()
	for name, replaced := range map[string]bool{"of the file": false, "of the file that is replaced": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := startS3(t)
			f := startFront(t, s)
			m := startMount(t, mountOptions{s3: s, url: f.url, prefix: "vol/", args: []string{"--write-back=100ms"}})
			uploaded, other := "old", "new"
			if replaced {
				uploaded, other = other, uploaded
			}
			held, pass := make(chan struct{}, 10), make(chan struct{})
			f.set(func(f *front) {
				f.answer = func(r *http.Request) bool {
					if r.Method == http.MethodPut && strings.HasSuffix(r.URL.Path, "/vol/"+uploaded) {
						held <- struct{}{}
						<-pass
					}
					return true
				}
			})
			first, second := payload(1000, 1), payload(2000, 2)
			want := first
			check(t, os.WriteFile(m.path(uploaded), first, 0o644))
			<-held
			if replaced {
				check(t, os.WriteFile(m.path(other), second, 0o644))
				want = second
			}
			renamed := make(chan error, 1)
			go func() { renamed <- os.Rename(m.path("old"), m.path("new")) }()
			select {
			case err := <-renamed:
				t.Errorf("the rename did not wait: %v", err)
			case <-time.After(300 * time.Millisecond):
			}
			close(pass)
			await(t, 30*time.Second, "the renamed file in the service", func() bool {
				got, _ := s.get("vol/new")
				_, before := s.get("vol/old")
				return bytes.Equal(got, want) && !before
			})
			got, err := os.ReadFile(m.path("new"))
			if err != nil || !bytes.Equal(got, want) {
				t.Errorf("it has %d bytes, %v", len(got), err)
			}
		})
	}
}

func TestNoUploadBeginsDuringARename(t *testing.T) {
	r := newRenames()
	end, again := r.begin("old", "new"), r.begin("new", "newer")
	for name, want := range map[string]bool{"old": false, "dir/new": false, "old/file": false, "newer": false, "other": true, "older": true} {
		if answered, ok := r.upload(name); ok != want {
			t.Errorf("%s: %v", name, ok)
		} else if ok {
			answered()
		}
	}
	end()
	for name, want := range map[string]bool{"old": true, "new": false} {
		if _, ok := r.upload(name); ok != want {
			t.Errorf("%s after one rename: %v", name, ok)
		}
	}
	again()
	if _, ok := r.upload("new"); !ok {
		t.Error("new after both renames")
	}
}
