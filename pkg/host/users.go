//go:build linux

package host

import (
	"context"
	"fmt"
	"os"
	"strings"

	"github.com/s3-csi/s3-csi-driver/pkg/proc"
)

// maxUsers bounds the users of a mount that are named.
const maxUsers = 10

// Users returns up to ten processes that keep a mount busy, as "bash (pid 12)": their working or root directory, executable or an
// open file is on it. It reads only links and fdinfo in /proc, and so answers for an unresponsive mount, too. It does not see
// processes that this one may not inspect, nor memory maps of closed files.
func (n *Namespace) Users(ctx context.Context, m Mount) ([]string, error) {
	var users []string
	err := n.run(ctx, "searching for users of "+m.Mountpoint, nil, func() error {
		pids, err := proc.PIDs()
		if err != nil {
			return err
		}
		var found []string
		for _, pid := range pids {
			if ctx.Err() != nil || len(found) == maxUsers {
				break
			}
			if usesMount(pid, m) {
				found = append(found, processName(pid))
			}
		}
		users = found
		return ctx.Err()
	})
	if err != nil {
		return nil, err
	}
	return users, nil
}

// usesMount reports whether a process keeps a mount busy.
func usesMount(pid int, m Mount) bool {
	for _, link := range []string{"cwd", "root", "exe"} {
		place, err := os.Readlink(proc.Path(pid, link))
		if err == nil && isBelow(place, m.Mountpoint) && seesMount(pid, m) {
			return true
		}
	}
	fds, err := os.ReadDir(proc.Path(pid, "fdinfo"))
	if err != nil {
		return false
	}
	for _, fd := range fds {
		info, err := os.ReadFile(proc.Path(pid, "fdinfo", fd.Name()))
		if err != nil {
			continue
		}
		if id, ok := fdinfoMountID(string(info)); ok && id == m.ID {
			return true
		}
	}
	return false
}

// seesMount reports whether a mount is in a process's namespace. A path alone could be one of another namespace.
func seesMount(pid int, m Mount) bool {
	// One line is enough, so a table that changes during the read is not read again.
	table, err := os.ReadFile(proc.Path(pid, "mountinfo"))
	if err != nil {
		return false
	}
	id := fmt.Sprintf("%d ", m.ID)
	for line := range strings.Lines(string(table)) {
		if strings.HasPrefix(line, id) {
			return true
		}
	}
	return false
}

// isBelow reports whether place is dir or in it.
func isBelow(place, dir string) bool {
	return place == dir || strings.HasPrefix(place, strings.TrimSuffix(dir, "/")+"/")
}
