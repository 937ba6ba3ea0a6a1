package hostile

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// Look looks at the target of a client of that kind, as kubelet, container runtimes and containers do. It returns an error
// if the file system leads out of itself, or if the kind's file system is not shown. It ignores other errors.
func Look(target, kind string) error {
	if path, err := filepath.EvalSymlinks(target); err == nil && path != target {
		return fmt.Errorf("%s is %s", target, path)
	}
	_, _ = os.Stat(target)
	if dir, err := os.Open(target); err == nil {
		names, err := dir.Readdirnames(100)
		dir.Close()
		if (kind == Many || kind == Endless) && len(names) != 100 {
			return fmt.Errorf("the directory has %d entries: %w", len(names), err)
		}
	}
	name := filepath.Join(target, "name")
	info, err := os.Lstat(name)
	shown := map[string]fs.FileMode{Links: fs.ModeSymlink, Devices: fs.ModeDevice}[kind]
	if shown != 0 && (err != nil || info.Mode()&shown == 0) {
		return fmt.Errorf("%s is not %s: %w", name, shown, err)
	}
	if kind != Devices {
		return nil
	}
	device, err := os.Open(name)
	if err == nil {
		return errors.Join(errors.New("a device node of the client can be opened"), device.Close())
	}
	return nil
}

// Main is a declared client, and returns its exit code. A driver with launcher systemd first executes the program with --version.
func Main() int {
	if asked() {
		return 0
	}
	if err := Serve(os.Getenv(Env), fuseFD); err != nil {
		fmt.Println(err)
		return 1
	}
	return 0
}

// IsClient reports whether the process is to be Main.
func IsClient() bool { return os.Getenv(Env) != "" || asked() }

func asked() bool { return len(os.Args) == 2 && os.Args[1] == "--version" }
