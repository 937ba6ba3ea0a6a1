package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	fusefs "github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
	"github.com/rclone/rclone/cmd/mount2"
	"github.com/rclone/rclone/cmd/mountlib"
	"github.com/rclone/rclone/fs"
	"github.com/rclone/rclone/vfs"
	"golang.org/x/sys/unix"
)

// maxWrite is the largest read or write that the kernel sends.
const maxWrite = 1 << 20

// run serves until the file system is unmounted and everything is stored.
func run(ctx context.Context, c config, stdout io.Writer) error {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT)
	// A supervisor that is gone must not take the data with it.
	signal.Ignore(syscall.SIGPIPE)

	if err := checkFuse(c.fuseFD); err != nil {
		return err
	}
	if err := configureRclone(c); err != nil {
		return err
	}
	unlock, err := lockCache(c)
	if err != nil {
		return err
	}
	defer unlock()
	plain, err := newRemote(ctx, c)
	if err != nil {
		return err
	}
	queue, err := newUploads()
	if err != nil {
		return err
	}
	cache := newCache(c)
	remote, err := newGuard(ctx, c, plain, cache)
	if err != nil {
		return err
	}
	if err := cache.repair(ctx, remote); err != nil {
		return fmt.Errorf("cache of an earlier process: %w", err)
	}
	if err := remote.unsent.takeOver(); err != nil {
		return fmt.Errorf("cache of an earlier process: %w", err)
	}
	if err := cache.awaitRemote(ctx, remote); err != nil {
		return err
	}
	if cache.used {
		if left, err := cache.unsent(); err == nil && len(left) > 0 { // whose uploads are late
			remote.heads.credentials.renew(ctx)
		}
		kept, stop := context.WithCancel(ctx)
		defer stop()
		go remote.heads.credentials.keep(kept)
	}
	files, err := newVFS(ctx, c, remote)
	if err != nil {
		return err
	}
	defer func() { files.Shutdown() }()
	if err := cache.check(files); err != nil {
		return err
	}
	taken := cache.takeUp(ctx, files)
	server, open, err := newServer(c, files)
	if err != nil {
		return err
	}

	open.renaming = remote.unsent.renaming
	report := newReporter(stdout)
	defer report.close()
	unmounted := make(chan struct{})
	go func() {
		defer close(unmounted)
		server.Serve()
	}()
	report.say(readyLine)

	d := &drainer{queue: queue, cache: cache, guard: remote, report: report, forget: files.FlushDirCache, again: func(ctx context.Context) error {
		if err := cache.awaitRemote(ctx, remote); err != nil {
			return err
		}
		files.Shutdown()
		if err := remote.unsent.takeOver(); err != nil {
			return err
		}
		fresh, err := newVFS(ctx, c, remote)
		if err == nil {
			files = fresh
		}
		return err
	}}
	d.whileMounted(ctx, unmounted, signals)
	taken()
	if n := open.releaseAll(); n > 0 {
		fs.Logf(nil, "%d files were still open when the file system was unmounted", n)
	}
	return d.drain(ctx, signals)
}

// newServer takes over the FUSE descriptor. The kernel's first request is answered when it returns.
func newServer(c config, files *vfs.VFS) (*fuse.Server, *handles, error) {
	mountOpt := mountlib.Options{AttrTimeout: fs.Duration(attrTime), AllowOther: true}
	root, err := mount2.NewFS(files, &mountOpt).Root()
	if err != nil {
		return nil, nil, fmt.Errorf("root directory: %w", err)
	}
	timeout := attrTime
	opt := &fusefs.Options{
		EntryTimeout: &timeout, AttrTimeout: &timeout, UID: c.uid, GID: c.gid,
		NullPermissions: true, // show a mode of 0000 as that
		MountOptions: fuse.MountOptions{
			AllowOther: true, FsName: "s3csi", Name: "rclone",
			DisableXAttrs: true, DisableReadDirPlus: true, MaxWrite: maxWrite,
			// Containers with a user namespace get their volumes id-mapped, which the kernel (6.12 and newer) allows where it
			// checks permissions itself (default_permissions) and is asked to. It then tells nothing of callers' ids, which
			// nobody here wants to know.
			IDMappedMount: true,
			Logger:        log.New(withoutNoise{os.Stderr}, "fuse: ", 0),
		},
	}
	raw := newHandles(fusefs.NewNodeFS(root, opt))
	server, err := fuse.NewServer(raw, "/dev/fd/"+strconv.Itoa(c.fuseFD), &opt.MountOptions)
	if err != nil {
		return nil, nil, fmt.Errorf("FUSE descriptor %d: %w", c.fuseFD, err)
	}
	return server, raw, nil
}

// withoutNoise leaves out what go-fuse says of every request that it does not implement. The kernel asks once and then
// does without.
type withoutNoise struct{ w io.Writer }

func (n withoutNoise) Write(p []byte) (int, error) {
	if bytes.Contains(p, []byte("Unimplemented opcode")) {
		return len(p), nil
	}
	return n.w.Write(p)
}

// checkFuse tells a wrong descriptor from the errors that reading a FUSE request from it would give, or from waiting for
// one for ever.
func checkFuse(fd int) error {
	const fuseMajor, fuseMinor = 10, 229 // of /dev/fuse, fixed in the kernel's list of devices
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fmt.Errorf("--fuse-fd %d: %w", fd, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFCHR || unix.Major(st.Rdev) != fuseMajor || unix.Minor(st.Rdev) != fuseMinor {
		return fmt.Errorf("--fuse-fd %d: is not /dev/fuse", fd)
	}
	unix.CloseOnExec(fd)
	return nil
}

// lockCache keeps a second process out of the cache: two would upload and remove each other's data.
func lockCache(c config) (func(), error) {
	if !c.needsCache() {
		return func() {}, nil
	}
	if err := os.MkdirAll(c.cacheDir, 0o700); err != nil {
		return nil, fmt.Errorf("--cache-dir: %w", err)
	}
	f, err := os.OpenFile(filepath.Join(c.cacheDir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("--cache-dir: %w", err)
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if err != nil {
		f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, fmt.Errorf("--cache-dir %s: is used by another process", c.cacheDir)
		}
		return nil, fmt.Errorf("--cache-dir: lock: %w", err)
	}
	return func() { f.Close() }, nil
}

// since is a duration for a log line.
func since(t time.Time) time.Duration { return time.Since(t).Round(time.Second) }
