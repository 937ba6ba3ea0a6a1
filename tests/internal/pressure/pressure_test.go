package pressure

import (
	"os"
	"os/exec"
	"runtime"
	"testing"
	"time"
)

func TestUntil(t *testing.T) {
	start := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	at := func(after, cpu, disk time.Duration) Moment {
		return Moment{start.Add(after), Stalls{CPU: time.Hour + cpu, Disk: disk}}
	}
	for name, tt := range map[string]struct {
		later Moment
		want  time.Duration
	}{
		"a machine with nothing else to do":    {at(10*time.Second, 0, 0), 10 * time.Second},
		"one that waits for CPUs":              {at(10*time.Second, 4*time.Second, 0), 6 * time.Second},
		"one that waits for its disk":          {at(10*time.Second, 0, 3*time.Second), 7 * time.Second},
		"both at once, which may be together":  {at(10*time.Second, 4*time.Second, 3*time.Second), 6 * time.Second},
		"one that has hardly run at all":       {at(10*time.Second, 9*time.Second, 0), 2 * time.Second},
		"one whose kernel counts with a delay": {at(10*time.Second, 11*time.Second, 0), 2 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			if got := at(0, 0, 0).Until(tt.later); got != tt.want {
				t.Errorf("got %s, want %s", got, tt.want)
			}
		})
	}
}

// With more to run than CPUs, the kernel reports it, and time passes more slowly.
func TestABusyMachine(t *testing.T) {
	if _, err := os.ReadFile("/proc/pressure/cpu"); err != nil {
		t.Skipf("the kernel keeps no account of pressure: %v", err)
	}
	began := Now()
	for range 4 * runtime.NumCPU() {
		cmd := exec.CommandContext(t.Context(), "sh", "-c", "while :; do :; done")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	}
	for time.Since(began.Time) < 20*time.Second {
		time.Sleep(50 * time.Millisecond)
		if all := time.Since(began.Time); all > 200*time.Millisecond && began.Since() < all*9/10 {
			return
		}
	}
	t.Errorf("of %s, %s could be run in", time.Since(began.Time), began.Since())
}
