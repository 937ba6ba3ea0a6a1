// Package table writes tables for people.
package table

import (
	"fmt"
	"strings"
	"time"
	"unicode/utf8"
)

// Table has rows of equally many cells, and notes below them.
type Table struct {
	head  []string
	lines []line
}

type line struct {
	cells []string
	note  string
}

// New returns a table with these columns.
func New(head ...string) *Table { return &Table{head: head} }

// Row adds a row. An empty cell is shown as a dash.
func (t *Table) Row(cells ...string) {
	for i, c := range cells {
		if c == "" {
			cells[i] = "-"
		}
	}
	t.lines = append(t.lines, line{cells: cells})
}

// Note adds a line below the last row.
func (t *Table) Note(text string) { t.lines = append(t.lines, line{note: text}) }

// String returns the table. Control characters in cells and notes are replaced.
func (t *Table) String() string {
	all := append([]line{{cells: t.head}}, t.lines...)
	width := make([]int, len(t.head))
	for _, l := range all {
		for i, c := range l.cells {
			l.cells[i] = printable(c)
			width[i] = max(width[i], utf8.RuneCountInString(l.cells[i]))
		}
	}
	var b strings.Builder
	for _, l := range all {
		if l.cells == nil {
			b.WriteString("    " + printable(l.note) + "\n")
			continue
		}
		var row strings.Builder
		for i, c := range l.cells {
			row.WriteString(c + strings.Repeat(" ", width[i]-utf8.RuneCountInString(c)+2))
		}
		b.WriteString(strings.TrimRight(row.String(), " ") + "\n")
	}
	return b.String()
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
