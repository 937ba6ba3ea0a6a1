package rig

import (
	"os/exec"
	"testing"
	"time"
)

func TestEnded(t *testing.T) {
	for status, want := range map[string]bool{
		"": true,
		"Name:\tx\nState:\tS (sleeping)\nThreads:\t1\n": false,
		"Name:\tx\nState:\tZ (zombie)\nThreads:\t3\n":   false,
		"Name:\tx\nState:\tZ (zombie)\nThreads:\t1\n":   true,
		"Name:\tx\nState:\tX (dead)\nThreads:\t0\n":     true,
	} {
		if got := ended(status); got != want {
			t.Errorf("%q: %t, want %t", status, got, want)
		}
	}
	cmd := exec.CommandContext(t.Context(), "sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	pid := cmd.Process.Pid
	if Ended(pid) {
		t.Error("it has ended before it was killed")
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(20 * time.Second); !Ended(pid); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("it was killed and has not ended: %s", statusOf(pid))
		}
	}
	_ = cmd.Wait()
	if !Ended(pid) {
		t.Error("it was reaped and has not ended")
	}
}
