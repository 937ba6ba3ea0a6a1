//go:build race

package sandbox

import (
	"os"
	"path/filepath"
)

// reports allows the race detector to write its reports where the tests look for them (tests/internal/race).
func reports() []rule {
	program, err := os.Executable()
	if err != nil {
		return nil
	}
	return permit(write, filepath.Join(filepath.Dir(filepath.Dir(program)), "races"))
}
