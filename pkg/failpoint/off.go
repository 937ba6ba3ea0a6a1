//go:build !failpoints

// Package failpoint marks steps at which a crash must do no harm. Tests hold a program at such a step and kill it. Only programs
// built with the tag failpoints can be held.
package failpoint

// Here marks a step. It does nothing in programs for users.
func Here(string) {}
