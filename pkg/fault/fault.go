// Package fault gives errors a kind, so that the RPC edge can choose a status code without reading texts.
//
// Inner packages return fault errors and know nothing of gRPC; pkg/driver maps kinds to codes in one place.
// A kind survives wrapping with %w; the outermost kind wins.
package fault

import (
	"context"
	"errors"
	"fmt"
)

// Kind says what an error means for the caller of an RPC.
type Kind uint8

const (
	// Unknown is an error that nobody classified; the outcome of the call is not known.
	Unknown Kind = iota
	// Invalid is bad input; the text names the field.
	Invalid
	// NotFound is a volume, bucket or path that is not there.
	NotFound
	// Exists is something of that name that differs from, or is not, what was asked for.
	Exists
	// Precondition is a state that an operator has to change before a retry can work.
	Precondition
	// Busy is work that is under way or contended; a retry will find out.
	Busy
	// Denied is a refusal by the storage service or by a policy of the operator.
	Denied
	// Unauthenticated is missing, expired or wrong credentials.
	Unauthenticated
	// Unavailable is a service that did not answer or asked to slow down.
	Unavailable
	// Timeout is a deadline that passed with the outcome unknown.
	Timeout
	// Exhausted is a limit that was reached.
	Exhausted
	// OutOfRange is a capacity that cannot be had.
	OutOfRange
	// Unsupported is a thing that this driver does not do.
	Unsupported
)

// Error is an error with a kind and, for Invalid, the field that is wrong.
type Error struct {
	Kind  Kind
	Field string // the request's field, as its author wrote it: "parameters.prefix"
	err   error
}

// Error implements error.
func (e *Error) Error() string {
	if e.Field != "" {
		return e.Field + ": " + e.err.Error()
	}
	return e.err.Error()
}

// Unwrap gives the error that the kind was put on.
func (e *Error) Unwrap() error { return e.err }

// Errorf is fmt.Errorf with a kind.
func Errorf(kind Kind, format string, args ...any) error {
	return &Error{Kind: kind, err: fmt.Errorf(format, args...)}
}

// Field is an Invalid error that names the field.
func Field(field, format string, args ...any) error {
	return &Error{Kind: Invalid, Field: field, err: fmt.Errorf(format, args...)}
}

// KindOf is the kind of the outermost fault error in err's chain. Where there is none, a context's end is Timeout and
// the rest Unknown.
func KindOf(err error) Kind {
	if f := (*Error)(nil); errors.As(err, &f) {
		return f.Kind
	}
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) {
		return Timeout
	}
	return Unknown
}

// Is tells whether err is of that kind.
func Is(err error, kind Kind) bool { return err != nil && KindOf(err) == kind }
