package rig

import (
	"fmt"
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

func TestOnlyRacesWithinTheVFSAreLeftOut(t *testing.T) {
	const report = `
WARNING: DATA RACE
Read at 0x00c002380ee8 by goroutine 916:
  %s()
      somewhere/item.go:834 +0xf45

Previous write at 0x00c002380ee8 by goroutine 928:
  %s()
      somewhere/item.go:1550 +0x17e

Goroutine 916 (running) created at:
  github.com/rclone/rclone/vfs.New()
`
	const vfs, s3, own = "github.com/rclone/rclone/vfs/vfscache.(*Item).rename", "github.com/rclone/rclone/backend/s3.(*Object).Size", "main.(*guard).upload"
	for functions, want := range map[[2]string]bool{{vfs, vfs}: true, {vfs, own}: false, {s3, vfs}: false, {own, own}: false} {
		if got := ofVFS(fmt.Sprintf(report, functions[0], functions[1])); got != want {
			t.Errorf("%q: %t, want %t", functions, got, want)
		}
	}
	if ofVFS("fatal error: something else") {
		t.Error("what is no race is left out")
	}
}
