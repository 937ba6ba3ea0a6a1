package volume

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the table of parameters into docs/reference/parameters.md")

const (
	docsFile   = "../../docs/reference/parameters.md"
	tableBegin = "<!-- parameters: go test ./pkg/volume -run TestDocsParameters -update -->\n"
	tableEnd   = "<!-- end of parameters -->\n"

	snapshotTableBegin = "<!-- snapshot parameters: go test ./pkg/volume -run TestDocsParameters -update -->\n"
)

func TestDocsParametersAreThoseOfTheCode(t *testing.T) {
	text, err := os.ReadFile(docsFile)
	must(t, err)
	want := string(text)
	for begin, rows := range map[string]string{tableBegin: markdownTable(), snapshotTableBegin: snapshotTable()} {
		head, rest, ok := strings.Cut(want, begin)
		_, tail, closed := strings.Cut(rest, tableEnd)
		if !ok || !closed {
			t.Fatalf("%s has lost the marks of its table: %s…%s", docsFile, begin, tableEnd)
		}
		want = head + begin + "\n" + rows + "\n" + tableEnd + tail
	}
	if want == string(text) {
		return
	}
	if !*update {
		t.Fatalf("%s differs from ParameterDocs; run: go test ./pkg/volume -run TestDocsParameters -update", docsFile)
	}
	must(t, os.WriteFile(docsFile, []byte(want), 0o644))
}

func markdownTable() string {
	var b strings.Builder
	b.WriteString("S: StorageClass, V: VolumeAttributesClass, P: static PersistentVolume.\n\n| parameter | in | default | meaning |\n|---|---|---|---|\n")
	for _, doc := range ParameterDocs() {
		var in string
		if doc.Scope != ScopeContext {
			in += "S"
		}
		if doc.Mutable {
			in += "V"
		}
		if doc.Scope != ScopeClass {
			in += "P"
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", doc.Name, in, doc.Default, doc.Meaning)
	}
	return b.String()
}

func snapshotTable() string {
	var b strings.Builder
	b.WriteString("| parameter | default | meaning |\n|---|---|---|\n")
	for _, doc := range SnapshotParameterDocs() {
		fmt.Fprintf(&b, "| `%s` | %s | %s |\n", doc.Name, doc.Default, doc.Meaning)
	}
	return b.String()
}

func TestEveryDocumentedParameterIsParsed(t *testing.T) {
	for _, doc := range ParameterDocs() {
		if doc.Default == "" || doc.Meaning == "" || strings.ContainsAny(doc.Default+doc.Meaning, "|\n") {
			t.Errorf("%s: row of the table %+v", doc.Name, doc)
		}
		// An impossible value must be refused for itself, not as an unknown parameter.
		_, err := ParseParameters(map[string]string{"bucketName": "shared", doc.Name: "\x01"}, pvc)
		if unknown := strings.Contains(fmt.Sprint(err), "is not a parameter"); unknown != (doc.Scope == ScopeContext) {
			t.Errorf("StorageClass: %s: %v", doc.Name, err)
		}
		wantInvalid(t, err, "")
		_, _, err = parseContext("h", map[string]string{"bucketName": "shared", doc.Name: "\x01"})
		if unknown := strings.Contains(fmt.Sprint(err), "is not a key"); unknown != (doc.Scope == ScopeClass) {
			t.Errorf("context: %s: %v", doc.Name, err)
		}
		wantInvalid(t, err, "")
	}
}
