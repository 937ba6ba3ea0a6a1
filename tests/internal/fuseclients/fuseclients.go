// Package fuseclients has the steps that tests run with each FUSE client, whether the driver's own or of others, and what they found. The
// table of docs/reference/clients.md is rendered from that.
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
	"time"
)

// Case is a client, where it runs, and how it gets the FUSE descriptor. It is one row of the table.
type Case struct {
	Client  string
	Place   string // one of BuiltIn, Declared, InAPod, InKubernetes
	Way     string // one of Starter, Path, Fusermount
	Version string // what is tested, against which service
}

// Values of Case.Place.
const (
	BuiltIn      = "built in"
	Declared     = "declared"
	InAPod       = "in a pod"
	InKubernetes = "in a pod of a Kubernetes"
)

// Values of Case.Way.
const (
	Starter    = "`/dev/fd/3` from `s3-csi-fuse-starter`"
	Path       = "`/dev/fd/3`"
	Fusermount = "`s3-csi-fusermount`"
)

// Cases are the rows of the table.
func Cases() []Case {
	const (
		own    = "S3"
		rclone = "Debian's package, S3"
		s3fs   = "1.90 of Debian (libfuse 2), S3"
		sshfs  = "3.7 of Debian (libfuse 3), OpenSSH's server"
		gcs    = "3.11, fake-gcs-server"
	)
	return []Case{
		{"mountpoint-s3", BuiltIn, Path, own},
		{"rclone", BuiltIn, Path, own},
		{"rclone mount2", Declared, Path, rclone},
		{"rclone mount", Declared, Fusermount, rclone},
		{"s3fs", Declared, Fusermount, s3fs},
		{"s3-csi-mountpoint", InAPod, Starter, own},
		{"s3-csi-mountpoint", InAPod, Fusermount, own},
		{"rclone mount2", InAPod, Starter, rclone},
		{"rclone mount", InAPod, Fusermount, rclone},
		{"s3fs", InAPod, Fusermount, s3fs},
		{"sshfs", InAPod, Starter, sshfs},
		{"sshfs", InAPod, Fusermount, sshfs},
		{"gcsfuse", InAPod, Starter, gcs},
		{"gcsfuse", InAPod, Fusermount, gcs},
		{"s3-csi-mountpoint", InKubernetes, Starter, own},
		{"s3-csi-mountpoint", InKubernetes, Fusermount, "MinIO"},
		{"sshfs", InKubernetes, Starter, sshfs},
		{"sshfs", InKubernetes, Fusermount, sshfs},
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

// Volume is a volume whose client serves, with a file "file" that has the content "content".
type Volume struct {
	Dir      string
	ReadOnly bool
	// Stored reads a file of the volume where the service has it. The error of a missing file is fs.ErrNotExist. nil if ReadOnly.
	Stored func(name string) (string, error)
	// Late is how long after close or a removal the service may have another state; 0: not at all.
	Late time.Duration
	// Restart kills the client and returns when the next one serves.
	Restart func()
	// Renew returns when the credentials that the client had do not work any more. It reports whether the same client runs as before.
	// nil if that is the pod's own concern.
	Renew func() (same bool)
	// Unpublish unpublishes the volume; nil if the pod waits for its client.
	Unpublish func()
}

// step is something that is tried with each client.
type step struct {
	name   string
	writes bool
	run    func(v Volume) error
}

func steps() []step {
	return []step{
		{"list", false, func(v Volume) error { return v.lists(".", "file") }},
		{"read", false, func(v Volume) error { return v.reads("file", "content") }},
		{"mkdir", true, func(v Volume) error { return os.Mkdir(v.path("made"), 0o755) }},
		{"write", true, func(v Volume) error {
			if err := v.write("made/file"); err != nil {
				return err
			}
			return v.stores("made/file")
		}},
		{"rename", true, func(v Volume) error {
			if err := os.Rename(v.path("made/file"), v.path("made/renamed")); err != nil {
				return err
			}
			if err := v.lists("made", "renamed"); err != nil {
				return err
			}
			return v.stores("made/renamed")
		}},
		{"heal", false, func(v Volume) error {
			v.Restart()
			err := v.reads("file", "content")
			for _, name := range v.made() {
				err = errors.Join(err, v.reads(name, string(large())))
			}
			return err
		}},
		{"delete", true, func(v Volume) error {
			made := v.made()
			if len(made) == 0 {
				return errors.New("there is nothing to delete")
			}
			for _, name := range made {
				if err := v.deletes(name); err != nil {
					return err
				}
			}
			return v.reads("file", "content")
		}},
	}
}

// Columns of the table after those of the steps.
const (
	renewal = "renewal"
	drain   = "drain"
)

// What is found of a step.
const (
	works    = "yes"
	fails    = "no"
	notOurs  = "–"
	inPlace  = "same client"
	replaced = "new client"
)

// Use runs all steps. What it finds must be what is recorded of the case.
func (c Case) Use(t testing.TB, v Volume) {
	t.Helper()
	var found strings.Builder
	try := func(what, result string, run func(Volume) error) {
		t.Helper()
		if err := run(v); err != nil {
			t.Logf("%s, %s, %s: %s: %v", c.Client, c.Place, c.Way, what, err)
			result = fails
		}
		fmt.Fprintf(&found, "%s: %s\n", what, result)
	}
	nothing := func(Volume) error { return nil }
	for _, s := range steps() {
		if s.writes && v.ReadOnly {
			try(s.name, notOurs, nothing)
		} else {
			try(s.name, works, s.run)
		}
	}
	if v.Renew == nil {
		try(renewal, notOurs, nothing)
	} else if v.Renew() {
		try(renewal, inPlace, renewed)
	} else {
		try(renewal, replaced, renewed)
	}
	if v.Unpublish == nil {
		try(drain, notOurs, nothing)
	} else {
		try(drain, works, drained)
	}
	c.record(t, found.String())
}

// renewed uses the volume with other credentials than it was published with.
func renewed(v Volume) error {
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

// drained unpublishes the volume right after a file was closed.
func drained(v Volume) error {
	err := v.write("drained")
	v.Unpublish()
	if err != nil {
		return err
	}
	v.Late = 0
	return v.stores("drained")
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

// made are the files of the directory that the steps make.
func (v Volume) made() (names []string) {
	entries, _ := os.ReadDir(v.path("made")) // there is none where nothing can be written
	for _, e := range entries {
		names = append(names, "made/"+e.Name())
	}
	return names
}

func (v Volume) deletes(name string) error {
	if err := os.Remove(v.path(name)); err != nil {
		return err
	}
	return v.soon(func() error {
		got, err := v.Stored(name)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return fmt.Errorf("the service still has %d bytes of %s: %w", len(got), name, err)
	})
}

func (v Volume) stores(name string) error {
	return v.soon(func() error {
		got, err := v.Stored(name)
		if err == nil && got != string(large()) {
			err = fmt.Errorf("the service has %d bytes of %s, or others than were written", len(got), name)
		}
		return err
	})
}

// soon tries until there is no error, while the service may be late.
func (v Volume) soon(try func() error) error {
	for end := time.Now().Add(v.Late); ; time.Sleep(50 * time.Millisecond) {
		if err := try(); err == nil || time.Now().After(end) {
			return err
		}
	}
}
