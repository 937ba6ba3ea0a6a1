package sandbox

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"unsafe"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// The offsets in the kernel's struct seccomp_data. It has the six arguments of a call as 64-bit numbers from offset 16.
const (
	numberOffset       = 0
	architectureOffset = 4
	argumentsOffset    = 16
)

// ErrNoSeccomp means that the kernel, or another filter of system calls, does not let this process filter system calls.
var ErrNoSeccomp = errors.New("the kernel offers this process no filters of system calls")

// FiltersCalls returns nil if RestrictCalls can filter system calls here. Otherwise the error wraps ErrNoSeccomp.
func FiltersCalls() error {
	action := uint32(unix.SECCOMP_RET_ERRNO)
	if _, errno := seccomp(unix.SECCOMP_GET_ACTION_AVAIL, 0, unsafe.Pointer(&action)); errno != 0 { //nolint:gosec // x/sys has no call for it
		return fmt.Errorf("%w: %w", ErrNoSeccomp, errno)
	}
	return nil
}

func seccomp(operation, flags uintptr, argument unsafe.Pointer) (uintptr, unix.Errno) {
	result, _, errno := unix.Syscall(unix.SYS_SECCOMP, operation, flags, uintptr(argument))
	return result, errno
}

// RestrictCalls restricts this process, and all that it starts, to the system calls of programs that serve files: no namespaces, mounts,
// tracing, io_uring, keyrings, memory files, or memory and queues shared through the kernel's IPC; sockets only of UNIX, TCP and UDP, and
// TCP connections only by connect(2), which Landlock checks; no memory that is both written and executed, and no set-user-ID files.
// Refused calls fail with EPERM, and those that libraries have a fallback for with ENOSYS. The process has no_new_privs afterwards. An
// error wraps ErrNoSeccomp if the kernel, or another filter, allows no filters (FiltersCalls).
func RestrictCalls() error {
	if err := FiltersCalls(); err != nil {
		return err
	}
	raw, err := bpf.Assemble(filter())
	if err != nil {
		return fmt.Errorf("assemble the filter of system calls: %w", err)
	}
	instructions := make([]unix.SockFilter, len(raw))
	for i, r := range raw {
		instructions[i] = unix.SockFilter{Code: r.Op, Jt: r.Jt, Jf: r.Jf, K: r.K}
	}
	runtime.LockOSThread() // no_new_privs is the thread's
	defer runtime.UnlockOSThread()
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("set no_new_privs: %w", err)
	}
	program := unix.SockFprog{Len: uint16(len(instructions)), Filter: &instructions[0]}
	thread, errno := seccomp(unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC, unsafe.Pointer(&program)) //nolint:gosec // the same
	switch {
	case errno != 0:
		return fmt.Errorf("filter system calls: %w", errno)
	case thread != 0:
		return fmt.Errorf("filter system calls: thread %d has another filter", thread)
	}
	return nil
}

// allowed returns the system calls that are allowed whatever their arguments are.
func allowed() []uint32 {
	return append([]uint32{
		// files
		unix.SYS_READ, unix.SYS_READV, unix.SYS_PREAD64, unix.SYS_PREADV, unix.SYS_PREADV2, unix.SYS_READAHEAD,
		unix.SYS_WRITE, unix.SYS_WRITEV, unix.SYS_PWRITE64, unix.SYS_PWRITEV, unix.SYS_PWRITEV2,
		unix.SYS_LSEEK, unix.SYS_CLOSE, unix.SYS_CLOSE_RANGE, unix.SYS_DUP, unix.SYS_DUP3, unix.SYS_FCNTL, unix.SYS_FLOCK, unix.SYS_IOCTL,
		unix.SYS_COPY_FILE_RANGE, unix.SYS_SENDFILE, unix.SYS_SPLICE, unix.SYS_TEE, unix.SYS_VMSPLICE, unix.SYS_PIPE2,
		unix.SYS_FALLOCATE, unix.SYS_TRUNCATE, unix.SYS_FTRUNCATE, unix.SYS_FADVISE64, unix.SYS_CACHESTAT,
		unix.SYS_FSYNC, unix.SYS_FDATASYNC, unix.SYS_SYNCFS, unix.SYS_SYNC_FILE_RANGE,
		unix.SYS_STATX, unix.SYS_FSTAT, unix.SYS_STATFS, unix.SYS_FSTATFS, unix.SYS_FACCESSAT, unix.SYS_FACCESSAT2, unix.SYS_READLINKAT,
		unix.SYS_GETDENTS64, unix.SYS_GETCWD, unix.SYS_CHDIR, unix.SYS_FCHDIR, unix.SYS_UMASK, unix.SYS_NAME_TO_HANDLE_AT,
		unix.SYS_RENAMEAT, unix.SYS_RENAMEAT2, unix.SYS_UNLINKAT, unix.SYS_LINKAT, unix.SYS_SYMLINKAT, unix.SYS_UTIMENSAT,
		unix.SYS_FCHOWN, unix.SYS_FCHOWNAT,
		unix.SYS_GETXATTR, unix.SYS_LGETXATTR, unix.SYS_FGETXATTR, unix.SYS_LISTXATTR, unix.SYS_LLISTXATTR, unix.SYS_FLISTXATTR,
		unix.SYS_SETXATTR, unix.SYS_LSETXATTR, unix.SYS_FSETXATTR, unix.SYS_REMOVEXATTR, unix.SYS_LREMOVEXATTR, unix.SYS_FREMOVEXATTR,
		unix.SYS_INOTIFY_INIT1, unix.SYS_INOTIFY_ADD_WATCH, unix.SYS_INOTIFY_RM_WATCH,
		unix.SYS_IO_SETUP, unix.SYS_IO_DESTROY, unix.SYS_IO_SUBMIT, unix.SYS_IO_CANCEL, unix.SYS_IO_GETEVENTS, unix.SYS_IO_PGETEVENTS,
		// network
		unix.SYS_CONNECT, unix.SYS_BIND, unix.SYS_LISTEN, unix.SYS_ACCEPT, unix.SYS_ACCEPT4, unix.SYS_SHUTDOWN,
		unix.SYS_GETSOCKNAME, unix.SYS_GETPEERNAME, unix.SYS_GETSOCKOPT, unix.SYS_RECVFROM, unix.SYS_RECVMSG, unix.SYS_RECVMMSG,
		// events and time
		unix.SYS_EPOLL_CREATE1, unix.SYS_EPOLL_CTL, unix.SYS_EPOLL_PWAIT, unix.SYS_EPOLL_PWAIT2, unix.SYS_PPOLL, unix.SYS_PSELECT6,
		unix.SYS_EVENTFD2, unix.SYS_SIGNALFD4, unix.SYS_TIMERFD_CREATE, unix.SYS_TIMERFD_SETTIME, unix.SYS_TIMERFD_GETTIME,
		unix.SYS_TIMER_CREATE, unix.SYS_TIMER_DELETE, unix.SYS_TIMER_GETTIME, unix.SYS_TIMER_SETTIME, unix.SYS_TIMER_GETOVERRUN,
		unix.SYS_GETITIMER, unix.SYS_SETITIMER, unix.SYS_NANOSLEEP, unix.SYS_CLOCK_NANOSLEEP, unix.SYS_CLOCK_GETTIME, unix.SYS_CLOCK_GETRES, unix.SYS_GETTIMEOFDAY,
		// memory
		unix.SYS_BRK, unix.SYS_MUNMAP, unix.SYS_MREMAP, unix.SYS_MADVISE, unix.SYS_PROCESS_MADVISE, unix.SYS_MINCORE, unix.SYS_MSYNC, unix.SYS_MSEAL,
		unix.SYS_MLOCK, unix.SYS_MLOCK2, unix.SYS_MUNLOCK, unix.SYS_MLOCKALL, unix.SYS_MUNLOCKALL, unix.SYS_PKEY_ALLOC, unix.SYS_PKEY_FREE,
		unix.SYS_MBIND, unix.SYS_GET_MEMPOLICY, unix.SYS_SET_MEMPOLICY, unix.SYS_MEMBARRIER,
		// processes and threads
		unix.SYS_EXECVE, unix.SYS_EXECVEAT, unix.SYS_EXIT, unix.SYS_EXIT_GROUP, unix.SYS_WAIT4, unix.SYS_WAITID, unix.SYS_PRCTL, unix.SYS_SECCOMP,
		unix.SYS_LANDLOCK_CREATE_RULESET, unix.SYS_LANDLOCK_ADD_RULE, unix.SYS_LANDLOCK_RESTRICT_SELF,
		unix.SYS_FUTEX, unix.SYS_FUTEX_WAITV, unix.SYS_FUTEX_WAIT, unix.SYS_FUTEX_WAKE, unix.SYS_FUTEX_REQUEUE,
		unix.SYS_SET_ROBUST_LIST, unix.SYS_GET_ROBUST_LIST, unix.SYS_RSEQ, unix.SYS_SET_TID_ADDRESS, unix.SYS_RESTART_SYSCALL,
		unix.SYS_KILL, unix.SYS_TKILL, unix.SYS_TGKILL, unix.SYS_PIDFD_OPEN, unix.SYS_PIDFD_SEND_SIGNAL, unix.SYS_RT_SIGQUEUEINFO, unix.SYS_RT_TGSIGQUEUEINFO,
		unix.SYS_RT_SIGACTION, unix.SYS_RT_SIGPROCMASK, unix.SYS_RT_SIGPENDING, unix.SYS_RT_SIGSUSPEND, unix.SYS_RT_SIGTIMEDWAIT,
		unix.SYS_RT_SIGRETURN, unix.SYS_SIGALTSTACK,
		unix.SYS_GETPID, unix.SYS_GETPPID, unix.SYS_GETTID, unix.SYS_GETPGID, unix.SYS_SETPGID, unix.SYS_GETSID, unix.SYS_SETSID,
		unix.SYS_GETUID, unix.SYS_GETEUID, unix.SYS_GETGID, unix.SYS_GETEGID, unix.SYS_GETGROUPS, unix.SYS_GETRESUID, unix.SYS_GETRESGID,
		unix.SYS_SETUID, unix.SYS_SETGID, unix.SYS_SETGROUPS, unix.SYS_SETREUID, unix.SYS_SETREGID, unix.SYS_SETRESUID, unix.SYS_SETRESGID,
		unix.SYS_SETFSUID, unix.SYS_SETFSGID, unix.SYS_CAPGET, unix.SYS_CAPSET,
		unix.SYS_GETRLIMIT, unix.SYS_SETRLIMIT, unix.SYS_PRLIMIT64, unix.SYS_GETRUSAGE, unix.SYS_TIMES, unix.SYS_SYSINFO, unix.SYS_UNAME,
		unix.SYS_GETCPU, unix.SYS_GETRANDOM,
		unix.SYS_GETPRIORITY, unix.SYS_SETPRIORITY, unix.SYS_IOPRIO_GET, unix.SYS_IOPRIO_SET, unix.SYS_SCHED_YIELD,
		unix.SYS_SCHED_GETAFFINITY, unix.SYS_SCHED_SETAFFINITY, unix.SYS_SCHED_GETATTR, unix.SYS_SCHED_GETPARAM, unix.SYS_SCHED_SETPARAM, unix.SYS_SCHED_GETSCHEDULER,
		unix.SYS_SCHED_GET_PRIORITY_MAX, unix.SYS_SCHED_GET_PRIORITY_MIN, unix.SYS_SCHED_RR_GET_INTERVAL,
	}, earlier()...)
}

// newest is the latest system call that the lists of this package take into account.
const newest = unix.SYS_MSEAL

// condition is a part of a filter that ends with a decision on a call, by its arguments.
type condition []bpf.Instruction

// conditions returns what is decided by arguments.
func conditions() map[uint32]condition {
	const suid = unix.S_ISUID | unix.S_ISGID
	const create = unix.O_CREAT | unix.O_TMPFILE&^unix.O_DIRECTORY
	const namespaces = unix.CLONE_NEWNS | unix.CLONE_NEWCGROUP | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC | unix.CLONE_NEWUSER | unix.CLONE_NEWPID | unix.CLONE_NEWNET
	const perLinux, query = 0, 0xffffffff // personality(2)
	all := map[uint32]condition{
		unix.SYS_SOCKET:     socket(),
		unix.SYS_SOCKETPAIR: among(0, unix.EAFNOSUPPORT, unix.AF_UNIX),
		// It connects without connect(2), so Landlock does not see it.
		unix.SYS_SENDTO:   without(3, unix.MSG_FASTOPEN),
		unix.SYS_SENDMSG:  without(2, unix.MSG_FASTOPEN),
		unix.SYS_SENDMMSG: without(3, unix.MSG_FASTOPEN),
		// An upper layer protocol (TCP_ULP) makes a TCP socket one of SMC, for example, which Landlock does not restrict.
		unix.SYS_SETSOCKOPT: append(given(1, low, unix.IPPROTO_TCP, slices.Concat(
			given(2, low, unix.TCP_ULP, condition{fails(unix.EPERM)}),
			given(2, low, unix.TCP_FASTOPEN_CONNECT, condition{fails(unix.EPERM)}),
			given(2, low, unix.TCP_REPAIR, condition{fails(unix.EPERM)}),
			condition{allow()})), allow()),
		unix.SYS_CLONE: without(0, namespaces),
		// Its arguments are in memory, where a filter cannot see them.
		unix.SYS_CLONE3:             {fails(unix.ENOSYS)},
		unix.SYS_OPENAT2:            {fails(unix.ENOSYS)},
		unix.SYS_OPENAT:             creating(2, create, without(3, suid)),
		unix.SYS_MKDIRAT:            without(2, suid),
		unix.SYS_MKNODAT:            without(2, suid),
		unix.SYS_FCHMOD:             without(1, suid),
		unix.SYS_FCHMODAT:           without(2, suid),
		unix.SYS_FCHMODAT2:          without(2, suid),
		unix.SYS_MMAP:               notBoth(2, unix.PROT_WRITE, unix.PROT_EXEC),
		unix.SYS_MPROTECT:           without(2, unix.PROT_EXEC),
		unix.SYS_PKEY_MPROTECT:      without(2, unix.PROT_EXEC),
		unix.SYS_PERSONALITY:        among(0, unix.EPERM, perLinux, query),
		unix.SYS_SCHED_SETSCHEDULER: among(1, unix.EPERM, unix.SCHED_NORMAL, unix.SCHED_BATCH, unix.SCHED_IDLE),
	}
	earlierConditions(all, suid, create)
	return all
}

func fails(errno unix.Errno) bpf.Instruction {
	return bpf.RetConstant{Val: unix.SECCOMP_RET_ERRNO | uint32(errno)}
}

func allow() bpf.Instruction { return bpf.RetConstant{Val: unix.SECCOMP_RET_ALLOW} }

// argument loads the low half of an argument. All that is decided on are an int in the kernel, or flags in that half.
func argument(n uint32) bpf.Instruction {
	return bpf.LoadAbsolute{Off: argumentsOffset + 8*n, Size: 4} // little-endian
}

// low is the mask of an argument's whole low half.
const low = 0xffffffff

// given applies a condition, which decides, if an argument has this value under the mask. What follows it decides otherwise.
func given(n, mask, value uint32, c condition) condition {
	test := condition{argument(n), bpf.ALUOpConstant{Op: bpf.ALUOpAnd, Val: mask}, bpf.JumpIf{Cond: bpf.JumpEqual, Val: value, SkipFalse: uint8(len(c))}}
	return append(test, c...)
}

// socket allows UNIX sockets, and of IP only TCP, whose ports Landlock restricts, and UDP. Landlock knows no other protocol with ports,
// such as MPTCP, SCTP or SMC. A protocol of 0 is the default of the type.
func socket() condition {
	const kind = 0xf // without SOCK_CLOEXEC and SOCK_NONBLOCK
	ip := slices.Concat(
		given(1, kind, unix.SOCK_STREAM, among(2, unix.EPROTONOSUPPORT, 0, unix.IPPROTO_TCP)),
		given(1, kind, unix.SOCK_DGRAM, among(2, unix.EPROTONOSUPPORT, 0, unix.IPPROTO_UDP)),
		condition{fails(unix.ESOCKTNOSUPPORT)})
	return slices.Concat(
		given(0, low, unix.AF_UNIX, condition{allow()}),
		given(0, low, unix.AF_INET, ip),
		given(0, low, unix.AF_INET6, ip),
		condition{fails(unix.EAFNOSUPPORT)})
}

// among refuses all values of an argument but these.
func among(n uint32, errno unix.Errno, values ...uint32) condition {
	c := condition{argument(n)}
	for _, v := range values {
		c = append(c, bpf.JumpIf{Cond: bpf.JumpEqual, Val: v, SkipFalse: 1}, allow())
	}
	return append(c, fails(errno))
}

// without refuses an argument with any of these bits.
func without(n, bits uint32) condition {
	return condition{argument(n), bpf.JumpIf{Cond: bpf.JumpBitsSet, Val: bits, SkipFalse: 1}, fails(unix.EPERM), allow()}
}

// notBoth refuses an argument with both bits.
func notBoth(n, one, other uint32) condition {
	return append(given(n, one|other, one|other, condition{fails(unix.EPERM)}), allow())
}

// creating applies a condition if an argument has any of these bits. Otherwise the call is allowed.
func creating(n, bits uint32, c condition) condition {
	return append(condition{argument(n), bpf.JumpIf{Cond: bpf.JumpBitsSet, Val: bits, SkipTrue: 1}, allow()}, c...)
}

// filter returns the program that decides on each system call (the kernel's Documentation/userspace-api/seccomp_filter.rst).
func filter() []bpf.Instruction {
	program := []bpf.Instruction{
		bpf.LoadAbsolute{Off: architectureOffset, Size: 4},
		// Other architectures, such as 32 bits, have other numbers.
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: architecture, SkipTrue: 1},
		bpf.RetConstant{Val: unix.SECCOMP_RET_KILL_PROCESS},
		bpf.LoadAbsolute{Off: numberOffset, Size: 4},
	}
	calls := allowed()
	slices.Sort(calls)
	calls = slices.Compact(calls)
	for len(calls) > 0 {
		n := 1
		for n < len(calls) && calls[n] == calls[0]+uint32(n) {
			n++
		}
		program = append(program,
			bpf.JumpIf{Cond: bpf.JumpGreaterOrEqual, Val: calls[0], SkipFalse: 2},
			bpf.JumpIf{Cond: bpf.JumpGreaterThan, Val: calls[n-1], SkipTrue: 1},
			allow(),
		)
		calls = calls[n:]
	}
	for call, c := range conditions() {
		program = append(program, bpf.JumpIf{Cond: bpf.JumpEqual, Val: call, SkipFalse: uint8(len(c))})
		program = append(program, c...)
	}
	// Libraries try system calls that are newer than they need, and use others if the kernel does not have them.
	return append(program, bpf.JumpIf{Cond: bpf.JumpGreaterThan, Val: newest, SkipFalse: 1}, fails(unix.ENOSYS), fails(unix.EPERM))
}
