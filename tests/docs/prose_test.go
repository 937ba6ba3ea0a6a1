package docs

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// mostWordsOfASentence includes lists within a sentence.
const mostWordsOfASentence = 40

// substitutions are words that the project does not use, and what it writes instead.
var substitutions = []struct{ words, instead string }{
	{`nobody(?:'s)?|somebody|whoever`, "the actor, or the passive voice"},
	{`for want of`, "out of, without"},
	{`anew|once more`, "again"},
	{`for ever`, "forever, indefinitely"},
	{`in vain`, "without success"},
	{`in(?:to)? the place of|tak(?:e|es|en|ing) the place of`, "replace, instead of"},
	{`held against`, "checked against"},
	{`shall`, "should, must"},
	{`last words`, "exit output"},
	{`dies|died|dying|deaths?`, "exit, crash"},
	{`living|dead`, "healthy, running; stale, exited"},
	{`relive|births?`, "restart, start, generation"},
	{`comes? to (?:its|their) end`, "finish"},
	{`mend|mends|mended|uphold|upholds`, "repair, ensure"},
	{`look(?:s|ed)? after`, "reconcile"},
	{`complaints|condemned|handed`, "the standard term"},
	{`rid of`, "remove"},
	{`tells? whether|tells? of`, "report whether, report"},
	{`(?:is|are) told`, "is reported, gets"},
}

// rules are the substitutions as one expression, because there is much text.
type rules struct {
	words, sentence, word *regexp.Regexp
}

func newRules() rules {
	var all []string
	for _, s := range substitutions {
		all = append(all, "("+s.words+")")
	}
	return rules{
		words:    regexp.MustCompile(`\b(?:` + strings.Join(all, "|") + `)\b`),
		sentence: regexp.MustCompile(`[.!?:;|](?:\s|$)`),
		word:     regexp.MustCompile(`\w[\w'’-]*`),
	}
}

// check returns what is wrong with a line of prose: words to replace, and sentences that are too long.
func (r rules) check(line string) []string {
	var found []string
	lower := strings.ReplaceAll(strings.ToLower(line), `"nobody"`, "") // the user of this name
	for _, match := range r.words.FindAllStringSubmatch(lower, -1) {
		i := slices.IndexFunc(match[1:], func(group string) bool { return group != "" })
		found = append(found, fmt.Sprintf("write %q instead of %q", substitutions[i].instead, match[0]))
	}
	if strings.Count(line, " ") < mostWordsOfASentence {
		return found
	}
	for _, sentence := range r.sentence.Split(line, -1) {
		if words := r.word.FindAllString(sentence, -1); len(words) > mostWordsOfASentence {
			found = append(found, fmt.Sprintf("a sentence of %d words: %s …", len(words), strings.Join(words[:8], " ")))
		}
	}
	return found
}

// prose returns the lines of a page without code and the targets of links.
func prose(markdown string) []string {
	if !strings.ContainsAny(markdown, "`]") {
		return strings.Split(markdown, "\n")
	}
	text := regexp.MustCompile("(?s)```.*?```").ReplaceAllStringFunc(markdown, func(code string) string { return strings.Repeat("\n", strings.Count(code, "\n")) })
	text = regexp.MustCompile("`[^`\n]*`").ReplaceAllString(text, "X")
	text = regexp.MustCompile(`\]\([^)\n]*\)`).ReplaceAllString(text, "]")
	return strings.Split(text, "\n")
}

func TestProse(t *testing.T) {
	r := newRules()
	for _, page := range pages(t) {
		for i, line := range prose(read(t, page)) {
			for _, wrong := range r.check(line) {
				t.Errorf("%s:%d: %s", page, i+1, wrong)
			}
		}
	}
}

// Texts of errors, logs, flags and metrics follow the same rules. They are what is a sentence among the strings of the driver.
func TestProseOfStrings(t *testing.T) {
	r := newRules()
	strs := 0
	for _, dir := range []string{"pkg", "cmd", "clients/rclone"} {
		err := filepath.WalkDir(filepath.Join(root, dir), func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			files := token.NewFileSet()
			file, err := parser.ParseFile(files, path, nil, parser.SkipObjectResolution)
			if err != nil {
				return err
			}
			ast.Inspect(file, func(n ast.Node) bool {
				literal, ok := n.(*ast.BasicLit)
				if !ok || literal.Kind != token.STRING {
					return true
				}
				text, err := strconv.Unquote(literal.Value)
				if err != nil || strings.Count(text, " ") < 2 {
					return true
				}
				strs++
				for _, line := range prose(text) {
					for _, wrong := range r.check(line) {
						t.Errorf("%s: %s", files.Position(literal.Pos()), wrong)
					}
				}
				return true
			})
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if strs < 1000 {
		t.Errorf("only %d strings were read", strs)
	}
}

func TestProseIsChecked(t *testing.T) {
	r := newRules()
	for line, want := range map[string]int{
		"If a client crashes, the driver starts a new one.":                       0,
		"Nobody restarts a client that died for want of memory.":                  3,
		"| state | the living mount takes the place of the dead one |":            3,
		"It waits. " + strings.Repeat("word ", mostWordsOfASentence) + "more.":    1,
		strings.Repeat("word ", 30) + "ends here. " + strings.Repeat("word ", 30): 0,
	} {
		if found := r.check(line); len(found) != want {
			t.Errorf("%s: %q", line, found)
		}
	}
	for text, want := range map[string]int{"It is `dead`.": 0, "[dead](dead.md)": 1, "```\ndead\n```\ndead": 1, "[a](dead.md)": 0} {
		found := 0
		for _, line := range prose(text) {
			found += len(r.check(line))
		}
		if found != want {
			t.Errorf("%q: %d findings", text, found)
		}
	}
}
