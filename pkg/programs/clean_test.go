package programs

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
)

// version installs the place's programs with another content, as another version of the driver does.
func (p *place) version(v string) Installed {
	p.t.Helper()
	p.Version = v
	p.write(p.Files[len(p.Files)-1], "of "+v)
	return p.install()
}

func TestOnlyUnusedVersionsAreRemoved(t *testing.T) {
	p := newPlace(t)
	sleep, err := exec.LookPath("sleep")
	if err != nil {
		t.Skipf("needs the program sleep: %v", err)
	}
	p.Files = []string{sleep, filepath.Join(p.dir, "image", "client")}

	unused, recorded, run, held := p.version("v1"), p.version("v2"), p.version("v3"), p.version("v4")
	for _, i := range []Installed{unused, recorded, run} { // their drivers have ended
		if err := i.Close(); err != nil {
			t.Fatal(err)
		}
	}
	cmd := exec.Command(run.Path(filepath.Base(sleep)), "1000")
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	end := func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }
	defer end()
	base := filepath.Dir(unused.Dir)
	const digest = "-0123456789abcdef"
	foreign := []string{"notes.txt", "backup", "v1", "v1-0123", "v1" + strings.ToUpper(digest), "file" + digest, "link" + digest, "deep" + digest}
	if err := errors.Join(
		os.WriteFile(filepath.Join(base, "notes.txt"), nil, 0o644), os.WriteFile(filepath.Join(base, "file"+digest), nil, 0o644),
		os.Symlink(unused.Dir, filepath.Join(base, "link"+digest)), os.MkdirAll(filepath.Join(base, "deep"+digest, "er"), 0o755),
	); err != nil {
		t.Fatal(err)
	}
	for _, name := range foreign {
		if err := os.MkdirAll(filepath.Join(base, name), 0o755); err != nil && !errors.Is(err, syscall.ENOTDIR) {
			t.Fatal(err)
		}
	}

	now := p.version("v5")
	used := func(dir string) bool { return dir == recorded.Dir }
	// What is not a version's is left alone, and said where it has the name of one.
	if err := now.Clean(bounded(t), here{}, used); err == nil || !strings.Contains(err.Error(), "deep"+digest+" was not removed") {
		t.Errorf("%v", err)
	}
	want := func(dirs ...Installed) {
		t.Helper()
		names := slices.Clone(foreign)
		for _, d := range dirs {
			names = append(names, filepath.Base(d.Dir))
		}
		slices.Sort(names)
		if got := p.versions(); !slices.Equal(got, names) {
			t.Errorf("there are %v, want %v", got, names)
		}
	}
	want(recorded, run, held, now)
	p.program(run.Path("client"), "of v3")

	end()
	if err := os.RemoveAll(filepath.Join(base, "deep"+digest)); err != nil {
		t.Fatal(err)
	}
	foreign = foreign[:len(foreign)-1]
	if err := held.Close(); err != nil {
		t.Fatal(err)
	}
	if err := now.Clean(bounded(t), here{}, func(string) bool { return false }); err != nil {
		t.Fatal(err)
	}
	want(now)
	p.program(now.Path("client"), "of v5")
}

func TestCleanContinuesAfterAnInterruption(t *testing.T) {
	p := newPlace(t, "helper", "client")
	old := p.version("v1")
	if err := errors.Join(old.Close(), os.Remove(old.Path("program-1"))); err != nil {
		t.Fatal(err)
	}
	now := p.version("v2")
	if err := now.Clean(bounded(t), here{}, func(string) bool { return false }); err != nil {
		t.Fatal(err)
	}
	if got := p.versions(); len(got) != 1 || got[0] != filepath.Base(now.Dir) {
		t.Errorf("%v", got)
	}
}

func TestRollbackFindsOrInstallsTheOldPrograms(t *testing.T) {
	p := newPlace(t, "helper", "client")
	first := p.version("v1")
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	second := p.version("v2")
	if err := second.Clean(bounded(t), here{}, func(string) bool { return false }); err != nil {
		t.Fatal(err)
	}
	again := p.version("v1")
	if again.Dir != first.Dir {
		t.Errorf("%s, it was %s", again.Dir, first.Dir)
	}
	p.program(again.Path("program-2"), "of v1")
}
