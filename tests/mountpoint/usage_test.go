//go:build linux

package mountpoint

import (
	"context"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// who has an option or check.
type who int

const (
	both   who = iota
	ours       // s3-csi-mountpoint only
	theirs     // mount-s3 only
)

// A wrong command line must fail with the exit code that the driver knows, before anything is mounted or asked of a service.
func TestWrongCommandLinesAreRefused(t *testing.T) {
	path := program(t)
	tests := []struct {
		argv string
		code int
		want string // in the output, if the program is our own
		who  who
	}{
		{argv: "", code: 2, want: "required"},
		{argv: "bucket", code: 2, want: "required"},
		{argv: "bucket d e", code: 2, want: "unexpected argument"},
		{argv: "--bogus bucket d", code: 2, want: "unexpected argument '--bogus'"},
		{argv: "--read-onl bucket d", code: 2, want: "unexpected argument"},
		{argv: "--prefix=x bucket d", code: 2, want: "must end in '/'"},
		{argv: "--region bucket d", code: 2},
		{argv: "--region -x bucket d", code: 2},
		{argv: "--debug --debug bucket d", code: 2, want: "multiple times"},
		{argv: "--max-threads=1 --max-threads=2 bucket d", code: 2, want: "multiple times"},
		{argv: "--debug=true bucket d", code: 2, want: "unexpected value"},
		{argv: "--uid=0 bucket d", code: 2, want: "invalid value"},
		{argv: "--gid=0 bucket d", code: 2, want: "invalid value"},
		{argv: "--gid=4294967296 bucket d", code: 2, want: "invalid value"},
		{argv: "--max-threads=0 bucket d", code: 2, want: "invalid value"},
		{argv: "--memory-target=511 bucket d", code: 2, want: "invalid value"},
		{argv: "--dir-mode=0999 bucket d", code: 2, want: "octal"},
		{argv: "--file-mode=1777 bucket d", code: 2, want: "mode"},
		{argv: "--metadata-ttl=soon bucket d", code: 2, want: "invalid value"},
		{argv: "--sse=foo bucket d", code: 2, want: "possible values"},
		{argv: "--upload-checksums=md5 bucket d", code: 2, want: "possible values"},
		{argv: "--sse-kms-key-id=arn:aws:kms:x:1:key/1 bucket d", code: 2, want: "--sse"},
		{argv: "--sse=aws:kms --sse-kms-key-id=alias/x bucket d", code: 2, want: "ARN"},
		{argv: "--max-cache-size=5 bucket d", code: 2, want: "--cache"},
		{argv: "--cache=/tmp --max-cache-size=x bucket d", code: 2, want: "invalid value"},
		{argv: "--cache=/tmp --max-cache-size=-1 bucket d", code: 2},
		{argv: "--cache= bucket d", code: 2, want: "a value is required"},
		{argv: "--ca-bundle= bucket d", code: 2, want: "a value is required"},
		{argv: "--part-size=9000000 --read-part-size=9000000 bucket d", code: 2, want: "cannot be used with"},
		{argv: "-fz bucket d", code: 2, want: "unexpected argument '-z'"},
		{argv: "ab d", code: 2, want: "3-255"},
		{argv: "buck/et d", code: 2, want: "valid name"},
		{argv: "s3://bucket/x d", code: 2, want: "valid name"},
		{argv: "--foreground --sse=AES256 --sse-kms-key-id=arn:aws:kms:x:1:key/1 bucket /dev/fd/3", code: 1, want: "sse-kms-key-id"},
		{argv: "--foreground -- bucket /dev/fd/97", code: 1, want: "not a valid file descriptor"},
		{argv: "--foreground bucket /dev/fd/3", code: 1, want: "/dev/fuse file descriptor but got /dev/null"},
		{argv: "-fd bucket /no/such/directory", code: 1},
		{argv: "-f bucket /tmp", code: 1, want: "must be a FUSE descriptor", who: ours},
		{argv: "--help", code: 0, want: "Usage: s3-csi-mountpoint"},
		{argv: "--version", code: 0, want: "s3-csi-mountpoint"},

		{argv: "--otlp-export-interval=5 bucket d", code: 2, who: theirs},
		{argv: "--allow-root --allow-other bucket d", code: 2, who: theirs},
		{argv: "--no-log --debug bucket d", code: 2, who: theirs},
		{argv: "--foreground --prefix=a/ s3://bucket/x/ /dev/fd/3", code: 1, who: theirs},
	}
	for _, tt := range tests {
		t.Run(tt.argv, func(t *testing.T) {
			if tt.who == ours && !isOwn() || tt.who == theirs && isOwn() {
				t.Skip("the program under test does not have this")
			}
			code, output := run(t, path, os.DevNull, strings.Fields(tt.argv)...)
			if code != tt.code || isOwn() && !strings.Contains(output, tt.want) {
				t.Errorf("exit code %d, want %d and %q in\n%s", code, tt.code, tt.want, output)
			}
		})
	}
}

// run returns the exit code and the output of a command line whose descriptor 3 is an open device.
func run(t *testing.T, path, device string, argv ...string) (code int, output string) {
	t.Helper()
	file, err := os.OpenFile(device, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, argv...)
	cmd.Env = []string{"AWS_EC2_METADATA_DISABLED=true"}
	cmd.ExtraFiles = []*os.File{file}
	out, _ := cmd.CombinedOutput()
	return cmd.ProcessState.ExitCode(), string(out)
}
