//go:build linux

// Package host does the mount work on Linux: it enters the host's mount namespace, reads mount tables, opens targets without
// following symbolic links, mounts and binds FUSE file systems, replaces stale mounts, and reads the state of FUSE connections.
// It holds no policy: packages above it decide which volume is mounted where and when.
//
// Every call that may wait for a FUSE client runs under Namespace.Do, which returns when its context ends, even if the system
// call does not. Functions that say "call inside Do" are plain system calls on the calling thread.
//
// The oldest supported kernel is 5.12: openat2 (5.6), open_tree and move_mount (5.2), mount_setattr (5.12). Since 6.5
// (MOVE_MOUNT_BENEATH), a replaced stale mount leaves no trace.
package host
