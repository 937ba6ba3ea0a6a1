// Package hostile is a FUSE client that misbehaves. Tests execute themselves as it, as a declared client and as one in a user's pod.
package hostile

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Env is the variable with the kind of client that a test's own program is to be.
const Env = "S3CSI_TEST_HOSTILE"

// What a client does instead of serving.
const (
	NeverAnswers   = "never answering"
	Garbage        = "answering garbage"
	ExitsAfterInit = "exiting after INIT"
	HangsAfterInit = "silent after INIT"
	HangsOnStat    = "answering all but attributes"
	FailsThenHangs = "failing the usage, silent about attributes"
)

// What a client serves.
const (
	RootLink  = "a root that is a link"
	HugeNames = "names of 4096 bytes"
	BadNames  = "names that are paths"
	Links     = "links for all names"
	Devices   = "devices for all names"
	Many      = "100,000 entries"
	Endless   = "a directory without end"
)

// What a client does that is only slow, or has lost its service.
const (
	Slow    = "answering attributes late"
	Offline = "reporting the error of its service as that of the usage"
)

// What a client prints.
const (
	Ready              = "ready\n" // it does what it is for
	AttributesAnswered = "attributes answered"
)

const (
	exiting      = "exiting at "
	answersAfter = 1300 * time.Millisecond // longer than the driver waits at a time
	manyEntries  = 100_000
)

// The numbers of requests (include/uapi/linux/fuse.h).
const (
	opLookup     = 1
	opForget     = 2
	opGetattr    = 3
	opReadlink   = 5
	opStatfs     = 17
	opInit       = 26
	opOpendir    = 27
	opReaddir    = 28
	opReleasedir = 29
	opInterrupt  = 36
	opForgets    = 42
)

// steps are the requests at which clients exit, instead of answering.
func steps() map[string]uint32 {
	return map[string]uint32{"INIT": opInit, "LOOKUP": opLookup, "GETATTR": opGetattr, "STATFS": opStatfs, "OPENDIR": opOpendir, "READDIR": opReaddir}
}

// Exiting are the kinds that serve until one request.
func Exiting() []string {
	kinds := make([]string, 0, len(steps()))
	for name := range steps() {
		kinds = append(kinds, exiting+name)
	}
	return kinds
}

// Serving are the kinds that serve a malicious file system.
func Serving() []string {
	return []string{RootLink, HugeNames, BadNames, Links, Devices, Many, Endless}
}

// fuseFD is the FUSE descriptor of a declared client.
const fuseFD = 3

// Serve is a client of a FUSE descriptor until it exits, or the connection ends.
func Serve(kind string, fd int) error {
	if kind == NeverAnswers {
		return Sleep()
	}
	exits := steps()[strings.TrimPrefix(kind, exiting)]
	buf := make([]byte, 1<<18)
	for first := true; ; first = false {
		n, err := unix.Read(fd, buf)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil || n < 40 {
			return fmt.Errorf("reading a request: %d, %w", n, err)
		}
		r := request{fd, kind, buf[:n]}
		if exits != 0 && r.op() == exits || kind == ExitsAfterInit && r.op() != opInit {
			if first {
				fmt.Print(Ready)
			}
			return nil
		}
		if err := r.answer(); err != nil {
			return fmt.Errorf("answering: %w", err)
		}
		if first {
			fmt.Print(Ready)
		}
	}
}

// Sleep keeps all descriptors open.
func Sleep() error {
	fmt.Print(Ready)
	time.Sleep(time.Hour)
	return io.EOF
}

// request is a request of the kernel (struct fuse_in_header and what follows).
type request struct {
	fd   int
	kind string
	data []byte
}

func (r request) op() uint32 { return binary.NativeEndian.Uint32(r.data[4:]) }

func (r request) answer() error {
	op := r.op()
	if op == opForget || op == opForgets || op == opInterrupt {
		return nil
	}
	switch r.kind {
	case Garbage:
		if op == opInit {
			for i := range 64 {
				_, _ = unix.Write(r.fd, make([]byte, i)) // too short, and of no request
			}
			return r.reply(make([]byte, 24)) // of protocol 0.0
		}
	case HangsOnStat:
		if op == opStatfs {
			return r.reply(make([]byte, 80))
		}
	case FailsThenHangs:
		if op == opStatfs {
			return r.fail(unix.EIO)
		}
	case Offline:
		if op == opStatfs {
			return r.fail(unix.ECONNREFUSED)
		}
		return r.served()
	case HangsAfterInit:
	default:
		return r.served()
	}
	if op == opInit {
		return r.init()
	}
	return nil // it is silent
}

func (r request) init() error {
	init := make([]byte, 64)
	for i, v := range []uint32{7, 31, 1 << 17, 0, 12 | 9<<16, 1 << 17, 1} {
		binary.NativeEndian.PutUint32(init[4*i:], v)
	}
	return r.reply(init)
}

// served answers like a client that serves.
func (r request) served() error {
	switch r.op() {
	case opInit:
		return r.init()
	case opStatfs:
		return r.reply(make([]byte, 80))
	case opGetattr:
		if r.kind == Slow {
			time.Sleep(answersAfter)
		}
		fmt.Println(AttributesAnswered)
		return r.reply(append(make([]byte, 16), r.attributes(binary.NativeEndian.Uint64(r.data[16:]))...))
	case opOpendir:
		return r.reply(make([]byte, 16))
	case opReaddir:
		return r.reply(r.entries(int(binary.NativeEndian.Uint64(r.data[48:])), int(binary.NativeEndian.Uint32(r.data[56:]))))
	case opReleasedir:
		return r.reply(nil)
	case opLookup:
		if r.kind == Links || r.kind == Devices {
			entry := make([]byte, 40, 128)
			binary.NativeEndian.PutUint64(entry, 2)
			return r.reply(append(entry, r.attributes(2)...))
		}
		return r.fail(unix.ENOENT)
	case opReadlink:
		return r.reply([]byte("/etc"))
	}
	return r.fail(unix.ENOSYS)
}

// attributes are those of a node (struct fuse_attr); node 1 is the root.
func (r request) attributes(node uint64) []byte {
	mode, device := uint32(unix.S_IFDIR|0o755), uint32(0)
	switch {
	case node == 1 && r.kind == RootLink, node != 1 && r.kind == Links:
		mode = unix.S_IFLNK | 0o777
	case node != 1:
		mode, device = unix.S_IFCHR|0o666, uint32(unix.Mkdev(1, 5)) // /dev/zero
	}
	b := make([]byte, 88)
	binary.NativeEndian.PutUint64(b, node)
	binary.NativeEndian.PutUint32(b[60:], mode)
	binary.NativeEndian.PutUint32(b[64:], 2) // links
	binary.NativeEndian.PutUint32(b[76:], device)
	return b
}

// entries are those of the root from an offset, in at most size bytes (struct fuse_dirent).
func (r request) entries(offset, size int) (b []byte) {
	all := 1
	switch r.kind {
	case Many:
		all = manyEntries
	case Endless:
		all = 1 << 40
	}
	for ; offset < all; offset++ {
		name := fmt.Sprintf("entry-%d", offset)
		switch r.kind {
		case HugeNames:
			name = strings.Repeat("x", 4096)[:min(4096, size-24)]
		case BadNames:
			name = "../../etc"
		}
		entry := make([]byte, 24, 24+len(name)+8)
		binary.NativeEndian.PutUint64(entry, uint64(offset)+2)
		binary.NativeEndian.PutUint64(entry[8:], uint64(offset)+1)
		binary.NativeEndian.PutUint32(entry[16:], uint32(len(name)))
		entry = append(entry, name...)
		entry = append(entry, make([]byte, -len(entry)&7)...)
		if len(b)+len(entry) > size {
			return b
		}
		b = append(b, entry...)
	}
	return b
}

func (r request) fail(errno unix.Errno) error { return r.write(-int32(errno), nil) }

func (r request) reply(body []byte) error { return r.write(0, body) }

func (r request) write(code int32, body []byte) error {
	b := make([]byte, 16, 16+len(body))
	binary.NativeEndian.PutUint32(b, uint32(16+len(body)))
	binary.NativeEndian.PutUint32(b[4:], uint32(code))
	copy(b[8:], r.data[8:16])
	_, err := unix.Write(r.fd, append(b, body...))
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EINVAL) && r.kind != Garbage {
		return nil // the request was interrupted, or the kernel refuses the answer
	}
	return err
}
