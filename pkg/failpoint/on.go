//go:build failpoints

// Package failpoint marks the steps between which a crash must do no harm. Only programs built with the tag failpoints, for
// tests, can be held at such a step.
package failpoint

import (
	"os"
	"path/filepath"
	"time"
)

// EnvDir names a directory. A step is held there for as long as the file "hold-<step>" exists in it, and shows that with the
// file "at-<step>".
const EnvDir = "S3CSI_FAILPOINTS"

// Here is a step.
func Here(step string) {
	dir := os.Getenv(EnvDir)
	if dir == "" {
		return
	}
	hold, at := filepath.Join(dir, "hold-"+step), filepath.Join(dir, "at-"+step)
	for ; exists(hold); time.Sleep(2 * time.Millisecond) {
		_ = os.WriteFile(at, nil, 0o600) // a directory that is gone holds nobody
	}
	_ = os.Remove(at)
}

func exists(file string) bool {
	_, err := os.Lstat(file)
	return err == nil
}
