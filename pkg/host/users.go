//go:build linux

package host

import (
	"context"
	"fmt"
	"os"
	"strings"
)

// maxUsers bounds how many users of a mount are named.
const maxUsers = 10

// Users names processes that keep a mount busy: a working or root directory, an executable or an open file on it. It
// reads only links and fdinfo of /proc, never a file on the mount, so that it answers for a hung mount too. At most
// ten are named, as "bash (pid 12)"; processes that this one may not look into, and memory maps of closed files, are
// not seen.
func (n *Namespace) Users(ctx context.Context, m Mount) ([]string, error) {
	var users []string
	err := n.run(ctx, "looking for users of "+m.Mountpoint, nil, func() error {
		pids, err := processes()
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

// usesMount tells whether a process keeps a mount busy.
func usesMount(pid int, m Mount) bool {
	for _, link := range []string{"cwd", "root", "exe"} {
		place, err := os.Readlink(procPath(pid, link))
		if err == nil && isBelow(place, m.Mountpoint) && seesMount(pid, m) {
			return true
		}
	}
	fds, err := os.ReadDir(procPath(pid, "fdinfo"))
	if err != nil {
		return false
	}
	for _, fd := range fds {
		info, err := os.ReadFile(procPath(pid, "fdinfo", fd.Name()))
		if err != nil {
			continue
		}
		if id, ok := fdinfoMountID(string(info)); ok && id == m.ID {
			return true
		}
	}
	return false
}

// seesMount tells whether a mount is in a process's namespace: paths of other namespaces can read alike.
func seesMount(pid int, m Mount) bool {
	// One line is looked for, so a list that changes meanwhile does no harm worth a second read.
	table, err := os.ReadFile(procPath(pid, "mountinfo"))
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

// isBelow tells whether place is dir or in it.
func isBelow(place, dir string) bool {
	return place == dir || strings.HasPrefix(place, strings.TrimSuffix(dir, "/")+"/")
}
