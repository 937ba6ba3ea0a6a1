package rig

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// Names of systemd's that mounts have on a host.
const (
	unitPattern   = "s3csi-*.service"
	cgroupPattern = "system.slice/system-s3csi.slice/" + unitPattern
)

// unitGrace is how long systemd may take to clear away a unit whose processes have ended.
const unitGrace = 5 * time.Second

// unitsLeft describes the units of this host and their cgroups; those that are just going are waited for. A rig with units
// is the only one on its host.
func (r *Rig) unitsLeft() []string {
	if !r.units {
		return nil
	}
	for end := time.Now().Add(unitGrace); ; time.Sleep(10 * time.Millisecond) {
		left := unitsNow()
		if len(left) == 0 || time.Now().After(end) {
			return left
		}
	}
}

func unitsNow() (left []string) {
	out, err := systemctl("list-units", "--all", "--plain", "--no-legend", unitPattern)
	if err != nil {
		return []string{err.Error()}
	}
	for line := range strings.Lines(out) {
		left = append(left, "unit "+strings.Join(strings.Fields(line), " "))
	}
	// The unified hierarchy alone, or those of version 1 side by side.
	for _, pattern := range []string{"/sys/fs/cgroup/" + cgroupPattern, "/sys/fs/cgroup/*/" + cgroupPattern} {
		dirs, _ := filepath.Glob(pattern) // the pattern is well formed
		for _, dir := range dirs {
			left = append(left, "cgroup "+dir)
		}
	}
	return left
}

// endUnits ends all units by force.
func (r *Rig) endUnits() error {
	if !r.units || len(unitsNow()) == 0 {
		return nil
	}
	_, killed := systemctl("kill", "--signal=KILL", unitPattern)
	_, stopped := systemctl("stop", unitPattern)
	_, forgotten := systemctl("reset-failed", unitPattern)
	if left := r.unitsLeft(); len(left) > 0 {
		return errors.Join(fmt.Errorf("left on the host: %s", strings.Join(left, "; ")), killed, stopped, forgotten)
	}
	return nil
}

func systemctl(args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, "systemctl", slices.Concat([]string{"--no-pager", "--quiet"}, args)...).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("systemctl %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(string(out)))
	}
	return string(out), nil
}
