//go:build failpoints

// Package failpoint marks steps at which a crash must do no harm. Tests hold a program at such a step and kill it. Only programs
// built with the tag failpoints can be held.
package failpoint

import (
	"os"
	"path/filepath"
	"time"
)

// EnvDir is the environment variable with a directory. A step is held as long as the file "hold-<step>" exists there. A held step
// creates the file "at-<step>".
const EnvDir = "S3CSI_FAILPOINTS"

// Here marks a step, and waits as long as a test holds the step.
func Here(step string) {
	dir := os.Getenv(EnvDir)
	if dir == "" {
		return
	}
	hold, at := filepath.Join(dir, "hold-"+step), filepath.Join(dir, "at-"+step)
	for pause := time.Millisecond; exists(hold); pause = min(2*pause, 32*time.Millisecond) {
		if !exists(at) {
			_ = os.WriteFile(at, nil, 0o600) // a removed directory holds no step
		}
		time.Sleep(pause)
	}
	_ = os.Remove(at)
}

func exists(file string) bool {
	_, err := os.Lstat(file)
	return err == nil
}
