package main

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
)

// source returns credentials or an error, and counts calls.
type source struct {
	next  aws.Credentials
	err   error
	calls int
}

func (s *source) Retrieve(context.Context) (aws.Credentials, error) {
	s.calls++
	return s.next, s.err
}

// If the helper has crashed, the last credentials are used until they expire.
func TestCredentialsOutliveTheHelperUntilTheyExpire(t *testing.T) {
	keys := func(id string, left time.Duration) aws.Credentials {
		return aws.Credentials{AccessKeyID: id, SecretAccessKey: "s", CanExpire: true, Expires: time.Now().Add(left)}
	}
	gone := errors.New("connection refused")
	for name, tc := range map[string]struct {
		last  aws.Credentials
		since time.Duration // since they were fetched
		next  aws.Credentials
		err   error
		want  string
		calls int
	}{
		"first":                    {next: keys("new", time.Hour), want: "new", calls: 1},
		"just fetched":             {last: keys("last", time.Hour), next: keys("new", time.Hour), want: "last"},
		"fetched a while ago":      {last: keys("last", time.Hour), since: 2 * refreshInterval, next: keys("new", time.Hour), want: "new", calls: 1},
		"no helper, still valid":   {last: keys("last", time.Hour), since: 2 * refreshInterval, err: gone, want: "last", calls: 1},
		"no helper, expired":       {last: keys("last", -time.Second), since: 2 * refreshInterval, err: gone, calls: 1},
		"expired at once":          {last: keys("last", -time.Second), next: keys("new", time.Hour), want: "new", calls: 1},
		"no helper from the start": {err: gone, calls: 1},
	} {
		t.Run(name, func(t *testing.T) {
			s := &source{next: tc.next, err: tc.err}
			l := &credentialCache{from: s, last: tc.last, renewed: time.Now().Add(-tc.since)}
			got, err := l.Retrieve(t.Context())
			if got.AccessKeyID != tc.want || s.calls != tc.calls || (tc.want == "") != errors.Is(err, gone) {
				t.Errorf("got %q, %v after %d calls, want %q after %d", got.AccessKeyID, err, s.calls, tc.want, tc.calls)
			}
		})
	}
}

// Directories are listed again after the upload of a conflict has left the queue, because rclone has its object until then.
func TestDirectoriesAreReadAgainAfterTheUpload(t *testing.T) {
	var files conflictedFiles
	for _, step := range []struct {
		before, meanwhile []string // quarantined before the queue is read, and after
		queued            map[string]bool
		want              bool
	}{
		{before: []string{"a", "b"}, queued: map[string]bool{"a": true, "b": true}},
		{queued: map[string]bool{"b": true}, want: true},
		{queued: map[string]bool{"b": true}},
		{want: false}, // the queue cannot be read
		{queued: map[string]bool{}, want: true},
		{queued: map[string]bool{}},
		{meanwhile: []string{"c"}, queued: map[string]bool{}},
		{meanwhile: []string{"c"}, queued: map[string]bool{}, want: true},
		{queued: map[string]bool{}, want: true},
		{queued: map[string]bool{}},
	} {
		for _, name := range step.before {
			files.add(name)
		}
		if got := files.settled(func() map[string]bool {
			for _, name := range step.meanwhile {
				files.add(name)
			}
			return step.queued
		}); got != step.want {
			t.Errorf("%+v: settled %v", step, got)
		}
	}
}
