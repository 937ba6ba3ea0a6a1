package pages

import (
	"regexp"
	"strings"
	"testing"
)

// Entry is an item of a list that begins with what an operator sees, in code: part of an error, or a state.
type Entry struct {
	Page, Heading string // "errors", "Unpublishing"
	Text          string
	// Words is how much there is to read: the section from its heading to the end of the entry.
	Words  int
	quotes []*regexp.Regexp
}

// Anchor is the entry's section, as errors name it: "docs/reference/errors.md#unpublishing".
func (e Entry) Anchor() string { return "docs/" + e.Page + ".md#" + anchor(e.Heading) }

// Explains reports whether a text has one of the entry's quotes.
func (e Entry) Explains(text string) bool {
	for _, q := range e.quotes {
		if q.MatchString(text) {
			return true
		}
	}
	return false
}

var (
	heading = regexp.MustCompile(`(?m)^## (.*)$`)
	code    = regexp.MustCompile("`([^`]+)`")
	notWord = regexp.MustCompile(`[^\w -]`)
)

// anchor is what GitHub makes of a heading.
func anchor(heading string) string {
	return strings.ReplaceAll(notWord.ReplaceAllString(strings.ToLower(heading), ""), " ", "-")
}

// Entries are those of a page of docs/, by the page's name.
func Entries(t testing.TB, page string) []Entry {
	t.Helper()
	text := Read(t, page)
	var all []Entry
	sections := heading.FindAllStringSubmatchIndex(text, -1)
	for i, at := range sections {
		end := len(text)
		if i+1 < len(sections) {
			end = sections[i+1][0]
		}
		words := 0
		for line := range strings.Lines(text[at[0]:end]) {
			words += len(strings.Fields(line))
			item, ok := strings.CutPrefix(line, "- ")
			if !ok {
				continue
			}
			e := Entry{Page: page, Heading: text[at[2]:at[3]], Text: strings.TrimSpace(item), Words: words}
			// The quotes are before the first colon that is in none: "`a …`, `b: c`: what to do".
			blank := code.ReplaceAllStringFunc(item, func(c string) string { return strings.Repeat("x", len(c)) })
			subject, _, ok := strings.Cut(blank, ": ")
			if !ok {
				continue
			}
			for _, quote := range code.FindAllStringSubmatch(item[:len(subject)], -1) {
				e.quotes = append(e.quotes, pattern(quote[1]))
			}
			if len(e.quotes) > 0 {
				all = append(all, e)
			}
		}
	}
	return all
}

// pattern matches what a quote stands for: "…" is anything.
func pattern(quote string) *regexp.Regexp {
	parts := strings.Split(quote, "…")
	for i, part := range parts {
		parts[i] = regexp.QuoteMeta(strings.Trim(part, " "))
	}
	return regexp.MustCompile(strings.Join(parts, ".*"))
}
