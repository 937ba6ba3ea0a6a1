package rig

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// Ended reports whether a process has ended, even if it has not been reaped yet. A zombie with threads has not: its first thread
// is gone, and the others still run, or hang, and hold what it had open. It does not look in /proc, where the kernel may keep both
// processors busy for seconds if a process is looked at while it exits.
func Ended(pid int) bool {
	process, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return errors.Is(err, unix.ESRCH)
	}
	defer unix.Close(process)
	poll := []unix.PollFd{{Fd: int32(process), Events: unix.POLLIN}} // readable when all threads have ended (pidfd_open(2))
	_, _ = unix.Poll(poll, 0)                                        // an interrupted one sees it the next time
	return poll[0].Revents&unix.POLLIN != 0
}

// ended is what Ended says, by the process's status.
func ended(status string) bool {
	switch statusField(status, "State") {
	case "", "X":
		return true
	case "Z":
		threads := statusField(status, "Threads")
		return threads == "1" || threads == "0"
	default:
		return false
	}
}

// statusOf is /proc/<pid>/status (proc_pid_status(5)), "" where there is no such process.
func statusOf(pid int) string {
	status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	return string(status)
}

// statusField is the first word of a line of it.
func statusField(status, name string) string {
	_, rest, _ := strings.Cut("\n"+status, "\n"+name+":\t")
	word, _, _ := strings.Cut(rest, "\n")
	word, _, _ = strings.Cut(word, "\t")
	word, _, _ = strings.Cut(word, " ")
	return word
}
