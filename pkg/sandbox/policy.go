package sandbox

import (
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// dnsPort is the port of name servers.
const dnsPort = 53

// Helper is the policy of a helper, within which its children have stricter ones. It may read and execute what its user may, write only
// to the given directories, and listen only on a port that the kernel chooses.
func Helper(writable ...string) Policy {
	const ownProcesses = unix.LANDLOCK_ACCESS_FS_WRITE_FILE | unix.LANDLOCK_ACCESS_FS_TRUNCATE // their names and OOM scores
	return Policy{
		files: change | makeDevice | unix.LANDLOCK_ACCESS_FS_IOCTL_DEV, bind: []uint16{0}, open: true,
		rules: slices.Concat(require(write, writable...), permit(ownProcesses, "/proc"), permit(device, devices()...), reports()),
	}
}

// Child is what a helper's child needs in addition to what every program does.
type Child struct {
	Programs []string // the program, and those that it executes
	// Without are names of programs of the system that it must not execute, because it has others of these names.
	Without  []string
	Files    []string // to read, with everything below them
	Writable []string // directories to read and write; nothing in them can be executed
	Ports    []uint16 // TCP ports to connect to, in addition to that of name servers; nil: any
}

// Policy returns the policy of a client or a session program. It may
//
//   - execute and read the system's programs and libraries, and its own programs,
//   - read the files of /etc, the certificates and the files of name services that are elsewhere, /proc and /sys,
//   - read and write the given directories and the devices without state,
//   - connect to the given TCP ports, and bind to none.
func (c Child) Policy() Policy {
	p := Policy{files: execute | write | device | makeDevice, connect: c.Ports, open: c.Ports == nil}
	if !p.open {
		p.connect = append(slices.Clone(c.Ports), dnsPort)
	}
	p.rules = slices.Concat(
		system(programs(), c.Without), permit(execute, c.Programs...), require(write, c.Writable...), require(read, c.Files...),
		// Files of /etc as a whole: a name service's file is replaced by another one when it changes, and a rule is for the old one.
		// No directory there can be listed but those of certificates.
		permit(readFile, "/etc"), permit(read, "/etc/ssl", "/etc/pki", "/etc/ca-certificates", "/proc", "/sys"),
		permit(read, elsewhere()...), permit(device, devices()...), reports(),
	)
	return p
}

// permit returns rules for paths that may be missing.
func permit(access uint64, paths ...string) (rules []rule) {
	for _, path := range paths {
		rules = append(rules, rule{path: path, access: access})
	}
	return rules
}

// require returns rules for paths that must exist.
func require(access uint64, paths ...string) (rules []rule) {
	for _, path := range paths {
		rules = append(rules, rule{path: path, access: access, required: true})
	}
	return rules
}

// programs are the directories of the system's programs and libraries.
func programs() []string {
	return []string{"/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/gnu/store"}
}

// system returns the rules for the system's programs and libraries below these directories. Names in without that are in a directory of
// programs cannot be executed. A rule holds for all below a directory, so there is then one for each of its entries.
func system(dirs, without []string) []rule {
	with := map[string]bool{} // directories with such a program, without symbolic links
	for _, dir := range dirs {
		if len(without) == 0 {
			break
		}
		for _, bin := range []string{"", "bin", "sbin", "local/bin", "local/sbin"} {
			if resolved, err := filepath.EvalSymlinks(filepath.Join(dir, bin)); err == nil && hasAny(resolved, without) {
				with[resolved] = true
			}
		}
	}
	var rules []rule
	for _, dir := range dirs {
		if resolved, err := filepath.EvalSymlinks(dir); err == nil {
			dir = resolved
		}
		rules = append(rules, executable(dir, with, without)...)
	}
	return rules
}

func hasAny(dir string, names []string) bool {
	return slices.ContainsFunc(names, func(name string) bool {
		_, err := os.Lstat(filepath.Join(dir, name))
		return err == nil
	})
}

// executable returns the rules for all below a path but the programs of these names in the directories with.
func executable(path string, with map[string]bool, without []string) []rule {
	within := false
	for dir := range with {
		within = within || dir == path || strings.HasPrefix(dir, path+"/")
	}
	if !within {
		return permit(execute, path)
	}
	rules := permit(read, path)
	entries, _ := os.ReadDir(path) // one that cannot be listed: nothing in it is executed
	for _, entry := range entries {
		// The kernel checks the files that symbolic links lead to.
		if entry.Type()&os.ModeSymlink != 0 || with[path] && slices.Contains(without, entry.Name()) {
			continue
		}
		rules = append(rules, executable(filepath.Join(path, entry.Name()), with, without)...)
	}
	return rules
}

func devices() []string {
	return []string{"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"}
}

// elsewhere returns the directories outside of /etc with certificates and name services' files, and the targets of links in /etc. The
// directories of name services are whole, because a service replaces its file, and a rule is for the old one.
func elsewhere() []string {
	paths := append([]string{
		"/var/lib/ca-certificates",
		"/run/systemd/resolve", "/run/resolvconf", "/run/NetworkManager", "/run/netconfig", "/run/connman", "/run/dhcpcd",
	}, linkedFrom("/etc")...)
	slices.Sort(paths)
	return slices.Compact(paths)
}

// linkedFrom returns the targets outside of a directory of its links, each of which alone is needed: the directory of a file may hold
// anything.
func linkedFrom(etc string) []string {
	var targets []string
	for link, dir := range map[string]bool{
		"resolv.conf": false, "hosts": false, "nsswitch.conf": false, "localtime": false, "ssl/cert.pem": false, "ssl/certs": true, "pki/tls/certs": true,
	} {
		target, err := filepath.EvalSymlinks(filepath.Join(etc, link))
		if err != nil || strings.HasPrefix(target, etc+"/") {
			continue
		}
		if fi, err := os.Stat(target); err == nil && (fi.Mode().IsRegular() || dir && fi.IsDir()) {
			targets = append(targets, target)
		}
	}
	return targets
}
