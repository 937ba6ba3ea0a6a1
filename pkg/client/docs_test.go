package client

import (
	"flag"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the tables of docs/reference/client-options.md")

const (
	document = "../../docs/reference/client-options.md"
	prose    = "../../docs/reference/clients.md"
	marker   = "<!-- tables: written by go test ./pkg/client -update -->\n"
)

// tables are the part of the document that the code knows.
func tables() string {
	var b strings.Builder
	for _, c := range All() {
		fmt.Fprintf(&b, "\n## Options of %s\n\n| option | values | default | meaning |\n|---|---|---|---|\n", c.Name)
		for _, name := range slices.Sorted(maps.Keys(c.Options)) {
			o := c.Options[name]
			values := o.Values()
			if o.Kind == Flag {
				values = "flag"
			}
			fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", name, values, o.Default, o.Meaning)
		}
	}
	return b.String()
}

func TestTheDocumentListsTheTables(t *testing.T) {
	text, err := os.ReadFile(document)
	must(t, err)
	head, written, ok := strings.Cut(string(text), marker)
	if !ok {
		t.Fatalf("%s has no line %q", document, marker)
	}
	if *update {
		must(t, os.WriteFile(document, []byte(head+marker+tables()), 0o644))
		return
	}
	if written != tables() {
		t.Errorf("the tables of %s are not those of the code; run go test ./pkg/client -update", document)
	}
}

func TestTheDocumentNamesEveryClient(t *testing.T) {
	text, err := os.ReadFile(prose)
	must(t, err)
	for _, c := range All() {
		for _, name := range append([]string{c.Name}, c.Programs...) {
			if !strings.Contains(string(text), "`"+name+"`") {
				t.Errorf("%s does not speak of %s", prose, name)
			}
		}
	}
}
