// Command standin is a stand-in for a client: it tries what a sandbox forbids, and waits, as it is told.
package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

func main() { os.Exit(standIn(os.Args[1:])) }

// standIn does the steps one after the other, says how each went ("<step>: <error>") and gives an exit code:
//
//	write:<dir>      make a file there
//	list:<dir>       name the entries
//	link:<path>      say where a symbolic link leads
//	open:<path>      open a file for reading and writing
//	socket:<family>  make a datagram socket of that address family's number
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
