//go:build !lane || ordinary

package node

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/moby/sys/mountinfo"
	"google.golang.org/grpc/codes"

	"github.com/s3-csi/s3-csi-driver/pkg/launcher"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
)

// statusOf reads /proc/<pid>/status (proc_pid_status(5)).
func statusOf(t *testing.T, pid int) map[string]string {
	t.Helper()
	fields := map[string]string{}
	for line := range strings.Lines(read(t, fmt.Sprintf("/proc/%d/status", pid))) {
		key, value, _ := strings.Cut(line, ":")
		fields[key] = strings.Join(strings.Fields(value), " ")
	}
	return fields
}

// isLog reports whether a descriptor of a process is a log of the launcher process. That of a former spare has lost its path, because its
// directory has become the mount's.
func (e *env) isLog(p rig.Process, fd string) bool {
	e.t.Helper()
	logs, err := filepath.Glob(filepath.Join(e.State, "scratch", "*", launcher.LogFile))
	if err != nil {
		e.t.Fatal(err)
	}
	open, err := os.Stat(fmt.Sprintf("/proc/%d/fd/%s", p.PID, fd))
	return err == nil && slices.ContainsFunc(logs, func(path string) bool {
		log, err := os.Stat(path)
		return err == nil && os.SameFile(log, open)
	})
}

// descriptors are what a process has open: number → link.
func descriptors(t *testing.T, pid int) map[string]string {
	t.Helper()
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	links := map[string]string{}
	for _, entry := range entries {
		if link, err := os.Readlink(filepath.Join(dir, entry.Name())); err == nil {
			links[entry.Name()] = link
		}
	}
	return links
}

// unixSockets are the inodes of UNIX sockets with a path, as links in /proc show them.
func unixSockets(t *testing.T) map[string]string {
	t.Helper()
	found := map[string]string{}
	for line := range strings.Lines(read(t, "/proc/net/unix")) {
		if f := strings.Fields(line); len(f) == 8 {
			found["socket:["+f[6]+"]"] = f[7]
		}
	}
	return found
}

// Helpers and clients have a user id of their own and no way to any other power.
func TestClientsHaveNoPrivileges(t *testing.T) {
	t.Parallel()
	e := start(t)
	volumes, targets := map[string]string{}, map[string]string{}
	for _, client := range clients {
		targets[client] = e.publish(static("alone-"+client, client), client)
		volumes[client] = "alone-" + client
	}
	seen := map[int]string{}
	for _, client := range clients {
		c := e.client(client)
		if other := seen[c.UID]; other != "" {
			t.Errorf("clients %s and %s have the same uid %d", client, other, c.UID)
		}
		seen[c.UID] = client
		if c.UID < e.FirstUID || c.UID > e.LastUID {
			t.Errorf("client %s: uid %d is not of --uid-range", client, c.UID)
		}
	}
	all := e.Running("")
	if len(all) != 2*len(clients) {
		t.Errorf("processes: %v", all)
	}
	sockets := unixSockets(t)
	for _, p := range all {
		status := statusOf(t, p.PID)
		uid := fmt.Sprint(p.UID)
		ids := strings.Join([]string{uid, uid, uid, uid}, " ")
		for field, want := range map[string]string{
			"Uid": ids, "Gid": ids, "Groups": "", "NoNewPrivs": "1",
			"CapInh": strings.Repeat("0", 16), "CapPrm": strings.Repeat("0", 16), "CapEff": strings.Repeat("0", 16),
			"CapBnd": strings.Repeat("0", 16), "CapAmb": strings.Repeat("0", 16),
		} {
			if got, ok := status[field]; !ok || got != want {
				t.Errorf("%s: %s is %q, want %q", p.Name, field, got, want)
			}
		}
		fuse := 0
		for fd, link := range descriptors(t, p.PID) {
			own := strings.HasPrefix(link, filepath.Join(e.State, "scratch")+"/") || strings.HasPrefix(link, e.Cache+"/") || e.isLog(p, fd)
			switch {
			case link == "/dev/fuse":
				fuse++
			case own, link == os.DevNull, link == "/dev/urandom", strings.HasPrefix(link, "pipe:"), strings.HasPrefix(link, "anon_inode:"):
			case strings.HasPrefix(link, "socket:"):
				path := sockets[link]
				former := filepath.Dir(filepath.Dir(path)) == filepath.Join(e.State, "spares") && // the kernel shows where it was made
					slices.Contains(strings.Split(read(t, fmt.Sprintf("/proc/%d/cmdline", p.PID)), "\x00"), filepath.Base(filepath.Dir(path)))
				if path != "" && !former && !strings.HasPrefix(path, filepath.Join(e.State, "mounts")+"/") {
					t.Errorf("%s: descriptor %s is the socket %s", p.Name, fd, path)
				}
			case strings.HasPrefix(link, "/proc/"), strings.HasPrefix(link, "/sys/fs/cgroup"): // a runtime's looks at itself
			default:
				t.Errorf("%s: descriptor %s is %s", p.Name, fd, link)
			}
		}
		if isClient := seen[p.UID] != "" && p.Name == programs[seen[p.UID]]; isClient && fuse != 1 || !isClient && fuse != 0 {
			t.Errorf("%s has %d FUSE descriptors", p.Name, fuse)
		}
		e.noSecretIn(p.Name+"'s command line", []byte(read(t, fmt.Sprintf("/proc/%d/cmdline", p.PID))))
		e.noSecretIn(p.Name+"'s environment", []byte(read(t, fmt.Sprintf("/proc/%d/environ", p.PID))))
		if strings.Contains(read(t, fmt.Sprintf("/proc/%d/environ", p.PID)), e.Rig.S3.Keys.AccessKeyID) {
			t.Errorf("%s's environment holds an access key", p.Name)
		}
	}
	for fd, link := range descriptors(t, e.PID()) {
		if link == "/dev/fuse" {
			t.Errorf("the driver holds a FUSE descriptor, %s", fd)
		}
	}
	for client, target := range targets {
		e.unpublish(static(volumes[client], client), target)
	}
	e.NothingLeft(t)
}

// What a client could try on its own does not work: it cannot open /dev/fuse (where that is root's) nor mount.
func TestClientsCannotMount(t *testing.T) {
	t.Parallel()
	e := start(t)
	e.program(rclone, `
( : 9<>/dev/fuse ) && echo opened || echo refused
/usr/bin/unshare -r -m /bin/true 2>&1
/bin/mount -t tmpfs none /tmp 2>&1 && echo mounted
/bin/cat `+filepath.Join(e.State, "salt")+` 2>&1
/bin/ls `+filepath.Join(e.State, "mounts")+` 2>&1
exit 3
`)
	err := e.tryPublish(30*time.Second, static("v", rclone), e.Target("t"))
	want(t, err, codes.Unavailable, "exit status 3")
	if fi, statErr := os.Stat("/dev/fuse"); statErr == nil && fi.Mode().Perm()&0o006 == 0 && !strings.Contains(err.Error(), "refused") {
		t.Errorf("/dev/fuse could be opened: %v", err)
	}
	if strings.Contains(err.Error(), "| mounted") {
		t.Errorf("it could mount: %v", err)
	}
	if n := strings.Count(err.Error(), "Permission denied"); n < 2 {
		t.Errorf("it looked into the driver's state: %v", err)
	}
	e.undone(e.Target("t"))
}

// A publication is nosuid and nodev whatever its author asks for.
func TestPublicationsAreNosuidAndNodev(t *testing.T) {
	t.Parallel()
	e := start(t)
	v := static("flags", rclone)
	target := e.publish(v, "t")
	for _, m := range mountsAt(t, target) {
		checkOptions(t, m, "nosuid", "nodev", "rw")
		// Containers can be its slaves. Nothing is mounted in it by what is mounted elsewhere.
		if group, alone := strings.CutPrefix(m.Optional, "shared:"); !alone || strings.Contains(group, " ") {
			t.Errorf("%s has the propagation %q, want that of a shared mount", m.Mountpoint, m.Optional)
		}
		if peers := peersOf(t, m); len(peers) > 0 {
			t.Errorf("%s is not alone in its peer group: %v", m.Mountpoint, peers)
		}
	}
	e.unpublish(v, target)
	e.NothingLeft(t)
}

// peersOf returns the other mount points of a shared mount's peer group.
func peersOf(t *testing.T, m *mountinfo.Info) []string {
	t.Helper()
	var peers []string
	_, err := mountinfo.GetMounts(func(other *mountinfo.Info) (skip, stop bool) {
		if other.ID != m.ID && slices.Contains(strings.Fields(other.Optional), m.Optional) {
			peers = append(peers, other.Mountpoint)
		}
		return true, false
	})
	if err != nil {
		t.Fatal(err)
	}
	return peers
}

func checkOptions(t *testing.T, m *mountinfo.Info, options ...string) {
	t.Helper()
	for _, o := range options {
		if !strings.Contains(","+m.Options+",", ","+o+",") {
			t.Errorf("%s lacks %s: %s", m.Mountpoint, o, m.Options)
		}
	}
}
