// Package workflows checks the files of .github.
package workflows

import (
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/rhysd/actionlint"
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
