package rigtest

import (
	"context"
	"net"
	"runtime"

	"golang.org/x/sys/unix"
)

// Dial connects to an address, as net.Dialer.DialContext does.
type Dial = func(ctx context.Context, network, address string) (net.Conn, error)

// DialAs connects as a user: a mount's helper answers no other user than its client's.
func DialAs(uid int, dial Dial) Dial {
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		// A socket belongs to the file system uid of the thread that creates it.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		former, err := unix.SetfsuidRetUid(uid)
		if err != nil {
			return nil, err
		}
		defer unix.Setfsuid(former) //nolint:errcheck // it has no error
		return dial(ctx, network, address)
	}
}
