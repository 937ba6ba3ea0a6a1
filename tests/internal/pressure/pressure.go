// Package pressure measures time without that in which the machine had something to run and could not: what is promised
// within a time is promised where it can run.
package pressure

import (
	"os"
	"strconv"
	"strings"
	"time"
)

// Stalls are how long, since the machine was started, something had to wait for a CPU, and for the disk (Linux,
// Documentation/accounting/psi.rst); always 0 where the kernel does not tell.
type Stalls struct {
	CPU  time.Duration `json:"cpu"`
	Disk time.Duration `json:"disk"`
}

// Read gives those of now.
func Read() Stalls { return Stalls{CPU: total("cpu"), Disk: total("io")} }

func total(of string) time.Duration {
	pressure, _ := os.ReadFile("/proc/pressure/" + of)
	some, _, _ := strings.Cut(string(pressure), "\n")
	_, us, _ := strings.Cut(some, "total=")
	n, _ := strconv.ParseInt(us, 10, 64)
	return time.Duration(n) * time.Microsecond
}

// Moment is a point in time, and the stalls until then.
type Moment struct {
	time.Time
	Stalls
}

// Now is this moment.
func Now() Moment { return Moment{time.Now(), Read()} }

// Until is the time from m to a later moment in which the machine could run. It is a fifth of the whole time at least, so
// that it passes on the busiest machine.
func (m Moment) Until(later Moment) time.Duration {
	all := later.Sub(m.Time)
	return max(all-max(later.CPU-m.CPU, later.Disk-m.Disk, 0), all/5)
}

// Since is Until now.
func (m Moment) Since() time.Duration { return m.Until(Now()) }
