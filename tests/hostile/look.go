package hostile

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

// Look looks at a target, as kubelet, container runtimes and containers do. Errors of the client are none of Look's: it returns one if the
// file system leads out of itself.
func Look(target string) error {
	if path, err := filepath.EvalSymlinks(target); err == nil && path != target {
		return fmt.Errorf("%s is %s", target, path)
	}
	_, _ = os.Stat(target)
	if dir, err := os.Open(target); err == nil {
		_, _ = dir.Readdirnames(100)
		dir.Close()
	}
	info, err := os.Lstat(filepath.Join(target, "name"))
	if err != nil || info.Mode()&os.ModeDevice == 0 {
		return nil //nolint:nilerr // see above
	}
	device, err := os.Open(filepath.Join(target, "name"))
	if err == nil {
		return errors.Join(errors.New("a device node of the client can be opened"), device.Close())
	}
	return nil
}
