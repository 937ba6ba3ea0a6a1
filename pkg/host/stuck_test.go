//go:build linux

package host

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/proc"
)

// The ways in which getStuck waits for a client that does not answer.
const (
	stuckMapped = "mapped" // executes a program with a changed page of a shared mapping, which the kernel writes first
	stuckFile   = "file"   // executes a program with a close-on-exec file open, which the kernel flushes first
)

// getStuck gets stuck with a file of a FUSE file system. It returns only an error.
func getStuck(way, file string) error {
	fd, err := unix.Open(file, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	if way == stuckMapped {
		page, err := unix.Mmap(fd, 0, fakeSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		if err != nil {
			return err
		}
		page[0] = 1
	}
	fmt.Println("ready")
	if way == stuckFile {
		_, err := syscall.ForkExec("/bin/true", []string{"true"}, nil) // its child gets stuck, and this process waits for that
		return err
	}
	return unix.Exec("/bin/true", []string{"true"}, nil)
}

// stuck starts a process that gets stuck and returns its pid. The file system is at dir.
func stuck(t *testing.T, way, dir string) int {
	t.Helper()
	cmd := exec.Command("/proc/self/exe", way, dir+"/file")
	cmd.Env = append(os.Environ(), levelEnv+"="+levelStuck)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := out.Read(make([]byte, 6)); err != nil {
		t.Fatal(err)
	}
	return cmd.Process.Pid
}

func TestExp(t *testing.T) {
	needMounts(t)
	n := testNamespace(t)
	if n.Foreign() { t.Skip() }
	dir := hostDir(t, n)
	for _, way := range []string{stuckMapped, stuckFile} {
		place := mkdir(t, dir, way)
		startFake(t, n, place, &fakeFuse{source: "s3csi:stuck", nodes: fakeNodes(), unanswered: map[uint32]bool{opWrite: true, opFlush: true}})
		pid := stuck(t, way, place)
		time.Sleep(300*time.Millisecond)
		if way == stuckFile {
			kids, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid))
			all, _ := exec.Command("sh", "-c", "for p in /proc/[0-9]*; do [ \"$(sed -n 's/^PPid:.//p' $p/status)\" = "+fmt.Sprint(pid)+" ] && basename $p; done").Output()
			t.Logf("children %q %q", kids, all)
			fmt.Sscan(strings.TrimSpace(string(all)), &pid)
		}
		for _, f := range []string{"stat", "status", "cgroup", "comm", "mountinfo", "uid_map", "ns/mnt", "ns/pid", "ns/user", "cwd", "root", "exe", "fd", "fdinfo", "maps", "cmdline", "environ", "io", "oom_score_adj", "limits", "wchan", "stack", "syscall", "task", "setgroups", "loginuid", "attr/current", "mounts", "auxv", "smaps_rollup","fd/0","fdinfo/0"} {
			done := make(chan string, 1)
			go func() {
				p := proc.Path(pid, f)
				if l, err := os.Readlink(p); err == nil { 
					_ , err := os.Stat(p)
					done <- "link "+l+fmt.Sprint(err); return }
				b, err := os.ReadFile(p)
				done <- fmt.Sprint(len(b), err)
			}()
			select {
			case r := <-done: t.Logf("%s %s: %s", way, f, r)
			case <-time.After(200*time.Millisecond): t.Logf("%s %s: BLOCKS", way, f)
			}
		}
		pfd, err := unix.PidfdOpen(pid, 0)
		t.Log(pfd, err)
		for _, c := range []uintptr{3, 5, 9} { // mnt, pid, user
			done := make(chan string, 1)
			go func() {
				fd, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(pfd), 0xFF00|c, 0)
				l, _ := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
				done <- fmt.Sprint(int(fd), e, l)
			}()
			select {
			case r := <-done: t.Logf("%s ioctl %d: %s", way, c, r)
			case <-time.After(200*time.Millisecond): t.Logf("%s ioctl %d: BLOCKS", way, c)
			}
		}
		done := make(chan string, 1)
		go OnThrowawayThread(func() { unix.Unshare(unix.CLONE_FS); done <- fmt.Sprint(unix.Setns(pfd, unix.CLONE_NEWNS)) })
		select {
		case r := <-done: t.Logf("%s setns: %s", way, r)
		case <-time.After(200*time.Millisecond): t.Logf("%s setns: BLOCKS", way)
		}
	}
}
