package main

import (
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

// once refuses a flag that is given twice: on a command line put together from several sources the second would win
// without a word.
type once struct {
	Value interface {
		String() string
		Set(string) error
	}
	set bool
}

func (o *once) String() string {
	if o.Value == nil {
		return "" // the flag package asks a zero value
	}
	return o.Value.String()
}

func (o *once) Set(s string) error {
	if o.set {
		return errors.New("given twice")
	}
	o.set = true
	return o.Value.Set(s)
}

func (o *once) IsBoolFlag() bool {
	_, ok := o.Value.(*boolValue)
	return ok
}

type stringValue string

func (v *stringValue) String() string     { return string(*v) }
func (v *stringValue) Set(s string) error { *v = stringValue(s); return nil }

type boolValue bool

func (v *boolValue) String() string { return strconv.FormatBool(bool(*v)) }
func (v *boolValue) Set(s string) error {
	switch s {
	case "true":
		*v = true
	case "false":
		*v = false
	default:
		return errors.New("must be true or false")
	}
	return nil
}

type intValue int

func (v *intValue) String() string { return strconv.Itoa(int(*v)) }
func (v *intValue) Set(s string) error {
	n, err := strconv.Atoi(s)
	if err != nil {
		return errors.New("must be a number")
	}
	*v = intValue(n)
	return nil
}

// idValue is a number like a user's id. The last one, -1 for the kernel, means nobody.
type idValue uint32

func (v *idValue) String() string { return strconv.FormatUint(uint64(*v), 10) }
func (v *idValue) Set(s string) error {
	n, err := strconv.ParseUint(s, 10, 32)
	if err != nil || n == math.MaxUint32 {
		return fmt.Errorf("must be a number from 0 to %d", uint32(math.MaxUint32-1))
	}
	*v = idValue(n)
	return nil
}

type modeValue uint32

func (v *modeValue) String() string { return fmt.Sprintf("%04o", uint32(*v)) }
func (v *modeValue) Set(s string) error {
	n, err := strconv.ParseUint(s, 8, 32)
	if err != nil || n > 0o777 {
		return errors.New("must be octal permission bits, 0000 to 0777")
	}
	*v = modeValue(n)
	return nil
}

type durationValue time.Duration

func (v *durationValue) String() string { return time.Duration(*v).String() }
func (v *durationValue) Set(s string) error {
	d, err := time.ParseDuration(s)
	if err != nil {
		return errors.New("must be a duration like 10s")
	}
	*v = durationValue(d)
	return nil
}

// sizeValue is a number of bytes, with Ki, Mi, Gi or Ti for powers of 1024.
type sizeValue int64

func (v *sizeValue) String() string { return formatSize(int64(*v)) }
func (v *sizeValue) Set(s string) error {
	n, err := parseSize(s)
	if err != nil {
		return err
	}
	*v = sizeValue(n)
	return nil
}

type sizeUnit struct {
	suffix string
	shift  uint
}

// sizeUnits are the largest first.
func sizeUnits() []sizeUnit { return []sizeUnit{{"Ti", 40}, {"Gi", 30}, {"Mi", 20}, {"Ki", 10}} }

func parseSize(s string) (int64, error) {
	var shift uint
	for _, u := range sizeUnits() {
		if rest, ok := strings.CutSuffix(s, u.suffix); ok {
			s, shift = rest, u.shift
			break
		}
	}
	n, err := strconv.ParseUint(s, 10, 63)
	if err != nil || n > math.MaxInt64>>shift {
		return 0, errors.New("must be a number of bytes like 1073741824 or 1Gi")
	}
	return int64(n) << shift, nil
}

func formatSize(n int64) string {
	for _, u := range sizeUnits() {
		if n != 0 && n%(1<<u.shift) == 0 {
			return strconv.FormatInt(n>>u.shift, 10) + u.suffix
		}
	}
	return strconv.FormatInt(n, 10)
}
