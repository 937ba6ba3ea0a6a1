package faults

import (
	"context"
	"fmt"
	"os/exec"
	"strings"
	"time"

	"github.com/s3-csi/s3-csi-driver/tests/rig"
)

// units are the names of the units, and the cgroups, of the lane's mounts: other lanes have theirs on the same host.
func (l *lane) units() []string {
	if l.Launcher != rig.LauncherSystemd {
		return nil
	}
	out, err := systemctl("show", "--property=Id,ActiveState,ExecStart", "s3csi-*.service")
	for range 100 { // another cell restarts what is asked
		if err == nil {
			break
		}
		time.Sleep(20 * time.Millisecond)
		out, err = systemctl("show", "--property=Id,ActiveState,ExecStart", "s3csi-*.service")
	}
	if err != nil {
		return []string{err.Error()}
	}
	var units []string
	for unit := range strings.SplitSeq(out, "\n\n") {
		if !strings.Contains(unit, l.State+"/") {
			continue
		}
		var id, state string
		for line := range strings.Lines(unit) {
			name, value, _ := strings.Cut(strings.TrimSpace(line), "=")
			switch name {
			case "Id":
				id = value
			case "ActiveState":
				state = value
			}
		}
		units = append(units, id+", "+state)
	}
	return units
}

// mainPID is the bus's; "" where systemd does not answer.
func mainPID() string {
	out, _ := systemctl("show", "--value", "--property=MainPID", "dbus.service")
	return strings.TrimSpace(out)
}

func systemctl(args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, "systemctl", append([]string{"--no-pager"}, args...)...).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("systemctl %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(string(out)))
	}
	return string(out), nil
}
