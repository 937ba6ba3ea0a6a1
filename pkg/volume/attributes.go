package volume

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// Names of StorageClass parameters and volume context keys.
const (
	keyBackend             = "backend"
	keyBucketName          = "bucketName"
	keyBucketNamePrefix    = "bucketNamePrefix"
	keyPrefix              = "prefix"
	keyOnDelete            = "onDelete"
	keyTags                = "tags"
	keyRegion              = "region"
	keyClient              = "client"
	keyCredentials         = "credentials"
	keyUID                 = "uid"
	keyGID                 = "gid"
	keyDirMode             = "dirMode"
	keyFileMode            = "fileMode"
	keyReadOnly            = "readOnly"
	keyMountOptions        = "mountOptions"
	keyExpectedBucketOwner = "expectedBucketOwner"
	keyMemoryLimit         = "memoryLimit"
	keyCPUWeight           = "cpuWeight"
	keyTasksMax            = "tasksMax"
	keyCache               = "cache"
	keyCacheSize           = "cacheSize"
	keyConsistency         = "consistency"
	keyLinger              = "linger"
	keyUsage               = "usage"
	keyRoleARN             = "roleARN"
	keyScope               = "scope"
	keySessionDuration     = "sessionDuration"
)

// codec parses and formats one setting in a P.
type codec[P any] struct {
	set func(p *P, value, field string) error // field names the setting in errors
	get func(p *P) string                     // the form that set parses; "" if it is not set
}

// of is the codec of the field at. A nil format is for settings that are not part of the volume's context or digest.
func of[P any, T comparable](at func(*P) *T, parse func(value, field string) (T, error), format func(T) string) codec[P] {
	return codec[P]{
		set: func(p *P, value, field string) (err error) {
			*at(p), err = parse(value, field)
			return err
		},
		get: func(p *P) string {
			var unset T
			if v := *at(p); format != nil && v != unset {
				return format(v)
			}
			return ""
		},
	}
}

// oneOf is the codec of a text that is one of values.
func oneOf[P any, T ~string](at func(*P) *T, values ...T) codec[P] {
	return of(at, parseOneOf(values...), text)
}

func text[T ~string](v T) string { return string(v) }

func yes(bool) string { return "true" }

func number(n uint64) string { return strconv.FormatUint(n, 10) }

func identity(id *uint32) string { return number(uint64(*id)) }

func octal(mode *uint32) string { return fmt.Sprintf("%04o", *mode) }

// check checks the attributes against each other. of is the prefix of their names in errors.
func (a Attributes) check(of string) error {
	if a.CacheSize != 0 && !a.Cache {
		return fault.Field(of+"."+keyCacheSize, "needs cache: \"true\"")
	}
	if a.Scope == ScopeOff && a.Credentials != credentials.SourceWorkload && a.RoleARN == "" && a.SessionDuration != 0 {
		return fault.Field(of+"."+keySessionDuration, "has no effect with scope: %s, because no session is made", ScopeOff)
	}
	return nil
}

// context returns the attributes that were set, in the form that Read parses.
func (a Attributes) context() map[string]string {
	context := map[string]string{}
	p := Parameters{Node: a, Mutable: Mutable{Usage: a.Usage}}
	for _, doc := range ParameterDocs() {
		if value := doc.codec.get(&p); value != "" && doc.Scope != ScopeClass {
			context[doc.Name] = value
		}
	}
	return context
}

func parseClient(value, field string) (string, error) {
	if !IsName(value, 32) {
		return "", fault.Field(field, "%q is not a client name such as mountpoint-s3", value)
	}
	return value, nil
}

func parseOneOf[T ~string](values ...T) func(value, field string) (T, error) {
	return func(value, field string) (T, error) {
		if slices.Contains(values, T(value)) {
			return T(value), nil
		}
		return "", fault.Field(field, "%q must be one of %s", value, strings.ReplaceAll(strings.Trim(fmt.Sprint(values), "[]"), " ", ", "))
	}
}

func parseRole(value, field string) (string, error) {
	if err := Role(value).Check(); err != nil {
		return "", fault.Field(field, "%q %w", printable(value), err)
	}
	return value, nil
}

// short is Duration.String without trailing zeros: "10m", not "10m0s".
func short(d time.Duration) string {
	s := d.String()
	for _, zero := range []string{"m0s", "h0m"} {
		if strings.HasSuffix(s, zero) {
			s = s[:len(s)-2]
		}
	}
	return s
}

// parseDuration parses durations from least to most, of which example is one.
func parseDuration(least, most time.Duration, example string) func(value, field string) (time.Duration, error) {
	return func(value, field string) (time.Duration, error) {
		d, err := time.ParseDuration(value)
		if err != nil || d < least || d > most || d%time.Second != 0 {
			return 0, fault.Field(field, "%q is not a duration of whole seconds from %s to %s, such as %s", value, short(least), short(most), example)
		}
		return d, nil
	}
}

// ParseOwner parses a uid or gid. The highest number means "no id" to the kernel.
func ParseOwner(value, field string) (*uint32, error) {
	n, err := strconv.ParseUint(value, 10, 32)
	if err != nil || strconv.FormatUint(n, 10) != value || n == 1<<32-1 {
		return nil, fault.Field(field, "%q is not a whole number from 0 to 4294967294", value)
	}
	id := uint32(n)
	return &id, nil
}

func parseMode(value, field string) (*uint32, error) {
	n, err := strconv.ParseUint(value, 8, 32)
	if err != nil || n > 0o777 || len(value) > 4 {
		return nil, fault.Field(field, "%q is not an octal number from 0 to 0777, such as 0755", value)
	}
	mode := uint32(n)
	return &mode, nil
}

func parseBool(value, field string) (bool, error) {
	switch value {
	case "true":
		return true, nil
	case "false":
		return false, nil
	}
	return false, fault.Field(field, "%q is neither true nor false", value)
}

// parseBytes parses an amount of bytes; most 0 is no bound.
func parseBytes[T int64 | uint64](least, most uint64) func(value, field string) (T, error) {
	return func(value, field string) (T, error) {
		bytes, err := ParseQuantity(value)
		if err == nil {
			err = checkRange(bytes, least, most)
		}
		if err != nil {
			return 0, fault.Field(field, "%q %w", value, err)
		}
		return T(bytes), nil
	}
}

func parseNumber[T int64 | uint64](least, most uint64) func(value, field string) (T, error) {
	return func(value, field string) (T, error) {
		n, err := strconv.ParseUint(value, 10, 64)
		if err != nil || number(n) != value || n < least || n > most {
			return 0, fault.Field(field, "%q is not a whole number from %d to %d", value, least, most)
		}
		return T(n), nil
	}
}

func parseAccount(value, field string) (string, error) {
	if !credentials.IsAccount(value) {
		return "", fault.Field(field, "%q is not an AWS account id of 12 digits", value)
	}
	return value, nil
}

// parseRegion also accepts regions of services that are not AWS ("RegionOne", "garage").
func parseRegion(value, field string) (string, error) {
	if !isSegment(value, 64) {
		return "", fault.Field(field, "%q is not a region's name such as us-east-1", value)
	}
	return value, nil
}

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

// ParseQuantity parses an amount of bytes: a positive whole number, optionally with one of the units Ki, Mi, Gi and Ti
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

// FormatQuantity returns an amount of bytes in its canonical form: with the largest of Ki, Mi, Gi and Ti that divides it, or without a unit.
// ParseQuantity parses it.
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
