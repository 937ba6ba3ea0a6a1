package sandbox

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"
)

// needs skips a test that a kernel without this version of Landlock cannot show anything with, or an unprivileged user.
func needs(t *testing.T, version int) {
	t.Helper()
	if abi, err := ABI(); err != nil || abi < version {
		t.Skipf("needs Landlock %d: %d, %v", version, abi, err)
	}
	if os.Geteuid() != 0 {
		t.Skip("needs root, so that only the sandbox refuses anything")
	}
}

// place is a directory with what a child may write, and beside it what it may not.
type place struct{ own, other, program string }

func newPlace(t *testing.T) place {
	t.Helper()
	dir := t.TempDir()
	p := place{filepath.Join(dir, "own"), filepath.Join(dir, "other"), filepath.Join(dir, "program")}
	program, err := os.ReadFile("/bin/true")
	for _, err := range []error{
		err, os.Mkdir(p.own, 0o777), os.Mkdir(p.other, 0o777), os.Mkdir(p.own+"/sub", 0o777),
		os.WriteFile(p.own+"/file", []byte("x"), 0o666), os.WriteFile(p.other+"/file", []byte("x"), 0o666),
		os.WriteFile(p.program, program, 0o755), os.WriteFile(p.own+"/program", program, 0o755), os.WriteFile(p.own+"/written", program, 0o755),
		os.WriteFile(p.other+"/program", program, 0o755),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	return p
}

func (p place) child() Policy {
	return Child{Programs: []string{p.program}, Writable: []string{p.own}, Ports: []uint16{}}.Policy()
}

// attempts are tried under a policy; want is the error, nil for none.
type attempts map[string]struct {
	try  func() error
	want error
}

func (a attempts) under(t *testing.T, p Policy) {
	t.Helper()
	for name, c := range a {
		t.Run(name, func(t *testing.T) {
			if err := p.Run(c.try); !errors.Is(err, c.want) || c.want == nil && err != nil {
				t.Errorf("%v, want %v", err, c.want)
			}
		})
	}
}

func readFileAt(path string) func() error {
	return func() error {
		_, err := os.ReadFile(path)
		return err
	}
}

func list(path string) func() error {
	return func() error {
		_, err := os.ReadDir(path)
		return err
	}
}

func writeAt(path string) func() error {
	return func() error { return os.WriteFile(path, []byte("y"), 0o666) }
}

func run(path string) func() error {
	return func() error {
		p, err := os.StartProcess(path, []string{path}, &os.ProcAttr{})
		if err != nil {
			return err
		}
		_, err = p.Wait()
		return err
	}
}

func TestChildOpensOnlyItsFiles(t *testing.T) {
	needs(t, MinABI)
	p := newPlace(t)
	attempts{
		"own file":                     {readFileAt(p.own + "/file"), nil},
		"own directory":                {list(p.own), nil},
		"new own file":                 {writeAt(p.own + "/new"), nil},
		"own rename":                   {func() error { return os.Rename(p.own+"/program", p.own+"/sub/program") }, nil},
		"own program":                  {run(p.program), nil},
		"program that it wrote":        {run(p.own + "/written"), unix.EACCES},
		"program elsewhere":            {run(p.other + "/program"), unix.EACCES},
		"the system's program":         {run("/bin/true"), nil},
		"file elsewhere":               {readFileAt(p.other + "/file"), unix.EACCES},
		"directory elsewhere":          {list(p.other), unix.EACCES},
		"new file elsewhere":           {writeAt(p.other + "/new"), unix.EACCES},
		"removal elsewhere":            {func() error { return os.Remove(p.other + "/file") }, unix.EACCES},
		"directory made elsewhere":     {func() error { return os.Mkdir(p.other+"/d", 0o777) }, unix.EACCES},
		"move out":                     {func() error { return os.Rename(p.own+"/file", p.other+"/moved") }, unix.EACCES},
		"link to elsewhere":            {func() error { return os.Link(p.other+"/file", p.own+"/linked") }, unix.EXDEV},
		"device":                       {func() error { return unix.Mknod(p.own+"/device", unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))) }, unix.EACCES},
		"/dev/null":                    {writeAt("/dev/null"), nil},
		"/dev/fuse":                    {readFileAt("/dev/fuse"), unix.EACCES},
		"/etc/passwd":                  {readFileAt("/etc/passwd"), nil},
		"listing /etc":                 {list("/etc"), unix.EACCES},
		"/proc/self":                   {readFileAt("/proc/self/status"), nil},
		"writing to /proc":             {writeAt("/proc/self/comm"), unix.EACCES},
		"memory of another process":    {readFileAt("/proc/1/environ"), unix.EACCES},
		"listing /var":                 {list("/var"), unix.EACCES},
		"listing /":                    {list("/"), unix.EACCES},
		"listing /run":                 {list("/run"), unix.EACCES},
		"listing /tmp":                 {list("/tmp"), unix.EACCES},
		"programs are not replaceable": {writeAt(p.program), unix.EACCES},
	}.under(t, p.child())
}

// A program that must not be executed cannot be by any of its paths, and everything else can.
func TestSandbox_ChildCannotExecuteUnlistedPrograms(t *testing.T) {
	needs(t, MinABI)
	p := newPlace(t)
	attempts{
		"in /bin":                  {run("/bin/true"), unix.EACCES},
		"in /usr/bin":              {run("/usr/bin/true"), unix.EACCES},
		"its own one of that name": {run(p.program), nil},
		"reading it":               {readFileAt("/bin/true"), nil},
		"another in /bin":          {run("/bin/false"), nil},
		"another in /usr/bin":      {run("/usr/bin/env"), nil},
		"listing /usr/bin":         {list("/usr/bin"), nil},
	}.under(t, Child{Programs: []string{p.program}, Without: []string{"true", "no-such-program"}, Ports: []uint16{}}.Policy())
}

func TestRulesOfASystemWithoutAProgram(t *testing.T) {
	root := t.TempDir()
	for _, dir := range []string{"usr/bin/sub", "usr/lib", "nix"} {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, file := range []string{"usr/bin/fusermount3", "usr/bin/sh", "usr/lib/fusermount3"} {
		if err := os.WriteFile(filepath.Join(root, file), nil, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for link, to := range map[string]string{"bin": "usr/bin", "usr/bin/fusermount": "fusermount3", "usr/bin/X11": "."} {
		if err := os.Symlink(to, filepath.Join(root, link)); err != nil {
			t.Fatal(err)
		}
	}
	dirs := []string{filepath.Join(root, "usr"), filepath.Join(root, "bin"), filepath.Join(root, "nix"), filepath.Join(root, "missing")}
	got := map[string]uint64{}
	for _, r := range system(dirs, []string{"fusermount", "fusermount3"}) {
		path, err := filepath.Rel(root, r.path)
		if err != nil {
			t.Fatal(err)
		}
		got[path] |= r.access
	}
	want := map[string]uint64{"usr": read, "usr/bin": read, "usr/bin/sub": execute, "usr/bin/sh": execute, "usr/lib": execute, "nix": execute, "missing": execute}
	if !maps.Equal(got, want) {
		t.Errorf("rules %v, want %v", got, want)
	}
	if got := system(dirs, []string{"none"}); len(got) != len(dirs) {
		t.Errorf("rules without a program that is not there: %v", got)
	}
}

// TestChild_LinkedFileIsReadableWithoutItsNeighbours has name service files of /etc that are links into a directory with others.
func TestChild_LinkedFileIsReadableWithoutItsNeighbours(t *testing.T) {
	etc, run := t.TempDir(), t.TempDir()
	for _, err := range []error{
		os.WriteFile(run+"/resolv.conf", []byte("x"), 0o644), os.WriteFile(run+"/secret", []byte("x"), 0o644), os.MkdirAll(run+"/certs", 0o755),
		os.WriteFile(etc+"/hosts", []byte("x"), 0o644), os.Mkdir(etc+"/ssl", 0o755), os.Symlink(run+"/resolv.conf", etc+"/resolv.conf"),
		os.Symlink(run, etc+"/nsswitch.conf"), os.Symlink(run+"/certs", etc+"/ssl/certs"), os.Symlink("/nonexistent", etc+"/localtime"),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	linked := linkedFrom(etc)
	slices.Sort(linked)
	if want := []string{run + "/certs", run + "/resolv.conf"}; !slices.Equal(linked, want) {
		t.Fatalf("%q, want %q", linked, want)
	}
	needs(t, MinABI)
	p := newPlace(t).child()
	for _, path := range linked {
		p.rules = append(p.rules, rule{path, read, false})
	}
	attempts{
		"the file":      {readFileAt(run + "/resolv.conf"), nil},
		"its neighbour": {readFileAt(run + "/secret"), unix.EACCES},
		"its directory": {list(run), unix.EACCES},
	}.under(t, p)
}

func TestChildTruncatesOnlyItsFiles(t *testing.T) {
	needs(t, truncateABI)
	p := newPlace(t)
	attempts{
		"own":       {func() error { return os.Truncate(p.own+"/file", 0) }, nil},
		"elsewhere": {func() error { return os.Truncate(p.other+"/file", 0) }, unix.EACCES},
	}.under(t, p.child())
}

func TestHelperWritesOnlyItsDirectories(t *testing.T) {
	needs(t, MinABI)
	p := newPlace(t)
	attempts{
		"new own file":       {writeAt(p.own + "/new"), nil},
		"file elsewhere":     {readFileAt(p.other + "/file"), nil},
		"program elsewhere":  {run(p.other + "/program"), nil},
		"new file elsewhere": {writeAt(p.other + "/new"), unix.EACCES},
		"its name":           {writeAt("/proc/self/task/" + strconv.Itoa(os.Getpid()) + "/comm"), nil},
	}.under(t, Helper(p.own))
}

func TestRequiredFilesMustExist(t *testing.T) {
	needs(t, MinABI)
	for name, p := range map[string]Policy{
		"file":      Child{Programs: []string{"/bin/true"}, Files: []string{"/nonexistent/file"}}.Policy(),
		"directory": Child{Programs: []string{"/bin/true"}, Writable: []string{"/nonexistent/dir"}}.Policy(),
		"helper's":  Helper("/nonexistent/dir"),
	} {
		started := false
		err := p.Run(func() error { started = true; return nil })
		if !errors.Is(err, os.ErrNotExist) || started {
			t.Errorf("%s: %v, started %v", name, err, started)
		}
	}
}

func TestConnectionsOnlyToGivenPorts(t *testing.T) {
	needs(t, networkABI)
	listen := func() (net.Listener, uint16) {
		l, err := net.Listen("tcp4", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = l.Close() })
		return l, l.Addr().(*net.TCPAddr).AddrPort().Port()
	}
	_, own := listen()
	_, other := listen()
	connect := func(port uint16) func() error {
		return func() error { // not with package net, whose threads are others
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return err
			}
			defer unix.Close(fd)
			return unix.Connect(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}, Port: int(port)})
		}
	}
	bind := func(port int) func() error {
		return func() error {
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return err
			}
			defer unix.Close(fd)
			return unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}, Port: port})
		}
	}
	p := newPlace(t)
	attempts{
		"its port":     {connect(own), nil},
		"another port": {connect(other), unix.EACCES},
		"DNS":          {connect(dnsPort), unix.ECONNREFUSED},
		"bind":         {bind(0), unix.EACCES},
	}.under(t, Child{Programs: []string{p.program}, Ports: []uint16{own}}.Policy())
	attempts{"any port": {connect(other), nil}}.under(t, Child{Programs: []string{p.program}}.Policy())
	attempts{"any free port": {bind(0), nil}, "a port": {bind(18080), unix.EACCES}, "any port": {connect(other), nil}}.under(t, Helper())
}

func TestSandbox_SignalsAndAbstractSocketsStayWithin(t *testing.T) {
	needs(t, scopeABI)
	start := func() *os.Process {
		cmd := exec.Command("/bin/sleep", "1000")
		if err := cmd.Start(); err != nil {
			t.Error(err)
			return nil
		}
		return cmd.Process
	}
	outside := start()
	name := fmt.Sprintf("@s3csi-sandbox-test-%d", os.Getpid())
	l, err := net.Listen("unix", name)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	p := newPlace(t)
	attempts{
		"a process outside": {func() error { return unix.Kill(outside.Pid, 0) }, unix.EPERM},
		"a process of its own": {func() error {
			inside := start()
			defer func() { _, _ = inside.Wait() }()
			return unix.Kill(inside.Pid, unix.SIGKILL)
		}, nil},
		"an abstract socket outside": {func() error {
			fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return err
			}
			defer unix.Close(fd)
			return unix.Connect(fd, &unix.SockaddrUnix{Name: name})
		}, unix.EPERM},
	}.under(t, p.child())
	_ = outside.Kill()
	_, _ = outside.Wait()
}

func TestSandbox_OlderKernelsEnforceWhatTheyCan(t *testing.T) {
	p := Child{Programs: []string{"/bin/true"}, Ports: []uint16{443}}.Policy()
	for abi, want := range map[int]struct {
		truncate, ioctl, net, scoped bool
		size                         uintptr
	}{
		2: {false, false, false, false, 8}, 3: {true, false, false, false, 8}, 4: {true, false, true, false, 16}, 5: {true, true, true, false, 16},
		6: {true, true, true, true, 24}, 99: {true, true, true, true, 24},
	} {
		a := p.enforced(abi)
		if got := a.files&unix.LANDLOCK_ACCESS_FS_TRUNCATE != 0; got != want.truncate {
			t.Errorf("%d: truncate %v", abi, got)
		}
		if got := a.files&unix.LANDLOCK_ACCESS_FS_IOCTL_DEV != 0; got != want.ioctl {
			t.Errorf("%d: ioctl %v", abi, got)
		}
		if a.net != 0 != want.net || a.scoped != 0 != want.scoped || a.size(abi) != want.size {
			t.Errorf("%d: %+v, %d bytes", abi, a, a.size(abi))
		}
		if a.files&unix.LANDLOCK_ACCESS_FS_REFER == 0 {
			t.Errorf("%d: without REFER, renames to other directories fail", abi)
		}
	}
}

// Every level that this kernel has is enforced with the attributes of that level.
func TestEveryLevelMakesARuleset(t *testing.T) {
	needs(t, MinABI)
	have, _ := ABI()
	for abi := MinABI; abi <= have; abi++ {
		for name, p := range map[string]Policy{"child": Child{Programs: []string{"/bin/true"}, Ports: []uint16{443}}.Policy(), "helper": Helper(t.TempDir())} {
			set, err := p.ruleset(abi)
			if err != nil {
				t.Errorf("%s, version %d: %v", name, abi, err)
				continue
			}
			_ = unix.Close(set)
		}
	}
}
