package e2e

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/tests/internal/output"
)

// What deploy/off-cluster is: objects for the cluster, and units for a machine.
const (
	offCluster     = "../../deploy/off-cluster"
	offClusterUser = 65533 // who the units' processes run as
)

// outside is a machine's directory with what docs/how-to/off-cluster.md has one put there.
type outside string

func (d outside) in(path string) string { return filepath.Join(string(d), path) }

// keys are those of a user who is the controller's own, as the units' EnvironmentFile has them.
func (d outside) keys(t testing.TB) credentials.Keys {
	t.Helper()
	k, err := world.s3.AddUser(t.Context(), "off-cluster", everything)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// unitProcess is a unit's main process, started without systemd.
type unitProcess struct {
	name string
	cmd  *exec.Cmd
	said output.Buffer
	done chan error
}

// start starts what a unit says, with the paths of this machine's directory, as a user without rights.
func (d outside) start(t testing.TB, unit string, keys ...credentials.Keys) *unitProcess {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(offCluster, unit+".service"))
	if err != nil {
		t.Fatal(err)
	}
	line := regexp.MustCompile(`(?m)^ExecStart=(.+)$`).FindSubmatch(text)
	if line == nil {
		t.Fatalf("%s.service starts nothing", unit)
	}
	argv := strings.Fields(strings.NewReplacer("/usr/local/bin/", d.in("bin")+"/", "/run/s3-csi-controller", d.in("run"), "/etc/s3-csi-driver", string(d),
		"127.0.0.1:9811", "127.0.0.1:0").Replace(string(line[1])))
	p := &unitProcess{name: unit, cmd: exec.Command(argv[0], argv[1:]...), done: make(chan error, 1)}
	p.cmd.Env, p.cmd.Dir = []string{"PATH=/usr/bin:/bin"}, "/"
	for _, k := range keys {
		p.cmd.Env = append(p.cmd.Env, "AWS_ACCESS_KEY_ID="+k.AccessKeyID, "AWS_SECRET_ACCESS_KEY="+k.SecretAccessKey)
	}
	p.cmd.Stdout, p.cmd.Stderr = &p.said, &p.said
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL, Credential: &syscall.Credential{Uid: offClusterUser, Gid: offClusterUser}}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() { p.done <- p.cmd.Wait() }()
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("%s said:\n%s", p.name, p.said.String())
		}
		_ = p.cmd.Process.Kill() // where stop was not reached
	})
	return p
}

// stop ends the process as systemd does, and says how it ended.
func (p *unitProcess) stop(t testing.TB) error {
	t.Helper()
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	select {
	case err := <-p.done:
		return err
	case <-time.After(35 * time.Second): // TimeoutStopSec
		t.Errorf("%s does not end", p.name)
		return nil
	}
}
