package client

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// Given are the options that one place sets, and the place's name in errors.
type Given struct {
	Field   string
	Options []volume.Option
}

// Check refuses options that are not allowed for this client: unknown names, names that the driver sets, values of the wrong
// type, duplicates and contradictions. The error is Invalid and names "field[i]".
//
// Options that pass are safe on a command line: each is one argument and cannot be taken for another option.
func (c Client) Check(options []volume.Option, field string) error {
	return c.CheckAll(Given{field, options})
}

// CheckAll is Check for options that several places set.
func (c Client) CheckAll(places ...Given) error {
	at, given := map[string]string{}, map[string]string{}
	for _, place := range places {
		for i, o := range place.Options {
			here := fmt.Sprintf("%s[%d]", place.Field, i)
			t, ok := c.Options[o.Name]
			if !ok {
				return fault.Field(here, "%s", c.refusal(o.Name))
			}
			if first, dup := at[o.Name]; dup {
				return fault.Field(here, "option %q is given twice, first as %s; remove one", o.Name, first)
			}
			if p := t.problem(o); p != "" {
				return fault.Field(here, "option %q of client %s %s", o.Name, c.Name, p)
			}
			at[o.Name], given[o.Name] = here, o.Value
			if t.Kind == Flag {
				given[o.Name] = strconv.FormatBool(o.On())
			}
		}
	}
	if c.rules != nil {
		if name, p := c.rules(given); p != "" {
			return fault.Field(at[name], "option %q of client %s %s", name, c.Name, p)
		}
	}
	return nil
}

// Volume is what a client is asked to serve. Place is that of the attributes in errors.
type Volume struct {
	Place      string
	Prefix     string
	Attributes volume.Attributes
	Group      *uint32 // of the publication (VOLUME_MOUNT_GROUP), or nil
	Options    []Given
}

// CheckVolume refuses a volume with options or attributes that the client cannot honour. The error is Invalid and names what is wrong.
func (c Client) CheckVolume(v Volume) error {
	if err := c.CheckAll(v.Options...); err != nil {
		return err
	}
	a := v.Attributes
	set := map[string]bool{
		"prefix": v.Prefix != "", "uid": a.UID != nil, "gid": a.GID != nil || v.Group != nil, "dirMode": a.DirMode != nil, "fileMode": a.FileMode != nil,
		"cache": a.Cache, "cacheSize": a.CacheSize != 0,
	}
	for _, name := range c.ignores {
		if set[name] {
			return fault.Field(v.Place+"."+name, "client %s cannot honour it, because its declaration in the driver's config file has no argument for it; use "+
				"another client", c.Name)
		}
	}
	if a.GID == nil && v.Group != nil && *v.Group < c.MinOwner {
		return fault.Field("volume_capability.mount.volume_mount_group",
			"client %s does not support group %d (in Kubernetes: the pod's fsGroup); set gid of the volume, or use another client", c.Name, *v.Group)
	}
	if err := c.CheckOwner(a.UID, a.GID, v.Place); err != nil {
		return err
	}
	var options []volume.Option
	for _, place := range v.Options {
		options = append(options, place.Options...)
	}
	return c.CheckLimits(a, options, v.Place)
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

// CheckLimits refuses memory and task limits in a that are too low for the client or its options, a cache that is set both as
// a parameter and as an option, and a consistency that an option contradicts. A limit of 0 is none; options have passed Check. The
// error is Invalid and names "<field>.memoryLimit", "<field>.tasksMax", "<field>.cache" or "<field>.consistency".
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
	if c.contradiction != nil {
		if name := c.contradiction(a.Consistency, given); name != "" {
			return fault.Field(field+".consistency", "%s contradicts the mount option %s of client %s; remove one of them",
				a.Consistency, name, c.Name)
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
	return fmt.Sprintf("client %s has no option %s; supported options: %s", c.Name, quote(name), strings.Join(known, ", "))
}

// Share is the operator's limit of one mount on a node; 0 is no limit.
type Share struct {
	Memory    uint64 // bytes
	CPUWeight uint64
	Tasks     uint64 // processes and threads
}

// CheckInline refuses settings of inline volumes that authors of PersistentVolumes may use and authors of pods may not: limits above the share,
// a cache larger than DefaultCacheSize, verbose logs, and clients that are not for pods' authors. Options have passed Check and attributes
// CheckLimits. The error is Denied and names "volume_context.memoryLimit" and so on, or "mountOptions".
func (c Client) CheckInline(a volume.Attributes, options []volume.Option, share Share) error {
	if c.NoInline {
		return fault.Errorf(fault.Denied, "volume_context.client: client %s is not allowed for inline volumes; use a PersistentVolumeClaim, or set inline: true "+
			"in its declaration in the driver's config file", c.Name)
	}
	memory := share.Memory
	if memory != 0 {
		memory = max(memory, c.NeedsMemory(nil)) // the default
	}
	const cache = "the default"
	for _, l := range []struct {
		field, what string
		asks, most  uint64
		format      func(uint64) string
		says        string
	}{
		{"volume_context.memoryLimit", "", a.MemoryLimit, memory, volume.FormatQuantity, "the node's --memory-limit"},
		{"volume_context.cpuWeight", "", a.CPUWeight, share.CPUWeight, decimalOf, "the node's --cpu-weight"},
		{"volume_context.tasksMax", "", a.TasksMax, share.Tasks, decimalOf, "the node's --tasks-max"},
		{"volume_context.cacheSize", "", a.CacheSize, volume.DefaultCacheSize, volume.FormatQuantity, cache},
		{"mountOptions", "the required memoryLimit of ", c.NeedsMemory(options), memory, volume.FormatQuantity, "the node's --memory-limit"},
		{"mountOptions", "a cache of ", c.cacheOf(options), volume.DefaultCacheSize, volume.FormatQuantity, cache},
	} {
		if l.most != 0 && l.asks > l.most {
			return fault.Errorf(fault.Denied, "%s: %s%s is more than the %s allowed for an inline volume (%s); reduce it or use a PersistentVolumeClaim", l.field,
				l.what, l.format(l.asks), l.format(l.most), l.says)
		}
	}
	if a.Usage != 0 {
		return fault.Errorf(fault.Denied, "volume_context.usage: not allowed for an inline volume, because each pod's volume would be listed on its own; use a "+
			"PersistentVolumeClaim")
	}
	for _, name := range c.logging {
		if o, given := volume.FindOption(options, name); given && o.On() {
			return fault.Errorf(fault.Denied, "mountOptions: option %q of client %s is not allowed for inline volumes, because it fills the node's log", name, c.Name)
		}
	}
	return nil
}

// cacheOf returns the cache size in the client's own options, in bytes; 0: none.
func (c Client) cacheOf(options []volume.Option) uint64 {
	var most uint64
	for _, name := range c.caching {
		if o, given := volume.FindOption(options, name); given {
			most = max(most, c.Options[name].bytes(o.Value))
		}
	}
	return most
}

// bytes returns the value of an option in bytes, or 0.
func (t OptionType) bytes(value string) uint64 {
	switch {
	case t.Kind == Size:
		n, _ := parseSize(value)
		return uint64(n)
	case t.Kind == Integer && t.Unit == "MiB":
		n, _ := strconv.ParseUint(value, 10, 64)
		return n * uint64(mib)
	}
	return 0
}

func decimalOf(n uint64) string { return strconv.FormatUint(n, 10) }
