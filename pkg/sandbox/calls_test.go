package sandbox

import (
	"encoding/binary"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// decide returns what the filter decides on a call.
func decide(t *testing.T, arch, number uint32, args ...uint32) uint32 {
	t.Helper()
	vm, err := bpf.NewVM(filter())
	if err != nil {
		t.Fatal(err)
	}
	data := make([]byte, argumentsOffset+6*8) // the VM loads big-endian numbers
	binary.BigEndian.PutUint32(data[numberOffset:], number)
	binary.BigEndian.PutUint32(data[architectureOffset:], arch)
	for i, a := range args {
		binary.BigEndian.PutUint32(data[argumentsOffset+8*i:], a)
	}
	action, err := vm.Run(data)
	if err != nil {
		t.Fatal(err)
	}
	return uint32(action)
}

func TestFilterDecides(t *testing.T) {
	errno := func(e unix.Errno) uint32 { return unix.SECCOMP_RET_ERRNO | uint32(e) }
	const allowed, x32 = unix.SECCOMP_RET_ALLOW, 0x40000000
	for _, c := range []struct {
		what         string
		arch, number uint32
		args         []uint32
		want         uint32
	}{
		{"read", architecture, unix.SYS_READ, nil, allowed},
		{"mount", architecture, unix.SYS_MOUNT, nil, errno(unix.EPERM)},
		{"the newest call", architecture, newest, nil, allowed},
		{"a newer call", architecture, newest + 1, nil, errno(unix.ENOSYS)},
		{"read of x32", architecture, unix.SYS_READ | x32, nil, errno(unix.ENOSYS)},
		{"read of 32 bits", unix.AUDIT_ARCH_I386, unix.SYS_READ, nil, unix.SECCOMP_RET_KILL_PROCESS},
		{"openat of an existing file", architecture, unix.SYS_OPENAT, []uint32{0, 0, unix.O_RDWR, unix.S_ISUID}, allowed},
		{"openat of a directory", architecture, unix.SYS_OPENAT, []uint32{0, 0, unix.O_DIRECTORY, unix.S_ISUID}, allowed},
		{"openat of a new file", architecture, unix.SYS_OPENAT, []uint32{0, 0, unix.O_CREAT, 0o755}, allowed},
		{"openat of a new file with set-user-ID", architecture, unix.SYS_OPENAT, []uint32{0, 0, unix.O_CREAT, unix.S_ISUID | 0o755}, errno(unix.EPERM)},
		{"openat of a file without a name", architecture, unix.SYS_OPENAT, []uint32{0, 0, unix.O_TMPFILE | unix.O_RDWR, unix.S_ISGID}, errno(unix.EPERM)},
		{"a thread", architecture, unix.SYS_CLONE, []uint32{unix.CLONE_VM | unix.CLONE_THREAD | unix.CLONE_SIGHAND}, allowed},
		{"clone3", architecture, unix.SYS_CLONE3, nil, errno(unix.ENOSYS)},
		{"TCP of IPv6", architecture, unix.SYS_SOCKET, []uint32{unix.AF_INET6, unix.SOCK_STREAM | unix.SOCK_CLOEXEC | unix.SOCK_NONBLOCK, unix.IPPROTO_TCP}, allowed},
		{"UDP by its number", architecture, unix.SYS_SOCKET, []uint32{unix.AF_INET, unix.SOCK_DGRAM, unix.IPPROTO_UDP}, allowed},
		{"packets of UNIX", architecture, unix.SYS_SOCKET, []uint32{unix.AF_UNIX, unix.SOCK_SEQPACKET | unix.SOCK_CLOEXEC}, allowed},
		{"SMC", architecture, unix.SYS_SOCKET, []uint32{unix.AF_INET, unix.SOCK_STREAM, 256}, errno(unix.EPROTONOSUPPORT)},
		{"family of SMC", architecture, unix.SYS_SOCKET, []uint32{unix.AF_SMC, unix.SOCK_STREAM}, errno(unix.EAFNOSUPPORT)},
		{"SCTP packets, the type's default", architecture, unix.SYS_SOCKET, []uint32{unix.AF_INET6, unix.SOCK_SEQPACKET}, errno(unix.ESOCKTNOSUPPORT)},
		{"DCCP, the type's default", architecture, unix.SYS_SOCKET, []uint32{unix.AF_INET, unix.SOCK_DCCP}, errno(unix.ESOCKTNOSUPPORT)},
		{"UDP-Lite of IPv6", architecture, unix.SYS_SOCKET, []uint32{unix.AF_INET6, unix.SOCK_DGRAM, unix.IPPROTO_UDPLITE}, errno(unix.EPROTONOSUPPORT)},
		{"the TCP layer of SMC", architecture, unix.SYS_SETSOCKOPT, []uint32{3, unix.IPPROTO_TCP, unix.TCP_ULP}, errno(unix.EPERM)},
		{"an option of TCP", architecture, unix.SYS_SETSOCKOPT, []uint32{3, unix.IPPROTO_TCP, unix.TCP_NODELAY}, allowed},
		{"an option of that number elsewhere", architecture, unix.SYS_SETSOCKOPT, []uint32{3, unix.SOL_SOCKET, unix.TCP_ULP}, allowed},
		{"sendmmsg that connects", architecture, unix.SYS_SENDMMSG, []uint32{3, 0, 1, unix.MSG_FASTOPEN | unix.MSG_NOSIGNAL}, errno(unix.EPERM)},
		{"sendmsg with other flags", architecture, unix.SYS_SENDMSG, []uint32{3, 0, unix.MSG_NOSIGNAL | unix.MSG_DONTWAIT}, allowed},
		{"all namespaces", architecture, unix.SYS_CLONE, []uint32{unix.CLONE_NEWUSER}, errno(unix.EPERM)},
	} {
		if got := decide(t, c.arch, c.number, c.args...); got != c.want {
			t.Errorf("%s: %#x, want %#x", c.what, got, c.want)
		}
	}
}

// restricted is the environment variable of a process that restricts itself.
const restricted = "S3CSI_TEST_RESTRICTED"

// TestRestrictedProcess makes system calls in a process with the filter, from a thread that was there before.
func TestRestrictedProcess(t *testing.T) {
	if err := FiltersCalls(); err != nil {
		t.Skip(err)
	}
	if os.Geteuid() != 0 {
		t.Skip("needs root, so that only the filter refuses anything")
	}
	if os.Getenv(restricted) == "" {
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v")
		cmd.Env = append(os.Environ(), restricted+"=1", "TMPDIR="+t.TempDir())
		out, err := cmd.CombinedOutput()
		if t.Logf("%s", out); err != nil || !strings.Contains(string(out), "--- PASS: TestRestrictedProcess/") {
			t.Error(err)
		}
		return
	}
	calls, results, started := make(chan func() error), make(chan error), make(chan struct{})
	defer close(calls)
	go func() {
		runtime.LockOSThread()
		close(started)
		for call := range calls {
			results <- call()
		}
	}()
	<-started
	if err := RestrictCalls(); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	raw := func(number uintptr, args ...uintptr) func() error {
		var a [6]uintptr
		copy(a[:], args)
		return func() error {
			if _, _, errno := unix.Syscall6(number, a[0], a[1], a[2], a[3], a[4], a[5]); errno != 0 {
				return errno
			}
			return nil
		}
	}
	socket := func(family, kind, protocol int) func() error {
		return func() error {
			fd, err := unix.Socket(family, kind, protocol)
			if err == nil {
				_ = unix.Close(fd)
			}
			return err
		}
	}
	setOption := func(option int) func() error {
		return func() error {
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0)
			if err != nil {
				return err
			}
			defer unix.Close(fd)
			return unix.SetsockoptInt(fd, unix.IPPROTO_TCP, option, 1)
		}
	}
	listener, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	address := listener.Addr().(*net.TCPAddr)
	var limits unix.Rlimit
	for name, c := range map[string]struct {
		try  func() error
		want error
	}{
		"a file":         {func() error { return os.WriteFile(filepath.Join(dir, "file"), []byte("x"), 0o644) }, nil},
		"a directory":    {func() error { return os.Mkdir(filepath.Join(dir, "dir"), 0o755) }, nil},
		"a program":      {func() error { return exec.CommandContext(t.Context(), "/bin/true").Run() }, nil},
		"UNIX":           {socket(unix.AF_UNIX, unix.SOCK_STREAM, 0), nil},
		"TCP":            {socket(unix.AF_INET, unix.SOCK_STREAM, 0), nil},
		"UDP":            {socket(unix.AF_INET, unix.SOCK_DGRAM, 0), nil},
		"limits":         {func() error { return unix.Getrlimit(unix.RLIMIT_NOFILE, &limits) }, nil},
		"executable map": {func() error { return mapped(unix.PROT_READ | unix.PROT_EXEC) }, nil},
		"query domain":   {raw(unix.SYS_PERSONALITY, 0xffffffff), nil},
		"batch":          {func() error { return schedule(unix.SCHED_BATCH) }, nil},

		"option of TCP": {setOption(unix.TCP_NODELAY), nil},
		"a Go connection": {func() error {
			c, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", address.String())
			if err == nil {
				err = c.Close()
			}
			return err
		}, nil},

		"sendto connects":   {func() error { return fastOpen(address.Port, "sendto") }, unix.EPERM},
		"sendmsg connects":  {func() error { return fastOpen(address.Port, "sendmsg") }, unix.EPERM},
		"sendmmsg connects": {func() error { return fastOpen(address.Port, "sendmmsg") }, unix.EPERM},
		"TCP_ULP":           {setOption(unix.TCP_ULP), unix.EPERM},
		"UDP-Lite":          {socket(unix.AF_INET, unix.SOCK_DGRAM, unix.IPPROTO_UDPLITE), unix.EPROTONOSUPPORT},
		"SCTP":              {socket(unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_SCTP), unix.EPROTONOSUPPORT},
		"ping":              {socket(unix.AF_INET, unix.SOCK_DGRAM, unix.IPPROTO_ICMP), unix.EPROTONOSUPPORT},
		"raw IP":            {socket(unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_RAW), unix.ESOCKTNOSUPPORT},
		"pair of IP":        {func() error { _, err := unix.Socketpair(unix.AF_INET, unix.SOCK_STREAM, 0); return err }, unix.EAFNOSUPPORT},

		"MPTCP":          {socket(unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_MPTCP), unix.EPROTONOSUPPORT},
		"netlink":        {socket(unix.AF_NETLINK, unix.SOCK_RAW, 0), unix.EAFNOSUPPORT},
		"packets":        {socket(unix.AF_PACKET, unix.SOCK_RAW, 0), unix.EAFNOSUPPORT},
		"vsock":          {socket(unix.AF_VSOCK, unix.SOCK_STREAM, 0), unix.EAFNOSUPPORT},
		"written code":   {func() error { return mapped(unix.PROT_WRITE | unix.PROT_EXEC) }, unix.EPERM},
		"memory to code": {madeExecutable, unix.EPERM},
		"a memory file":  {func() error { _, err := unix.MemfdCreate("x", 0); return err }, unix.EPERM},
		"unshare":        {func() error { return unix.Unshare(unix.CLONE_FS) }, unix.EPERM},
		"a namespace":    {namespaced, unix.EPERM},
		"setns":          {func() error { return unix.Setns(0, 0) }, unix.EPERM},
		"mount":          {func() error { return unix.Mount("none", dir, "tmpfs", 0, "") }, unix.EPERM},
		"fsopen":         {func() error { _, err := unix.Fsopen("tmpfs", 0); return err }, unix.EPERM},
		"chroot":         {func() error { return unix.Chroot("/") }, unix.EPERM},
		"openat2":        {func() error { _, err := unix.Openat2(unix.AT_FDCWD, "/", &unix.OpenHow{}); return err }, unix.ENOSYS},
		"handle":         {func() error { _, err := unix.OpenByHandleAt(-1, unix.NewFileHandle(0, nil), 0); return err }, unix.EPERM},
		"set-user-ID":    {func() error { return os.Chmod(dir, os.ModeSetuid|0o755) }, unix.EPERM},
		"set-group-ID":   {func() error { return unix.Mkdir(filepath.Join(dir, "group"), unix.S_ISGID|0o755) }, unix.EPERM},
		"set-user-ID file": {func() error {
			_, err := unix.Open(filepath.Join(dir, "suid"), unix.O_CREAT, unix.S_ISUID|0o755)
			return err
		}, unix.EPERM},
		"trace":              {func() error { return syscall.PtraceAttach(os.Getppid()) }, unix.EPERM},
		"read memory":        {func() error { _, err := unix.ProcessVMReadv(os.Getpid(), nil, nil, 0); return err }, unix.EPERM},
		"performance events": {raw(unix.SYS_PERF_EVENT_OPEN), unix.EPERM},
		"BPF":                {raw(unix.SYS_BPF), unix.EPERM},
		"io_uring":           {raw(unix.SYS_IO_URING_SETUP), unix.EPERM},
		"userfaultfd":        {raw(unix.SYS_USERFAULTFD), unix.EPERM},
		"keyring":            {func() error { _, err := unix.KeyctlGetKeyringID(unix.KEY_SPEC_SESSION_KEYRING, false); return err }, unix.EPERM},
		"shared memory":      {func() error { _, err := unix.SysvShmGet(unix.IPC_PRIVATE, 4096, unix.IPC_CREAT); return err }, unix.EPERM},
		"semaphores":         {raw(unix.SYS_SEMGET, unix.IPC_PRIVATE, 1), unix.EPERM},
		"a message queue":    {raw(unix.SYS_MQ_OPEN), unix.EPERM},
		"host name":          {func() error { return unix.Sethostname(nil) }, unix.EPERM},
		"clock":              {raw(unix.SYS_CLOCK_SETTIME), unix.EPERM},
		"another domain":     {raw(unix.SYS_PERSONALITY, 0x0040000), unix.EPERM}, // ADDR_NO_RANDOMIZE
		"real time":          {func() error { return schedule(unix.SCHED_FIFO) }, unix.EPERM},
	} {
		t.Run(name, func(t *testing.T) {
			calls <- c.try
			if err := <-results; !errors.Is(err, c.want) || c.want == nil && err != nil {
				t.Errorf("%v, want %v", err, c.want)
			}
		})
	}
}

// fastOpen connects to a loopback port with TCP Fast Open, by one of the calls that can.
func fastOpen(port int, call string) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	to := &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}, Port: port}
	switch call {
	case "sendto":
		return unix.Sendto(fd, []byte("x"), unix.MSG_FASTOPEN, to)
	case "sendmsg":
		return unix.Sendmsg(fd, []byte("x"), nil, to, unix.MSG_FASTOPEN)
	}
	payload := []byte("x")
	name := unix.RawSockaddrInet4{Family: unix.AF_INET, Port: uint16(port)<<8 | uint16(port)>>8, Addr: to.Addr}
	message := struct {
		header unix.Msghdr
		length uint32
	}{header: unix.Msghdr{Name: (*byte)(unsafe.Pointer(&name)), Namelen: unix.SizeofSockaddrInet4, Iov: &unix.Iovec{Base: &payload[0], Len: 1}, Iovlen: 1}}
	if _, _, errno := unix.Syscall6(unix.SYS_SENDMMSG, uintptr(fd), uintptr(unsafe.Pointer(&message)), 1, unix.MSG_FASTOPEN, 0, 0); errno != 0 {
		return errno
	}
	return nil
}

func mapped(protection int) error {
	m, err := unix.Mmap(-1, 0, os.Getpagesize(), protection, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return err
	}
	return unix.Munmap(m)
}

func madeExecutable() error {
	m, err := unix.Mmap(-1, 0, os.Getpagesize(), unix.PROT_READ, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return err
	}
	return errors.Join(unix.Mprotect(m, unix.PROT_READ|unix.PROT_EXEC), unix.Munmap(m))
}

func namespaced() error {
	cmd := exec.Command("/bin/true")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWUTS}
	return cmd.Run()
}

// schedule changes the calling thread's policy.
func schedule(policy uintptr) error {
	priority := int32(0)
	if policy == unix.SCHED_FIFO {
		priority = 1
	}
	if _, _, errno := unix.Syscall(unix.SYS_SCHED_SETSCHEDULER, 0, policy, uintptr(unsafe.Pointer(&priority))); errno != 0 {
		return errno
	}
	return nil
}
