//go:build linux

package host

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

func TestPassableNamesTheClosedDirectory(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root: it acts as another user")
	}
	const uid = 2100000
	for name, tc := range map[string]struct {
		path   string
		spoil  func(root string) error
		closed string // "": none
	}{
		"open":                {path: "a/b/c"},
		"the first":           {path: "a/b/c", spoil: mode("a", 0o700), closed: "a"},
		"one in between":      {path: "a/b/c", spoil: mode("a/b", 0o750), closed: "a/b"},
		"the last":            {path: "a/b/c", spoil: mode("a/b/c", 0o766), closed: "a/b/c"},
		"without a list":      {path: "a/b/c", spoil: mode("a/b", 0o711)},
		"of root's group":     {path: "a/b/c", spoil: mode("a/b", 0o770), closed: "a/b"},
		"what is to be made":  {path: "a/b/c/d/e", spoil: mode("a/b", 0o700), closed: "a/b"},
		"nothing to be found": {path: "a/b/c/d/e"},
		"of the user":         {path: "a/b/c", spoil: func(root string) error { return own(root, "a/b", uid) }},
		"behind a link": {path: "link/c", closed: "a/b", spoil: func(root string) error {
			return firstError(os.Symlink("a/b", filepath.Join(root, "link")), os.Chmod(filepath.Join(root, "a/b"), 0o700))
		}},
		// Root resolves the path once: clients do not pass through the directory of the link.
		"a link in a closed directory": {path: "hidden/link", spoil: func(root string) error {
			return firstError(os.Mkdir(filepath.Join(root, "hidden"), 0o700), os.Symlink("../a/b/c", filepath.Join(root, "hidden/link")))
		}},
		"an access control list": {path: "a/b/c", closed: "a/b", spoil: func(root string) error { return forbid(filepath.Join(root, "a/b"), uid) }},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			for _, dir := range []string{filepath.Dir(root), root} { // of this test alone
				if err := os.Chmod(dir, 0o755); err != nil {
					t.Fatal(err)
				}
			}
			if err := os.MkdirAll(filepath.Join(root, "a/b/c"), 0o755); err != nil {
				t.Fatal(err)
			}
			if tc.spoil != nil {
				if err := tc.spoil(root); err != nil {
					if name == "an access control list" {
						t.Skip("needs a file system with access control lists:", err)
					}
					t.Fatal(err)
				}
			}
			err := testNamespace(t).Passable(t.Context(), filepath.Join(root, tc.path), uid)
			switch {
			case tc.closed == "" && err != nil:
				t.Error(err)
			case tc.closed != "" && (!fault.Is(err, fault.Precondition) || !strings.Contains(err.Error(), filepath.Join(root, tc.closed)+" (mode ")):
				t.Errorf("got %v, want %s named", err, tc.closed)
			}
		})
	}
}

// The changes to the thread must end with the call.
func TestPassableLeavesTheProcessRoot(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root: it acts as another user")
	}
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	n := testNamespace(t)
	for range 20 {
		_ = n.Passable(t.Context(), dir, 2100000)
		if _, err := os.ReadDir(dir); err != nil {
			t.Fatal(err)
		}
	}
}

func mode(path string, mode os.FileMode) func(string) error {
	return func(root string) error { return os.Chmod(filepath.Join(root, path), mode) }
}

func own(root, path string, uid int) error {
	return firstError(os.Chmod(filepath.Join(root, path), 0o700), os.Chown(filepath.Join(root, path), uid, uid))
}

func firstError(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

// forbid sets an access control list that lets all users but one pass (acl(5); the attribute's form is
// include/uapi/linux/posix_acl_xattr.h: version 2, then tag, permissions and id of each entry).
func forbid(dir string, uid uint32) error {
	const userObj, user, groupObj, mask, other, anyone = 0x01, 0x02, 0x04, 0x10, 0x20, ^uint32(0)
	acl := []byte{2, 0, 0, 0}
	for _, e := range []struct {
		tag, perm byte
		id        uint32
	}{{userObj, 7, anyone}, {user, 0, uid}, {groupObj, 5, anyone}, {mask, 5, anyone}, {other, 5, anyone}} {
		acl = append(acl, e.tag, 0, e.perm, 0, byte(e.id), byte(e.id>>8), byte(e.id>>16), byte(e.id>>24))
	}
	return unix.Setxattr(dir, "system.posix_acl_access", acl, 0)
}
