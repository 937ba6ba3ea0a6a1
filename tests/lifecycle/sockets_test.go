package lifecycle_test

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/s3-csi/s3-csi-driver/tests/rig/rigtest"
	"github.com/s3-csi/s3-csi-driver/tests/s3server"
)

func TestTheSocketOfAKilledDriverIsReplaced(t *testing.T) {
	t.Parallel()
	endpoint, path := socket(t)
	first := launch(t, nil, "controller", "--endpoint="+endpoint)
	first.ready(t, dial(t, endpoint))
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("socket: %v, %v, want mode 0600", info.Mode(), err)
	}
	first.signal(t, syscall.SIGKILL)
	first.exit(t)
	if !exists(path) {
		t.Fatal("a killed driver leaves no socket: this test proves nothing")
	}
	next := launch(t, nil, "controller", "--endpoint="+endpoint)
	next.ready(t, dial(t, endpoint))
	next.signal(t, syscall.SIGTERM)
	if code := next.exit(t); code != 0 || exists(path) {
		t.Errorf("exit code %d, socket left: %t", code, exists(path))
	}
}

func TestTheSocketOfALivingDriverIsNotStolen(t *testing.T) {
	t.Parallel()
	endpoint, path := socket(t)
	first := launch(t, nil, "controller", "--endpoint="+endpoint)
	first.ready(t, dial(t, endpoint))
	second := launch(t, nil, "controller", "--endpoint="+endpoint)
	if code := second.exit(t); code == 0 {
		t.Error("the second driver's exit code is 0")
	}
	contains(t, second.stderr.String(), path, "stop that driver first")
	_, err := dial(t, endpoint).GetPluginInfo(rigtest.Context(t, patience), &csi.GetPluginInfoRequest{})
	if err != nil {
		t.Errorf("the first driver cannot be reached any more: %v", err)
	}
}

func TestWhatIsNoSocketIsNeverRemoved(t *testing.T) {
	t.Parallel()
	for kind, create := range map[string]func(string) error{
		"a regular file":  func(p string) error { return os.WriteFile(p, []byte("precious"), 0o600) },
		"a directory":     func(p string) error { return os.Mkdir(p, 0o700) },
		"a symbolic link": func(p string) error { return os.Symlink("elsewhere", p) },
	} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			endpoint, path := socket(t)
			if err := create(path); err != nil {
				t.Fatal(err)
			}
			before, err := os.Lstat(path)
			if err != nil {
				t.Fatal(err)
			}
			p := launch(t, nil, "controller", "--endpoint="+endpoint)
			if code := p.exit(t); code == 0 {
				t.Error("exit code 0")
			}
			contains(t, p.stderr.String(), path, kind)
			if after, err := os.Lstat(path); err != nil || !os.SameFile(before, after) {
				t.Errorf("it is gone: %v", err)
			}
		})
	}
}

func TestASocketInAMissingDirectoryIsAClearError(t *testing.T) {
	t.Parallel()
	_, path := socket(t)
	p := launch(t, nil, "controller", "--endpoint=unix://"+filepath.Join(filepath.Dir(path), "missing", "csi.sock"))
	if code := p.exit(t); code == 0 {
		t.Error("exit code 0")
	}
	contains(t, p.stderr.String(), filepath.Join(filepath.Dir(path), "missing"), "does not exist")
}

func TestTCPOnTheLoopbackInterfaceWorksWithAPlainClient(t *testing.T) {
	t.Parallel()
	s := rigtest.StartServer(t, s3server.Options{})
	endpoint := "tcp://" + port(t)
	p := launch(t, environment(s, "CSI_ENDPOINT="+endpoint), "controller")
	c := dial(t, endpoint)
	p.ready(t, c)
	v := rigtest.Create(t, c, "vol")
	rigtest.Delete(t, c, v.GetVolumeId())
	p.signal(t, syscall.SIGTERM)
	if code := p.exit(t); code != 0 {
		t.Errorf("exit code %d", code)
	}
	// Another one can have the port at once.
	launch(t, environment(s), "controller", "--endpoint="+endpoint).ready(t, c)
}

func TestAPortThatIsTakenIsAClearError(t *testing.T) {
	t.Parallel()
	taken := port(t)
	endpoint, _ := socket(t)
	first := launch(t, nil, "controller", "--endpoint="+endpoint, "--http-endpoint="+taken)
	first.ready(t, dial(t, endpoint))
	other, path := socket(t)
	for _, args := range [][]string{{"--endpoint=tcp://" + taken}, {"--endpoint=" + other, "--http-endpoint=" + taken}} {
		p := launch(t, nil, append([]string{"controller"}, args...)...)
		if code := p.exit(t); code == 0 {
			t.Errorf("%v: exit code 0", args)
		}
		contains(t, p.stderr.String(), taken)
	}
	if exists(path) {
		t.Error("the socket is left")
	}
}
