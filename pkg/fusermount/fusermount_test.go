package fusermount

import (
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestParseReadsWhatLibrariesAsk(t *testing.T) {
	mount := Call{Mount: true, Socket: 5}
	for _, c := range []struct {
		args string
		want Call
	}{
		{"-o rw,nosuid,nodev,fsname=x,subtype=s3fs -- /mnt", mount}, // libfuse 2 and 3
		{"--options=rw -- /mnt", mount},
		{"-orw /mnt", mount},
		{"/mnt -o rw", mount}, // go-fuse
		{"-o -u -- /mnt", mount},
		{"-- -u", mount},
		{"--auto-unmount -- /mnt", mount},
		{"-U /mnt", mount},
		{"-c 7 /mnt", Call{Mount: true, Socket: 7}},
		{"-c7 /mnt", Call{Mount: true, Socket: 7}},
		{"--comm-fd 8 /mnt", Call{Mount: true, Socket: 8}},
		{"--comm-fd=9 /mnt", Call{Mount: true, Socket: 9}},
		{"-u /mnt", Call{}},
		{"-uqz -- /mnt", Call{}},
		{"-quz /mnt", Call{}},
		{"--unmount --quiet --lazy -- /mnt", Call{}},
		{"-V", Call{Version: true}},
		{"--version", Call{Version: true}},
	} {
		got, err := Parse(strings.Fields(c.args), "5")
		if err != nil || got != c.want {
			t.Errorf("%q: %+v, %v, want %+v", c.args, got, err, c.want)
		}
	}
	for _, socket := range []string{"", "-1", "x", "99999999999", "5 "} {
		if _, err := Parse([]string{"/mnt"}, socket); err == nil {
			t.Errorf("the socket %q: no error", socket)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add("-o\x00rw\x00--\x00/mnt", "5")
	f.Add("-c", "")
	f.Add("-oc\x00--comm-fd", "1")
	f.Add("-\x00--\x00-u", "0")
	f.Fuzz(func(t *testing.T, args, socket string) {
		call, err := Parse(strings.Split(args, "\x00"), socket)
		if err == nil && call.Mount && (call.Version || call.Socket < 0) {
			t.Fatalf("%+v", call)
		}
	})
}

func TestSendSendsTheFuseDescriptorAndNoOther(t *testing.T) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pair[0])
	defer unix.Close(pair[1])
	place := func(path string) {
		t.Helper()
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			t.Skipf("cannot open %s: %v", path, err)
		}
		defer f.Close()
		if err := unix.Dup3(int(f.Fd()), FuseFD, unix.O_CLOEXEC); err != nil {
			t.Fatal(err)
		}
	}
	defer unix.Close(FuseFD)
	place(os.DevNull)
	if err := Send(pair[0]); err == nil {
		t.Error("it sends a descriptor that is not of FUSE")
	}
	place("/dev/fuse")
	if err := Send(pair[0]); err != nil {
		t.Fatal(err)
	}
	oob := make([]byte, unix.CmsgSpace(4))
	_, n, _, _, err := unix.Recvmsg(pair[1], make([]byte, 1), oob, unix.MSG_CMSG_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	messages, err := unix.ParseSocketControlMessage(oob[:n])
	if err != nil || len(messages) != 1 {
		t.Fatalf("%v, %v", messages, err)
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(fds) != 1 {
		t.Fatalf("%v, %v", fds, err)
	}
	defer unix.Close(fds[0])
	if err := Send(pair[0] + 100); err == nil {
		t.Error("a number that is no socket: no error")
	}
}
