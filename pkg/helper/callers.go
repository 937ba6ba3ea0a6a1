package helper

import (
	"encoding/binary"
	"net/netip"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// callers finds out which user's process connects from a TCP address, with sock_diag(7). It is not safe for concurrent use.
type callers struct {
	netlink  int
	sequence uint32
}

// newCallers must be called before system calls are restricted: no socket of netlink can be made afterwards. It returns nil if the
// kernel has none.
func newCallers() *callers {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_SOCK_DIAG)
	if err != nil {
		return nil
	}
	return &callers{netlink: fd}
}

// The kernel's struct inet_diag_sockid and inet_diag_req_v2 of linux/inet_diag.h, after a netlink header. Ports and addresses are
// big-endian.
type diagRequest struct {
	header                       unix.NlMsghdr
	family, protocol, extensions uint8
	_                            uint8
	states                       uint32
	fromPort, toPort             [2]byte
	from, to                     [16]byte
	networkInterface             uint32
	cookie                       [2]uint32
}

// The offset of idiag_uid in an answer: struct inet_diag_msg after a netlink header.
const diagUID = unix.SizeofNlMsghdr + 64

// uid returns the user of the socket at the address from that is connected to the other. ok is false if there is no such socket.
func (c *callers) uid(from, to netip.AddrPort) (uid uint32, ok bool) {
	c.sequence++
	r := diagRequest{
		header: unix.NlMsghdr{Len: uint32(unsafe.Sizeof(diagRequest{})), Type: unix.SOCK_DIAG_BY_FAMILY, Flags: unix.NLM_F_REQUEST, Seq: c.sequence},
		family: unix.AF_INET, protocol: unix.IPPROTO_TCP, states: ^uint32(0), cookie: [2]uint32{^uint32(0), ^uint32(0)},
	}
	binary.BigEndian.PutUint16(r.fromPort[:], from.Port())
	binary.BigEndian.PutUint16(r.toPort[:], to.Port())
	copy(r.from[:], from.Addr().AsSlice())
	copy(r.to[:], to.Addr().AsSlice())
	request := (*[unsafe.Sizeof(r)]byte)(unsafe.Pointer(&r))[:] //nolint:gosec // x/sys has no type for it
	if unix.Sendto(c.netlink, request, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}) != nil {
		return 0, false
	}
	var answer [512]byte
	for { // the kernel answers before sendto returns
		n, _, err := unix.Recvfrom(c.netlink, answer[:], unix.MSG_DONTWAIT)
		if err != nil || n < unix.SizeofNlMsghdr {
			return 0, false
		}
		header := (*unix.NlMsghdr)(unsafe.Pointer(&answer[0])) //nolint:gosec // the same
		if header.Seq == c.sequence {
			return binary.NativeEndian.Uint32(answer[diagUID:]), header.Type == unix.SOCK_DIAG_BY_FAMILY && n >= diagUID+4
		}
	}
}

// admits reports whether a process of this one's user has connected to the listener from an address. Without sock_diag, or its part for
// TCP, which finds the listener itself, each is admitted.
func (c *callers) admits(listener, from netip.AddrPort) (uid uint32, ok bool) {
	if c == nil {
		return 0, true
	}
	own := uint32(os.Getuid())
	if uid, ok := c.uid(from, listener); ok {
		return uid, uid == own
	}
	_, works := c.uid(listener, netip.AddrPortFrom(netip.IPv4Unspecified(), 0))
	return 0, !works
}
