package credentials

import (
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
)

// canaries are all values that must not be seen, with what they are.
type canaries struct {
	mu    sync.Mutex
	names map[string]string
}

func (c *canaries) add(value, what string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.names[value] = what
}

// in tells which of them a text holds.
func (c *canaries) in(text []byte) []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	var found []string
	for value, what := range c.names {
		if bytes.Contains(text, []byte(value)) {
			found = append(found, what)
		}
	}
	return found
}

// Nothing secret of any source is seen by anybody who has no business with it, while mounts live, fail and end.
func TestNothingSecretIsSeen(t *testing.T) {
	e := start(t)
	c := &canaries{names: map[string]string{e.user.SecretAccessKey: "alice's secret key", e.Process.Keys().SecretAccessKey: "root's secret key"}}
	add := func(from source) source { // notes what a publication brings
		return source{from.name, func(r *csi.NodePublishVolumeRequest) {
			from.bring(r)
			for _, text := range []string{r.GetSecrets()["secretAccessKey"], r.GetSecrets()[tokensKey], r.GetVolumeContext()[tokensKey]} {
				if text == "" {
					continue
				}
				c.add(text, "what came with a publication, "+from.name)
				for part := range strings.SplitSeq(text, `"`) { // the tokens in it, and what they are signed with
					if strings.HasPrefix(part, "eyJ") {
						c.add(part, "a token, "+from.name)
						c.add(part[strings.LastIndex(part, ".")+1:], "a token's signature, "+from.name)
					}
				}
			}
		}}
	}
	var volumes []*csi.Volume
	var targets []string
	for i, from := range e.sources() {
		for _, client := range []string{rclone, mountpoint} {
			name := fmt.Sprintf("canary-%d-%s", i, client)
			v := volume(name, client, "sessionDuration", short.String())
			targets = append(targets, e.publish(v, name, add(from)))
			volumes = append(volumes, v)
		}
	}
	// The session programs come and go: they are looked at all the time.
	seen := make(chan []string)
	stop := make(chan struct{})
	go func() { seen <- e.watch(c, stop) }()
	failures := e.fail(add)
	e.await(time.Minute, "renewals", e.more(10, ofPods, ofMounts))
	for i, target := range targets {
		if err := os.WriteFile(filepath.Join(target, "file"), []byte("x"), 0o644); err != nil {
			t.Errorf("%s: %v", volumes[i].GetVolumeId(), err)
		}
		_ = e.tryPublish(volumes[i], target, add(e.sources()[i/2]))
	}
	close(stop)
	for _, what := range <-seen {
		t.Error(what)
	}
	e.noSecretsIn(c)
	e.noSecretsInUnits(c)
	for i, target := range targets {
		e.unpublish(volumes[i], target)
	}
	e.NothingLeft(t)
	for what, text := range map[string]string{"the driver's log": e.Logs(), "the metrics": e.metrics(), "errors": failures} {
		for _, found := range c.in([]byte(text)) {
			t.Errorf("%s hold %s", what, found)
		}
	}
	e.noSecretsIn(c)
}

// fail makes publications fail in every way that involves credentials, and returns the errors.
func (e *env) fail(add func(source) source) string {
	e.t.Helper()
	var said strings.Builder
	wrong := e.user
	wrong.SecretAccessKey = "a+wrong/secret+key/canary0000000000000000"
	broken := source{"a broken token", func(r *csi.NodePublishVolumeRequest) {
		e.workload(true).bring(r)
		r.Secrets[tokensKey] = strings.Replace(r.Secrets[tokensKey], `"token":"`, `"token":"x`, 1)
	}}
	expired := source{"an expired token", func(r *csi.NodePublishVolumeRequest) {
		e.workload(true).bring(r)
		r.Secrets[tokensKey] = tokens(e, -time.Minute)
	}}
	unreadable := source{"tokens that are none", func(r *csi.NodePublishVolumeRequest) {
		e.workload(true).bring(r)
		r.Secrets[tokensKey] += "x"
	}}
	for i, from := range []source{e.secretOf(wrong), broken, expired, unreadable} {
		v := volume(fmt.Sprintf("failing-%d", i), rclone)
		err := e.tryPublish(v, e.Target("failing"), add(from))
		if err == nil {
			e.t.Errorf("%s is good for a mount", from.name)
		}
		fmt.Fprintln(&said, err)
	}
	return said.String()
}

// exempt are the processes that were given what they have: the test, the S3 server and the driver, whose children show its
// command line and its environment until they execute their own program, also those that are another user's by then.
func (e *env) exempt(pid int) bool {
	if pid == os.Getpid() || pid == e.Process.PID() || pid == e.PID() {
		return true
	}
	own := cmdline(e.PID())
	return own != "" && cmdline(pid) == own
}

func cmdline(pid int) string {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	return string(b)
}

// watch looks at the command lines and environments of all processes until stop is closed.
func (e *env) watch(c *canaries, stop <-chan struct{}) []string {
	var found []string
	for {
		select {
		case <-stop:
			return found
		case <-time.After(5 * time.Millisecond):
		}
		entries, _ := os.ReadDir("/proc")
		for _, entry := range entries {
			pid, err := strconv.Atoi(entry.Name())
			if err != nil || e.exempt(pid) {
				continue
			}
			for _, file := range []string{"cmdline", "environ"} {
				text, _ := os.ReadFile(filepath.Join("/proc", entry.Name(), file))
				for _, what := range c.in(text) {
					if said := fmt.Sprintf("%s of %s holds %s", file, comm(pid), what); !slices.Contains(found, said) {
						found = append(found, said)
					}
				}
			}
		}
	}
}

func comm(pid int) string {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
	return strings.TrimSpace(string(b))
}

// noSecretsIn looks into every file that the driver, helpers and clients have written, and at whether a core of theirs could be.
func (e *env) noSecretsIn(c *canaries) {
	e.t.Helper()
	for _, dir := range []string{e.State, e.Cache, e.Dir} {
		err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			switch {
			case err != nil:
				return nil //nolint:nilerr // what goes away meanwhile, or is a mount
			case d.IsDir() && (filepath.Base(path) == "sources" || filepath.Base(path) == "targets"):
				return filepath.SkipDir // file systems of the clients
			case !d.Type().IsRegular() || strings.HasPrefix(path, e.Clients):
				return nil
			}
			text, err := os.ReadFile(path)
			if err != nil {
				return nil //nolint:nilerr // as above
			}
			for _, what := range c.in(text) {
				e.t.Errorf("file %s holds %s", path, what)
			}
			return nil
		})
		if err != nil {
			e.t.Error(err)
		}
	}
	for _, line := range e.Processes() {
		_, rest, _ := strings.Cut(line, ", pid ")
		var pid int
		if _, err := fmt.Sscan(strings.TrimSuffix(strings.Fields(rest)[0], ","), &pid); err != nil {
			e.t.Fatal(err)
		}
		limits, err := os.ReadFile(fmt.Sprintf("/proc/%d/limits", pid))
		if err != nil {
			continue // it has just ended
		}
		for limit := range strings.Lines(string(limits)) {
			if rest, ok := strings.CutPrefix(limit, "Max core file size"); ok && !slices.Equal(strings.Fields(rest), []string{"0", "0", "bytes"}) {
				e.t.Errorf("%s can leave a core: %s", line, strings.TrimSpace(limit))
			}
		}
	}
}

// noSecretsInUnits looks at all that systemd knows of mounts.
func (e *env) noSecretsInUnits(c *canaries) {
	e.t.Helper()
	if e.Launcher != rig.LauncherSystemd {
		return
	}
	for _, args := range [][]string{{"show", "--all", "s3csi-*.service"}, {"cat", "s3csi-*.service"}} {
		out, err := exec.CommandContext(e.t.Context(), "systemctl", append([]string{"--no-pager"}, args...)...).CombinedOutput()
		if err != nil || len(out) == 0 {
			e.t.Errorf("systemctl %s: %v: %s", args[0], err, out)
		}
		for _, what := range c.in(out) {
			e.t.Errorf("systemctl %s shows %s", args[0], what)
		}
	}
	out, err := exec.CommandContext(e.t.Context(), "journalctl", "--no-pager", "--all", "--unit=s3csi-*").CombinedOutput()
	if err != nil {
		e.t.Logf("there is no journal: %v", err)
	}
	for _, what := range c.in(out) {
		e.t.Errorf("the journal holds %s", what)
	}
}
