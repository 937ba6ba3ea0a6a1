package node

import (
	"os/exec"
	"strings"
	"testing"
)

// What a package may never know, however indirectly: docs/explanation/architecture.md names the reasons.
func TestPackagesKnowNoMoreThanTheyMay(t *testing.T) {
	const (
		module = "github.com/s3-csi/s3-csi-driver/"
		csi    = "github.com/container-storage-interface/"
		grpc   = "google.golang.org/grpc"
	)
	out, err := exec.Command("go", "list", "-f", `{{.ImportPath}} {{join .Deps " "}}`, module+"pkg/...", module+"cmd/s3-csi-driver").Output()
	if err != nil {
		t.Fatal(err)
	}
	forbidden := map[string][]string{
		"cmd/s3-csi-driver":    {"k8s.io/client-go"},
		"pkg/publish":          {module + "pkg/launcher", module + "pkg/mount/supervisor", module + "pkg/mount/runner", "github.com/coreos/go-systemd"},
		"pkg/mount/monitor":    {module + "pkg/launcher", module + "pkg/mount/supervisor", module + "pkg/publish"},
		"pkg/mount/supervisor": {module + "pkg/publish", module + "pkg/mount/monitor"},
		"pkg/mount/runner":     {module + "pkg/publish", module + "pkg/mount/supervisor", module + "pkg/mount/heal", module + "pkg/mount/want"},
		"pkg/mount/linger":     {module + "pkg/publish", module + "pkg/mount/supervisor", module + "pkg/mount/heal"},
		"pkg/mount/overlap":    {module + "pkg/launcher", module + "pkg/mount/runner", module + "pkg/mount/drain"},
		"pkg/mount/spares":     {module + "pkg/publish", module + "pkg/mount/runner", module + "pkg/mount/creds", module + "pkg/backend"},
		"pkg/mount/uids":       {module + "pkg/publish", module + "pkg/mount/runner", module + "pkg/mount/creds", module + "pkg/backend"},
		"pkg/mount/heal":       {module + "pkg/mount/creds", module + "pkg/session", module + "pkg/launcher"},
		"pkg/mount/state":      {module + "pkg/launcher", module + "pkg/helper", module + "pkg/mount/creds"},
		"pkg/mount":            {module + "pkg/helper", module + "pkg/launcher", module + "pkg/mount/state"},
	}
	seen := 0
	for line := range strings.Lines(string(out)) {
		path, deps, _ := strings.Cut(strings.TrimSpace(line), " ")
		name := strings.TrimPrefix(path, module)
		never := forbidden[name]
		seen += min(len(never), 1)
		if strings.HasPrefix(name, "pkg/") && name != "pkg/driver" && name != "pkg/redact" { // whose sanitizer is of CSI's library
			never = append(never, csi, grpc)
		}
		if name != "cmd/s3-csi-driver" && name != "pkg/node" { // the wiring
			never = append(never, module+"pkg/podclient")
		}
		for dep := range strings.FieldsSeq(deps) {
			for _, f := range never {
				if strings.HasPrefix(dep, f) {
					t.Errorf("%s depends on %s", name, dep)
				}
			}
		}
	}
	if seen != len(forbidden) {
		t.Errorf("%d of the %d packages with rules exist", seen, len(forbidden))
	}
}
