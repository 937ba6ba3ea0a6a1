package helper

import (
	"fmt"
	"os"
	"sync"
	"time"
)

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
	l.line(l.scrub.scrub(clean(fmt.Appendf(nil, format, args...)), false))
}

// line writes a line that is cleaned and scrubbed. Errors are ignored: a mount is worth more than its log.
func (l *logger) line(text string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	stamp := l.now().UTC().Format(time.RFC3339)
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
