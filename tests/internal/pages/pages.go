// Package pages reads pages of the documentation, for tests of what they print.
package pages

import (
	"os"
	"regexp"
	"strings"
	"testing"
)

// Block is a block of code in a page.
type Block struct {
	Language string // as the page names it
	Text     string
	Line     int // in the page, of the text's first
}

// First is the block's first line.
func (b Block) First() string {
	first, _, _ := strings.Cut(b.Text, "\n")
	return first
}

var fence = regexp.MustCompile("(?ms)^ *```(\\w*)\n(.*?)^ *```$")

// Blocks are those of a page.
func Blocks(markdown string) []Block {
	var all []Block
	for _, at := range fence.FindAllStringSubmatchIndex(markdown, -1) {
		all = append(all, Block{Language: markdown[at[2]:at[3]], Text: markdown[at[4]:at[5]], Line: 1 + strings.Count(markdown[:at[4]], "\n")})
	}
	return all
}

// Read reads a page of docs/ by its name, without .md, in the test of a package beside this one.
func Read(t testing.TB, name string) string {
	t.Helper()
	text, err := os.ReadFile("../../docs/" + name + ".md")
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

var heredoc = regexp.MustCompile(`(?ms)^ *cat *> *(\S+) *<<'?END'?\n(.*?)^END$`)

// Files are the files that a page's commands write with cat, by name.
func Files(markdown string) map[string]string {
	files := map[string]string{}
	for _, b := range Blocks(markdown) {
		if b.Language != "sh" {
			continue
		}
		for _, m := range heredoc.FindAllStringSubmatch(b.Text, -1) {
			files[m[1]] = m[2]
		}
	}
	return files
}
