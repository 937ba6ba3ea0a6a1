package host

import (
	"path"
	"strings"
)

// Owners selects other mount namespaces by their owners: the pods or allocations whose containers use them. Owners are compared by their
// names, which the caller chooses. The zero value selects none.
type Owners struct {
	// ByCgroup returns the owner of a process by the text of its /proc/<pid>/cgroup; "": none.
	ByCgroup func(text string) string
	// ByMounts returns the owner of a namespace by its mount table; "": none. It is asked if no process has an owner by its cgroup. nil: no
	// namespace has one.
	ByMounts func(mounts []Mount) string
}

// Directory is a directory as mount tables show it: in every mount namespace a bind mount of it has the same device and root.
type Directory struct {
	major, minor uint32
	root         string
}

// DirectoryIn returns the Directory of a path in a mount table, without looking at the file system. ok is false if nothing is mounted above
// the path. The path must be absolute and without symbolic links.
func DirectoryIn(mounts []Mount, dir string) (d Directory, ok bool) {
	longest := -1
	for _, m := range mounts { // of two mounts at one place the later one is on top
		rest, below := cutDir(dir, m.Mountpoint)
		if below && len(m.Mountpoint) >= longest {
			longest, ok = len(m.Mountpoint), true
			d = Directory{m.Major, m.Minor, path.Join(m.Root, rest)}
		}
	}
	return d, ok
}

// Shows reports whether a mount shows the directory or something below it.
func (d Directory) Shows(m Mount) bool {
	_, below := cutDir(m.shown(), d.root)
	return m.Major == d.major && m.Minor == d.minor && below
}

// cutDir returns the rest of a path below a directory, which may be the directory itself.
func cutDir(file, dir string) (rest string, below bool) {
	if dir == "/" {
		return file, true
	}
	rest, below = strings.CutPrefix(file, dir)
	return rest, below && (rest == "" || rest[0] == '/')
}
