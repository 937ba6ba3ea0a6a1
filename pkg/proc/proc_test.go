package proc

import (
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"
)

func status(state, uids, threads string) Status {
	return Status("Name:\tUid:\t5000\nState:\t" + state + "\nUid:\t" + uids + "\nThreads:\t" + threads + "\n")
}

func TestStatusShowsWhetherAProcessRuns(t *testing.T) {
	for _, tc := range []struct {
		what, state, threads string
		want                 bool
	}{
		{"sleeping", "S (sleeping)", "3", true},
		{"blocked in the kernel", "D (disk sleep)", "1", true},
		{"zombie", "Z (zombie)", "1", false},
		{"zombie with a thread that is blocked", "Z (zombie)", "2", true},
		{"dead", "X (dead)", "1", false},
		{"no state", "", "1", false},
	} {
		if got := status(tc.state, "1\t1\t1\t1", tc.threads).Running(); got != tc.want {
			t.Errorf("%s: %v", tc.what, got)
		}
	}
	if Status(nil).Running() {
		t.Error("an empty status runs")
	}
}

func TestStatusUIDs(t *testing.T) {
	ruid, euid, ok := status("S", "7\t8\t9\t10", "1").UIDs()
	if ruid != 7 || euid != 8 || !ok {
		t.Errorf("%d, %d, %t", ruid, euid, ok)
	}
	for _, uids := range []string{"", "7", "-1\t0\t0\t0", "0\tx\t0\t0", "4294967296\t0\t0\t0"} {
		if ruid, euid, ok := status("S", uids, "1").UIDs(); ok {
			t.Errorf("%q: %d, %d", uids, ruid, euid)
		}
	}
	if _, _, ok := Status("Name:\tUid: 4 4 4 4\n").UIDs(); ok {
		t.Error("the name is taken for the uid")
	}
}

func TestThisProcess(t *testing.T) {
	pid := os.Getpid()
	pids, err := PIDs()
	if err != nil || !slices.Contains(pids, pid) {
		t.Errorf("%d is not in %v, %v", pid, pids, err)
	}
	s, err := ReadStatus(pid)
	if err != nil {
		t.Fatal(err)
	}
	ruid, euid, ok := s.UIDs()
	if !ok || int(ruid) != os.Getuid() || int(euid) != os.Geteuid() || !s.Running() || s.Field("TracerPid") == "" || s.Field("Missing") != "" {
		t.Errorf("%s", s)
	}
	if used, err := CPUTime(pid); err != nil || used < 0 {
		t.Errorf("%s, %v", used, err)
	}
}

func TestProcessThatHasExitedIsGone(t *testing.T) {
	cmd := exec.Command("true")
	if err := cmd.Run(); err != nil {
		t.Fatal(err)
	}
	if _, err := ReadStatus(cmd.Process.Pid); !Gone(err) {
		t.Errorf("its status: %v", err)
	}
	if _, err := CPUTime(cmd.Process.Pid); !Gone(err) {
		t.Errorf("its CPU time: %v", err)
	}
}

func FuzzStatus(f *testing.F) {
	f.Add([]byte(status("S (sleeping)", "5000\t5000\t5000\t5000", "3")))
	f.Add([]byte("Uid:\t5000"))
	f.Fuzz(func(t *testing.T, text []byte) {
		s := Status(text)
		_ = s.Running()
		if ruid, _, ok := s.UIDs(); ok && ruid == 5000 && !strings.Contains(string(text), "5000") {
			t.Error("a uid that is not there")
		}
	})
}

// A reader returns what the kernel shows of each process, also when the status before was longer, or is longer than its buffer.
func TestStatusReaderReadsOneAfterTheOther(t *testing.T) {
	other := exec.Command("sleep", "60")
	if err := other.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = other.Process.Kill(); _ = other.Wait() })
	reader := StatusReader{buf: make([]byte, 0, 16)}
	for range 2 {
		for _, pid := range []int{os.Getpid(), other.Process.Pid} {
			status, err := reader.Read(pid)
			if err != nil || !strings.HasPrefix(string(status), "Name:") || status.Field("Pid") != strconv.Itoa(pid) ||
				strings.Count(string(status), "\nPid:") != 1 || !status.Running() {
				t.Errorf("process %d: %v, %s", pid, err, status)
			}
		}
	}
	if _, err := reader.Read(1 << 30); !Gone(err) {
		t.Errorf("a process that does not exist: %v", err)
	}
	if allocs := testing.AllocsPerRun(100, func() { _, _ = reader.Read(os.Getpid()) }); allocs > 5 {
		t.Errorf("%v allocations for a status", allocs)
	}
}
