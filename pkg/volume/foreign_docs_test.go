package volume

import (
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const (
	foreignBegin = "<!-- tables: go test ./pkg/volume -run TestDocsForeign -update -->\n"
	foreignEnd   = "<!-- end of tables -->\n"
)

// foreignTitle is the title of an origin's table, and of its first column.
type foreignTitle struct {
	origin       Origin
	title, thing string
}

// foreignTitles are the tables of the page, in their order.
var foreignTitles = []foreignTitle{
	{OriginOption, "Mount options that set attributes", "option"},
	{OriginAWSAttribute, "Volume attributes of the AWS driver", "attribute"},
	{OriginAWSOption, "Mount options of the AWS driver", "option"},
	{OriginK8sS3, "Parameters and volume attributes of k8s-csi-s3", "name"},
	{OriginSecret, "Secrets of k8s-csi-s3", "key"},
	{OriginRclone, "`options` of k8s-csi-s3 with `mounter: rclone`", "option"},
	{OriginOtherMounter, "`options` of k8s-csi-s3 with another `mounter`, or none", "option"},
}

func TestDocsForeignWordsAreThoseOfTheCode(t *testing.T) {
	const file = "../../docs/reference/migrating-settings.md"
	text, err := os.ReadFile(file)
	must(t, err)
	head, rest, ok := strings.Cut(string(text), foreignBegin)
	_, tail, closed := strings.Cut(rest, foreignEnd)
	if !ok || !closed {
		t.Fatalf("%s has lost the marks of its tables: %s…%s", file, foreignBegin, foreignEnd)
	}
	want := head + foreignBegin + foreignTables() + "\n" + foreignEnd + tail
	switch {
	case want == string(text):
	case !*update:
		t.Errorf("%s differs from ForeignDocs; run: go test ./pkg/volume -run TestDocsForeign -update", file)
	default:
		must(t, os.WriteFile(file, []byte(want), 0o644))
	}
}

// oneName is what a row says that only renames: an attribute or a mount option of this driver.
var oneName = regexp.MustCompile(`^(mount option )?([a-zA-Z-]+)$`)

// foreignTables is a table for each origin, with a line for all rows that say the same, and for all that only rename.
func foreignTables() string {
	var b strings.Builder
	for _, part := range foreignTitles {
		fmt.Fprintf(&b, "\n### %s\n\n| %s | outcome | here |\n|---|---|---|\n", part.title, part.thing)
		var lines []string
		names, here, outcomes := map[string][]string{}, map[string]string{}, map[string]Outcome{}
		for _, row := range ForeignDocs() {
			if row.Origin != part.origin {
				continue
			}
			line, text := string(row.Outcome)+row.Here, row.Here
			if to := oneName.FindStringSubmatch(row.Here); to != nil && row.Outcome == Mapped {
				line, text = string(row.Outcome)+" to "+to[1], row.Here
				if before, ok := here[line]; ok {
					text = before + ", " + to[2]
				}
			}
			if names[line] == nil {
				lines = append(lines, line)
			}
			here[line] = text
			name := "`" + row.Name + "`"
			if row.Name == others {
				name = "all others"
			}
			names[line] = append(names[line], name)
			outcomes[line] = row.Outcome
		}
		for _, line := range lines {
			text := here[line]
			if len(names[line]) > 1 && strings.Contains(line, " to mount option ") {
				text = strings.Replace(text, "mount option ", "mount options ", 1)
			}
			fmt.Fprintf(&b, "| %s | %s | %s |\n", strings.Join(names[line], ", "), outcomes[line], text)
		}
	}
	return b.String()
}

// Each origin has rows and a title, so that no row is left out of the pages.
func TestDocsForeignHaveEveryOrigin(t *testing.T) {
	page := foreignTables()
	var origins []Origin
	for _, row := range ForeignDocs() {
		if row.Name != others && !strings.Contains(page, "`"+row.Name+"`") {
			t.Errorf("%s %s is on no page", row.Origin, row.Name)
		}
		if !slices.Contains(origins, row.Origin) {
			origins = append(origins, row.Origin)
		}
	}
	if titles := strings.Count(page, "\n### "); titles != len(origins) {
		t.Errorf("%d tables for %d origins", titles, len(origins))
	}
}
