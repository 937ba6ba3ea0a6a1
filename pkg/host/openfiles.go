//go:build linux

package host

import (
	"os"
	"sync"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// openFiles is a set of descriptors that is closed when its last user releases it: a call that its caller has abandoned still uses
// them.
type openFiles struct {
	mu    sync.Mutex
	users int
	files []*os.File
}

// newOpenFiles makes an empty set with one user.
func newOpenFiles() *openFiles { return &openFiles{users: 1} }

// acquire adds a user, and reports false if the set is closed already.
func (o *openFiles) acquire() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.users == 0 {
		return false
	}
	o.users++
	return true
}

// release removes a user.
func (o *openFiles) release() {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.users--; o.users > 0 {
		return
	}
	for _, f := range o.files {
		f.Close()
	}
	o.files = nil
}

// add puts a descriptor into the set on behalf of a user.
func (o *openFiles) add(fd int, name string) *os.File {
	f := os.NewFile(uintptr(fd), name)
	o.mu.Lock()
	defer o.mu.Unlock()
	o.files = append(o.files, f)
	return f
}

// using runs fn as a user of all the sets.
func using(fn func() error, sets ...*openFiles) error {
	for i, o := range sets {
		if !o.acquire() {
			for _, acquired := range sets[:i] {
				acquired.release()
			}
			return fault.Errorf(fault.Timeout, "not started: the caller has stopped waiting")
		}
	}
	defer func() {
		for _, o := range sets {
			o.release()
		}
	}()
	return fn()
}
