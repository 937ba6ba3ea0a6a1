package helper

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

func TestSecretsAreScrubbedInEveryForm(t *testing.T) {
	var s scrubber
	s.setSecrets(time.Now(), "a", "se+cret/1=", "", "token=")
	for line, want := range map[string]string{
		"a se+cret/1= b":         "a [redacted] b",
		"x=se%2Bcret%2F1%3D":     "x=[redacted]",
		"token= token=":          "[redacted] [redacted]",
		"nothing":                "nothing",
		"partly se+cret/1, fine": "partly se+cret/1, fine",
	} {
		if got := s.scrub(line); got != want {
			t.Errorf("%q: %q, want %q", line, got, want)
		}
	}
	if got := s.scrubCut("cut off se+cret"); got != "cut off [redacted]" {
		t.Errorf("a secret's beginning at a cut: %q", got)
	}
}

func TestReplacedSecretsAreScrubbedForAWhileAndThenForgotten(t *testing.T) {
	var s scrubber
	now := time.Now()
	shown := func(secret string) bool { return strings.Contains(s.scrub("x "+secret), secret) }
	s.setSecrets(now, "endpoint", "forever")
	s.setSecrets(now, "session", "old")
	s.setSecrets(now, "session", "new")
	s.dropRetired(now.Add(retiredAge - time.Second))
	if shown("old") || shown("new") || shown("forever") {
		t.Error("a secret is shown soon after it was replaced")
	}
	s.dropRetired(now.Add(retiredAge))
	if !shown("old") || shown("new") || shown("forever") {
		t.Error("what is not in use any more has to go, and nothing else")
	}
	// Many sessions in a short time do not fill the memory, and push out nothing that is in use.
	for i := range 10 * maxRetired {
		s.setSecrets(now, "session", fmt.Sprintf("session-%03d", i))
	}
	if len(s.retired) != maxRetired || shown("forever") || shown("session-159") || shown("session-158") || !shown("session-001") {
		t.Errorf("%d former secrets", len(s.retired))
	}
	// The same secret once more is in use, and stays so.
	s.setSecrets(now, "order", "token", "key")
	s.setSecrets(now, "order", "token", "key2")
	s.dropRetired(now.Add(time.Hour))
	if shown("token") || shown("key2") || !shown("key") {
		t.Error("an order's secrets")
	}
}
