package conc

import (
	"strings"
	"sync"
	"time"
)

// maxSubjects bounds the memory of a LogLimiter.
const maxSubjects = 10000

// LogLimiter decides which messages are logged: each subject's when its text changes, and otherwise once per Repeat. It is safe for
// concurrent use; its fields must be set before.
type LogLimiter struct {
	Repeat time.Duration
	// Burst and PerSecond bound the messages of all subjects together; a Burst of 0: there is no bound.
	Burst, PerSecond float64

	mu      sync.Mutex
	last    map[string]message // by subject
	used    float64            // of Burst
	when    time.Time          // of used
	dropped int                // since a message was logged
}

type message struct {
	text    string
	when    time.Time
	dropped int
}

// Allow reports whether a message is to be logged, and how many were not, of this subject and for the bound of all, since the last ones
// that were. Numbers in the text do not count: durations and sizes differ each time.
func (l *LogLimiter) Allow(subject, text string, now time.Time) (ok bool, dropped int) {
	text = strings.Map(func(r rune) rune {
		if r >= '0' && r <= '9' {
			return -1
		}
		return r
	}, text)
	l.mu.Lock()
	defer l.mu.Unlock()
	m, known := l.last[subject]
	if known && m.text == text && now.Sub(m.when) < l.Repeat {
		m.dropped++
		l.last[subject] = m
		return false, 0
	}
	l.used, l.when = max(0, l.used-l.PerSecond*now.Sub(l.when).Seconds()), now
	if l.Burst > 0 && l.used > l.Burst-1 {
		l.dropped++
		return false, 0
	}
	l.used++
	delete(l.last, subject)
	l.forget(now)
	dropped, l.dropped = l.dropped+m.dropped, 0
	l.last[subject] = message{text: text, when: now}
	return true, dropped
}

// forget makes room for a subject.
func (l *LogLimiter) forget(now time.Time) {
	if l.last == nil {
		l.last = map[string]message{}
	}
	for s, m := range l.last {
		if now.Sub(m.when) >= l.Repeat {
			l.dropped += m.dropped
			delete(l.last, s)
		}
	}
	for s, m := range l.last { // any of them is logged again too early
		if len(l.last) < maxSubjects {
			break
		}
		l.dropped += m.dropped
		delete(l.last, s)
	}
}
