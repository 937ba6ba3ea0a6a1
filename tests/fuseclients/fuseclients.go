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
	"slices"
	"strings"
	"syscall"
	"testing"
)

// Case is a client, where it runs, and how it gets the FUSE descriptor.
type Case struct {
	Client  string
	Place   string // one of InAPod, Declared
	Way     string // one of Starter, Path, Fusermount
	Version string // what is tested, against which service
	Renewal string // one of NotOurs, InPlace, Replaced
	Drain   string // one of NotOurs, Drained
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

// Values of Case.Renewal and Case.Drain.
const (
	NotOurs  = "–" // the pod's own concern
	InPlace  = "by the same client"
	Replaced = "by another client"
	Drained  = "yes"
)

// Cases are the rows of the table.
func Cases() []Case {
	const (
		rclone = "Debian's package, S3"
		s3fs   = "1.90 of Debian (libfuse 2), S3"
		sshfs  = "3.7 of Debian (libfuse 3), OpenSSH's server"
		gcs    = "3.11, fake-gcs-server"
	)
	return []Case{
		{"rclone mount2", Declared, Path, rclone, InPlace, Drained},
		{"rclone mount", Declared, Fusermount, rclone, InPlace, Drained},
		{"s3fs", Declared, Fusermount, s3fs, Replaced, Drained},
		{"rclone mount2", InAPod, Starter, rclone, NotOurs, NotOurs},
		{"rclone mount", InAPod, Fusermount, rclone, NotOurs, NotOurs},
		{"s3fs", InAPod, Fusermount, s3fs, NotOurs, NotOurs},
		{"sshfs", InAPod, Starter, sshfs, NotOurs, NotOurs},
		{"sshfs", InAPod, Fusermount, sshfs, NotOurs, NotOurs},
		{"gcsfuse", InAPod, Starter, gcs, NotOurs, NotOurs},
		{"gcsfuse", InAPod, Fusermount, gcs, NotOurs, NotOurs},
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
	// Renew returns when the credentials that the client had do not work any more. It reports whether the same client runs as before.
	// nil for NotOurs.
	Renew func() (same bool)
	// Unpublish unpublishes the volume; nil for NotOurs.
	Unpublish func()
}

// Use runs all steps: those of every client, and those that its row of the table promises.
func (c Case) Use(t testing.TB, v Volume) {
	t.Helper()
	try := func(what string, run func(Volume) error) {
		t.Helper()
		if err := run(v); err != nil {
			t.Fatalf("%s, %s, %s: %s: %v", c.Client, c.Place, c.Way, what, err)
		}
	}
	if (v.Renew == nil) != (c.Renewal == NotOurs) || (v.Unpublish == nil) != (c.Drain == NotOurs) {
		t.Fatalf("%s, %s, %s: the table has renewal %q and drain %q, which is not what the test tries", c.Client, c.Place, c.Way, c.Renewal, c.Drain)
	}
	for _, s := range steps() {
		try(s.name, s.run)
	}
	if v.Renew != nil {
		try("renewal", c.renewal)
	}
	if v.Unpublish != nil {
		try("drain", drain)
	}
}

// renewal uses the volume with other credentials than it was published with.
func (c Case) renewal(v Volume) error {
	if same := v.Renew(); same != (c.Renewal == InPlace) {
		return fmt.Errorf("the same client runs as before: %t", same)
	}
	if err := v.write("renewed"); err != nil {
		return err
	}
	if err := v.stores("renewed"); err != nil {
		return err
	}
	entries, err := os.ReadDir(v.path("."))
	if err == nil && !slices.ContainsFunc(entries, func(e os.DirEntry) bool { return e.Name() == "renewed" }) {
		err = fmt.Errorf("the root lists %v", entries)
	}
	if err != nil {
		return err
	}
	return v.reads("file", "content")
}

// drain unpublishes the volume right after a file was closed.
func drain(v Volume) error {
	if err := v.write("drained"); err != nil {
		return err
	}
	v.Unpublish()
	return v.stores("drained")
}

func steps() []step {
	return []step{
		{"list", func(v Volume) error { return v.lists(".", "file") }},
		{"read", func(v Volume) error { return v.reads("file", "content") }},
		{"make directories", func(v Volume) error { return os.Mkdir(v.path("made"), 0o755) }},
		{"write", func(v Volume) error {
			if err := v.write("made/file"); err != nil {
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

// write writes a file while this process starts no other one: a child closes its copy of the file, and some clients end a file with the
// first flush.
func (v Volume) write(name string) error {
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	return os.WriteFile(v.path(name), large(), 0o644)
}

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
	b.WriteString("| client | tested | where | descriptor from | renewal | drain |\n|---|---|---|---|---|---|\n")
	for _, c := range Cases() {
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s | %s |\n", c.Client, c.Version, c.Place, c.Way, c.Renewal, c.Drain)
	}
	names := make([]string, 0, len(steps()))
	for _, s := range steps() {
		names = append(names, s.name)
	}
	fmt.Fprintf(&b, "\nWhat works with each: %s and %s. Renewal: which client serves after the session has expired, or the keys in the secret have changed. Drain: what was closed is stored when the volume is unpublished.\n",
		strings.Join(names[:len(names)-1], ", "), names[len(names)-1])
	return b.String()
}
