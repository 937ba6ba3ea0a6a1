// Package docs tests the pages of the project: their length, links and words.
package docs

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const (
	root      = "../.."
	mostWords = 2000
)

// pages are the paths of all pages.
func pages(t *testing.T) []string {
	t.Helper()
	var all []string
	for _, pattern := range []string{"*.md", "docs/*.md", "docs/*/*.md", "charts/*/README.md", "examples/*.md"} {
		found, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil || len(found) == 0 {
			t.Fatalf("%s: no pages: %v", pattern, err)
		}
		all = append(all, found...)
	}
	if len(all) < 40 {
		t.Fatalf("only %d pages", len(all))
	}
	return all
}

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// A page of docs/ is short enough to be read, also if it is generated.
func TestPagesAreShort(t *testing.T) {
	for _, page := range pages(t) {
		if !strings.Contains(page, "docs/") {
			continue
		}
		if words := len(strings.Fields(read(t, page))); words > mostWords {
			t.Errorf("%s has %d words, at most %d are allowed: cut it, or move a part to another page", page, words, mostWords)
		}
	}
}

// Relative links in pages lead to files and headings.
func TestLinks(t *testing.T) {
	checked := 0
	for _, page := range pages(t) {
		for _, link := range regexp.MustCompile(`\]\(([^)\s]+)\)`).FindAllStringSubmatch(read(t, page), -1) {
			path, anchor, _ := strings.Cut(link[1], "#")
			if strings.Contains(path, "://") {
				continue
			}
			target := page
			if path != "" {
				target = filepath.Join(filepath.Dir(page), path)
			}
			checked++
			checkTarget(t, page, target, anchor)
		}
	}
	if checked < 300 {
		t.Errorf("only %d links", checked)
	}
}

// Files of the repository that name a page of docs/, such as errors of the driver and alerts, name one that exists, and its headings.
// The page on other drivers links to their pages.
func TestReferences(t *testing.T) {
	out, err := exec.CommandContext(t.Context(), "git", "-C", root, "grep", "-IohE", `\bdocs/[a-z0-9/-]+\.md(#[A-Za-z0-9_-]+)?`, "--", ".",
		":!docs/explanation/comparison.md").Output()
	if err != nil {
		t.Skipf("not a checkout: %v", err)
	}
	references := strings.Fields(string(out))
	slices.Sort(references)
	references = slices.Compact(references)
	for _, reference := range references {
		path, anchor, _ := strings.Cut(reference, "#")
		checkTarget(t, "a file", filepath.Join(root, path), anchor)
	}
	if len(references) < 40 {
		t.Errorf("only %d references", len(references))
	}
}

func checkTarget(t *testing.T, from, target, anchor string) {
	t.Helper()
	if _, err := os.Stat(target); err != nil {
		t.Errorf("%s: %v", from, err)
		return
	}
	if anchor != "" && !slices.Contains(anchors(read(t, target)), anchor) {
		t.Errorf("%s: %s has no heading #%s", from, target, anchor)
	}
}

// The picture of the demo shows its steps.
func TestPictureOfTheDemo(t *testing.T) {
	picture := read(t, filepath.Join(root, "docs/demo.svg"))
	steps := 0
	for _, file := range []string{"play.go", "place.go"} {
		for _, step := range regexp.MustCompile(`\bstep\("([^"]+)"\)`).FindAllStringSubmatch(read(t, filepath.Join(root, "tests/cmd/demo", file)), -1) {
			steps++
			if !strings.Contains(picture, "== "+step[1]+"<") && !strings.Contains(step[1], "DEMO_S3_ENDPOINT") {
				t.Errorf("docs/demo.svg has no step %q: make it again from the output of make demo", step[1])
			}
		}
	}
	if steps < 10 {
		t.Errorf("only %d steps", steps)
	}
}

// anchors returns the anchors that GitHub generates for headings.
func anchors(markdown string) []string {
	var list []string
	for _, heading := range regexp.MustCompile(`(?m)^#+ (.*)$`).FindAllStringSubmatch(markdown, -1) {
		name := regexp.MustCompile(`\]\([^)]*\)`).ReplaceAllString(heading[1], "]")
		name = regexp.MustCompile(`[^\w -]`).ReplaceAllString(strings.ToLower(name), "")
		list = append(list, strings.ReplaceAll(name, " ", "-"))
	}
	return list
}
