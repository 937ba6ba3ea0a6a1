package helper

import (
	"fmt"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"time"
)

const (
	redacted = "[redacted]"
	// maxRetired is how many replaced secrets are remembered, and retiredAge for how long: a client uses a replaced key, and
	// may print it, until its advertised validity ends.
	maxRetired = 16
	retiredAge = advertisedLifetime
)

// scrubber removes the secrets that the helper knows from text.
type scrubber struct {
	mu      sync.Mutex
	held    map[string][]string // in use, by owner
	retired []retiredSecret     // the oldest first
}

type retiredSecret struct {
	text  string
	until time.Time
}

// setSecrets sets the secrets of an owner. Its previous secrets are retired.
func (s *scrubber) setSecrets(now time.Time, owner string, secrets ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.held == nil {
		s.held = map[string][]string{}
	}
	before := s.held[owner]
	var texts []string
	for _, secret := range secrets {
		if secret != "" { // the longer ones first, of which the others are parts
			texts = append(texts, secret, percentEncode(secret))
		}
	}
	s.held[owner] = texts
	for _, text := range before {
		if !slices.Contains(texts, text) {
			s.retired = append(s.retired, retiredSecret{text, now.Add(retiredAge)})
		}
	}
	s.retired = s.retired[max(0, len(s.retired)-maxRetired):]
}

func (s *scrubber) dropRetired(now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.retired = slices.DeleteFunc(s.retired, func(r retiredSecret) bool { return !now.Before(r.until) })
}

// scrub returns line without known secrets.
func (s *scrubber) scrub(line string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.each(func(secret string) { line = strings.ReplaceAll(line, secret, redacted) })
	return line
}

// scrubCut is scrub for a line whose end was cut off: it also removes the beginning of a secret at the end.
func (s *scrubber) scrubCut(line string) string {
	line = s.scrub(line)
	s.mu.Lock()
	defer s.mu.Unlock()
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
	for _, f := range s.retired {
		fn(f.text)
	}
}

// percentEncode returns a secret as it appears in the query of a URL; session tokens contain "+", "/" and "=".
func percentEncode(s string) string { return strings.ReplaceAll(url.QueryEscape(s), "+", "%20") }

// maxLog bounds the helper's log in bytes if it is a regular file, as with the process launcher (usually on a tmpfs). A journal
// has limits of its own.
const maxLog = 256 << 10

// logger writes plain lines: time, then text. Everything goes through the scrubber.
type logger struct {
	mu      sync.Mutex
	out     *os.File
	size    int64 // of out, if it is a regular file
	regular bool
	scrub   *scrubber
	now     func() time.Time
}

func newLogger(out *os.File, scrub *scrubber, now func() time.Time) *logger {
	l := &logger{out: out, scrub: scrub, now: now}
	if fi, err := out.Stat(); err == nil && fi.Mode().IsRegular() {
		l.regular, l.size = true, fi.Size()
	}
	return l
}

func (l *logger) printf(format string, args ...any) {
	l.line(l.scrub.scrub(clean(fmt.Appendf(nil, format, args...))))
}

// line writes a line that is cleaned and scrubbed. Errors are ignored: a log failure must not affect the mount.
func (l *logger) line(text string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	stamp := stamp(l.now())
	if l.regular && l.size > maxLog {
		// The launcher opened it for appending, so the next line is written at the start.
		if l.out.Truncate(0) == nil {
			n, _ := l.out.WriteString(stamp + " (log truncated)\n")
			l.size = int64(n)
		}
	}
	n, _ := l.out.WriteString(stamp + " " + text + "\n")
	l.size += int64(n)
}
