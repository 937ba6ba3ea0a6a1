package launcher

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// ForkExec moves the descriptors that it passes on through numbers just above them: a program that is executed through such a
// number would be gone by then, which happens when many start at once.
func TestProgramDescriptorIsAboveThePassedOnes(t *testing.T) {
	program, err := os.Open("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	defer program.Close()
	before := program.Fd()
	passed := []uintptr{before - 1, before - 2}
	high, err := dupAbove(before, passed)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(high)
	if high <= int(before)+len(passed)+2 {
		t.Errorf("descriptor %d lies among those that %v are moved through", high, passed)
	}
	if flags, err := unix.FcntlInt(uintptr(high), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
		t.Errorf("it would be passed on itself: %#x, %v", flags, err)
	}
}
