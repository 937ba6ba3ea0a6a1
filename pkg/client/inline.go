package client

import (
	"strconv"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// Share is the operator's limit of one mount on a node; 0 is no limit.
type Share struct {
	Memory    uint64 // bytes
	CPUWeight uint64
	Tasks     uint64 // processes and threads
}

// CheckInline refuses settings of inline volumes that authors of PersistentVolumes may use and authors of pods may not: limits
// above the share, a cache larger than DefaultCacheSize, and verbose logs. Options have passed Check and attributes CheckLimits.
// The error is Denied and names "volume_context.memoryLimit" and so on, or "mountOptions".
func (c Client) CheckInline(a volume.Attributes, options []volume.Option, share Share) error {
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
			return fault.Errorf(fault.Denied, "%s: %s%s is more than the %s allowed for an inline volume (%s); reduce it or use a PersistentVolumeClaim", l.field, l.what, l.format(l.asks), l.format(l.most), l.says)
		}
	}
	for _, name := range c.logging {
		if o, given := find(options, name); given && on(o) {
			return fault.Errorf(fault.Denied, "mountOptions: option %q of client %s is not allowed for inline volumes, because it fills the node's log", name, c.Name)
		}
	}
	return nil
}

// cacheOf returns the cache size in the client's own options, in bytes; 0: none.
func (c Client) cacheOf(options []volume.Option) uint64 {
	var most uint64
	for _, name := range c.caching {
		if o, given := find(options, name); given {
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
