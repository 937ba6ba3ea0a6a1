package helper

import (
	"path/filepath"
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// A spare runs no client before it has a mount, gets one once, and then works in the mount's directories.
func TestAssign_SpareGetsOneMount(t *testing.T) {
	r := newRig(t, func(o *options) { o.args.Spare = true })
	if _, err := r.tryStart("exit:0"); !fault.Is(err, fault.Precondition) {
		t.Errorf("a client without a mount: %v", err)
	}
	for _, a := range []Assignment{{}, {Name: "a-1", StateDir: "relative"}, {Name: "a-1", StateDir: "/a", CacheDir: "relative"}} {
		if err := r.peer.Assign(bounded(t), a); !fault.Is(err, fault.Invalid) {
			t.Errorf("%+v: %v", a, err)
		}
	}
	dir := t.TempDir()
	a := Assignment{Name: "a-1", StateDir: dir, CacheDir: filepath.Join(dir, "cache")}
	if err := r.peer.Assign(bounded(t), a); err != nil {
		t.Fatal(err)
	}
	if err := r.peer.Assign(bounded(t), a); !fault.Is(err, fault.Exists) {
		t.Errorf("another mount: %v", err)
	}
	r.start("exit:3")
	r.until("the client's exit", exited)
	if end, ok, err := ReadEnd(dir); err != nil || !ok || end.Code != 3 {
		t.Errorf("the exit in the mount's directory: %+v, %v, %v", end, ok, err)
	}
	if _, ok, err := ReadEnd(r.dir); err != nil || ok {
		t.Errorf("the spare's directory has the exit, too: %v", err)
	}
}

func TestAssign_IsRefusedByAHelperWithAMount(t *testing.T) {
	r := newRig(t)
	if err := r.peer.Assign(bounded(t), Assignment{Name: "a-1", StateDir: t.TempDir()}); !fault.Is(err, fault.Exists) {
		t.Errorf("a mount for a mount's helper: %v", err)
	}
}

func TestArgumentsAreReadBack(t *testing.T) {
	for _, a := range []Arguments{
		{Name: "a-1", StateDir: "/s"},
		{Name: "spare-1", StateDir: "/s", CacheDir: "/c", Landlock: true, Spare: true},
	} {
		if got, err := parse(a.CommandLine()[1:]); err != nil || got != a {
			t.Errorf("%+v is read as %+v, %v", a, got, err)
		}
	}
}
