package main

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"
)

// noConfig keeps rclone from looking for a configuration file.
const noConfig = "RCLONE_CONFIG=/dev/null"

// leaveEnvironment makes rclone ignore RCLONE_* variables and configuration files. rclone reads both while its packages are
// initialised, before main, so the program executes itself again without them. A supervisor that sets RCLONE_CONFIG=/dev/null,
// HOME and no other variable of rclone avoids that.
func leaveEnvironment() error {
	env := os.Environ()
	clean := cleanEnvironment(env)
	if slices.Equal(env, clean) {
		return nil
	}
	// The FUSE descriptor is inherited: nothing has set close-on-exec on it yet.
	if err := syscall.Exec("/proc/self/exe", os.Args, clean); err != nil { //nolint:gosec // this very program, with its own arguments
		return fmt.Errorf("restart without RCLONE_* variables: %w; unset them", err)
	}
	return nil
}

// cleanEnvironment returns the environment to run in. It is idempotent.
func cleanEnvironment(env []string) []string {
	clean := make([]string, 0, len(env)+2)
	home, none := false, false
	for _, kv := range env {
		ours := kv == noConfig && !none
		if (strings.HasPrefix(kv, "RCLONE_") || strings.HasPrefix(kv, "_RCLONE_")) && !ours {
			continue
		}
		none = none || ours
		home = home || strings.HasPrefix(kv, "HOME=") && kv != "HOME="
		clean = append(clean, kv)
	}
	if !none {
		clean = append(clean, noConfig)
	}
	if !home {
		// Without HOME, rclone runs other programs to find it.
		clean = append(slices.DeleteFunc(clean, func(kv string) bool { return kv == "HOME=" }), "HOME=/nonexistent")
	}
	return clean
}
