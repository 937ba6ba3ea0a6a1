//go:build !race

package launcher_test

// memoryLimit is what a helper may cost, in KiB.
const memoryLimit = 5 << 10
