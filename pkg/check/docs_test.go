package check

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

func TestEveryRowIsDocumentedAndNoOther(t *testing.T) {
	page, err := os.ReadFile("../../docs/check.md")
	if err != nil {
		t.Fatal(err)
	}
	documented := map[string]bool{}
	for line := range strings.Lines(string(page)) {
		if cell, ok := strings.CutPrefix(line, "| `"); ok {
			cell, _, _ = strings.Cut(cell, " | ")
			for name := range strings.SplitSeq(cell, "`") {
				if name = strings.Trim(name, ", "); name != "" {
					documented[name] = false
				}
			}
		}
	}
	sources, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	more, err := filepath.Glob("clientcheck/*.go")
	if err != nil || len(more) == 0 {
		t.Fatalf("%q, %v", more, err)
	}
	sources = append(sources, more...)
	row := regexp.MustCompile(`\bitem\{"([A-Za-z0-9.]+)"|\{"([A-Za-z0-9]+)", "[^"]+", [a-z!]`)
	for _, path := range sources {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		source, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range row.FindAllStringSubmatch(string(source), -1) {
			name := m[1] + m[2]
			switch name {
			case "client.":
				name = "client.<name>"
			case "dns.":
				name = "dns.<backend>"
			}
			if _, ok := documented[name]; !ok {
				t.Errorf("docs/check.md does not say what %q is", name)
			}
			documented[name] = true
		}
	}
	for name, there := range documented {
		if !there {
			t.Errorf("docs/check.md tells of %q, which no check is called", name)
		}
	}
}
