package main

import (
	"errors"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// asProgram makes the test binary the program itself.
const asProgram = "S3CSI_TEST_AS_HELPER"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		main()
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func TestModes(t *testing.T) {
	for _, tt := range []struct {
		args []string
		code int
		says string
	}{
		{[]string{"--version"}, 0, "devel\n"},
		{[]string{"run-as", "0", "0", "helper"}, 1, "run-as"},
		{[]string{"helper"}, 1, "--name"},
		{[]string{"version"}, 2, "the driver starts it"},
		{nil, 2, "the driver starts it"},
	} {
		cmd := exec.CommandContext(t.Context(), os.Args[0], tt.args...)
		cmd.Env = []string{asProgram + "=1"}
		out, err := cmd.CombinedOutput()
		if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
			t.Fatal(err)
		}
		if got := cmd.ProcessState.ExitCode(); got != tt.code || !strings.Contains(string(out), tt.says) {
			t.Errorf("%q: exit code %d, %q", tt.args, got, out)
		}
	}
}

// Every mount pays for what is linked into this program, in time and in memory.
func TestNothingBigIsLinkedIn(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", "-f", "{{if not .Standard}}{{.ImportPath}}{{end}}", ".").CombinedOutput()
	if err != nil {
		t.Fatalf("go list: %v\n%s", err, out)
	}
	small := []string{"golang.org/x/sys/unix", "golang.org/x/net/bpf"} // need nothing else
	for path := range strings.Lines(string(out)) {
		path = strings.TrimSpace(path)
		if !strings.HasPrefix(path, "github.com/s3-csi/s3-csi-driver/") && !slices.Contains(small, path) {
			t.Errorf("%s is linked into the helper", path)
		}
	}
	for _, heavy := range []string{"net/http", "crypto/tls"} {
		if out, err := exec.Command("go", "list", "-deps", ".").Output(); err != nil || strings.Contains(string(out), "\n"+heavy+"\n") {
			t.Errorf("%s is linked into the helper (%v)", heavy, err)
		}
	}
}
