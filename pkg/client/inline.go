package client

import (
	"strconv"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// Share is what one mount may take of a node, as its operator has it; 0 is no limit.
type Share struct {
	Memory    uint64 // bytes
	CPUWeight uint64
	Tasks     uint64 // processes and threads
}

// CheckInline refuses, as fault.Denied, what an author of PersistentVolumes may say and the author of a pod may not, of an inline
// volume: to have more of a node than the share, or more of its disk than DefaultCacheSize, and to fill its log, which only the
// operator reads. Options have passed Check and the attributes CheckLimits. The error names "volume_context.memoryLimit" and so on,
// or "mountOptions".
func (c Client) CheckInline(a volume.Attributes, options []volume.Option, share Share) error {
	memory := share.Memory
	if memory != 0 {
		memory = max(memory, c.NeedsMemory(nil)) // which a volume gets that says nothing
	}
	const cache = "what every volume may have"
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
		{"mountOptions", "they need a memoryLimit of ", c.NeedsMemory(options), memory, volume.FormatQuantity, "the node's --memory-limit"},
		{"mountOptions", "they ask for a cache of ", c.cacheOf(options), volume.DefaultCacheSize, volume.FormatQuantity, cache},
	} {
		if l.most != 0 && l.asks > l.most {
			return fault.Errorf(fault.Denied, "%s: %s%s, and an inline volume of a pod may have at most %s (%s): ask for less, or use a PersistentVolumeClaim", l.field, l.what, l.format(l.asks), l.format(l.most), l.says)
		}
	}
	for _, name := range c.logging {
		if o, given := find(options, name); given && on(o) {
			return fault.Errorf(fault.Denied, "mountOptions: option %q of client %s is not for inline volumes of pods: what it writes goes into the node's log, which is the operator's", name, c.Name)
		}
	}
	return nil
}

// cacheOf is how large a cache the options ask for, in the client's own words, in bytes; 0: they do not say.
func (c Client) cacheOf(options []volume.Option) uint64 {
	var most uint64
	for _, name := range c.caching {
		if o, given := find(options, name); given {
			most = max(most, c.Options[name].bytes(o.Value))
		}
	}
	return most
}

// bytes is the value of an option that is an amount of bytes, or 0 of another.
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
