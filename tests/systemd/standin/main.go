// Command standin is a stand-in for a client: it tries what a sandbox forbids, and waits, as its arguments say.
package main

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

func main() {
	if len(os.Args) > 2 && os.Args[1] == "--without-landlock" {
		fmt.Fprintln(os.Stderr, withoutLandlock(os.Args[2:]))
		os.Exit(1)
	}
	os.Exit(standIn(os.Args[1:]))
}

// withoutLandlock executes a program for which the kernel has no Landlock: a filter refuses its first system call as such a kernel does.
// It returns only after an error.
func withoutLandlock(argv []string) error {
	runtime.LockOSThread()
	const number = 0 // offset in struct seccomp_data
	filter := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: number},
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.SYS_LANDLOCK_CREATE_RULESET, Jf: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ERRNO | uint32(unix.ENOSYS)},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
	}
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	if _, _, errno := unix.Syscall(unix.SYS_PRCTL, unix.PR_SET_SECCOMP, unix.SECCOMP_MODE_FILTER, uintptr(unsafe.Pointer(&program))); errno != 0 {
		return fmt.Errorf("filtering system calls: %w", errno)
	}
	path, err := exec.LookPath(argv[0])
	if err != nil {
		return err
	}
	return unix.Exec(path, argv, os.Environ())
}

func dial(network, addr string) error {
	conn, err := new(net.Dialer).DialContext(context.Background(), network, addr)
	if err != nil {
		return err
	}
	return conn.Close()
}

// standIn does the steps one after the other, says how each went ("<step>: <error>") and gives an exit code:
//
//	write:<dir>      make a file there
//	list:<dir>       name the entries
//	read:<path>      read a file
//	truncate:<path>  truncate a file without opening it
//	exec:<path>      run a program
//	signal:<pid>     send a process the signal 0
//	connect:<addr>   connect to a host and port with TCP
//	bind:<port>      bind a TCP socket
//	abstract:<name>  connect to an abstract UNIX socket
//	link:<path>      say where a symbolic link leads
//	open:<path>      open a file for reading and writing
//	socket:<family>  make a datagram socket of that address family's number
//	mptcp            make a socket of MPTCP
//	fastopen:<addr>  connect to a host and port with TCP Fast Open
//	unshare          make a user namespace
//	code             map memory that can be written and executed
//	send:<addr>      send a packet to an address
//	wait:<path>      until the file is there
//	exit:<code>      end
func standIn(steps []string) int {
	for _, step := range steps {
		name, arg, _ := strings.Cut(step, ":")
		n, _ := strconv.Atoi(arg) // 0 for steps without a number
		var err error
		var result string
		switch name {
		case "write":
			err = os.WriteFile(filepath.Join(arg, "stand-in"), []byte("x"), 0o644)
		case "list":
			var entries []os.DirEntry
			entries, err = os.ReadDir(arg)
			for _, e := range entries {
				result += " " + e.Name()
			}
		case "read":
			_, err = os.ReadFile(arg)
		case "truncate":
			err = os.Truncate(arg, 0)
		case "exec":
			err = exec.CommandContext(context.Background(), arg).Run()
		case "signal":
			err = unix.Kill(n, 0)
		case "connect":
			err = dial("tcp", arg)
		case "abstract":
			err = dial("unix", "@"+arg)
		case "bind":
			var fd int
			if fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0); err == nil {
				err = unix.Bind(fd, &unix.SockaddrInet4{Port: n})
				unix.Close(fd)
			}
		case "link":
			result, err = os.Readlink(arg)
		case "open":
			var f *os.File
			if f, err = os.OpenFile(arg, os.O_RDWR, 0); err == nil {
				f.Close()
			}
		case "socket":
			var fd int
			if fd, err = unix.Socket(n, unix.SOCK_DGRAM, 0); err == nil {
				unix.Close(fd)
			}
		case "mptcp":
			var fd int
			if fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_MPTCP); err == nil {
				unix.Close(fd)
			}
		case "fastopen":
			var to netip.AddrPort
			var fd int
			if to, err = netip.ParseAddrPort(arg); err == nil {
				fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0)
			}
			if err == nil {
				err = unix.Sendto(fd, []byte("x"), unix.MSG_FASTOPEN, &unix.SockaddrInet4{Addr: to.Addr().As4(), Port: int(to.Port())})
				unix.Close(fd)
			}
		case "unshare":
			err = unix.Unshare(unix.CLONE_NEWUSER)
		case "code":
			_, err = unix.Mmap(-1, 0, 4096, unix.PROT_WRITE|unix.PROT_EXEC, unix.MAP_ANON|unix.MAP_PRIVATE)
		case "send":
			var conn net.Conn
			if conn, err = new(net.Dialer).DialContext(context.Background(), "udp", net.JoinHostPort(arg, "80")); err == nil {
				_, err = conn.Write([]byte("x"))
				conn.Close()
			}
		case "wait":
			for _, err := os.Stat(arg); err != nil; _, err = os.Stat(arg) {
				time.Sleep(5 * time.Millisecond)
			}
		case "exit":
			return n
		default:
			err = fmt.Errorf("unknown step")
		}
		if err != nil {
			result = err.Error()
		}
		fmt.Printf("%s: %s\n", step, strings.TrimSpace(result))
	}
	return 0
}
