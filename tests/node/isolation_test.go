//go:build !lane || ordinary

package node

import (
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/s3-csi/s3-csi-driver/pkg/check"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// layer is a directory of a container of these tests that is on its writable layer.
const layer = "/var/cache/s3csi-test-layer"

// isolated is a command in PID and mount namespaces of its own, whose arguments are the driver.
func isolated(argv ...string) []string {
	return append([]string{"unshare", "--pid", "--fork", "--kill-child", "--mount", "--propagation", "private", "--mount-proc"}, argv...)
}

// makeRoot makes a container's root file system at $1, an overlay of this machine's on a tmpfs, in which $2 is as it is here; become
// makes it the root. Both are parts of a shell's program.
const (
	makeRoot = `set -e; root=$1/root; mount -t tmpfs tmpfs $1; mkdir $1/upper $1/work $root;
		mount -t overlay overlay -o lowerdir=/,upperdir=$1/upper,workdir=$1/work $root;
		mount --rbind /dev $root/dev; mount --rbind /sys $root/sys; mount --rbind $2 $root$2; mount -t proc proc $root/proc; shift 2; `
	become = `set -e; PATH=$PATH:/usr/sbin:/sbin; cd $root; pivot_root . .; umount -l .; cd /; `
)

// boxed is a shell's program in namespaces of its own, with a directory for makeRoot.
func boxed(t *testing.T, e *env, program string) []string {
	return isolated("sh", "-c", program, "sh", t.TempDir(), e.Dir)
}

// islands are places in which a driver takes PID 1's mount namespace for the host's, and is wrong.
func islands() map[string]func(*testing.T, *env) []string {
	return map[string]func(*testing.T, *env) []string{
		"PID 1":          func(*testing.T, *env) []string { return isolated() },
		"behind a shell": func(*testing.T, *env) []string { return isolated("sh", "-c", `"$@" & wait`, "sh") },
		"behind a shell, in a mount namespace of its own": func(*testing.T, *env) []string {
			return isolated("sh", "-c", `unshare --mount --propagation private "$@" & wait`, "sh")
		},
		"a container":              func(t *testing.T, e *env) []string { return boxed(t, e, makeRoot+become+`exec "$@"`) },
		"a container with an init": func(t *testing.T, e *env) []string { return boxed(t, e, makeRoot+become+`"$@" & wait`) },
		"a pod that shares its PID namespace": func(t *testing.T, e *env) []string {
			return boxed(t, e, `unshare --mount --propagation private sh -c '`+makeRoot+become+`exec "$@"' sh "$@" & exec sleep 1000`)
		},
	}
}

// A driver that cannot see the host refuses volumes before it has done anything for them, and says so wherever an operator looks.
func TestADriverThatCannotSeeTheHostRefusesVolumes(t *testing.T) {
	t.Parallel()
	rigtest.ProcessOnly(t, "these containers have no systemd")
	for name, wrapper := range islands() {
		t.Run(name, func(t *testing.T) {
			e := newEnv(t)
			e.Wrapper, e.Isolation = wrapper(t, e), nil
			e.drive()
			v, target := static("isolated", rclone), e.Target("t")
			_, err := e.NodePublishVolume(rigtest.Context(t, time.Minute), rigtest.PublishRequest(v, target))
			if status.Code(err) != codes.FailedPrecondition || !namesSetting(err.Error()) {
				t.Errorf("publish: %v", err)
			}
			if _, err := os.Lstat(target); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("the target was made: %v", err)
			}
			if code, body := page(t, e, "/readyz"); code != http.StatusServiceUnavailable || !namesSetting(body) {
				t.Errorf("/readyz: %d\n%s", code, body)
			}
			if code, _ := page(t, e, "/healthz"); code != http.StatusOK {
				t.Errorf("/healthz: %d, and a driver that is restarted sees no more", code)
			}
			if r, err := e.Probe(rigtest.Context(t, time.Minute), &csi.ProbeRequest{}); err != nil || !r.GetReady().GetValue() {
				t.Errorf("probe: %v, %v", r, err)
			}
			if !namesSetting(e.Logs()) {
				t.Error("the log does not name the setting")
			}
			if row := checkIsolation(t, e); row.Result != check.No || !row.Needed || !namesSetting(row.Why) {
				t.Errorf("check: %+v", row)
			}
			e.NothingLeft(t)
		})
	}
}

func TestADriverThatMayBeIsolatedPublishes(t *testing.T) {
	t.Parallel()
	rigtest.ProcessOnly(t, "these containers have no systemd")
	for name, wrapper := range islands() {
		t.Run(name, func(t *testing.T) {
			e := newEnv(t)
			e.Wrapper, e.Isolation = wrapper(t, e), []string{"--allow-isolated"}
			e.drive()
			v, target := static("isolated", rclone), e.Target("t")
			rigtest.Publish(t, e.Driver, v, target)
			if code, body := page(t, e, "/readyz"); code != http.StatusOK || !namesSetting(body) {
				t.Errorf("/readyz: %d\n%s", code, body)
			}
			rigtest.Unpublish(t, e.Driver, v, target)
		})
	}
}

// What a container's removal takes with it is named.
func TestADirectoryOnTheContainersLayerIsNamed(t *testing.T) {
	t.Parallel()
	rigtest.ProcessOnly(t, "these containers have no systemd")
	e := newEnv(t)
	e.Wrapper, e.Isolation = boxed(t, e, makeRoot+become+`exec "$@"`), nil
	e.drive("--cache-dir="+layer, "--state-dir="+e.Dir+"/state")
	_, err := e.NodePublishVolume(rigtest.Context(t, time.Minute), rigtest.PublishRequest(static("isolated", rclone), e.Target("t")))
	if status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "--cache-dir "+layer) || strings.Contains(err.Error(), "--state-dir") {
		t.Errorf("publish: %v", err)
	}
}

// A container that a runtime on the node made sees that node, even if the node is itself a container and has no systemd.
func TestADriverInAContainerOfANodeWithoutAnInitPublishes(t *testing.T) {
	t.Parallel()
	rigtest.ProcessOnly(t, "these containers have no systemd")
	e := newEnv(t)
	e.Wrapper, e.Isolation = boxed(t, e, makeRoot+`export root; unshare --mount --propagation private sh -c '`+become+`exec "$@"' sh "$@" & exec sleep 1000`), nil
	e.drive()
	v, target := static("isolated", rclone), e.Target("t")
	rigtest.Publish(t, e.Driver, v, target)
	if code, body := page(t, e, "/readyz"); code != http.StatusOK || namesSetting(body) {
		t.Errorf("/readyz: %d\n%s", code, body)
	}
	if row := checkIsolation(t, e); row.Result != check.Yes {
		t.Errorf("check: %+v", row)
	}
	rigtest.Unpublish(t, e.Driver, v, target)
	e.NothingLeft(t)
}

// namesSetting reports whether a text names what an operator has to set.
func namesSetting(text string) bool {
	return strings.Contains(text, "hostPID: true") && strings.Contains(text, `pid_mode = `)
}

func page(t *testing.T, e *env, path string) (code int, body string) {
	t.Helper()
	resp, err := (&http.Client{Timeout: 10 * time.Second}).Get("http://" + e.HTTP + path)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

// checkIsolation is what s3-csi-driver check --node says where the rig's drivers run.
func checkIsolation(t *testing.T, e *env) check.Row {
	t.Helper()
	argv := slices.Concat(e.Wrapper, []string{e.Program, "check", "--node", "--output=json", "--launcher=process", "--default-client=rclone",
		"--state-dir=" + e.State + "-check", "--cache-dir=" + e.Cache, "--host-dir=" + e.HostDir, "--client-dir=" + e.Clients})
	cmd := exec.CommandContext(rigtest.Context(t, 2*time.Minute), argv[0], argv[1:]...)
	cmd.Env = e.Environment()
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var report check.Report
	err = json.NewDecoder(out).Decode(&report)
	_ = cmd.Process.Kill() // PID 1 of a shared namespace goes on
	_ = cmd.Wait()
	if err != nil {
		t.Fatalf("the report: %v", err)
	}
	for _, s := range report.Sections {
		for _, row := range s.Rows {
			if s.Name == "node" && row.Check == "isolation" {
				return row
			}
		}
	}
	t.Fatalf("there is no such row: %+v", report)
	return check.Row{}
}
