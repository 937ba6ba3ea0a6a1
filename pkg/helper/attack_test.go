package helper

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// attackMode is this test binary's mode as an attacker.
const attackMode = "attack"

// attack prints a line for everything that it gets.
func attack(how string, args []string) int {
	switch how {
	case "look": // into processes
		for _, pid := range args {
			lookInto(pid)
		}
	case "scan": // the ports around one of the machine's own address, for credentials
		middle, _ := strconv.Atoi(args[0])
		for port := max(1, middle-500); port < min(middle+500, 1<<16); port++ {
			if knock(port, "") {
				fmt.Printf("GOT credentials at %d\n", port)
			}
		}
		fmt.Println("scanned")
	case "flood": // one port, until standard input ends
		go func() { _, _ = io.Copy(io.Discard, os.Stdin); os.Exit(0) }()
		port, _ := strconv.Atoi(args[0])
		fmt.Println("flooding")
		if len(args) > 1 { // with idle connections, and beginnings of requests
			go hold(port, "")
			go hold(port, "GET "+endpointPath+" HTTP/1.1\r\nHost: ")
		}
		for {
			if knock(port, "") || knock(port, "Authorization: "+strings.Repeat("0", 64)+"\r\n") {
				fmt.Println("GOT credentials")
			}
		}
	case "ask": // with the token, as a client does
		port, _ := strconv.Atoi(args[0])
		for range 200 {
			if began := time.Now(); !knock(port, "Authorization: "+args[1]+"\r\n") {
				fmt.Println("GOT no answer after", time.Since(began))
			}
		}
		fmt.Println("asked")
	case "connect": // to a socket
		conn, err := net.Dial("unix", args[0])
		if err != nil {
			fmt.Println("refused", err)
			return 0
		}
		_, _ = conn.Write(frame(`{"protocol":1,"op":"hello"}`))
		rep, err := readReply(conn)
		if err != nil || rep.Error == nil || rep.Status != nil {
			fmt.Printf("GOT an answer: %+v %v\n", rep, err)
			return 0
		}
		fmt.Println("refused", rep.Error.Text)
	case "pounce": // on every new child of a process, until standard input ends
		go func() { _, _ = io.Copy(io.Discard, os.Stdin); os.Exit(0) }()
		pounce(args[0], args[1:])
	}
	return 0
}

// hold keeps connections with the beginning of a request open.
func hold(port int, text string) {
	var held [300]net.Conn
	for n := 0; ; n = (n + 1) % len(held) {
		if held[n] != nil {
			_ = held[n].Close()
		}
		if conn, err := net.DialTimeout("tcp4", "127.0.0.1:"+strconv.Itoa(port), time.Second); err == nil {
			held[n] = conn
			_, _ = io.WriteString(conn, text)
		}
	}
}

// knock asks for credentials at a port. It reports whether it got them.
func knock(port int, header string) bool {
	conn, err := net.DialTimeout("tcp4", "127.0.0.1:"+strconv.Itoa(port), 5*time.Second)
	if err != nil {
		return false
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(5 * time.Second))
	_, _ = io.WriteString(conn, "GET "+endpointPath+" HTTP/1.1\r\nHost: x\r\n"+header+"\r\n")
	answer, _ := io.ReadAll(io.LimitReader(conn, 4096))
	return strings.Contains(string(answer), "SecretAccessKey")
}

// lookInto tries every way into a process that a user has.
func lookInto(pid string) {
	for _, name := range []string{"mem", "environ", "maps", "auxv", "syscall", "stack", "fd/0", "fd/3", "map_files", "pagemap", "io"} {
		path := "/proc/" + pid + "/" + name
		if f, err := os.OpenFile(path, os.O_RDONLY, 0); err == nil {
			if n, _ := f.Read(make([]byte, 1)); n > 0 || name == "mem" { // nothing is at its beginning
				fmt.Println("GOT", path)
			}
			_ = f.Close()
		}
		if link, err := os.Readlink(path); err == nil {
			fmt.Println("GOT", path, "->", link)
		}
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	n, _ := strconv.Atoi(pid)
	if err := unix.PtraceSeize(n); err == nil {
		fmt.Println("GOT a trace of", pid)
	}
	if err := unix.PtraceAttach(n); err == nil {
		fmt.Println("GOT a trace of", pid)
	}
	local, remote := make([]byte, 1), unix.RemoteIovec{Base: 0x400000, Len: 1}
	if _, err := unix.ProcessVMReadv(n, []unix.Iovec{{Base: &local[0], Len: 1}}, []unix.RemoteIovec{remote}, 0); err == nil {
		fmt.Println("GOT memory of", pid)
	}
	if fd, err := unix.PidfdOpen(n, 0); err == nil {
		if got, err := unix.PidfdGetfd(fd, 0, 0); err == nil {
			fmt.Println("GOT a descriptor of", pid, got)
		}
	}
	fmt.Println("looked into", pid)
}

// pounce attaches to every child of a process as soon as it is there, and holds on to it. Children of before are known.
func pounce(parent string, known []string) {
	runtime.LockOSThread()
	said, held := map[string]bool{}, map[string]bool{}
	strangers := map[string]bool{} // as far as they were there the last time
	fmt.Println("pouncing")
	for {
		// What it holds goes on as if nothing were.
		for {
			var ws unix.WaitStatus
			pid, err := unix.Wait4(-1, &ws, unix.WNOHANG|unix.WALL, nil)
			if err != nil || pid <= 0 {
				break
			}
			if ws.Stopped() {
				_ = unix.PtraceCont(pid, int(ws.StopSignal()))
			}
		}
		still := map[string]bool{}
		for _, pid := range processes() {
			if held[pid] || slices.Contains(known, pid) {
				continue
			}
			if strangers[pid] || !isChild(pid, parent) {
				still[pid] = true
				continue
			}
			if _, err := unix.Open("/proc/"+pid+"/mem", unix.O_RDONLY, 0); err == nil { // and it stays open
				fmt.Println("GOT the memory of", pid)
			}
			n, _ := strconv.Atoi(pid)
			switch err := unix.PtraceSeize(n); {
			case err == nil:
				held[pid] = true
				fmt.Println("GOT a trace of", pid)
			case errors.Is(err, unix.EPERM) && !said[pid]:
				said[pid] = true
				fmt.Println("missed", pid)
			}
		}
		strangers = still
	}
}

// processes are the numbers of all that are there now.
func processes() []string {
	dir, err := os.Open("/proc")
	if err != nil {
		return nil
	}
	defer dir.Close()
	names, _ := dir.Readdirnames(-1)
	return slices.DeleteFunc(names, func(name string) bool { return name[0] < '0' || name[0] > '9' })
}

func isChild(pid, parent string) bool {
	status, _ := os.ReadFile("/proc/" + pid + "/status")
	return strings.Contains(string(status), "\nPPid:\t"+parent+"\n")
}
