package programs

import (
	"crypto/sha256"
	"encoding/hex"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// programDir is a directory that other users reach.
func programDir(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for d := dir; d != os.TempDir(); d = filepath.Dir(d) {
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func script(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"+text+"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
}

func get(t *testing.T, name string) client.Client {
	t.Helper()
	c, err := client.Get(name)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// The first of a client's programs that is there is used.
func TestFind(t *testing.T) {
	dir := t.TempDir()
	cl := client.Client{Programs: []string{"own", "other"}}
	for _, step := range []struct {
		made string
		mode os.FileMode
		want string
		ok   bool
	}{{"unrelated", 0o755, "own", false}, {"other", 0o755, "other", true}, {"own", 0o644, "other", true}, {"own", 0o755, "own", true}} {
		path := filepath.Join(dir, step.made)
		script(t, path, "")
		if err := os.Chmod(path, step.mode); err != nil {
			t.Fatal(err)
		}
		if name, ok := Find(cl, dir); name != step.want || ok != step.ok {
			t.Errorf("with %s, mode %o: %s, %t", step.made, step.mode, name, ok)
		}
	}
}

// A client that the host cannot run is refused for as long as that is so.
func TestClientsThatCannotRunAreRefused(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root: programs are tried as another user")
	}
	dir := programDir(t)
	rclone, mountpoint := get(t, "rclone"), get(t, "mountpoint-s3")
	path := filepath.Join(dir, rclone.Programs[0])
	script(t, path, "exit 127")
	c := NewClients(here{}, client.All(), dir, dir)
	if got, err := c.Path(t.Context(), rclone); err != nil || got != path {
		t.Errorf("before it was tried: %q, %v", got, err)
	}
	c.tryAll(t.Context())
	for _, cl := range []client.Client{rclone, mountpoint} { // the other one is missing
		if _, err := c.Path(t.Context(), cl); !fault.Is(err, fault.Precondition) {
			t.Errorf("%s: %v", cl.Name, err)
		}
	}
	if err := os.Remove(path); err != nil { // it may be executed still
		t.Fatal(err)
	}
	script(t, path, "exit 0")
	if got, err := c.Path(t.Context(), rclone); err != nil || got != path {
		t.Errorf("when the host runs it: %q, %v", got, err)
	}
}

func TestCheck_DeclaredProgramBelongsToRootAndHasItsDigest(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root: the program must be root's")
	}
	dir := programDir(t)
	path := filepath.Join(dir, "tool")
	script(t, path, "exit 0")
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(content)
	right, wrong := hex.EncodeToString(sum[:]), strings.Repeat("0", 64)
	for _, c := range []struct {
		client client.Client
		mode   os.FileMode
		fails  bool
	}{
		{client.Client{}, 0o777, false}, // one of the driver's own
		{client.Client{Declared: true}, 0o755, false},
		{client.Client{Declared: true, SHA256: right}, 0o755, false},
		{client.Client{Declared: true, SHA256: wrong}, 0o755, true},
		{client.Client{Declared: true}, 0o775, true},
		{client.Client{Declared: true}, 0o757, true},
		{client.Client{Declared: true, Fusermount: true}, 0o755, true}, // whose program is missing
	} {
		if err := os.Chmod(path, c.mode); err != nil {
			t.Fatal(err)
		}
		if err := Check(c.client, path); fault.Is(err, fault.Precondition) != c.fails || (err != nil) != c.fails {
			t.Errorf("%+v, mode %o: %v", c.client, c.mode, err)
		}
	}
	script(t, filepath.Join(dir, client.FusermountProgram), "exit 0")
	tool := client.Client{Name: "a", Programs: []string{"tool"}}
	want := []string{filepath.Join(dir, client.FusermountProgram), path}
	if got := Files([]client.Client{tool, tool, {Name: "b", Programs: []string{"missing"}}}, dir); !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}
