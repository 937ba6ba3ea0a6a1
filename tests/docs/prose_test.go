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
	{`relive|births?|(?:previous|next|another|new) (?:life|lives)`, "restart, start, generation"},
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
	lower := strings.NewReplacer(`"nobody"`, "", "user nobody", "").Replace(strings.ToLower(line)) // the user of this name
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
	checkSources(t, []string{"pkg", "cmd", "clients/rclone"}, isProduct, stringsOf)
}

// Comments, and the failure texts and names of tests, follow the same rules in the folders that have been revised.
func TestProseOfTests(t *testing.T) {
	dirs := []string{"tests"}
	checkSources(t, dirs, isRevised, commentsOf)
	checkSources(t, dirs, isRevised, failuresOf)
	checkSources(t, dirs, isRevised, testNamesOf)
}

func isProduct(path string) bool { return !strings.HasSuffix(path, "_test.go") }

// isRevised leaves out the list of words, and a suite that has not been revised.
func isRevised(path string) bool {
	return !strings.HasSuffix(path, "docs/prose_test.go") && !strings.Contains(path, "tests/controller/")
}

// text is what a person reads in a source file.
type text struct {
	pos   token.Pos
	lines []string
}

// checkSources checks the texts of the Go files below directories.
func checkSources(t *testing.T, dirs []string, includes func(path string) bool, textsOf func(*ast.File) []text) {
	t.Helper()
	r := newRules()
	texts := 0
	for _, dir := range dirs {
		err := filepath.WalkDir(filepath.Join(root, dir), func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || !includes(path) {
				return err
			}
			files := token.NewFileSet()
			file, err := parser.ParseFile(files, path, nil, parser.SkipObjectResolution|parser.ParseComments)
			if err != nil {
				return err
			}
			for _, text := range textsOf(file) {
				texts++
				for _, line := range text.lines {
					for _, wrong := range r.check(line) {
						t.Errorf("%s: %s", files.Position(text.pos), wrong)
					}
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if texts < 300 {
		t.Errorf("only %d texts were read", texts)
	}
}

// stringsOf returns the strings of a file that may be sentences.
func stringsOf(file *ast.File) (all []text) {
	ast.Inspect(file, func(n ast.Node) bool {
		literal, ok := n.(*ast.BasicLit)
		if !ok || literal.Kind != token.STRING {
			return true
		}
		if s, err := strconv.Unquote(literal.Value); err == nil && strings.Count(s, " ") >= 2 {
			all = append(all, text{literal.Pos(), prose(s)})
		}
		return true
	})
	return all
}

// preformatted are the lines of a comment that gofmt does not wrap.
var preformatted = regexp.MustCompile(`(?m)^(?:\t| *- ).*$`)

// commentsOf returns the comments of a file.
func commentsOf(file *ast.File) (all []text) {
	for _, c := range file.Comments {
		plain := preformatted.ReplaceAllString(c.Text(), "")
		all = append(all, text{c.Pos(), prose(strings.ReplaceAll(plain, "\n", " "))})
	}
	return all
}

// failuresOf returns the texts of failures, skips and logs.
func failuresOf(file *ast.File) (all []text) {
	ast.Inspect(file, func(n ast.Node) bool {
		call, ok := n.(*ast.CallExpr)
		if !ok || len(call.Args) == 0 {
			return true
		}
		f, isMethod := call.Fun.(*ast.SelectorExpr)
		literal, isText := call.Args[0].(*ast.BasicLit)
		reports := []string{"Error", "Errorf", "Fatal", "Fatalf", "Log", "Logf", "Skip", "Skipf"}
		if isMethod && isText && literal.Kind == token.STRING && slices.Contains(reports, f.Sel.Name) {
			if s, err := strconv.Unquote(literal.Value); err == nil {
				all = append(all, text{literal.Pos(), prose(s)})
			}
		}
		return true
	})
	return all
}

var word = regexp.MustCompile(`[A-Z][a-z0-9]*`)

// testNamesOf returns the names of tests as words.
func testNamesOf(file *ast.File) (all []text) {
	for _, d := range file.Decls {
		if f, ok := d.(*ast.FuncDecl); ok && f.Recv == nil && strings.HasPrefix(f.Name.Name, "Test") {
			all = append(all, text{f.Pos(), []string{strings.Join(word.FindAllString(f.Name.Name, -1), " ")}})
		}
	}
	return all
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
