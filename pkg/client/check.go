package client

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// Check refuses options that are not allowed for this client: unknown names, names that the driver sets, values of the wrong
// type, duplicates and contradictions. The error is Invalid and names "field[i]".
//
// Options that pass are safe on a command line: each is one argument and cannot be taken for another option.
func (c Client) Check(options []volume.Option, field string) error {
	at := make(map[string]int, len(options))
	given := make(map[string]string, len(options))
	for i, o := range options {
		here := fmt.Sprintf("%s[%d]", field, i)
		t, ok := c.Options[o.Name]
		if !ok {
			return fault.Field(here, "%s", c.refusal(o.Name))
		}
		if first, dup := at[o.Name]; dup {
			return fault.Field(here, "option %q is given twice, first as %s[%d]; remove one", o.Name, field, first)
		}
		if p := t.problem(o); p != "" {
			return fault.Field(here, "option %q of client %s %s", o.Name, c.Name, p)
		}
		at[o.Name] = i
		if t.Kind != Flag {
			given[o.Name] = o.Value
		} else if on(o) {
			given[o.Name] = "true"
		}
	}
	if c.rules != nil {
		if name, p := c.rules(given); p != "" {
			return fault.Field(fmt.Sprintf("%s[%d]", field, at[name]), "option %q of client %s %s", name, c.Name, p)
		}
	}
	return nil
}

// CheckOwner refuses a uid or gid that the client does not support as owner of files; nil is unset. The error is Invalid and names
// "<field>.uid" or "<field>.gid".
func (c Client) CheckOwner(uid, gid *uint32, field string) error {
	for _, id := range []struct {
		name  string
		value *uint32
	}{{"uid", uid}, {"gid", gid}} {
		if id.value != nil && *id.value < c.MinOwner {
			return fault.Field(field+"."+id.name, "client %s does not support %s %d; use %d or more, or another client (root can read and write anyway)",
				c.Name, id.name, *id.value, c.MinOwner)
		}
	}
	return nil
}

// CheckLimits refuses memory and task limits in a that are too low for the client or its options, and a cache that is set both as
// a parameter and as an option. A limit of 0 is none; options have passed Check. The error is Invalid and names
// "<field>.memoryLimit", "<field>.tasksMax" or "<field>.cache".
func (c Client) CheckLimits(a volume.Attributes, options []volume.Option, field string) error {
	if a.MemoryLimit != 0 && a.MemoryLimit < c.MinMemory {
		return fault.Field(field+".memoryLimit", "%s is too low for client %s; use at least %s",
			volume.FormatQuantity(a.MemoryLimit), c.Name, volume.FormatQuantity(c.MinMemory))
	}
	if a.TasksMax != 0 && a.TasksMax < c.MinTasks {
		return fault.Field(field+".tasksMax", "%d processes and threads are too few for client %s; use at least %d", a.TasksMax, c.Name, c.MinTasks)
	}
	given := values(options)
	if a.MemoryLimit != 0 && c.memory != nil {
		if p := c.memory(a.MemoryLimit, given); p != "" {
			return fault.Field(field+".memoryLimit", "%s %s", volume.FormatQuantity(a.MemoryLimit), p)
		}
	}
	for _, name := range c.caching {
		if _, ok := given[name]; ok && a.Cache {
			return fault.Field(field+".cache", "duplicates the mount option %s of client %s; remove one of them", name, c.Name)
		}
	}
	return nil
}

// NeedsMemory returns the lowest memory limit, in bytes, that passes CheckLimits with these options.
func (c Client) NeedsMemory(options []volume.Option) uint64 {
	if c.least == nil {
		return c.MinMemory
	}
	return max(c.MinMemory, c.least(values(options)))
}

// values returns the options' values by name.
func values(options []volume.Option) map[string]string {
	given := make(map[string]string, len(options))
	for _, o := range options {
		given[o.Name] = o.Value
	}
	return given
}

// refusal returns why a name is not an option of the client. It does not show the value, which may be a secret after a misspelled
// name.
func (c Client) refusal(name string) string {
	plain := strings.ReplaceAll(strings.ToLower(name), "_", "-")
	if reason, ok := c.Refused[plain]; ok {
		return fmt.Sprintf("option %s is not allowed for client %s: %s", quote(name), c.Name, reason)
	}
	known := slices.Sorted(maps.Keys(c.Options))
	if near, edits := volume.Nearest(plain, known); len(plain) <= 64 && edits <= len(plain)/2 { // else it would be a guess
		return fmt.Sprintf("client %s has no option %s; did you mean %q?", c.Name, quote(name), near)
	}
	return fmt.Sprintf("client %s has no option %s; it takes %s", c.Name, quote(name), strings.Join(known, ", "))
}
