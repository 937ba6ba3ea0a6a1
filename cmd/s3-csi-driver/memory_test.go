package main

import (
	"runtime"
	"runtime/debug"
	"testing"
)

// What a driver has used once and uses no longer counts as unused, before and after it is collected, and not when it was returned.
func TestUnusedMemory_IsGarbageAndFreeMemory(t *testing.T) {
	const size = 64 << 20
	debug.FreeOSMemory()
	before := unusedMemory()
	garbage := make([]byte, size)
	garbage[size-1] = 1
	runtime.KeepAlive(garbage)
	if got := unusedMemory(); got < size {
		t.Errorf("%d bytes of garbage count as %d, after %d", size, got, before)
	}
	debug.FreeOSMemory()
	if got := unusedMemory(); got > size/2 {
		t.Errorf("%d bytes are unused after all was returned", got)
	}
}
