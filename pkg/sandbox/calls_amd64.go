package sandbox

import "golang.org/x/sys/unix"

const architecture = unix.AUDIT_ARCH_X86_64

// earlier returns the allowed calls that other architectures do not have, because there is a later one.
func earlier() []uint32 {
	return []uint32{
		unix.SYS_STAT, unix.SYS_LSTAT, unix.SYS_NEWFSTATAT, unix.SYS_ACCESS, unix.SYS_READLINK, unix.SYS_GETDENTS,
		unix.SYS_RENAME, unix.SYS_RMDIR, unix.SYS_LINK, unix.SYS_UNLINK, unix.SYS_SYMLINK, unix.SYS_CHOWN, unix.SYS_LCHOWN,
		unix.SYS_UTIME, unix.SYS_UTIMES, unix.SYS_FUTIMESAT, unix.SYS_DUP2, unix.SYS_PIPE, unix.SYS_INOTIFY_INIT,
		unix.SYS_POLL, unix.SYS_SELECT, unix.SYS_EPOLL_CREATE, unix.SYS_EPOLL_WAIT, unix.SYS_EVENTFD, unix.SYS_SIGNALFD,
		unix.SYS_PAUSE, unix.SYS_ALARM, unix.SYS_TIME, unix.SYS_FORK, unix.SYS_VFORK, unix.SYS_GETPGRP, unix.SYS_ARCH_PRCTL,
	}
}

// earlierConditions adds the same of calls whose arguments matter.
func earlierConditions(to map[uint32]condition, suid, create uint32) {
	to[unix.SYS_OPEN] = creating(1, create, without(2, suid))
	to[unix.SYS_CREAT] = without(1, suid)
	to[unix.SYS_MKDIR] = without(1, suid)
	to[unix.SYS_MKNOD] = without(1, suid)
	to[unix.SYS_CHMOD] = without(1, suid)
}
