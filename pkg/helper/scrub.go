package helper

import (
	"slices"
	"strings"
	"sync"
	"time"
)

const (
	redacted = "[redacted]"
	// formerSecrets is how many secrets that are not in use any more are remembered, and formerAge for how long: a client may
	// print a key that was replaced a while ago, which it uses for as long as it was told to.
	formerSecrets = 16
	formerAge     = toldLifetime
)

// scrubber takes the secrets that the helper knows out of text.
type scrubber struct {
	mu     sync.Mutex
	held   map[string][]string // in use, by what they are of
	former []formerSecret      // the oldest first
}

type formerSecret struct {
	text  string
	until time.Time
}

// hold learns the secrets that something has from now on. Those that it had before are forgotten after a while.
func (s *scrubber) hold(now time.Time, of string, secrets ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.held == nil {
		s.held = map[string][]string{}
	}
	before := s.held[of]
	var texts []string
	for _, secret := range secrets {
		if secret == "" {
			continue
		}
		texts = append(texts, secret)
		if e := percentEncode(secret); e != secret {
			texts = append(texts, e)
		}
	}
	s.held[of] = texts
	for _, text := range before {
		if !slices.Contains(texts, text) {
			s.former = append(s.former, formerSecret{text, now.Add(formerAge)})
		}
	}
	if n := len(s.former) - formerSecrets; n > 0 {
		s.former = slices.Delete(s.former, 0, n)
	}
}

// forget drops what has been out of use for long.
func (s *scrubber) forget(now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	for n < len(s.former) && !now.Before(s.former[n].until) {
		n++
	}
	s.former = slices.Delete(s.former, 0, n)
}

// scrub gives line without known secrets. cut tells that the line's end is missing: then a secret's beginning at its
// end goes, too.
func (s *scrubber) scrub(line string, cut bool) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.each(func(secret string) { line = strings.ReplaceAll(line, secret, redacted) })
	if !cut {
		return line
	}
	s.each(func(secret string) {
		for n := min(len(secret)-1, len(line)); n >= 4; n-- {
			if strings.HasSuffix(line, secret[:n]) {
				line = line[:len(line)-n] + redacted
				break
			}
		}
	})
	return line
}

// each calls fn for every secret. Call under mu.
func (s *scrubber) each(fn func(secret string)) {
	for _, texts := range s.held {
		for _, text := range texts {
			fn(text)
		}
	}
	for _, f := range s.former {
		fn(f.text)
	}
}

// percentEncode is how a secret looks in a URL's query; session tokens hold "+", "/" and "=".
func percentEncode(s string) string {
	const hex = "0123456789ABCDEF"
	var b strings.Builder
	for i := range len(s) {
		c := s[i]
		if c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || strings.IndexByte("-._~", c) >= 0 {
			b.WriteByte(c)
		} else {
			b.WriteByte('%')
			b.WriteByte(hex[c>>4])
			b.WriteByte(hex[c&15])
		}
	}
	return b.String()
}
