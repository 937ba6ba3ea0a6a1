// Package table writes tables for people.
package table

import (
	"cmp"
	"fmt"
	"strings"
	"text/tabwriter"
	"time"
)

// Table has rows of equally many cells, and notes below them.
type Table struct {
	rows  []string
	notes map[int][]string // by the number of the row above them
}

// New returns a table with these columns.
func New(head ...string) *Table {
	t := &Table{notes: map[int][]string{}}
	t.Row(head...)
	return t
}

// Row adds a row. An empty cell is shown as a dash.
func (t *Table) Row(cells ...string) {
	for i, c := range cells {
		cells[i] = cmp.Or(printable(c), "-")
	}
	t.rows = append(t.rows, strings.Join(cells, "\t"))
}

// Note adds a line below the last row.
func (t *Table) Note(text string) {
	row := len(t.rows) - 1
	t.notes[row] = append(t.notes[row], "    "+printable(text)+"\n")
}

// String returns the table. Control characters in cells and notes are replaced.
func (t *Table) String() string {
	var aligned, all strings.Builder
	w := tabwriter.NewWriter(&aligned, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(w, strings.Join(t.rows, "\n"))
	_ = w.Flush()
	row := 0
	for line := range strings.Lines(aligned.String()) {
		all.WriteString(line + strings.Join(t.notes[row], ""))
		row++
	}
	return all.String()
}

// printable replaces what could move a terminal's cursor.
func printable(s string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r >= 0x7f && r < 0xa0 {
			return ' '
		}
		return r
	}, s)
}

// Bytes returns a size in the largest unit of which there is at least one.
func Bytes(n uint64) string {
	const units = "KMGTPE"
	if n < 1<<10 {
		return fmt.Sprintf("%dB", n)
	}
	value, i := float64(n)/1024, 0
	for value >= 1024 && i < len(units)-1 {
		value, i = value/1024, i+1
	}
	if value < 10 {
		return fmt.Sprintf("%.1f%ciB", value, units[i])
	}
	return fmt.Sprintf("%.0f%ciB", value, units[i])
}

// Span returns a duration in its two largest units.
func Span(d time.Duration) string {
	d = max(d, 0).Round(time.Second)
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%ds", d/time.Second)
	case d < time.Hour:
		return fmt.Sprintf("%dm%02ds", d/time.Minute, d%time.Minute/time.Second)
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh%02dm", d/time.Hour, d%time.Hour/time.Minute)
	}
	return fmt.Sprintf("%dd%02dh", d/(24*time.Hour), d%(24*time.Hour)/time.Hour)
}
