//go:build linux

// Package host is the Linux plumbing below mounts: working in the host's mount namespace, reading the mount table,
// opening targets without following symbolic links, mounting FUSE file systems, binding them, and asking the kernel
// what a FUSE connection is doing. It holds no policy: which volume is mounted where and when is decided above it.
//
// Everything that may wait for a FUSE client runs under Namespace.Do, which returns when its context ends even where
// the system call below it does not. Functions that say "call inside Do" are plain system calls on the calling thread.
//
// The kernel baseline is 5.12: openat2 (5.6), open_tree and move_mount (5.2), mount_setattr (5.12).
// Dead mounts are replaced without leaving traces from 6.5 on (MOVE_MOUNT_BENEATH).
package host
