package rig

import (
	"fmt"
	"os"
	"strings"
)

// Ended reports whether a process has ended, even if it has not been reaped yet. A zombie with threads has not: its first thread
// is gone, and the others still run, or hang, and hold what it had open.
func Ended(pid int) bool { return ended(statusOf(pid)) }

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
