package client

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// Check refuses, as fault.Invalid, options that an author may not pass to this client: unknown names, names that belong
// to the driver, values of the wrong type, duplicates and contradictions. The error names "field[i]".
//
// What passes is safe to put on a command line: it is one argument and means what its name says.
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

// CheckOwner refuses, as fault.Invalid, a uid or gid that the client cannot show files with; nil is "not given". The
// error names "<field>.uid" or "<field>.gid".
func (c Client) CheckOwner(uid, gid *uint32, field string) error {
	for _, id := range []struct {
		name  string
		value *uint32
	}{{"uid", uid}, {"gid", gid}} {
		if id.value != nil && *id.value < c.MinOwner {
			return fault.Field(field+"."+id.name, "client %s cannot show files with %s %d: use %d or more, or another client (root may read and write anyway)",
				c.Name, id.name, *id.value, c.MinOwner)
		}
	}
	return nil
}

// CheckLimits refuses, as fault.Invalid, a memory limit or number of tasks that the client does not work within, a memory
// limit that contradicts the options, and a cache that is given both as a parameter and as an option. Limits are those of
// a, 0 is none; options have passed Check. The error names "<field>.memoryLimit", "<field>.tasksMax" or "<field>.cache".
func (c Client) CheckLimits(a volume.Attributes, options []volume.Option, field string) error {
	if a.MemoryLimit != 0 && a.MemoryLimit < c.MinMemory {
		return fault.Field(field+".memoryLimit", "%s is too little for client %s: give it at least %s",
			volume.FormatQuantity(a.MemoryLimit), c.Name, volume.FormatQuantity(c.MinMemory))
	}
	if a.TasksMax != 0 && a.TasksMax < c.MinTasks {
		return fault.Field(field+".tasksMax", "%d processes and threads are too few for client %s: give it at least %d", a.TasksMax, c.Name, c.MinTasks)
	}
	given := values(options)
	if a.MemoryLimit != 0 && c.memory != nil {
		if p := c.memory(a.MemoryLimit, given); p != "" {
			return fault.Field(field+".memoryLimit", "%s %s", volume.FormatQuantity(a.MemoryLimit), p)
		}
	}
	for _, name := range c.caching {
		if _, ok := given[name]; ok && a.Cache {
			return fault.Field(field+".cache", "stands beside the mount option %s of client %s, which says the same: remove one of them", name, c.Name)
		}
	}
	return nil
}

// NeedsMemory is the least memory limit, in bytes, that passes CheckLimits with these options. Where a volume has no limit of
// its own, a node's default below that is no use to anybody.
func (c Client) NeedsMemory(options []volume.Option) uint64 {
	if c.least == nil {
		return c.MinMemory
	}
	return max(c.MinMemory, c.least(values(options)))
}

// values are the options' values by name.
func values(options []volume.Option) map[string]string {
	given := make(map[string]string, len(options))
	for _, o := range options {
		given[o.Name] = o.Value
	}
	return given
}

// refusal says why a name is not among the client's options. Values are not repeated: whoever misspells a name may
// have put a secret behind it.
func (c Client) refusal(name string) string {
	plain := strings.ReplaceAll(strings.ToLower(name), "_", "-")
	if reason, ok := c.Refused[plain]; ok {
		return fmt.Sprintf("option %s may not be passed to client %s: %s", quote(name), c.Name, reason)
	}
	known := slices.Sorted(maps.Keys(c.Options))
	if near := nearest(plain, known); near != "" {
		return fmt.Sprintf("client %s has no option %s; did you mean %q?", c.Name, quote(name), near)
	}
	return fmt.Sprintf("client %s has no option %s; it takes %s", c.Name, quote(name), strings.Join(known, ", "))
}

// nearest is the known name that takes the fewest edits from name, or "" where that would be a guess.
func nearest(name string, known []string) string {
	if len(name) > 64 {
		return ""
	}
	best, least := "", len(name)/2+1
	for _, k := range known {
		if d := distance(name, k); d < least {
			best, least = k, d
		}
	}
	return best
}

// distance is the Levenshtein distance of two short names.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			d := diagonal
			if a[i] != b[j] {
				d++
			}
			diagonal = row[j+1]
			row[j+1] = min(d, row[j]+1, diagonal+1)
		}
	}
	return row[len(b)]
}
