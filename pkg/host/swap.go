//go:build linux

package host

import (
	"context"
	"errors"
	"time"
)

// Swap says which mounts are replaced by clones of which.
type Swap struct {
	// Living is the top mount on Living.Mountpoint in this namespace, as read from its table. It is checked again
	// (id and device) when it is opened.
	Living Mount
	// Dead tells, by their table entries, the mounts that are replaced. Mounts of Living's device are never taken.
	Dead func(Mount) bool
	// Bound is for each look-up inside the living file system, which its client has to answer.
	Bound time.Duration
}

// Swapped is what became of one mount.
type Swapped struct {
	Mountpoint string // as the namespace's own processes see it
	PID        int    // 0: in the namespace itself; else a process of the mount namespace
	Root       string // which directory (or file) of the file system it shows
	Err        error  // nil: replaced
}

// SwapHere replaces mounts of this namespace for which s.Dead is true and where(m) is true.
func (n *Namespace) SwapHere(ctx context.Context, s Swap, where func(Mount) bool) ([]Swapped, error) {
	return nil, errors.ErrUnsupported
}

// SwapElsewhere replaces mounts in the other mount namespaces of which a process satisfies theirs (the text of
// /proc/<pid>/cgroup), and leaves all other namespaces alone.
func (n *Namespace) SwapElsewhere(ctx context.Context, s Swap, theirs func(cgroup string) bool) ([]Swapped, error) {
	return nil, errors.ErrUnsupported
}

// DetachDead detaches mounts for which dead is true in other namespaces than this one of which no process satisfies
// spare, and says how many.
func (n *Namespace) DetachDead(ctx context.Context, dead func(Mount) bool, spare func(cgroup string) bool) (int, error) {
	return 0, errors.ErrUnsupported
}
