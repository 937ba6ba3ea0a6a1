// Package check reports to an operator what S3 services and hosts can do for this driver, before there are volumes or when one
// does not work.
//
// It tries each feature, with the code of the other packages if possible, and always removes what it created.
package check

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strings"
)

// Result is the result of a check.
type Result string

// The results.
const (
	Yes     Result = "yes"
	No      Result = "no"
	Unknown Result = "unknown" // it could not be checked
)

// Row is the result of one item.
type Row struct {
	Check   string `json:"check"` // a stable name
	What    string `json:"what"`
	Result  Result `json:"result"`
	Needed  bool   `json:"needed"`            // the driver does not work without it with the current configuration
	Why     string `json:"why"`               // the observation and its consequence
	Affects string `json:"affects,omitempty"` // what fails or is limited unless the result is yes
	Advice  string `json:"advice,omitempty"`  // what to do; "": nothing
	// Setting is the setting that helps, as in a config file, StorageClass or list of mount options; "": none is known.
	Setting string `json:"setting,omitempty"`
}

// The settings that rows name.
const (
	settingChecksums        = "upload-checksums=off"
	settingSingleController = "singleController: true"
	settingBucketName       = "bucketName"
	settingRegion           = "region"
	settingVirtual          = "addressing: virtual"
	settingPath             = "addressing: path"
	settingRclone           = "client: rclone"
	settingPartSize         = "part-size"
)

// with adds a setting and the advice to set it.
func (r Row) with(setting string) Row {
	r.Setting, r.Advice = setting, "set "+setting
	switch setting {
	case settingChecksums, settingPartSize:
		r.Advice += " in the mount options of the volumes"
	case settingBucketName, settingRclone:
		r.Advice += " in the volumes' StorageClasses and PersistentVolumes"
	case settingSingleController:
		r.Advice = "if only one controller of one cluster ever uses this backend, " + r.Advice + " for it in the driver's config file"
	default:
		r.Advice += " for the backend in the driver's config file"
	}
	return r
}

// Section has the rows of one backend or of the host.
type Section struct {
	Name  string   `json:"name"` // "backend default", "node", "client rclone"
	Rows  []Row    `json:"rows"`
	Notes []string `json:"notes,omitempty"` // what a declaration of the client should say
}

// Report is the outcome of all checks.
type Report struct {
	OK       bool      `json:"ok"` // no needed item failed
	Sections []Section `json:"sections"`
}

// NewReport returns the report of sections.
func NewReport(sections ...Section) Report {
	r := Report{OK: true, Sections: sections}
	for _, s := range sections {
		for _, row := range s.Rows {
			r.OK = r.OK && (!row.Needed || row.Result == Yes)
		}
	}
	return r
}

// JSON writes the report as JSON.
func (r Report) JSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	return e.Encode(r)
}

// Table writes the report as text. It marks needed items that failed.
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
			hint := row.Advice
			if row.Affects != "" {
				hint = strings.TrimSuffix("affects "+row.Affects+"; "+hint, "; ")
			}
			if hint != "" {
				fmt.Fprintf(&b, "  %-7s  %-*s  -> %s\n", "", widest, "", hint)
			}
		}
		if len(s.Notes) > 0 {
			b.WriteString("\nA declaration of this client should say:\n")
		}
		for _, note := range s.Notes {
			fmt.Fprintf(&b, "  %s\n", note)
		}
		b.WriteByte('\n')
	}
	if missing == 0 {
		b.WriteString("Everything that the driver needs is available.\n")
	} else {
		fmt.Fprintf(&b, "Required, but missing or unknown (marked with \"!\"): %d\n", missing)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// Item is a row without its result.
type Item struct {
	check, what string
	needed      bool
}

// Needed returns an item that the driver does not work without.
func Needed(check, what string) Item { return Item{check: check, what: what, needed: true} }

// Optional returns an item that the driver works without.
func Optional(check, what string) Item { return Item{check: check, what: what} }

// NeededIf returns an item that the driver does not work without if the condition holds.
func NeededIf(condition bool, check, what string) Item { return Item{check, what, condition} }

// What returns what the item is.
func (i Item) What() string { return i.what }

// Row returns the item with a result.
func (i Item) Row(result Result, why, advice string) Row {
	return Row{Check: i.check, What: i.what, Result: result, Needed: i.needed, Why: why, Advice: advice}
}

// noError returns yes, with why, if err is nil; else no.
func (i Item) noError(err error, why string) Row {
	if err != nil {
		return i.Row(No, OneLine(err), "")
	}
	return i.Row(Yes, why, "")
}

// probe is an item with the function that tries it.
type probe struct {
	item    Item
	affects string    // what fails or is limited without it
	needs   []*string // reasons why it cannot be tried, each of which must be ""
	try     func(context.Context, Item) Row
}

// rows collects the rows of a section.
type rows []Row

// tryAll adds the rows of probes.
func (r *rows) tryAll(ctx context.Context, probes []probe) {
	for _, p := range probes {
		*r = append(*r, p.row(ctx))
	}
}

func (p probe) row(ctx context.Context) Row {
	for _, why := range p.needs {
		if *why != "" {
			return p.item.Row(Unknown, *why, "")
		}
	}
	if ctx.Err() != nil {
		return p.item.Row(Unknown, "the check was stopped before", "")
	}
	row := p.try(ctx, p.item)
	if row.Result != Yes && p.affects != "" {
		row.Affects = p.affects
	}
	return row
}

// OneLine returns an error's text on one line.
func OneLine(err error) string { return strings.Join(strings.Fields(err.Error()), " ") }
