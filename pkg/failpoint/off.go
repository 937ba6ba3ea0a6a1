//go:build !failpoints

// Package failpoint marks the steps between which a crash must do no harm. Only programs built with the tag failpoints, for
// tests, can be held at such a step.
package failpoint

// Here is a step. In programs for users it is nothing.
func Here(string) {}
