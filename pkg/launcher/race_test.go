//go:build race

package launcher_test

// memoryLimit with the race detector's own memory, in KiB: no statement about the real program.
const memoryLimit = 256 << 10
