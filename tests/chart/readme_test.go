package chart

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

var update = flag.Bool("update", false, "write the table of the chart's README")

const (
	tableBegin = "<!-- values: go test ./chart -run TestReadme -update, in tests/ -->\n"
	tableEnd   = "<!-- end of values -->\n"
)

// row describes one value of the chart.
type row struct{ name, value, meaning string }

// rows reads values.yaml: a key whose comment begins with -- becomes a row.
func rows(t *testing.T) []row {
	t.Helper()
	text, err := os.ReadFile(chartDir + "/values.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var doc yaml.Node
	if err := yaml.Unmarshal(text, &doc); err != nil {
		t.Fatal(err)
	}
	var list []row
	var walk func(prefix string, node *yaml.Node)
	walk = func(prefix string, node *yaml.Node) {
		for i := 0; i < len(node.Content); i += 2 {
			key, value := node.Content[i], node.Content[i+1]
			name := prefix + key.Value
			comment := key.HeadComment[strings.LastIndex(key.HeadComment, "\n\n")+1:]
			meaning, ok := strings.CutPrefix(strings.TrimSpace(comment), "# -- ")
			switch {
			case ok:
				var v any
				if err := value.Decode(&v); err != nil {
					t.Fatal(err)
				}
				b, err := json.Marshal(v)
				if err != nil {
					t.Fatal(err)
				}
				if value.Tag == "!!str" && value.Value != "" {
					b = []byte(value.Value)
				}
				list = append(list, row{name, string(b), strings.ReplaceAll(meaning, "\n# ", " ")})
			case value.Kind == yaml.MappingNode && len(value.Content) > 0:
				walk(name+".", value)
			default:
				t.Errorf("values.yaml does not document %s", name)
			}
		}
	}
	walk("", doc.Content[0])
	return list
}

func TestReadme(t *testing.T) {
	const file = chartDir + "/README.md"
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, ok := strings.Cut(string(text), tableBegin)
	_, after, ok2 := strings.Cut(rest, tableEnd)
	if !ok || !ok2 {
		t.Fatalf("%s has no marks of the table", file)
	}
	var b strings.Builder
	b.WriteString(before + tableBegin + "\n| value | default | meaning |\n|---|---|---|\n")
	for _, r := range rows(t) {
		fmt.Fprintf(&b, "| `%s` | `%s` | %s |\n", r.name, r.value, strings.ReplaceAll(r.meaning, "|", `\|`))
	}
	b.WriteString("\n" + tableEnd + after)
	if *update {
		if err := os.WriteFile(file, []byte(b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if b.String() != string(text) {
		t.Errorf("%s does not match values.yaml; update it with: go test ./chart -run %s -update", file, t.Name())
	}
}

// The schema and values.yaml have the same keys.
func TestSchemaHasTheValues(t *testing.T) {
	s := readSchema(t)
	documented := map[string]bool{}
	for _, r := range rows(t) {
		documented[r.name] = true
		node := s
		for word := range strings.SplitSeq(r.name, ".") {
			if node = s.resolve(t, node).Properties[word]; node == nil {
				t.Fatalf("the schema has no %s", r.name)
			}
		}
	}
	var walk func(prefix string, node *schema)
	walk = func(prefix string, node *schema) {
		for name, p := range s.resolve(t, node).Properties {
			full := prefix + name
			if documented[full] {
				continue
			}
			if len(s.resolve(t, p).Properties) == 0 {
				t.Errorf("values.yaml has no %s", full)
			}
			walk(full+".", p)
		}
	}
	walk("", s)
	if len(documented) < 100 {
		t.Errorf("%d values", len(documented))
	}
}
