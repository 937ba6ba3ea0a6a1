// Package check finds out what S3 services and hosts can do for this driver, and says it to an operator: before there is a volume,
// or when one does not work.
//
// It tries things instead of believing what is said about them, and removes what it made, whatever happens. What the other packages
// know it asks them.
package check

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
)

// Result is what a check came to.
type Result string

// The results.
const (
	Yes     Result = "yes"
	No      Result = "no"
	Unknown Result = "unknown" // it could not be tried
)

// Row is one thing that was looked at.
type Row struct {
	Check  string `json:"check"` // a stable name
	What   string `json:"what"`
	Result Result `json:"result"`
	// Needed tells that, as things are configured, the driver does not work without.
	Needed bool `json:"needed"`
	// Why is what was seen and what it means.
	Why string `json:"why"`
	// Advice is what to do about it; "": nothing.
	Advice string `json:"advice,omitempty"`
}

// Section is what belongs to one backend, or to the host.
type Section struct {
	Name string `json:"name"` // "backend default", "node"
	Rows []Row  `json:"rows"`
}

// Report is the outcome of all checks.
type Report struct {
	OK       bool      `json:"ok"` // all that is needed is there
	Sections []Section `json:"sections"`
}

// NewReport judges sections.
func NewReport(sections ...Section) Report {
	r := Report{OK: true, Sections: sections}
	for _, s := range sections {
		for _, row := range s.Rows {
			r.OK = r.OK && (!row.Needed || row.Result == Yes)
		}
	}
	return r
}

// JSON writes the report for programs.
func (r Report) JSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	return e.Encode(r)
}

// Table writes the report for people: what is missing although it is needed is marked.
func (r Report) Table(w io.Writer) error {
	widest := 0
	for _, s := range r.Sections {
		for _, row := range s.Rows {
			widest = max(widest, len(row.What))
		}
	}
	var b strings.Builder
	missing := 0
	for _, s := range r.Sections {
		fmt.Fprintf(&b, "%s\n", s.Name)
		for _, row := range s.Rows {
			mark := " "
			if row.Needed && row.Result != Yes {
				mark = "!"
				missing++
			}
			line := fmt.Sprintf("%s %-7s  %-*s  %s", mark, row.Result, widest, row.What, row.Why)
			b.WriteString(strings.TrimRight(line, " ") + "\n")
			if row.Advice != "" {
				fmt.Fprintf(&b, "  %-7s  %-*s  -> %s\n", "", widest, "", row.Advice)
			}
		}
		b.WriteByte('\n')
	}
	if missing == 0 {
		b.WriteString("Everything that the driver needs is there.\n")
	} else {
		fmt.Fprintf(&b, "The driver needs what is marked with \"!\" (%d), and it is not there or not known to be.\n", missing)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// rows collects what one section finds out.
type rows struct{ all []Row }

func (r *rows) add(row Row) { r.all = append(r.all, row) }

// unknown adds rows for what could not be tried.
func (r *rows) unknown(why string, checks ...thing) {
	for _, c := range checks {
		r.add(c.row(Unknown, why, ""))
	}
}

// thing is a row before its result is known.
type thing struct {
	check, what string
	needed      bool
}

func (t thing) row(result Result, why, advice string) Row {
	return Row{Check: t.check, What: t.what, Result: result, Needed: t.needed, Why: why, Advice: advice}
}

// one is an error's text for a row: on one line.
func one(err error) string { return strings.Join(strings.Fields(err.Error()), " ") }
