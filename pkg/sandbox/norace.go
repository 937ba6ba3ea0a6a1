//go:build !race

package sandbox

// reports are the rules that only programs with the race detector need.
func reports() []rule { return nil }
