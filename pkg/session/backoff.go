package session

import "time"

// WithBackoff sets the longest pause between two attempts, 2 s otherwise, and returns the Maker. It must be called before Make.
func (m *Maker) WithBackoff(longest time.Duration) *Maker {
	m.backoff = longest
	return m
}
