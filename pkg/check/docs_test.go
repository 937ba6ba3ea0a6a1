package check

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

func TestDocs_EveryRowIsDocumented(t *testing.T) {
	page, err := os.ReadFile("../../docs/how-to/check.md")
	if err != nil {
		t.Fatal(err)
	}
	documented, settings, section := map[string]bool{}, map[string]bool{}, ""
	for line := range strings.Lines(string(page)) {
		if strings.HasPrefix(line, "#") {
			section = strings.TrimSpace(strings.TrimLeft(line, "#"))
		}
		into := documented
		switch {
		case section == "Settings":
			into = settings
		case !strings.HasPrefix(section, "Rows") && section != "A client":
			continue
		}
		if cell, ok := strings.CutPrefix(line, "| `"); ok {
			cell, _, _ = strings.Cut(cell, " | ")
			for name := range strings.SplitSeq(cell, "`") {
				if name = strings.Trim(name, ", "); name != "" {
					into[name] = false
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
	setting := regexp.MustCompile(`\bsetting[A-Z]\w+\s+= "([^"]+)"`)
	row := regexp.MustCompile(`\b(?:Needed|Optional|NeededIf)\((?:[^"]*, )?"([A-Za-z0-9.]+)"`)
	for _, path := range sources {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		source, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range setting.FindAllStringSubmatch(string(source), -1) {
			if _, ok := settings[m[1]]; !ok {
				t.Errorf("docs/how-to/check.md does not say where %q is set", m[1])
			}
			delete(settings, m[1])
		}
		for _, m := range row.FindAllStringSubmatch(string(source), -1) {
			name := m[1]
			switch name {
			case "client.":
				name = "client.<name>"
			case "dns.":
				name = "dns.<backend>"
			}
			if _, ok := documented[name]; !ok {
				t.Errorf("docs/how-to/check.md does not say what %q is", name)
			}
			documented[name] = true
		}
	}
	for name := range settings {
		t.Errorf("docs/how-to/check.md tells of the setting %q, which no row has", name)
	}
	for name, there := range documented {
		if !there {
			t.Errorf("docs/how-to/check.md tells of %q, which no check is called", name)
		}
	}
}
