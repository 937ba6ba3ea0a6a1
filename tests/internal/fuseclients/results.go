package fuseclients

import (
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// EnvRecord makes Use record what it finds, instead of comparing it with what is recorded.
const EnvRecord = "S3CSI_RECORD_CLIENTS"

// results is the directory of what was found, as tests of the packages beside this one name it.
const results = "../internal/fuseclients/results"

// recorded is that directory. Tests that run units of systemd have another root, without it.
//
//go:embed results/*.txt
var recorded embed.FS

// file is the name of the case's file in it.
func (c Case) file() string {
	way := map[string]string{Starter: "starter", Path: "path", Fusermount: "fusermount"}[c.Way]
	return strings.ReplaceAll(c.Client+"_"+c.Place+"_"+way, " ", "-") + ".txt"
}

// record compares what was found with what is recorded.
func (c Case) record(t testing.TB, found string) {
	t.Helper()
	if os.Getenv(EnvRecord) != "" {
		if err := os.WriteFile(filepath.Join(results, c.file()), []byte(found), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	before, err := recorded.ReadFile("results/" + c.file())
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	if found != string(before) {
		t.Fatalf("%s, %s, %s: found\n%srecorded in %s\n%sif that is right, run it with %s=1, and make docs", c.Client, c.Place, c.Way, found, c.file(), before,
			EnvRecord)
	}
}

// results are those of a case by step.
func (c Case) results() (map[string]string, error) {
	text, err := recorded.ReadFile("results/" + c.file())
	if err != nil {
		return nil, err
	}
	found := map[string]string{}
	for line := range strings.Lines(string(text)) {
		step, result, _ := strings.Cut(strings.TrimSpace(line), ": ")
		found[step] = result
	}
	return found, nil
}

// columns are those of what was found.
func columns() (names []string) {
	for _, s := range steps() {
		names = append(names, s.name)
	}
	return append(names, renewal, drain)
}

// Table renders the table of the documentation.
func Table() (string, error) {
	var b strings.Builder
	fmt.Fprintf(&b, "| client | where | descriptor | tested | %s |\n|---|---|---|---|%s\n", strings.Join(columns(), " | "), strings.Repeat("---|", len(columns())))
	for _, c := range Cases() {
		found, err := c.results()
		if err != nil {
			return "", err
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s |", c.Client, c.Place, c.Way, c.Version)
		for _, column := range columns() {
			if found[column] == "" {
				return "", fmt.Errorf("%s has nothing about %s", c.file(), column)
			}
			fmt.Fprintf(&b, " %s |", found[column])
		}
		b.WriteString("\n")
	}
	return b.String(), nil
}
