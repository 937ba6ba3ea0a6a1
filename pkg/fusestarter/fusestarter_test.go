package fusestarter

import (
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestParse(t *testing.T) {
	client := []string{"sshfs", "-f", "host:/", "/dev/fd/3"}
	minute := Command{Socket: "/fd/s", Timeout: time.Minute, Client: client}
	for _, tc := range []struct {
		args, socket string
		want         Command
		err          string
	}{
		{"--fd-passing-socket-path /fd/s -- sshfs -f host:/ /dev/fd/3", "", minute, ""},
		{"-fd-passing-socket-path=/fd/s -- sshfs -f host:/ /dev/fd/3", "/other", minute, ""},
		{"-- sshfs -f host:/ /dev/fd/3", "/fd/s", minute, ""},
		{"--timeout 5s -- sshfs -f host:/ /dev/fd/3", "/fd/s", Command{Socket: "/fd/s", Timeout: 5 * time.Second, Client: client}, ""},
		{"-- rclone --help -- x", "/fd/s", Command{Socket: "/fd/s", Timeout: time.Minute, Client: []string{"rclone", "--help", "--", "x"}}, ""},
		{"--help", "", Command{Help: true}, ""},
		{"--version", "", Command{Version: true}, ""},
		{"", "/fd/s", Command{}, "client is missing"},
		{"--", "/fd/s", Command{}, "client is missing"},
		{"-- sshfs", "", Command{}, "socket-path is missing"},
		{"sshfs /dev/fd/3", "/fd/s", Command{}, "follow after --"},
		{"--fd-passing-socket-path", "", Command{}, "needs an argument"},
		{"--fd-passing-socket-path -- sshfs", "", Command{}, "needs an argument"},
		{"--timeout=0s -- sshfs", "/fd/s", Command{}, "not a duration"},
		{"--timeout=soon -- sshfs", "/fd/s", Command{}, "invalid value"},
		{"--v=5 -- sshfs", "/fd/s", Command{}, "not defined"},
	} {
		got, err := Parse(strings.Fields(tc.args), tc.socket)
		if tc.err != "" {
			if err == nil || !strings.Contains(err.Error(), tc.err) {
				t.Errorf("%q: %v", tc.args, err)
			}
			continue
		}
		if err != nil || !reflect.DeepEqual(got, tc.want) {
			t.Errorf("%q: %+v, %v", tc.args, got, err)
		}
	}
}

// The client gets exactly the arguments after the first "--".
func FuzzParse(f *testing.F) {
	f.Add("--fd-passing-socket-path\x00/s\x00--\x00sshfs\x00/dev/fd/3", "")
	f.Add("--timeout\x00--\x00--\x00x", "/s")
	f.Add("--\x00", "/s")
	f.Fuzz(func(t *testing.T, args, socket string) {
		list := strings.Split(args, "\x00")
		c, err := Parse(list, socket)
		if err != nil || c.Help || c.Version {
			return
		}
		at := slices.Index(list, "--")
		if at < 0 || !slices.Equal(c.Client, list[at+1:]) || c.Client[0] == "" || c.Socket == "" || c.Timeout <= 0 {
			t.Fatalf("%+v", c)
		}
	})
}
