package docs

import (
	"encoding/json"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	printed "github.com/s3-csi/s3-csi-driver/tests/internal/pages"
)

// placeholder is what a reader replaces in a command.
var placeholder = regexp.MustCompile(`<[a-z]+>`)

// A shell can read the commands of the pages.
func TestCommandsAreShell(t *testing.T) {
	blocks := 0
	for _, page := range pages(t) {
		for _, b := range printed.Blocks(read(t, page)) {
			if b.Language != "sh" {
				continue
			}
			blocks++
			cmd := exec.CommandContext(t.Context(), "bash", "-n")
			cmd.Stdin = strings.NewReader(placeholder.ReplaceAllString(b.Text, "X"))
			if out, err := cmd.CombinedOutput(); err != nil || len(out) > 0 {
				t.Errorf("%s:%d: %v\n%s", page, b.Line, err, out)
			}
		}
	}
	if blocks < 40 {
		t.Errorf("only %d blocks", blocks)
	}
}

// Documents that a page shows, and those that its commands write, such as policies, are JSON.
func TestDocumentsAreJSON(t *testing.T) {
	documents := 0
	for _, page := range pages(t) {
		text := read(t, page)
		var all []string
		for _, b := range printed.Blocks(text) {
			if b.Language == "json" {
				all = append(all, b.Text)
			}
		}
		for name, document := range printed.Files(text) {
			if filepath.Ext(name) == ".json" {
				all = append(all, document)
			}
		}
		for _, document := range all {
			var v map[string]any
			if err := json.Unmarshal([]byte(document), &v); err != nil {
				t.Errorf("%s: %v\n%s", page, err, document)
			}
		}
		documents += len(all)
	}
	if documents < 6 {
		t.Errorf("only %d documents", documents)
	}
}

// usage is a command line of the driver: the mode, and what follows.
var usage = regexp.MustCompile(`s3-csi-driver (all|controller|node|check|status|volumes)\b([^|;#&)\n` + "`" + `]*)`)

// Flags of the driver that the pages use are those of its modes. docs/reference/flags.md is generated from them.
func TestCommandsHaveTheirFlags(t *testing.T) {
	flags := flagsOfModes(read(t, filepath.Join(root, "docs/reference/flags.md")))
	used := 0
	for _, page := range pages(t) {
		text := strings.ReplaceAll(read(t, page), "\\\n", "")
		for _, command := range usage.FindAllStringSubmatch(text, -1) {
			for word := range strings.FieldsSeq(command[2]) {
				name, _, _ := strings.Cut(word, "=")
				if !strings.HasPrefix(name, "--") {
					continue
				}
				used++
				if !slices.Contains(flags[command[1]], name) {
					t.Errorf("%s: mode %s has no flag %s", page, command[1], name)
				}
			}
		}
	}
	if used < 20 {
		t.Errorf("only %d flags", used)
	}
}

// flagsOfModes reads the tables of flags.md, below headings that name their modes, and its lines on flags that a mode shares with others.
func flagsOfModes(text string) map[string][]string {
	name := regexp.MustCompile("`(--[a-z0-9-]+)`")
	shared := regexp.MustCompile(`^Mode \[(\w+)\]\(.* also takes`)
	flags := map[string][]string{}
	var modes []string
	for line := range strings.Lines(text) {
		if heading, ok := strings.CutPrefix(line, "## "); ok {
			modes = strings.Fields(strings.ReplaceAll(heading, ",", " "))
		}
		of, found := modes, name.FindAllStringSubmatch(line, -1)
		switch m := shared.FindStringSubmatch(line); {
		case m != nil:
			of = m[1:]
		case !strings.HasPrefix(line, "| `--"):
			continue
		default:
			found = found[:1]
		}
		for _, flag := range found {
			for _, mode := range of {
				flags[mode] = append(flags[mode], flag[1])
			}
		}
	}
	return flags
}

func TestFlagsOfModes(t *testing.T) {
	flags := flagsOfModes(read(t, filepath.Join(root, "docs/reference/flags.md")))
	for mode, want := range map[string]string{"all": "--endpoint", "controller": "--cluster-id", "node": "--launcher", "check": "--config", "status": "--pod"} {
		if !slices.Contains(flags[mode], want) {
			t.Errorf("mode %s has %q, without %s", mode, flags[mode], want)
		}
	}
	if slices.Contains(flags["controller"], "--launcher") || slices.Contains(flags["check"], "--cluster-id") {
		t.Errorf("a mode has the flags of another: %q", flags)
	}
}
