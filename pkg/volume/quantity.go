package volume

import (
	"errors"
	"fmt"
	"math"
	"strconv"
)

// The bounds of a volume's limits. Clients may have higher minimums.
const (
	// MinMemoryLimit is the smallest memoryLimit, in bytes.
	MinMemoryLimit = 16 << 20
	// MinTasksMax is the smallest tasksMax.
	MinTasksMax = 32
	// MaxTasksMax is the largest tasksMax: the kernel's PID_MAX_LIMIT.
	MaxTasksMax = 4 << 20
	// MaxCPUWeight is the largest cpuWeight; the smallest is 1 (systemd.resource-control(5), CPUWeight=).
	MaxCPUWeight = 10000
	// MinCacheSize is the smallest cacheSize, in bytes.
	MinCacheSize = 1 << 20
	// MaxCacheSize is the largest cacheSize, in bytes.
	MaxCacheSize = 16 << 40
	// DefaultCacheSize is the default of cacheSize, in bytes. Every cache has a bound, because all share one disk of the node.
	DefaultCacheSize = 1 << 30
)

const quantity Pattern = `^([1-9][0-9]{0,18})(Ki|Mi|Gi|Ti|K|M|G|T)?$`

// ParseQuantity reads an amount of bytes: a whole number above zero, alone or with one of the units Ki, Mi, Gi and Ti
// (powers of 1024) or K, M, G and T (powers of 1000).
func ParseQuantity(text string) (uint64, error) {
	m := quantity.FindStringSubmatch(text)
	if m == nil {
		return 0, errors.New("is not an amount of bytes such as 1073741824, 512Mi or 10Gi (units: Ki, Mi, Gi, Ti, K, M, G, T)")
	}
	units := map[string]uint64{"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
	n, err := strconv.ParseUint(m[1], 10, 64)
	if err != nil || n > math.MaxInt64/units[m[2]] {
		return 0, errors.New("is too large")
	}
	return n * units[m[2]], nil
}

// FormatQuantity writes an amount of bytes in its only short form: with the largest of Ki, Mi, Gi and Ti that divides it,
// or alone. ParseQuantity reads it back.
func FormatQuantity(bytes uint64) string {
	for _, unit := range []struct {
		name  string
		shift uint
	}{{"Ti", 40}, {"Gi", 30}, {"Mi", 20}, {"Ki", 10}} {
		if bytes != 0 && bytes%(1<<unit.shift) == 0 {
			return strconv.FormatUint(bytes>>unit.shift, 10) + unit.name
		}
	}
	return strconv.FormatUint(bytes, 10)
}

// checkRange refuses amounts of bytes out of range.
func checkRange(bytes, least, most uint64) error {
	if bytes < least || most != 0 && bytes > most {
		if most == 0 {
			return fmt.Errorf("is less than %s", FormatQuantity(least))
		}
		return fmt.Errorf("is not from %s to %s", FormatQuantity(least), FormatQuantity(most))
	}
	return nil
}
