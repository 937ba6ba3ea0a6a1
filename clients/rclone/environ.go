package main

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"
)

// noConfig tells rclone that there is no configuration file, before it has looked for one.
const noConfig = "RCLONE_CONFIG=/dev/null"

// leaveEnvironment makes sure that no RCLONE_* variable and no configuration file decides anything. rclone reads both
// while its packages are initialised, before main, so the only way to be rid of them is to start again without. A
// supervisor that sets RCLONE_CONFIG=/dev/null, some HOME and nothing else of rclone's saves that.
func leaveEnvironment() error {
	env := os.Environ()
	clean := cleanEnvironment(env)
	if slices.Equal(env, clean) {
		return nil
	}
	// The FUSE descriptor is inherited: nothing has set close-on-exec on it yet.
	if err := syscall.Exec("/proc/self/exe", os.Args, clean); err != nil { //nolint:gosec // this very program, with its own arguments
		return fmt.Errorf("starting again without RCLONE_* variables (unset them instead): %w", err)
	}
	return nil
}

// cleanEnvironment is the environment that the program runs in; it is its own clean environment.
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
		// Without one rclone runs other programs to find it.
		clean = append(slices.DeleteFunc(clean, func(kv string) bool { return kv == "HOME=" }), "HOME=/nonexistent")
	}
	return clean
}
