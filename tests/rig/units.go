package rig

import (
	"context"
	"errors"
	"fmt"
	"maps"
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

// Units are the names and states of the units of this rig's mounts, by name.
func (r *Rig) Units() (map[string]string, error) {
	out, err := Systemctl("show", "--property=Id,ActiveState,ExecStart", unitPattern)
	if err != nil {
		return nil, err
	}
	units := map[string]string{}
	for unit := range strings.SplitSeq(out, "\n\n") {
		properties := map[string]string{}
		for line := range strings.Lines(unit) {
			name, value, _ := strings.Cut(strings.TrimSpace(line), "=")
			properties[name] = value
		}
		if strings.Contains(properties["ExecStart"], r.State+"/") {
			units[properties["Id"]] = properties["ActiveState"]
		}
	}
	return units, nil
}

// unitsLeft describes the rig's units and their cgroups; those that are just going are waited for.
func (r *Rig) unitsLeft() []string {
	for end := time.Now().Add(unitGrace); ; time.Sleep(10 * time.Millisecond) {
		left := r.unitsNow()
		if len(left) == 0 || time.Now().After(end) {
			return left
		}
	}
}

// unitsNow also has the cgroups that are nobody's: those that have no unit.
func (r *Rig) unitsNow() (left []string) {
	if !r.units {
		return nil
	}
	var cgroups []string
	// The unified hierarchy alone, or those of version 1 side by side.
	for _, pattern := range []string{"/sys/fs/cgroup/" + cgroupPattern, "/sys/fs/cgroup/*/" + cgroupPattern} {
		dirs, _ := filepath.Glob(pattern) // the pattern is well formed
		cgroups = append(cgroups, dirs...)
	}
	all, err1 := Systemctl("list-units", "--all", "--plain", "--no-legend", unitPattern)
	own, err2 := r.Units()
	for try := 0; errors.Join(err1, err2) != nil && try < 100; try++ { // a test restarts what is asked
		time.Sleep(20 * time.Millisecond)
		all, err1 = Systemctl("list-units", "--all", "--plain", "--no-legend", unitPattern)
		own, err2 = r.Units()
	}
	if err := errors.Join(err1, err2); err != nil {
		return []string{err.Error()}
	}
	for name, state := range own {
		left = append(left, "unit "+name+", "+state)
	}
	for _, dir := range cgroups {
		name := filepath.Base(dir)
		if _, ours := own[name]; ours || !strings.Contains(all, name) {
			left = append(left, "cgroup "+dir)
		}
	}
	return left
}

// endUnits ends all of the rig's units by force.
func (r *Rig) endUnits() error {
	if !r.units {
		return nil
	}
	units, err := r.Units()
	if err != nil || len(units) == 0 {
		return err
	}
	names := slices.Collect(maps.Keys(units))
	_, killed := Systemctl(append([]string{"kill", "--signal=KILL"}, names...)...)
	_, stopped := Systemctl(append([]string{"stop"}, names...)...)
	_, forgotten := Systemctl(append([]string{"reset-failed"}, names...)...)
	if left := r.unitsLeft(); len(left) > 0 {
		return errors.Join(fmt.Errorf("left on the host: %s", strings.Join(left, "; ")), killed, stopped, forgotten)
	}
	return nil
}

// Systemctl calls this host's systemd and gives what it says.
func Systemctl(args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, "systemctl", slices.Concat([]string{"--no-pager", "--quiet"}, args)...).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("systemctl %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(string(out)))
	}
	return string(out), nil
}
