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
	"runtime"
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

// run serves until the file system is unmounted and all changes are uploaded:
//
//  1. It configures rclone and locks the cache.
//  2. It repairs what a previous process left in the cache, and waits for S3 if that is needed to upload it.
//  3. It starts the VFS, reopens the files of the previous process, and serves.
//  4. After the unmount, it closes files that are still open and drains the upload queue.
func run(ctx context.Context, c config, stdout io.Writer) error {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT)
	// If the supervisor has exited, uploads continue.
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
	plain, err := newRemote(ctx, c, true)
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
	if err := recoverCache(ctx, cache, remote); err != nil {
		return err
	}
	if cache.used {
		kept, stop := context.WithCancel(ctx)
		defer stop()
		go remote.heads.credentials.keepFresh(kept)
	}
	files, err := newVFS(ctx, c, remote)
	if err != nil {
		return err
	}
	defer func() { files.Shutdown() }()
	if err := cache.check(files); err != nil {
		return err
	}
	stopReopening := cache.reopen(ctx, files, &remote.reopening, queue)
	server, open, err := newServer(c, files, remote.dirs)
	if err != nil {
		return err
	}
	answerAtOnce()

	trimmed, stopTrimming := context.WithCancel(ctx)
	defer stopTrimming()
	go remote.dirs.keepTrimmed(trimmed, c.cachePoll)
	open.renaming = remote.unsent.renaming
	remote.renames.items, open.renames = queue.items, remote.renames
	report := newReporter(stdout)
	defer report.close()
	unmounted := make(chan struct{})
	go func() {
		defer close(unmounted)
		server.Serve()
	}()
	report.send(readyLine)

	d := &drainer{queue: queue, cache: cache, guard: remote, report: report, renewVFS: func(ctx context.Context) error {
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
	stopReopening()
	if n := open.releaseAll(); n > 0 {
		fs.Logf(nil, "Closed files that were open at unmount: files=%d", n)
	}
	return d.drain(ctx, signals)
}

// recoverCache prepares the cache of a previous process for the upload of its files.
func recoverCache(ctx context.Context, cache *cache, remote *guard) error {
	if err := cache.repair(ctx, remote); err != nil {
		return fmt.Errorf("cache of a previous process: %w", err)
	}
	if err := remote.unsent.takeOver(); err != nil {
		return fmt.Errorf("cache of a previous process: %w", err)
	}
	if err := cache.awaitRemote(ctx, remote); err != nil {
		return err
	}
	if left, err := cache.unsent(); err == nil && len(left) > 0 { // their uploads are late and need credentials at once
		remote.heads.credentials.refresh(ctx)
	}
	return nil
}

// newServer takes over the FUSE descriptor, and returns after it has answered the kernel's INIT request.
func newServer(c config, files *vfs.VFS, dirs *directories) (*fuse.Server, *handles, error) {
	mountOpt := mountlib.Options{AttrTimeout: fs.Duration(attrTime), AllowOther: true}
	root, err := dirs.serve(mount2.NewFS(files, &mountOpt))
	if err != nil {
		return nil, nil, fmt.Errorf("root directory: %w", err)
	}
	timeout := attrTime
	opt := &fusefs.Options{
		EntryTimeout: &timeout, AttrTimeout: &timeout, UID: uint32(c.uid), GID: uint32(c.gid),
		NullPermissions: true, // otherwise mode 0000 is replaced by a default
		MountOptions: fuse.MountOptions{
			AllowOther: true, FsName: "s3csi", Name: "rclone",
			DisableXAttrs: true, DisableReadDirPlus: !c.listsAttributes(), MaxWrite: maxWrite,
			// Containers with a user namespace need ID-mapped volumes. Linux 6.12 and newer allow that with default_permissions,
			// and then omit the callers' IDs, which are not used here.
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

// answerAtOnce gives the Go runtime one more scheduler slot than go-fuse has readers of requests. They wait in read(2), where each keeps a
// slot until the runtime notices, after up to 10 ms. There are as many readers as slots, and then what answers requests waits for that.
func answerAtOnce() {
	const leastReaders = 2 // of go-fuse
	runtime.GOMAXPROCS(max(runtime.GOMAXPROCS(0), leastReaders) + 1)
}

// withoutNoise drops the log lines of go-fuse about requests that it does not implement. The kernel sends each of them once.
type withoutNoise struct{ w io.Writer }

func (n withoutNoise) Write(p []byte) (int, error) {
	if bytes.Contains(p, []byte("Unimplemented opcode")) {
		return len(p), nil
	}
	return n.w.Write(p)
}

// checkFuse returns an error if a descriptor is not /dev/fuse. Otherwise reading requests would fail with an unclear error, or wait
// forever.
func checkFuse(fd int) error {
	const fuseMajor, fuseMinor = 10, 229 // device number of /dev/fuse
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return fmt.Errorf("--fuse-fd %d: %w", fd, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFCHR || unix.Major(st.Rdev) != fuseMajor || unix.Minor(st.Rdev) != fuseMinor {
		return fmt.Errorf("--fuse-fd %d: not /dev/fuse", fd)
	}
	unix.CloseOnExec(fd)
	return nil
}

// lockCache prevents a second process from using the cache: two would upload and remove each other's data.
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
			return nil, fmt.Errorf("--cache-dir %s: in use by another process", c.cacheDir)
		}
		return nil, fmt.Errorf("--cache-dir: lock: %w", err)
	}
	return func() { f.Close() }, nil
}

// since returns a duration for a log line.
func since(t time.Time) time.Duration { return time.Since(t).Round(time.Second) }
