//go:build linux

// Command mount-s3 is a stand-in for Mountpoint for Amazon S3, for tests on machines that cannot have the real program.
// It is not Mountpoint, holds none of its code, and is no file system to keep data in.
//
// What it promises is to be as strict as the real one (version 1.24): it takes the same command line and refuses what the
// real one refuses with the same exit codes (2 for usage, 1 for everything later), wants the mounted FUSE descriptor as
// /dev/fd/N with the same checks, finds credentials only where the AWS SDKs find them, lists the prefix before it
// serves, says the same line when it is ready, and allows and forbids the same file operations: files are written once,
// from start to end; they are removed with --allow-delete and replaced with --allow-overwrite only; closing a file
// waits until it is stored; nothing is renamed.
//
// What it does not have: mounting by itself, running in the background, caches (their directory
// is there, and empty), directory buckets, metrics, speed.
// Options for those are checked and then ignored.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
)

const (
	exitFailure = 1
	exitUsage   = 2
	fuseDevice  = "/dev/fuse"
)

func main() {
	args, err := parse(os.Args[1:])
	switch {
	case errors.Is(err, errHelp):
		fmt.Println(usage())
		return
	case errors.Is(err, errVersion):
		fmt.Println("mount-s3 1.24.0-standin")
		return
	case err != nil:
		fmt.Fprintf(os.Stderr, "error: %v\n\nUsage: mount-s3 [OPTIONS] <BUCKET_NAME> <DIRECTORY>\n\nFor more information, try '--help'.\n", err)
		os.Exit(exitUsage)
	}
	if err := run(args); err != nil {
		fmt.Fprintln(os.Stderr, "Error:", err)
		os.Exit(exitFailure)
	}
}

func run(args *arguments) error {
	if args.uri {
		return errors.New("explicit prefix option not allowed with S3 URI")
	}
	if !args.has("foreground") {
		return errors.New("the stand-in only runs with --foreground")
	}
	fd, err := fuseFD(args.mountPoint)
	if err != nil {
		return fmt.Errorf("Failed to create mount point\n\nCaused by:\n    %w", err) //nolint:staticcheck // the real one's form
	}
	if err := args.checkTogether(); err != nil {
		return err
	}
	if err := syscall.SetNonblock(fd, false); err != nil {
		return err
	}

	// SIGTERM makes the real one unmount, which it cannot do with a descriptor: it goes on until somebody else does.
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT)
	go func() {
		for range signals {
			fmt.Println("received interrupt signal, shutting down Mountpoint")
		}
	}()

	store, err := newStore(context.Background(), args)
	if err != nil {
		return fmt.Errorf("Failed to create S3 client\n\nCaused by:\n    %w", err) //nolint:staticcheck // the real one's form
	}
	if err := store.probe(context.Background()); err != nil {
		return fmt.Errorf("Failed to create S3 client\n\nCaused by:\n    0: initial ListObjectsV2 failed for bucket %s in region %s\n    1: %w", args.bucket, store.region, err) //nolint:staticcheck // the real one's form
	}

	removeCache, err := args.makeCache()
	if err != nil {
		return fmt.Errorf("failed to create cache directory\n\nCaused by:\n    %w", err)
	}
	defer removeCache()

	tree := newTree(store, args)
	ttl := args.metadataTTL()
	options := &fs.Options{EntryTimeout: &ttl, AttrTimeout: &ttl}
	options.DisableReadDirPlus = true
	options.MaxWrite = 1 << 20
	if args.has("allow-overwrite") {
		options.ExtraCapabilities = fuse.CAP_ATOMIC_O_TRUNC
	}
	server, err := fuse.NewServer(fs.NewNodeFS(tree.root(), options), args.mountPoint, &options.MountOptions)
	if err != nil {
		return fmt.Errorf("Failed to create FUSE session: %w", err) //nolint:staticcheck // the real one's form
	}
	what := "bucket " + args.bucket
	if args.prefix != "" {
		what = "prefix " + args.prefix + " of " + what
	}
	fmt.Printf("%s is mounted at %s\n", what, args.mountPoint)
	server.Serve()
	return nil
}

// makeCache makes the cache's directory, which the real one empties at start and removes at its end.
func (a *arguments) makeCache() (remove func(), err error) {
	if !a.has("cache") || a.number("max-cache-size", 1) == 0 {
		return func() {}, nil
	}
	dir := filepath.Join(a.value("cache"), "mountpoint-cache")
	if err := os.RemoveAll(dir); err != nil {
		return nil, fmt.Errorf("cleanup of cache sub-directory failed due to IO error: %w", err)
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, fmt.Errorf("creation of cache sub-directory failed due to IO error: %w", err)
	}
	return func() { _ = os.RemoveAll(dir) }, nil
}

var fdPath = regexp.MustCompile(`^/dev/fd/(\d+)$`)

// fuseFD checks the mount point as the real program checks a descriptor.
func fuseFD(mountPoint string) (int, error) {
	m := fdPath.FindStringSubmatch(mountPoint)
	if m == nil {
		return 0, fmt.Errorf("the stand-in takes a mount point of the form /dev/fd/N only, not %s", mountPoint)
	}
	fd, err := strconv.Atoi(m[1])
	if err != nil || fd == 0 {
		return 0, fmt.Errorf("mount point %s is not a descriptor that the stand-in can use", mountPoint)
	}
	target, err := os.Readlink("/proc/self/fd/" + m[1])
	if err != nil {
		return 0, fmt.Errorf("mount point %s is not a valid file descriptor", mountPoint)
	}
	if target != fuseDevice {
		return 0, fmt.Errorf("expected mount point %s to be a %s file descriptor but got %s", mountPoint, fuseDevice, target)
	}
	info, err := os.ReadFile("/proc/self/fdinfo/" + m[1])
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(info)) {
		if text, ok := strings.CutPrefix(line, "flags:"); ok {
			flags, err := strconv.ParseUint(strings.TrimSpace(text), 8, 32)
			if err != nil || flags&syscall.O_ACCMODE != syscall.O_RDWR {
				return 0, fmt.Errorf("expected mount point %s file descriptor to have read and write permissions", mountPoint)
			}
		}
	}
	return fd, nil
}

// metadataTTL is how long the kernel may keep names and attributes; the real one's "minimal" is a fraction of a second.
func (a *arguments) metadataTTL() time.Duration {
	switch text := a.value("metadata-ttl"); text {
	case "":
		if a.has("cache") {
			return time.Minute
		}
		return 100 * time.Millisecond
	case "minimal", "0":
		return 100 * time.Millisecond
	case "indefinite":
		return 1000 * time.Hour
	default:
		seconds, _ := strconv.ParseInt(text, 10, 64)
		return time.Duration(min(seconds, 3_600_000)) * time.Second
	}
}
