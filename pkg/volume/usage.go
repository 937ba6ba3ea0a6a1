package volume

import "time"

// Usage is how often the usage of a volume is measured. 0: it was not asked for, and no modification can change that, because nodes read
// the settings of the other volumes only.
type Usage time.Duration

const (
	// UsageOff means that nothing is measured until a modification sets an interval.
	UsageOff Usage = -1
	// MinUsage is the shortest interval.
	MinUsage = 10 * time.Minute
	// MaxUsage is the longest interval.
	MaxUsage = 7 * 24 * time.Hour

	usageOff = "off"
)

// Interval returns the time between two measurements; 0: nothing is measured.
func (u Usage) Interval() time.Duration { return time.Duration(max(u, 0)) }

// String returns the form that ParseUsage parses; "" for 0.
func (u Usage) String() string {
	switch u {
	case 0:
		return ""
	case UsageOff:
		return usageOff
	}
	return time.Duration(u).String()
}

// ParseUsage parses an interval, or "off".
func ParseUsage(value string) (Usage, error) { return parseUsage(value, keyUsage) }

func parseUsage(value, field string) (Usage, error) {
	if value == usageOff {
		return UsageOff, nil
	}
	d, err := parseDuration(MinUsage, MaxUsage, "6h, or off")(value, field)
	return Usage(d), err
}
