package check

import (
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"

	checks "github.com/s3-csi/s3-csi-driver/pkg/check"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
)

func listen(t *testing.T, h http.Handler) string {
	t.Helper()
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	return s.URL
}

func TestAHostThatCanServeVolumes(t *testing.T) {
	t.Parallel()
	if err := rig.Usable(); err != nil {
		t.Skip(err)
	}
	g := newGateway(t)
	dir, clients := t.TempDir(), t.TempDir()
	const broken = "#!/bin/sh\necho mount-s3: error while loading shared libraries: libfuse.so.2: cannot open shared object file; exit 127\n"
	for name, text := range map[string]string{"s3-csi-rclone": "#!/bin/true\n", "mount-s3": broken} {
		if err := rig.WriteProgram(filepath.Join(clients, name), []byte(text)); err != nil {
			t.Fatal(err)
		}
	}
	for _, d := range []string{dir, filepath.Dir(dir)} { // both are of this test; programs below them are run by another user
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	r := run(t, g.user, g.backend(""), append(rig.IsolationFlags(), "--create-bucket", "--node", "--launcher=process", "--state-dir="+dir+"/state",
		"--host-dir="+dir+"/programs", "--client-dir="+clients, "--default-client=rclone")...)
	if len(r.Sections) != 2 || r.Sections[1].Name != "node" {
		t.Fatalf("%+v", r.Report)
	}
	if !r.OK || r.code != 0 {
		t.Errorf("exit code %d\n%s", r.code, table(r.Sections[1]))
		for _, row := range r.Sections[1].Rows {
			t.Logf("%+v", row)
		}
	}
	var names []string
	for _, row := range r.Sections[1].Rows {
		names = append(names, row.Check)
	}
	const want = "hostMounts isolation fuseDevice fuseMount stateDir cacheDir launcher sandbox survivesDriver hostPrograms hostPIDs openat2 openTree moveMount " +
		"mountSetattr statxMountID moveMountBeneath cgroups client.mountpoint-s3 client.rclone dns.lab"
	if got := strings.Join(names, " "); got != want {
		t.Errorf("rows\n%s\nwant\n%s", got, want)
	}
	for check, want := range map[string]checks.Result{"fuseMount": checks.Yes, "stateDir": checks.Yes, "cacheDir": checks.Yes, "hostPrograms": checks.Yes,
		"client.rclone": checks.Yes, "client.mountpoint-s3": checks.No, "dns.lab": checks.Yes} {
		if got := row(t, r, check); got.Result != want {
			t.Errorf("%+v", got)
		}
	}
	if got := row(t, r, "client.mountpoint-s3"); !strings.Contains(got.Why, "libfuse.so.2") {
		t.Errorf("%+v", got)
	}
	left, err := os.ReadDir(dir)
	if err != nil || len(left) != 0 {
		t.Errorf("the check left %v, %v", left, err)
	}
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil || strings.Contains(string(mounts), " "+dir+"/") { // of this test: others mount, too
		t.Errorf("a mount is left, %v", err)
	}
}

func TestANodeNeedsNoCredentialsOfItsOwn(t *testing.T) {
	t.Parallel()
	g := newGateway(t)
	r := run(t, credentials.Keys{}, g.backend(", scope: required"), "--node", "--state-dir="+t.TempDir(), "--host-dir="+t.TempDir())
	if got := row(t, r, "reachable"); got.Result != checks.Yes {
		t.Errorf("%+v", got)
	}
	for _, row := range r.Sections[0].Rows {
		if row.Needed && row.Result != checks.Yes {
			t.Errorf("%+v", row)
		}
	}
	if got := row(t, r, "credentials"); got.Result != checks.No {
		t.Errorf("%+v", got)
	}
}

func TestAHostThatCannotServeVolumesSaysWhy(t *testing.T) {
	t.Parallel()
	if err := rig.Usable(); err != nil {
		t.Skip(err)
	}
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	g := newGateway(t)
	r := run(t, g.user, `  lab: {endpoint: "http://no-such-host.invalid:9000"}`+"\n", "--node", "--launcher=systemd", "--state-dir="+file+"/state",
		"--host-dir="+file+"/programs", "--client-dir="+t.TempDir())
	if got := row(t, r, "reachable"); got.Result != checks.No || !got.Needed {
		t.Errorf("%+v", got)
	}
	for _, check := range []string{"fuseMount", "hostPrograms", "client.mountpoint-s3", "dns.lab"} {
		if got := row(t, r, check); got.Result != checks.No || got.Why == "" {
			t.Errorf("%+v", got)
		}
	}
	if r.OK || r.code != 1 {
		t.Errorf("exit code %d", r.code)
	}
}

func TestACheckNamesADirectoryThatClientsCannotReach(t *testing.T) {
	t.Parallel()
	if err := rig.Usable(); err != nil {
		t.Skip(err)
	}
	dir := t.TempDir()
	if err := os.Chmod(filepath.Dir(dir), 0o755); err != nil {
		t.Fatal(err)
	}
	closed := filepath.Join(dir, "closed")
	if err := os.Mkdir(closed, 0o700); err != nil {
		t.Fatal(err)
	}
	g := newGateway(t)
	r := run(t, g.user, g.backend(""), "--node", "--launcher=process", "--state-dir="+closed+"/state", "--cache-dir="+closed+"/cache",
		"--host-dir="+closed+"/programs")
	for _, check := range []string{"stateDir", "cacheDir", "hostPrograms"} {
		if got := row(t, r, check); got.Result != checks.No || !strings.Contains(got.Why, closed+" ") {
			t.Errorf("%+v", got)
		}
	}
	if r.OK || r.code != 1 {
		t.Errorf("exit code %d", r.code)
	}
	if left, err := os.ReadDir(closed); err != nil || len(left) != 0 {
		t.Errorf("the check left %v, %v", left, err)
	}
}
