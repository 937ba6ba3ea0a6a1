package faults

import (
	"context"
	"fmt"
	"os/exec"
	"strings"
	"time"

	"github.com/s3-csi/s3-csi-driver/tests/rig"
)

// units are those of the test node's mounts: other test nodes have theirs on the same host.
func (l *testNode) units() []string {
	if l.Launcher != rig.LauncherSystemd {
		return nil
	}
	units, err := l.Units()
	for range 100 { // another scenario restarts what is asked
		if err == nil {
			break
		}
		time.Sleep(20 * time.Millisecond)
		units, err = l.Units()
	}
	if err != nil {
		return []string{err.Error()}
	}
	var all []string
	for name, state := range units {
		all = append(all, name+", "+state)
	}
	return all
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
