package client

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// Kind is the kind of values that an option takes.
type Kind uint8

const (
	// Flag takes no value, "true" or "false"; without one it is true.
	Flag Kind = iota
	// Integer takes a decimal number from Min to Max, or one of Words.
	Integer
	// Enum takes one of Words.
	Enum
	// Duration takes a number and a unit, "90s" or "1h30m", from Min to Max milliseconds.
	Duration
	// Size takes a number of bytes from Min to Max with a binary unit: "512Mi", "20Gi".
	Size
	// Text takes what Pattern matches as a whole.
	Text
)

// OptionType is the type of an option: its values and its meaning. No valid value contains white space or control characters, or
// begins with a dash.
type OptionType struct {
	Kind     Kind
	Min, Max int64          // Integer: in Unit; Duration: milliseconds; Size: bytes
	Unit     string         // Integer: what is counted, for people
	Words    []string       // Enum: the values; Integer: values beside the numbers
	Pattern  volume.Pattern // Text
	Form     string         // Text: what Pattern asks for, for people
	Default  string         // the default, for people
	Meaning  string         // one sentence, for people
}

const (
	decimal  volume.Pattern = `^(0|[1-9][0-9]{0,17})$`
	duration volume.Pattern = `^([0-9]{1,9}(ms|h|m|s))+$`
	plain    volume.Pattern = `^[\x21-\x2c\x2e-\x7e][\x21-\x7e]*$`
	size     volume.Pattern = `^[1-9][0-9]{0,11}(Ki|Mi|Gi|Ti)$`
)

// Values describes the valid values, for people.
func (t OptionType) Values() string {
	switch t.Kind {
	case Flag:
		return "true or false; without a value it is true"
	case Integer:
		s := fmt.Sprintf("a number from %d to %d", t.Min, t.Max)
		if t.Unit != "" {
			s = fmt.Sprintf("a number of %s from %d to %d", t.Unit, t.Min, t.Max)
		}
		if len(t.Words) > 0 {
			s += ", or " + strings.Join(t.Words, ", ")
		}
		return s
	case Enum:
		return "one of " + strings.Join(t.Words, ", ")
	case Duration:
		return fmt.Sprintf("a duration such as 90s or 1h30m, from %v to %v", time.Duration(t.Min)*time.Millisecond, time.Duration(t.Max)*time.Millisecond)
	case Size:
		return fmt.Sprintf("a size such as 512Mi or 20Gi, from %s to %s", volume.FormatQuantity(uint64(t.Min)), volume.FormatQuantity(uint64(t.Max)))
	default:
		return t.Form
	}
}

// problem returns what is wrong with an option's value, "" if it is valid.
func (t OptionType) problem(o volume.Option) string {
	switch {
	case t.Kind == Flag && !o.HasValue:
		return ""
	case !o.HasValue || o.Value == "":
		return "needs a value: " + t.Values()
	case !t.takes(o.Value) && strings.Contains(o.Value, ","):
		return fmt.Sprintf("does not accept the value %s; use %s, and list each option separately", quote(o.Value), t.Values())
	case !t.takes(o.Value):
		return fmt.Sprintf("does not accept the value %s; use %s", quote(o.Value), t.Values())
	}
	return ""
}

func (t OptionType) takes(value string) bool {
	switch t.Kind {
	case Flag:
		return value == "true" || value == "false"
	case Integer:
		if slices.Contains(t.Words, value) {
			return true
		}
		if !decimal.MatchString(value) {
			return false
		}
		n, err := strconv.ParseInt(value, 10, 64)
		return err == nil && n >= t.Min && n <= t.Max
	case Enum:
		return slices.Contains(t.Words, value)
	case Duration:
		if !duration.MatchString(value) {
			return false
		}
		d, err := time.ParseDuration(value)
		return err == nil && d >= time.Duration(t.Min)*time.Millisecond && d <= time.Duration(t.Max)*time.Millisecond
	case Size:
		n, ok := parseSize(value)
		return ok && n >= t.Min && n <= t.Max
	case Text:
		return plain.MatchString(value) && t.Pattern.MatchString(value)
	}
	return false
}

const (
	mib = int64(1) << 20
	gib = mib << 10
	tib = gib << 10
)

// parseSize reads a Size value as bytes.
func parseSize(value string) (int64, bool) {
	if value == "0" {
		return 0, true
	}
	n, err := volume.ParseQuantity(value)
	return int64(n), err == nil && size.MatchString(value)
}

// quote quotes and shortens an author's text for an error.
func quote(s string) string {
	if len(s) > 64 {
		return strconv.Quote(strings.ToValidUTF8(s[:64], "")) + "…"
	}
	return strconv.Quote(s)
}
