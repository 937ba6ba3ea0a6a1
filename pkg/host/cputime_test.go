//go:build linux

package host

import (
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/cputime"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

func TestCPUTimeGrowsWithWork(t *testing.T) {
	uid := uint32(os.Getuid())
	before, err := CPUTime(os.Getpid(), uid)
	if err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(30 * time.Second); ; {
		after, err := CPUTime(os.Getpid(), uid)
		if err != nil {
			t.Fatal(err)
		}
		if after >= before+50*time.Millisecond {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("from %s to %s in half a minute of work", before, after)
		}
	}
}

func TestCPUTimeIsOfThatPidAndUser(t *testing.T) {
	if _, err := CPUTime(os.Getpid(), uint32(os.Getuid())+1); fault.KindOf(err) != fault.NotFound {
		t.Errorf("of another user: %v", err)
	}
	cmd := exec.Command("true")
	if err := cmd.Run(); err != nil {
		t.Fatal(err)
	}
	if _, err := CPUTime(cmd.Process.Pid, uint32(os.Getuid())); fault.KindOf(err) != fault.NotFound {
		t.Errorf("of one that ended: %v", err)
	}
}

func TestStatCPUTime(t *testing.T) {
	rest := " S 1 1 1 0 -1 4194560 1 2 3 4 "
	for _, tc := range []struct {
		name, stat string
		want       time.Duration
		fails      bool
	}{
		{"plain", "12 (sh)" + rest + "7 5 100 100 20 0", 120 * time.Millisecond, false},
		{"a name with brackets and blanks", "12 (a) b (c) 9 9)" + rest + "100 0 0", time.Second, false},
		{"more than can be said", "12 (sh)" + rest + "4611686018427387903 4611686018427387903 0", 922337203685 * 10 * time.Millisecond, false},
		{"no name", "12 sh S 1", 0, true},
		{"too short", "12 (sh)" + rest + "7", 0, true},
		{"no number", "12 (sh)" + rest + "7 x 0", 0, true},
		{"negative", "12 (sh)" + rest + "-7 1 0", 0, true},
	} {
		got, err := cputime.Parse(tc.stat)
		if got != tc.want || (err != nil) != tc.fails {
			t.Errorf("%s: %s, %v", tc.name, got, err)
		}
	}
}

func TestStatusUID(t *testing.T) {
	for status, want := range map[string]string{
		"Name:\tsh\nUid:\t7\t8\t9\t10\nGid:\t1\n": "7",
		"Name:\tsh\n":      "fails",
		"Uid:\n":           "fails",
		"Uid:\t-1\t0\n":    "fails",
		"Uid:\t4294967296": "fails",
		"Name:\tUid: 4\n":  "fails",
	} {
		uid, err := statusUID(status)
		if (err != nil) != (want == "fails") || err == nil && uid != 7 {
			t.Errorf("%q: %d, %v", status, uid, err)
		}
	}
}

func FuzzStat(f *testing.F) {
	stat, _ := os.ReadFile("/proc/self/stat")
	status, _ := os.ReadFile("/proc/self/status")
	f.Add(string(stat))
	f.Add(string(status))
	f.Add("1 ()) S")
	f.Fuzz(func(t *testing.T, text string) {
		if used, err := cputime.Parse(text); err == nil && (used < 0 || !strings.Contains(text, ")")) {
			t.Errorf("%q: %s", text, used)
		}
		_, _ = statusUID(text)
	})
}
