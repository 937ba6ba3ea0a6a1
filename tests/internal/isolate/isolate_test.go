package isolate_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/tests/internal/isolate"
)

func TestMain(m *testing.M) { os.Exit(isolate.Main(m.Run)) }

func needRoot(t *testing.T) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root: it makes namespaces")
	}
}

// What other packages' tests start is invisible here, and what is orphaned here is reaped.
func TestOnlyOwnProcesses(t *testing.T) {
	needRoot(t)
	out, err := exec.CommandContext(t.Context(), "sh", "-c", "(sleep 0.1 & echo $!) | cat").Output()
	if err != nil {
		t.Fatal(err)
	}
	orphan := "/proc/" + strings.TrimSpace(string(out))
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		_, err := os.Stat(orphan)
		if err != nil {
			break
		}
		if time.Now().After(end) {
			t.Fatal("an orphan that exited is not reaped")
		}
	}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if name := e.Name(); strings.Trim(name, "0123456789") == "" {
			if exe, _ := os.Readlink("/proc/" + name + "/exe"); !strings.HasSuffix(exe, ".test") {
				t.Errorf("process %s, %q, is not of these tests", name, exe)
			}
		}
	}
}

// A client that another package's tests have mounted ends with its mount there.
func TestNoClientsOfOthers(t *testing.T) {
	needRoot(t)
	const fuseHere = "S3CSI_TEST_FUSE"
	if os.Getenv(fuseHere) != "" {
		table, err := os.ReadFile("/proc/self/mountinfo")
		if err != nil || strings.Contains(string(table), " - fuse ") {
			t.Errorf("%v\n%s", err, table)
		}
		return
	}
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Skip("needs /dev/fuse: ", err)
	}
	defer unix.Close(fd)
	dir := t.TempDir()
	if err := unix.Mount("other", dir, "fuse", 0, fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", fd)); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	}()
	inner := exec.CommandContext(t.Context(), "/proc/self/exe", "-test.run", "^"+t.Name()+"$")
	inner.Env = []string{fuseHere + "=1"}
	if out, err := inner.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

func TestOwnNetwork(t *testing.T) {
	needRoot(t)
	for _, address := range []string{"127.0.0.1:53", "192.0.2.1:53"} {
		l, err := new(net.ListenConfig).Listen(context.Background(), "tcp", address)
		if err != nil {
			t.Error(err)
			continue
		}
		_ = l.Close()
	}
	interfaces, err := net.Interfaces()
	if err != nil || len(interfaces) == 0 || interfaces[0].Flags&net.FlagUp == 0 {
		t.Errorf("interfaces %v, %v, want the loopback interface, which is up", interfaces, err)
	}
}
