package rig

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
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

// Reports of rclone's own races are left out, and the line that counts them.
func TestRacesOfVFSAreLeftOut(t *testing.T) {
	const vfs, client = "github.com/rclone/rclone/vfs.(*File).Path()", "main.(*fs).Release()"
	report := func(first, second string) string {
		return "==================\nWARNING: DATA RACE\nWrite at 0x00c0 by goroutine 1:\n  " + first + "\n      file.go:1 +0x1\n\nPrevious read at 0x00c0 by " +
			"goroutine 2:\n  " + second +
			"\n      file.go:2 +0x1\n==================\n"
	}
	for _, tc := range []struct {
		text string
		want bool
	}{
		{report(vfs, vfs) + "Found 1 data race(s)\n", false},
		{report(vfs, client) + "Found 1 data race(s)\n", true},
		{report(vfs, vfs) + report(client, client) + "Found 2 data race(s)\n", true},
		{"FATAL: ThreadSanitizer: out of memory\n", true},
	} {
		r := &Rig{Dir: t.TempDir()}
		if err := errors.Join(r.makeRaces(), os.WriteFile(filepath.Join(r.races(), "s3-csi-rclone.1"), []byte(tc.text), 0o600)); err != nil {
			t.Fatal(err)
		}
		if err := r.Races(); (err != nil) != tc.want {
			t.Errorf("%q: %v", tc.text, err)
		}
	}
}
