package controller

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"strings"
	"sync"
	"testing"

	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
)

// canaries are all secrets of this run, which must be in no log and in no error.
var canaries = &secrets{}

type secrets struct {
	mu  sync.Mutex
	all []string
	log bytes.Buffer
}

func (s *secrets) add(keys credentials.Keys) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, secret := range []string{keys.SecretAccessKey, keys.SessionToken} {
		if secret != "" {
			s.all = append(s.all, secret)
		}
	}
}

// found is the beginning of a secret in the text, or "".
func (s *secrets) found(text string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, secret := range s.all {
		if strings.Contains(text, secret) {
			return secret[:4] + "…"
		}
	}
	return ""
}

func (s *secrets) check(t testing.TB, text string) {
	t.Helper()
	if c := s.found(text); c != "" {
		t.Errorf("the secret %s is shown", c)
	}
}

// Write takes what is logged, in one piece for the search at the end.
func (s *secrets) Write(line []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.log.Write(line)
}

// watch runs the tests with the most talkative log, and looks for secrets in it.
func (s *secrets) watch(run func() int) (int, error) {
	flags := flag.NewFlagSet("klog", flag.ContinueOnError)
	klog.InitFlags(flags)
	if err := errors.Join(flags.Set("logtostderr", "false"), flags.Set("alsologtostderr", "false"), flags.Set("stderrthreshold", "FATAL"), flags.Set("v",
		"10")); err != nil {
		return 0, err
	}
	klog.SetOutput(s)
	code := run()
	klog.Flush()
	text := s.log.String()
	if c := s.found(text); c != "" {
		return 1, fmt.Errorf("the secret %s is in the log", c)
	}
	if everything := flag.Lookup("test.run").Value.String() == ""; code == 0 && everything && !strings.Contains(text, "deleting volume") {
		return 1, errors.New("the log was not watched")
	}
	return code, nil
}

// logged is what was logged so far.
func (s *secrets) logged() string {
	klog.Flush()
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.log.String()
}
