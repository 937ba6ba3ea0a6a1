package volume

import (
	"errors"
	"fmt"
	"math"
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

// set parses one attribute and reports whether key is one. field names the key in errors.
func (a *Attributes) set(key, value, field string) (handled bool, err error) {
	switch key {
	case keyClient:
		a.Client, err = parseClient(value, field)
	case keyCredentials:
		a.Credentials, err = parseCredentials(value, field)
	case keyUID:
		a.UID, err = parseOwner(value, field)
	case keyGID:
		a.GID, err = parseOwner(value, field)
	case keyDirMode:
		a.DirMode, err = parseMode(value, field)
	case keyFileMode:
		a.FileMode, err = parseMode(value, field)
	case keyReadOnly:
		a.ReadOnly, err = parseBool(value, field)
	case keyMountOptions:
		a.MountOptions, err = ParseMountOptions(splitOptionList(value), field)
	case keyExpectedBucketOwner:
		a.ExpectedBucketOwner, err = parseAccount(value, field)
	case keyRegion:
		a.Region, err = parseRegion(value, field)
	case keyMemoryLimit:
		a.MemoryLimit, err = parseBytes(value, field, MinMemoryLimit, 0)
	case keyCPUWeight:
		a.CPUWeight, err = parseNumber(value, field, 1, MaxCPUWeight)
	case keyTasksMax:
		a.TasksMax, err = parseNumber(value, field, MinTasksMax, MaxTasksMax)
	case keyCache:
		a.Cache, err = parseBool(value, field)
	case keyCacheSize:
		a.CacheSize, err = parseBytes(value, field, MinCacheSize, MaxCacheSize)
	case keyConsistency:
		a.Consistency, err = parseConsistency(value, field)
	case keySnapshot:
		a.Snapshot, err = parseSnapshot(value, field)
	case keyLinger:
		a.Linger, err = parseLinger(value, field)
	case keyUsage:
		a.Usage, err = parseUsage(value, field)
	case keyRoleARN:
		a.RoleARN, err = parseRole(value, field)
	case keyScope:
		a.Scope, err = parseScope(value, field)
	case keySessionDuration:
		a.SessionDuration, err = parseSessionDuration(value, field)
	default:
		return false, nil
	}
	return true, err
}

// check checks the attributes against each other. of is the prefix of their names in errors.
func (a Attributes) check(of string) error {
	if a.CacheSize != 0 && !a.Cache {
		return fault.Field(of+"."+keyCacheSize, "needs cache: \"true\"")
	}
	if a.Scope == ScopeOff && a.Credentials != credentials.SourceWorkload && a.SessionDuration != 0 {
		return fault.Field(of+"."+keySessionDuration, "has no effect with scope: %s, because no session is made", ScopeOff)
	}
	return nil
}

// context returns the attributes that were set, in the form that set parses.
func (a Attributes) context() map[string]string {
	context := map[string]string{}
	put := func(key, value string) {
		if value != "" {
			context[key] = value
		}
	}
	put(keyClient, a.Client)
	put(keyCredentials, a.Credentials)
	put(keyExpectedBucketOwner, a.ExpectedBucketOwner)
	put(keyRegion, a.Region)
	put(keyMountOptions, joinOptionList(a.MountOptions))
	put(keyRoleARN, a.RoleARN)
	put(keyScope, a.Scope)
	put(keyConsistency, a.Consistency)
	put(keySnapshot, a.Snapshot)
	put(keyUsage, a.Usage.String())
	for key, d := range map[string]time.Duration{keySessionDuration: a.SessionDuration, keyLinger: a.Linger} {
		if d != 0 {
			put(key, d.String())
		}
	}
	for key, yes := range map[string]bool{keyReadOnly: a.ReadOnly, keyCache: a.Cache} {
		if yes {
			put(key, "true")
		}
	}
	for key, bytes := range map[string]uint64{keyMemoryLimit: a.MemoryLimit, keyCacheSize: a.CacheSize} {
		if bytes != 0 {
			put(key, FormatQuantity(bytes))
		}
	}
	for key, n := range map[string]uint64{keyCPUWeight: a.CPUWeight, keyTasksMax: a.TasksMax} {
		if n != 0 {
			put(key, strconv.FormatUint(n, 10))
		}
	}
	for key, id := range map[string]*uint32{keyUID: a.UID, keyGID: a.GID} {
		if id != nil {
			put(key, strconv.FormatUint(uint64(*id), 10))
		}
	}
	for key, mode := range map[string]*uint32{keyDirMode: a.DirMode, keyFileMode: a.FileMode} {
		if mode != nil {
			put(key, fmt.Sprintf("%04o", *mode))
		}
	}
	return context
}

func parseClient(value, field string) (string, error) {
	if !isName(value, 32) {
		return "", fault.Field(field, "%q is not a client name such as mountpoint-s3", value)
	}
	return value, nil
}

func parseCredentials(value, field string) (string, error) {
	switch value {
	case credentials.SourceDriver, credentials.SourceSecret, credentials.SourceWorkload:
		return value, nil
	}
	return "", fault.Field(field, "%q must be one of %s, %s, %s", value, credentials.SourceDriver, credentials.SourceSecret, credentials.SourceWorkload)
}

func parseRole(value, field string) (string, error) {
	if err := Role(value).Check(); err != nil {
		return "", fault.Field(field, "%q %w", printableRole(Role(value)), err)
	}
	return value, nil
}

func parseScope(value, field string) (string, error) {
	switch value {
	case ScopeRequired, ScopeAuto, ScopeOff:
		return value, nil
	}
	return "", fault.Field(field, "%q must be one of %s, %s, %s", value, ScopeRequired, ScopeAuto, ScopeOff)
}

func parseConsistency(value, field string) (string, error) {
	switch value {
	case ConsistencyCloseToOpen, ConsistencyRelaxed:
		return value, nil
	}
	return "", fault.Field(field, "%q must be one of %s, %s", value, ConsistencyCloseToOpen, ConsistencyRelaxed)
}

// parseSessionDuration parses the duration of sessions. Services have limits of their own: AWS at least 15 minutes and at most
// the role's maximum.
func parseSessionDuration(value, field string) (time.Duration, error) {
	d, err := time.ParseDuration(value)
	if err != nil || d < MinSessionDuration || d > MaxSessionDuration || d%time.Second != 0 {
		return 0, fault.Field(field, "%q is not a duration of whole seconds from 1s to 36h, such as 1h or 90m", value)
	}
	return d, nil
}

// parseLinger parses the time for which a mount outlives its last publication.
func parseLinger(value, field string) (time.Duration, error) {
	d, err := time.ParseDuration(value)
	if err != nil || d < MinLinger || d > MaxLinger || d%time.Second != 0 {
		return 0, fault.Field(field, "%q is not a duration of whole seconds from 1s to 24h, such as 10m", value)
	}
	return d, nil
}

// parseOwner parses a uid or gid. The highest number means "no id" to the kernel.
func parseOwner(value, field string) (*uint32, error) {
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
func parseBytes(value, field string, least, most uint64) (uint64, error) {
	bytes, err := ParseQuantity(value)
	if err == nil {
		err = checkRange(bytes, least, most)
	}
	if err != nil {
		return 0, fault.Field(field, "%q %w", value, err)
	}
	return bytes, nil
}

func parseNumber(value, field string, least, most uint64) (uint64, error) {
	n, err := strconv.ParseUint(value, 10, 64)
	if err != nil || strconv.FormatUint(n, 10) != value || n < least || n > most {
		return 0, fault.Field(field, "%q is not a whole number from %d to %d", value, least, most)
	}
	return n, nil
}

func parseAccount(value, field string) (string, error) {
	if len(value) != 12 || strings.Trim(value, "0123456789") != "" {
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
