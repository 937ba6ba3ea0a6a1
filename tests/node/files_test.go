//go:build !lane || ordinary

package node

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// What both clients promise: whole files, directories, names, sizes, deletion, overwriting.
func TestFiles(t *testing.T) { // alone: its big files keep the disk busy
	eachClient(t, func(t *testing.T, e *env, client string) {
		v := static("files", client)
		target := e.publish(v, "t")
		at := func(name ...string) string { return filepath.Join(append([]string{target}, name...)...) }

		big := random(64 << 20)
		write(t, at("big"), big)
		if got := read(t, at("big")); got != big {
			t.Errorf("the 64 MiB file: %d bytes, equal: %t", len(got), got == big)
		}
		f, err := os.Open(at("big"))
		if err != nil {
			t.Fatal(err)
		}
		piece := make([]byte, 1000)
		if _, err := f.ReadAt(piece, 33<<20+7); err != nil || string(piece) != big[33<<20+7:33<<20+1007] {
			t.Errorf("a piece from the middle: %v", err)
		}
		f.Close()

		if err := os.MkdirAll(at("dir", "sub"), 0o755); err != nil {
			t.Fatal(err)
		}
		for i, name := range names {
			write(t, at("dir", name), fmt.Sprint(i))
		}
		write(t, at("dir", "sub", "file"), "deep")
		for i := range 200 {
			write(t, at("many-"+fmt.Sprint(i)), fmt.Sprint(i))
		}
		for i, name := range names {
			if got := read(t, at("dir", name)); got != fmt.Sprint(i) {
				t.Errorf("%q reads %q", name, got)
			}
		}
		wanted := append(slices.Clone(names), "sub")
		slices.Sort(wanted)
		if got := list(t, at("dir")); !slices.Equal(got, wanted) {
			t.Errorf("the directory lists %q, want %q", got, wanted)
		}
		write(t, at("overwritten"), "a longer first version")
		e.await(20*time.Second, "overwriting", func() bool { return os.WriteFile(at("overwritten"), []byte("second"), 0o644) == nil })
		if got := read(t, at("overwritten")); got != "second" {
			t.Errorf("the overwritten file reads %q", got)
		}
		write(t, at("removed"), "x")
		if err := os.Remove(at("removed")); err != nil {
			t.Errorf("removing a file: %v", err)
		}
		if _, err := os.Stat(at("removed")); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the removed file: %v", err)
		}
		if err := os.Mkdir(at("empty-dir"), 0o755); err != nil {
			t.Error(err)
		}
		if err := os.Remove(at("empty-dir")); err != nil {
			t.Errorf("removing an empty directory: %v", err)
		}
		if err := os.Remove(at("dir", "sub")); err == nil {
			t.Error("a directory with a file in it was removed")
		}
		if _, err := os.Stat(at("missing")); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("a missing file: %v", err)
		}
		if err := os.Symlink("big", at("symlink")); err == nil {
			t.Error("a symbolic link was made")
		}
		switch client {
		case rclone:
			filesOfRclone(t, at)
		case mountpoint:
			filesOfMountpoint(t, at)
		}
		e.unpublish(v, target)
		e.NothingLeft(t)

		if got := e.Object(t, bucket, "files/big"); got != big {
			t.Errorf("the object of 64 MiB: %d bytes, equal: %t", len(got), got == big)
		}
		keys := e.Keys(t, bucket, "files/dir/")
		for _, name := range names {
			if !slices.Contains(keys, "files/dir/"+name) {
				t.Errorf("there is no object for %q", name)
			}
		}
		if n := len(e.Keys(t, bucket, "files/many-")); n != 200 {
			t.Errorf("%d of 200 small files are stored", n)
		}
		if keys := e.Keys(t, bucket, "files/removed"); len(keys) > 0 {
			t.Errorf("the removed file is an object: %v", keys)
		}
		// What another writer stores shows up.
		target = e.publish(v, "t")
		e.Put(t, bucket, "files/from-elsewhere", "hello")
		e.await(20*time.Second, "an object of another writer", func() bool {
			b, err := os.ReadFile(at("from-elsewhere"))
			return err == nil && string(b) == "hello"
		})
		e.unpublish(v, target)
	})
}

func list(t *testing.T, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	slices.Sort(names)
	return names
}

// rclone's cache makes files that can be changed anywhere and renamed.
func filesOfRclone(t *testing.T, at func(...string) string) {
	t.Helper()
	f, err := os.OpenFile(at("appended"), os.O_CREATE|os.O_RDWR|os.O_APPEND, 0o644)
	if err != nil {
		t.Fatal(err)
	}
	for _, part := range []string{"one ", "two ", "three"} {
		if _, err := f.WriteString(part); err != nil {
			t.Error(err)
		}
	}
	f.Close()
	if got := read(t, at("appended")); got != "one two three" {
		t.Errorf("the appended file reads %q", got)
	}
	f, err = os.OpenFile(at("appended"), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt([]byte("TWO"), 4); err != nil {
		t.Error(err)
	}
	if err := f.Truncate(7); err != nil {
		t.Error(err)
	}
	f.Close()
	if got := read(t, at("appended")); got != "one TWO" {
		t.Errorf("the changed file reads %q", got)
	}
	if err := os.Rename(at("appended"), at("dir", "renamed")); err != nil {
		t.Errorf("renaming a file: %v", err)
	} else if got := read(t, at("dir", "renamed")); got != "one TWO" {
		t.Errorf("the renamed file reads %q", got)
	}
	_ = os.Remove(at("dir", "renamed"))
	write(t, at("target-of-rename"), "old")
	write(t, at("new"), "new")
	if err := os.Rename(at("new"), at("target-of-rename")); err != nil {
		t.Errorf("renaming over a file: %v", err)
	} else if got := read(t, at("target-of-rename")); got != "new" {
		t.Errorf("the replaced file reads %q", got)
	}
}

// Mountpoint writes from start to end.
func filesOfMountpoint(t *testing.T, at func(...string) string) {
	t.Helper()
	if f, err := os.OpenFile(at("overwritten"), os.O_WRONLY|os.O_APPEND, 0); err == nil {
		_, err = f.WriteString("x")
		f.Close()
		if err == nil {
			t.Error("a file was appended to")
		}
	}
	f, err := os.Create(at("backwards"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteString("0123456789"); err != nil {
		t.Error(err)
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		t.Error(err)
	}
	if _, err := f.WriteString("x"); !errors.Is(err, unix.EINVAL) {
		t.Errorf("writing backwards: %v", err)
	}
	f.Close()
}
