//go:build !lane || ordinary

package node

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/s3-csi/s3-csi-driver/tests/internal/fuseclients"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// declareS3fs starts a driver with the declaration of s3fs. It returns the driver's flag for that.
func (e *env) declareS3fs() (flag string) {
	e.t.Helper()
	flag = e.declaredS3fs()
	e.drive(flag)
	return flag
}

// A declared client that reads its keys when it starts serves like the others. No process but the client has them, and none but root and
// the client's own user can read them there.
func TestAClientWithStaticKeysServes(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	e.declareS3fs()
	secret := e.user("owner")
	v := static("keys", s3fs, "mountOptions", "retries=2")
	target := e.publish(v, "keys", secrets(secret))
	write(t, filepath.Join(target, "file"), "content")
	e.keysOnlyIn(e.s3fs(), secret)
	fuseclients.Get(t, "s3fs", fuseclients.Declared, fuseclients.Fusermount).Use(t,
		fuseclients.Volume{Dir: target, Stored: e.Stored(t, bucket, "keys/"), Restart: func() {
			rigtest.Kill(t, e.s3fs())
			e.awaitRead(eventually, filepath.Join(target, "file"), "content")
			e.keysOnlyIn(e.s3fs(), secret)
		}, Renew: func() bool {
			before, second := e.s3fs(), e.anotherKey("owner")
			e.publish(v, "keys", secrets(second))
			e.awaitOther(s3fs, before)
			e.revoke("owner", secret)
			return e.s3fs() == before
		}, Unpublish: func() {
			write(t, filepath.Join(target, "last"), strings.Repeat("last", 4<<20)) // more than a mount's directory of state holds
			e.unpublish(v, target)
		}})
	if got := e.Object(t, bucket, "keys/last"); len(got) != 16<<20 {
		t.Errorf("the last file has %d bytes", len(got))
	}
	e.awaitNothingLeft(eventually)
}

// s3fs is the only process of that client.
func (e *env) s3fs() rig.Process {
	e.t.Helper()
	all := e.Running(s3fs)
	if len(all) != 1 {
		e.t.Fatalf("%d processes of the client: %v", len(all), e.Processes())
	}
	return all[0]
}

// awaitOther waits until another process than before is the only one of a client.
func (e *env) awaitOther(client string, before rig.Process) {
	e.t.Helper()
	e.await(eventually, "the former client to end", func() bool {
		running := e.Running(client)
		return len(running) == 1 && running[0].PID != before.PID
	})
}

// keysOnlyIn checks that the client has the keys of a secret in its environment, that no other user can read that, and that the keys are
// nowhere else.
func (e *env) keysOnlyIn(client rig.Process, secret map[string]string) {
	e.t.Helper()
	of := func(p rig.Process, file string) string { return read(e.t, fmt.Sprintf("/proc/%d/%s", p.PID, file)) }
	env := strings.Split(of(client, "environ"), "\x00")
	for name, want := range map[string]string{"AWS_ACCESS_KEY_ID": secret["accessKeyID"], "AWS_SECRET_ACCESS_KEY": secret["secretAccessKey"],
		"AWS_CONTAINER_AUTHORIZATION_TOKEN": "", "AWS_EC2_METADATA_DISABLED": "true"} {
		got := ""
		for _, variable := range env {
			if n, value, _ := strings.Cut(variable, "="); n == name {
				got = value
			}
		}
		if got != want {
			e.t.Errorf("the client's %s is not what it has to be", name)
		}
	}
	// The client starts it with its own environment, and it ends when the client has the descriptor.
	rigtest.Await(e.t, eventually, "fusermount to end", func() bool { return len(e.Running("fusermount")) == 0 })
	for _, p := range e.Running("") {
		e.noSecretIn(p.Name+"'s command line", []byte(of(p, "cmdline")))
		if p.PID != client.PID {
			e.noSecretIn(p.Name+"'s environment", []byte(of(p, "environ")))
		}
	}
	cat := exec.CommandContext(e.t.Context(), "cat", fmt.Sprintf("/proc/%d/environ", client.PID))
	cat.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(client.UID + 1), Gid: uint32(client.UID + 1)}}
	if out, err := cat.CombinedOutput(); err == nil || !strings.Contains(string(out), "Permission denied") {
		e.t.Errorf("another user reads the client's environment: %v", err)
	}
	for limit := range strings.Lines(of(client, "limits")) {
		if rest, ok := strings.CutPrefix(limit, "Max core file size"); ok && !slices.Equal(strings.Fields(rest), []string{"0", "0", "bytes"}) {
			e.t.Errorf("the client can leave a core: %s", limit)
		}
	}
	for _, root := range []string{e.State, e.Cache, e.Dir} {
		e.noSecretInFiles(root)
	}
	if e.Launcher == rig.LauncherSystemd {
		out, err := exec.CommandContext(e.t.Context(), "systemctl", "--no-pager", "show", "--all", "s3csi-*.service").CombinedOutput()
		if err != nil || len(out) == 0 {
			e.t.Errorf("systemctl show: %v: %s", err, out)
		}
		e.noSecretIn("a unit", out)
	}
}

// noSecretInFiles looks into every file that the driver, helpers and clients have written below a directory.
func (e *env) noSecretInFiles(root string) {
	e.t.Helper()
	err := filepath.WalkDir(root, func(path string, d os.DirEntry, err error) error {
		switch {
		case err != nil:
			return nil //nolint:nilerr // what goes away meanwhile, or is a mount
		case d.IsDir() && (d.Name() == "sources" || d.Name() == "targets" || path == e.Clients):
			return filepath.SkipDir // file systems of the clients, and programs
		case !d.Type().IsRegular():
			return nil
		}
		if text, err := os.ReadFile(path); err == nil {
			e.noSecretIn(path, text)
		}
		return nil
	})
	if err != nil {
		e.t.Error(err)
	}
}

// The helper has the keys, so that a client is started again by a driver that never had them. When the helper is gone, too, the next
// republish brings them.
func TestStaticKeysOutliveTheDriverAndComeAgainWithARepublish(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	flag := e.declareS3fs()
	secret := e.user("owner")
	v := static("again", s3fs)
	target := e.publish(v, "again", secrets(secret))
	file := filepath.Join(target, "file")
	write(t, file, "content")
	e.restart(flag)
	rigtest.Kill(t, e.s3fs())
	e.awaitRead(eventually, file, "content")
	e.keysOnlyIn(e.s3fs(), secret)

	rigtest.Kill(t, e.Running("")...)
	e.publish(v, "again", secrets(secret))
	e.awaitRead(eventually, file, "content")
	e.keysOnlyIn(e.s3fs(), secret)
	e.unpublish(v, target)
	e.awaitNothingLeft(eventually)
}

// A client with static keys cannot get others, so a publication with a changed secret moves to another client.
func TestAClientWithStaticKeysIsReplacedWhenItsSecretChanges(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	e.declareS3fs()
	first := e.user("owner")
	second := e.anotherKey("owner")
	v := static("rotated", s3fs)
	target := e.publish(v, "rotated", secrets(first))
	file := filepath.Join(target, "file")
	write(t, file, "content")
	before := e.s3fs()
	e.publish(v, "rotated", secrets(second))
	e.awaitRead(eventually, file, "content")
	e.awaitOther(s3fs, before)
	e.keysOnlyIn(e.s3fs(), second)
	e.revoke("owner", first)
	write(t, file, "changed")
	if got := e.Object(t, bucket, "rotated/file"); got != "changed" {
		t.Errorf("the object is %q", got)
	}
	e.publish(v, "rotated", secrets(second))
	e.unpublish(v, target)
	e.awaitNothingLeft(eventually)
}

// Keys that expire, or that another one than the volume's author can change, are refused before anything starts.
func TestAClientWithStaticKeysGetsNoOthers(t *testing.T) {
	t.Parallel()
	e := newEnv(t)
	e.declareS3fs()
	secret := e.user("owner")
	session := map[string]string{"accessKeyID": secret["accessKeyID"], "secretAccessKey": secret["secretAccessKey"], "sessionToken": "token"}
	for name, refused := range map[string]struct {
		attributes []string
		changes    []change
	}{
		"the driver's own":         {},
		"keys of a session":        {changes: []change{secrets(session)}},
		"a scope that needs those": {attributes: []string{"scope", "required"}, changes: []change{secrets(secret)}},
	} {
		t.Run(name, func(t *testing.T) {
			err := e.tryPublish(time.Minute, static("refused", s3fs, refused.attributes...), e.Target("refused"), refused.changes...)
			want(t, err, codes.FailedPrecondition, "clients."+s3fs+".credentials")
		})
	}
	e.undone(e.Target("refused"))
}
