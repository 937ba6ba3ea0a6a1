package symptoms

import (
	"flag"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
)

var update = flag.Bool("update", false, "write the observed codes into testdata/codes.txt instead of comparing them")

// golden has a line "symptom: code" for each error.
const golden = "testdata/codes.txt"

var (
	codeOf    = regexp.MustCompile(`^rpc error: code = (\w+)`)
	codesLock sync.Mutex
)

// checkCode compares the code of an error with the golden one. A line of the status has none.
func checkCode(t *testing.T, symptom, text string) {
	t.Helper()
	m := codeOf.FindStringSubmatch(text)
	if m == nil {
		return
	}
	codesLock.Lock()
	defer codesLock.Unlock()
	file, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	codes := map[string]string{}
	for line := range strings.Lines(string(file)) {
		symptom, code, _ := strings.Cut(strings.TrimSuffix(line, "\n"), ": ")
		codes[symptom] = code
	}
	if codes[symptom] == m[1] {
		return
	}
	if !*update {
		t.Errorf("%s: the error has the code %s, want %q as in %s", symptom, m[1], codes[symptom], golden)
		return
	}
	codes[symptom] = m[1]
	var b strings.Builder
	for _, symptom := range slices.Sorted(maps.Keys(codes)) {
		fmt.Fprintf(&b, "%s: %s\n", symptom, codes[symptom])
	}
	if err := os.WriteFile(golden, []byte(b.String()), 0o644); err != nil {
		t.Fatal(err)
	}
}
