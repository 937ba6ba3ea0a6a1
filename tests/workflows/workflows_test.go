// Package workflows checks the files of .github.
package workflows

import (
	"io"
	"os"
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
