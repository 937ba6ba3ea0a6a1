// Package workflows checks the files of .github.
package workflows

import (
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/rhysd/actionlint"
	"sigs.k8s.io/yaml"
)

func TestWorkflows(t *testing.T) {
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob(filepath.Join(root, ".github/workflows/*.yaml"))
	if err != nil || len(files) < 2 {
		t.Fatal(files, err)
	}
	project := actionlint.NewProjects()
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		linter, err := actionlint.NewLinter(io.Discard, &actionlint.LinterOptions{})
		if err != nil {
			t.Fatal(err)
		}
		p, err := project.At(file)
		if err != nil {
			t.Fatal(err)
		}
		found, err := linter.Lint(file, text, p)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range found {
			t.Errorf("%s:%d: %s [%s]", filepath.Base(file), e.Line, e.Message, e.Kind)
		}
	}
}

// The notes of a release are the section of its version, and there must be one before anything is published.
func TestNotes(t *testing.T) {
	file := filepath.Join(t.TempDir(), "CHANGELOG.md")
	const text = "# Changelog\n\nIntroduction.\n\n## [Unreleased]\n\n- later\n\n## [1.2.3-rc.1] - 2026-01-02\n\n- candidate\n\n## [1.2.2] - 2026-01-01\n\n### " +
		"Fixed\n\n- fix\n\n## [1.2.1] - 2025-12-01\n"
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	for version, want := range map[string]string{
		"v1.2.3-rc.1": "\n- candidate\n", "v1.2.2": "\n### Fixed\n\n- fix\n", "v1.2.1": "", "v1.2.3": "", "v1.2": "",
	} {
		out, err := exec.CommandContext(t.Context(), "../../hack/notes", version, file).Output()
		if (err == nil) != (want != "") || string(out) != want {
			t.Errorf("%s: %q, %v", version, out, err)
		}
	}
}

// GitHub ignores a form that it cannot read.
func TestIssueForms(t *testing.T) {
	files, err := filepath.Glob("../../.github/ISSUE_TEMPLATE/*")
	if err != nil || len(files) < 3 {
		t.Fatal(files, err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var form map[string]any
		if err := yaml.Unmarshal(text, &form); err != nil || len(form) == 0 {
			t.Errorf("%s: %v", file, err)
		}
	}
}
