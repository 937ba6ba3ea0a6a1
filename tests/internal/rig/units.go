package rig

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Names of systemd's that mounts have on a host.
const (
	unitPattern   = "s3csi-*.service"
	cgroupPattern = "system.slice/system-s3csi.slice/" + unitPattern
)

// unitGrace is how long systemd may take to clear away a unit whose processes have ended.
const unitGrace = 5 * time.Second

// Units are the names and states of the units of this rig's mounts, by name; those of spares are not among them.
func (r *Rig) Units() (map[string]string, error) {
	units, err := r.allUnits()
	for name := range r.Spares() {
		delete(units, "s3csi-"+name+".service")
	}
	return units, err
}

// allUnits are the Units and those of spares.
func (r *Rig) allUnits() (map[string]string, error) {
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

// UnitOf is the unit of the helper of a mount, by the mount's record.
func (r *Rig) UnitOf(mount string) (string, error) {
	file := filepath.Join(r.State, "mounts", mount, "mount.json")
	b, err := os.ReadFile(file)
	if err != nil {
		return "", err
	}
	record := struct{ Name, Spare string }{}
	if err := json.Unmarshal(b, &record); err != nil {
		return "", fmt.Errorf("%s: %w", file, err)
	}
	return "s3csi-" + cmp.Or(record.Spare, record.Name) + ".service", nil
}

// unitsLeft describes the rig's units and their cgroups; those that are just going are waited for.
func (r *Rig) unitsLeft() []string {
	for end, pause := time.Now().Add(unitGrace), 10*time.Millisecond; ; pause = min(2*pause, 100*time.Millisecond) {
		left := r.UnitTraces()
		if len(left) == 0 || time.Now().After(end) {
			return left
		}
		time.Sleep(pause)
	}
}

// UnitTraces lists the units of mounts, and cgroups that have no unit. It asks systemd, which costs much more than Traces.
func (r *Rig) UnitTraces() (left []string) {
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
	spares := r.Spares()
	for _, dir := range cgroups {
		name := filepath.Base(dir)
		if _, spare := spares[strings.TrimSuffix(strings.TrimPrefix(name, "s3csi-"), ".service")]; spare {
			continue
		}
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
	units, err := r.allUnits()
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

// sparePrefix begins the names of spares.
const sparePrefix = "spare-"

// Spares are the uids of the helpers that the driver has started ahead of need and that no mount has taken, by the names of their
// units. A spare's cache directory becomes the mount's.
func (r *Rig) Spares() map[string]int {
	found := map[string]int{}
	entries, _ := os.ReadDir(r.Cache)
	for _, e := range entries {
		var st unix.Stat_t
		if strings.HasPrefix(e.Name(), sparePrefix) && unix.Lstat(filepath.Join(r.Cache, e.Name()), &st) == nil {
			found[e.Name()] = int(st.Uid)
		}
	}
	return found
}

// isSpare reports whether a path is one of a spare.
func isSpare(path string) bool { return strings.HasPrefix(filepath.Base(path), sparePrefix) }

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
