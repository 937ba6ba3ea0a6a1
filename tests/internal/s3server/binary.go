package s3server

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
)

// EnvBinary names the server program; without it, it is built.
const EnvBinary = "S3SERVER_BIN"

// program is the import path of the server program.
const program = "github.com/s3-csi/s3-csi-driver/tests/cmd/s3server"

// built is the program that this process has built; it does so at most once.
var built = sync.OnceValues(build) //nolint:gochecknoglobals // what is built does not depend on who asks

// Binary is the path of the server program: $S3SERVER_BIN, or one built with the go command into $S3CSI_CACHE/bin or the
// user's cache directory. The go command's own cache makes building it again cheap.
func Binary() (string, error) {
	if path := os.Getenv(EnvBinary); path != "" {
		return path, nil
	}
	return built()
}

func build() (string, error) {
	_, here, _, ok := runtime.Caller(0)
	if !ok || !filepath.IsAbs(here) {
		return "", errors.New("s3server: the program's source is not known (built with -trimpath?): set " + EnvBinary)
	}
	dir := os.Getenv("S3CSI_CACHE")
	if dir == "" {
		cache, err := os.UserCacheDir()
		if err != nil {
			return "", fmt.Errorf("s3server: no place for the program, set %s: %w", EnvBinary, err)
		}
		dir = filepath.Join(cache, "s3-csi-driver")
	}
	bin := filepath.Join(dir, "bin", "s3server")
	if err := os.MkdirAll(filepath.Dir(bin), 0o755); err != nil {
		return "", err
	}
	// Built beside and renamed: test binaries of several packages run at the same time.
	temp, err := os.MkdirTemp(filepath.Dir(bin), "build")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(temp)
	fresh := filepath.Join(temp, "s3server")
	// The same flags as the test's own build, whose compiled packages are then used again.
	cmd := exec.Command("go", "build", "-o", fresh, program)
	cmd.Dir = filepath.Dir(filepath.Dir(here))
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("s3server: go build %s: %w\n%s", program, err, out)
	}
	return bin, os.Rename(fresh, bin)
}
