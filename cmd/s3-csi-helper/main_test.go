package main

import (
	"os/exec"
	"strings"
	"testing"
)

// Every mount pays for what is linked into this program, in time and in memory.
func TestNothingBigIsLinkedIn(t *testing.T) {
	out, err := exec.Command("go", "list", "-deps", "-f", "{{if not .Standard}}{{.ImportPath}}{{end}}", ".").CombinedOutput()
	if err != nil {
		t.Fatalf("go list: %v\n%s", err, out)
	}
	for path := range strings.Lines(string(out)) {
		path = strings.TrimSpace(path)
		if !strings.HasPrefix(path, "github.com/s3-csi/s3-csi-driver/") && path != "golang.org/x/sys/unix" {
			t.Errorf("%s is linked into the helper", path)
		}
	}
	for _, heavy := range []string{"net/http", "crypto/tls"} {
		if out, err := exec.Command("go", "list", "-deps", ".").Output(); err != nil || strings.Contains(string(out), "\n"+heavy+"\n") {
			t.Errorf("%s is linked into the helper (%v)", heavy, err)
		}
	}
}
