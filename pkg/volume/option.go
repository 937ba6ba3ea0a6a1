package volume

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// Option is one mount option of a StorageClass or PersistentVolume: "allow-delete" or "uid=1000", with or without leading dashes,
// or separated by one space as in "--uid 1000".
type Option struct {
	Name  string // without leading dashes
	Value string // meaningful if HasValue
	// HasValue distinguishes "name=" from "name".
	HasValue bool
}

// String returns "name" or "name=value".
func (o Option) String() string {
	if o.HasValue {
		return o.Name + "=" + o.Value
	}
	return o.Name
}

// FindOption returns the option of that name.
func FindOption(options []Option, name string) (Option, bool) {
	i := slices.IndexFunc(options, func(o Option) bool { return o.Name == name })
	if i < 0 {
		return Option{}, false
	}
	return options[i], true
}

// On reports whether a flag is set.
func (o Option) On() bool { return !o.HasValue || o.Value == "true" }

// ParseMountOptions splits mount options into names and values: "allow-delete", "--allow-delete", "uid=1000",
// "--uid=1000" and "--uid 1000" are options, anything else is an Invalid error that names field[i]. Options that a parser could
// take for two are refused: a single dash, white space inside a value, control characters, duplicate names. Clients check
// names and values.
func ParseMountOptions(flags []string, field string) ([]Option, error) {
	return parseFlags(flags, field, parseOption, func(o Option) string { return o.Name })
}

// parseFlags parses each of the flags, whose names must differ.
func parseFlags[F any](flags []string, field string, parse func(flag string) (F, error), name func(F) string) ([]F, error) {
	size := 0
	seen := make(map[string]int, len(flags))
	var all []F
	for i, flag := range flags {
		if size += len(flag); size > maxMap {
			return nil, fault.Field(field, "has more than %d bytes", maxMap)
		}
		at := fmt.Sprintf("%s[%d]", field, i)
		f, err := parse(flag)
		if err != nil {
			return nil, fault.Field(at, "%q %w", withoutValue(flag), err)
		}
		if first, ok := seen[name(f)]; ok {
			return nil, fault.Field(at, "repeats %s, which is in [%d]", name(f), first)
		}
		seen[name(f)] = i
		all = append(all, f)
	}
	return all, nil
}

// withoutValue returns an option for an error text: mount flags may contain secrets (CSI specification, MountVolume.mount_flags).
func withoutValue(flag string) string {
	text := strings.TrimLeft(flag, " ")
	if end := strings.IndexAny(text, "= \t\n\x00"); end >= 0 && end+1 < len(text) {
		return text[:end+1] + "…"
	}
	return flag
}

func parseOption(flag string) (Option, error) {
	if err := checkOptionText(flag); err != nil {
		return Option{}, err
	}
	text, dashed := strings.CutPrefix(flag, "--")
	if !dashed && strings.HasPrefix(flag, "-") {
		return Option{}, errors.New(`starts with a single dash; write the option's long name, as in "allow-delete" or "uid=1000"`)
	}
	end := strings.IndexAny(text, "= ")
	if end < 0 {
		end = len(text)
	}
	name, rest := text[:end], text[end:]
	if err := checkOptionName(name); err != nil {
		return Option{}, err
	}
	if rest == "" {
		return Option{Name: name}, nil
	}
	separator := rest[0]
	value, err := unquote(rest[1:])
	switch {
	case err != nil:
		return Option{}, err
	case strings.Contains(value, " "):
		return Option{}, errors.New("contains white space in its value or more than one space before it")
	case separator == '=':
	case !dashed:
		return Option{}, fmt.Errorf("separates name and value by a space; write %s=…", name)
	case value == "":
		return Option{}, errors.New("ends in a space")
	case value[0] == '=':
		return Option{}, errors.New("contains a space before the equals sign")
	case value[0] == '-':
		return Option{}, errors.New("looks like two options; list them one by one")
	}
	return Option{Name: name, Value: value, HasValue: true}, nil
}

// unquote removes the quotes around a value. No shell reads mount options, so any other way of quoting would become part of the value.
func unquote(value string) (string, error) {
	const quotes = "\"'"
	bare := strings.Trim(value, quotes)
	switch inner := len(value) - 2; {
	case bare == value:
	case inner >= 0 && value[0] == value[inner+1] && value[1:inner+1] == bare && strings.IndexByte(bare, value[0]) < 0:
	default:
		return "", errors.New("has quotes that do not surround its value; remove them")
	}
	if strings.Contains(bare, `\ `) {
		return "", errors.New(`contains a backslash before a space; quotes around the value keep its spaces`)
	}
	return bare, nil
}

// checkOptionText refuses characters that are not allowed in an option. The caller checks spaces.
func checkOptionText(flag string) error {
	if flag == "" {
		return errors.New("is empty")
	}
	if !utf8.ValidString(flag) {
		return errors.New("is not UTF-8")
	}
	for _, r := range flag {
		if r != ' ' && !unicode.IsPrint(r) {
			return fmt.Errorf("contains %U, which is a control character, white space or invisible", r)
		}
	}
	return nil
}

// checkOptionName refuses what is not [a-z][a-z0-9-]* without a dash at the end.
func checkOptionName(s string) error {
	switch {
	case IsName(s, 64) && 'a' <= s[0] && s[0] <= 'z':
		return nil
	case strings.Contains(s, ","):
		return errors.New("contains a comma; list each option separately")
	}
	return errors.New("does not start with an option name of a-z, 0-9 and inner dashes")
}

// splitOptionList splits the mountOptions of parameters and contexts, one string, at its commas.
func splitOptionList(list string) []string {
	if list == "" {
		return nil
	}
	return strings.Split(list, ",")
}

func joinOptionList(options []Option) string {
	parts := make([]string, len(options))
	for i, o := range options {
		parts[i] = o.String()
	}
	return strings.Join(parts, ",")
}
