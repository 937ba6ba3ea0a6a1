// Package fuseclients lists the FUSE clients of others that tests run with the driver, and has the steps that they run with each. The table
// of docs/pod-clients.md is rendered from it.
package fuseclients

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Case is a client, where it runs, and how it gets the FUSE descriptor.
type Case struct {
	Client  string
	Place   string // one of InAPod, Declared
	Way     string // one of Starter, Path, Fusermount
	Version string // what is tested, against which service
}

// Values of Case.Place.
const (
	InAPod   = "in a pod"
	Declared = "declared"
)

// Values of Case.Way.
const (
	Starter    = "`/dev/fd/3` from `s3-csi-fuse-starter`"
	Path       = "`fuse: path`"
	Fusermount = "`s3-csi-fusermount`"
)

// Cases are the rows of the table.
func Cases() []Case {
	const (
		rclone = "Debian's package, S3"
		s3fs   = "1.90 of Debian (libfuse 2), S3"
		sshfs  = "3.7 of Debian (libfuse 3), OpenSSH's server"
	)
	return []Case{
		{"rclone mount2", Declared, Path, rclone},
		{"rclone mount", Declared, Fusermount, rclone},
		{"s3fs", Declared, Fusermount, s3fs},
		{"rclone mount2", InAPod, Starter, rclone},
		{"rclone mount", InAPod, Fusermount, rclone},
		{"s3fs", InAPod, Fusermount, s3fs},
		{"sshfs", InAPod, Starter, sshfs},
		{"sshfs", InAPod, Fusermount, sshfs},
	}
}

// Get returns the case, which must be in the table.
func Get(t testing.TB, client, place, way string) Case {
	t.Helper()
	for _, c := range Cases() {
		if c.Client == client && c.Place == place && c.Way == way {
			return c
		}
	}
	t.Fatalf("the table of tested clients has no %s, %s, %s", client, place, way)
	return Case{}
}

// step is something that the table promises of each client.
type step struct {
	name string
	run  func(v Volume) error
}

// Volume is a volume whose client serves, with a file "file" that has the content "content".
type Volume struct {
	Dir string
	// Stored reads a file of the volume where the service has it. The error of a missing file is fs.ErrNotExist.
	Stored func(name string) (string, error)
	// Restart kills the client and returns when the next one serves.
	Restart func()
}

// Use runs all steps.
func (c Case) Use(t testing.TB, v Volume) {
	t.Helper()
	for _, s := range steps() {
		if err := s.run(v); err != nil {
			t.Fatalf("%s, %s, %s: %s: %v", c.Client, c.Place, c.Way, s.name, err)
		}
	}
}

func steps() []step {
	return []step{
		{"list", func(v Volume) error { return v.lists(".", "file") }},
		{"read", func(v Volume) error { return v.reads("file", "content") }},
		{"make directories", func(v Volume) error { return os.Mkdir(v.path("made"), 0o755) }},
		{"write", func(v Volume) error {
			if err := os.WriteFile(v.path("made/file"), large(), 0o644); err != nil {
				return err
			}
			return v.stores("made/file")
		}},
		{"rename", func(v Volume) error {
			if err := os.Rename(v.path("made/file"), v.path("made/renamed")); err != nil {
				return err
			}
			if err := v.lists("made", "renamed"); err != nil {
				return err
			}
			return v.stores("made/renamed")
		}},
		{"go on after a crash", func(v Volume) error {
			v.Restart()
			return v.reads("made/renamed", string(large()))
		}},
		{"delete", func(v Volume) error {
			if err := os.Remove(v.path("made/renamed")); err != nil {
				return err
			}
			if got, err := v.Stored("made/renamed"); !errors.Is(err, fs.ErrNotExist) {
				return fmt.Errorf("the service still has %d bytes of it: %w", len(got), err)
			}
			return v.reads("file", "content")
		}},
	}
}

// large is more than one request of FUSE.
func large() []byte { return bytes.Repeat([]byte("0123456789abcdef"), 1<<15) }

func (v Volume) path(name string) string { return filepath.Join(v.Dir, name) }

func (v Volume) lists(dir, want string) error {
	entries, err := os.ReadDir(v.path(dir))
	if err != nil {
		return err
	}
	if len(entries) != 1 || entries[0].Name() != want {
		return fmt.Errorf("%s lists %v, want %s alone", dir, entries, want)
	}
	return nil
}

func (v Volume) reads(name, want string) error {
	b, err := os.ReadFile(v.path(name))
	if err == nil && string(b) != want {
		err = fmt.Errorf("%s has %d bytes, or others than were written", name, len(b))
	}
	return err
}

func (v Volume) stores(name string) error {
	got, err := v.Stored(name)
	if err == nil && got != string(large()) {
		err = fmt.Errorf("the service has %d bytes of %s, or others than were written", len(got), name)
	}
	return err
}

// Table renders the table of the documentation.
func Table() string {
	var b strings.Builder
	b.WriteString("| client | tested | where | descriptor from |\n|---|---|---|---|\n")
	for _, c := range Cases() {
		fmt.Fprintf(&b, "| %s | %s | %s | %s |\n", c.Client, c.Version, c.Place, c.Way)
	}
	names := make([]string, 0, len(steps()))
	for _, s := range steps() {
		names = append(names, s.name)
	}
	fmt.Fprintf(&b, "\nWhat works with each: %s and %s.\n", strings.Join(names[:len(names)-1], ", "), names[len(names)-1])
	return b.String()
}
