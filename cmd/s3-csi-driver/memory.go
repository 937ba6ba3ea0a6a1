package main

import (
	"context"
	"runtime/debug"
	"runtime/metrics"
	"time"
)

const (
	trimEvery = 20 * time.Second // the interval between two checks of the memory that is not in use
	// trimAbove is how much of that the driver keeps, in bytes. The collection that returns it takes milliseconds of processor time.
	trimAbove = 4 << 20
)

// trimMemory returns memory to the system when the driver has become idle, until ctx ends. The runtime itself collects garbage only when
// the heap has doubled, so that a driver whose hundred mounts were published at once would keep twice what it needs.
func trimMemory(ctx context.Context) error {
	ticker := time.NewTicker(trimEvery)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
			if unusedMemory() > trimAbove {
				debug.FreeOSMemory()
			}
		case <-ctx.Done():
			return nil
		}
	}
}

// unusedMemory returns how many bytes of the heap are garbage, or were when it was last collected, or are free.
func unusedMemory() uint64 {
	samples := []metrics.Sample{
		{Name: "/memory/classes/heap/objects:bytes"}, {Name: "/memory/classes/heap/unused:bytes"}, {Name: "/memory/classes/heap/free:bytes"},
		{Name: "/gc/heap/live:bytes"},
	}
	metrics.Read(samples)
	held := samples[0].Value.Uint64() + samples[1].Value.Uint64() + samples[2].Value.Uint64()
	if live := samples[3].Value.Uint64(); live < held {
		return held - live
	}
	return 0
}
