package main

import (
	"errors"
	"flag"
	"fmt"
	"math"
	"strconv"

	"github.com/rclone/rclone/fs"
)

// once refuses a flag that is given twice. Otherwise the last one would win silently if a command line is assembled from
// several sources.
type once struct {
	flag.Value
	set bool
}

// String returns the value.
func (o *once) String() string {
	if o.Value == nil {
		return "" // the flag package calls String on a zero value
	}
	return o.Value.String()
}

// Set sets the value, once.
func (o *once) Set(s string) error {
	if o.set {
		return errors.New("given twice")
	}
	o.set = true
	return o.Value.Set(s)
}

// IsBoolFlag reports whether the flag can be given without a value.
func (o *once) IsBoolFlag() bool {
	b, ok := o.Value.(interface{ IsBoolFlag() bool })
	return ok && b.IsBoolFlag()
}

// size is a number of bytes in rclone's notation, except that a number without a unit is in bytes, not KiB.
type size fs.SizeSuffix

// String returns the size with the largest unit that fits.
func (v *size) String() string { return fs.SizeSuffix(*v).String() }

// Set parses a size.
func (v *size) Set(s string) error {
	if _, err := strconv.ParseUint(s, 10, 63); err == nil {
		s += "B"
	}
	return (*fs.SizeSuffix)(v).Set(s)
}

// id is a user or group ID. The largest one is not valid: for the kernel it is -1, no ID.
type id uint32

// String returns the number.
func (v *id) String() string { return strconv.FormatUint(uint64(*v), 10) }

// Set parses a number.
func (v *id) Set(s string) error {
	n, err := strconv.ParseUint(s, 10, 32)
	if err != nil || n == math.MaxUint32 {
		return fmt.Errorf("must be a number from 0 to %d", uint32(math.MaxUint32-1))
	}
	*v = id(n)
	return nil
}
