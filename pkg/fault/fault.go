// Package fault adds kinds to errors, from which the RPC edge derives status codes.
//
// Inner packages return fault errors and do not depend on gRPC; pkg/driver maps kinds to codes in one place.
// A kind survives wrapping with %w; the outermost kind wins.
package fault

import (
	"context"
	"errors"
	"fmt"
	"slices"
)

// Kind is what an error means for the caller of an RPC.
type Kind uint8

const (
	// Unknown is an unclassified error; the outcome of the call is not known.
	Unknown Kind = iota
	// Invalid is bad input; the text names the field.
	Invalid
	// NotFound is a volume, bucket or path that does not exist.
	NotFound
	// Exists is an object of that name that differs from the requested one.
	Exists
	// Precondition is a state that an operator must change before a retry can succeed.
	Precondition
	// Busy is work that is in flight or contended; retry.
	Busy
	// Denied is a refusal by the storage service or by a policy of the operator.
	Denied
	// Unauthenticated is missing, expired or wrong credentials.
	Unauthenticated
	// Unavailable is a service that did not respond or throttles requests.
	Unavailable
	// Timeout is a deadline that expired with the outcome unknown.
	Timeout
	// Exhausted is a limit that was reached.
	Exhausted
	// OutOfRange is a capacity that cannot be provided.
	OutOfRange
	// Unsupported is something that this driver does not do.
	Unsupported
)

// kindNames are the kinds' names, in their order. They travel between the driver and its helpers.
func kindNames() []string {
	return []string{
		"unknown", "invalid", "not-found", "exists", "precondition", "busy", "denied", "unauthenticated",
		"unavailable", "timeout", "exhausted", "out-of-range", "unsupported",
	}
}

// String returns the kind's name.
func (k Kind) String() string {
	names := kindNames()
	if int(k) >= len(names) {
		return names[Unknown]
	}
	return names[k]
}

// ParseKind is the inverse of String; Unknown for any other name.
func ParseKind(name string) Kind {
	return Kind(max(0, slices.Index(kindNames(), name)))
}

// MarshalText implements encoding.TextMarshaler with the kind's name.
func (k Kind) MarshalText() ([]byte, error) { return []byte(k.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler like ParseKind.
func (k *Kind) UnmarshalText(name []byte) error {
	*k = ParseKind(string(name))
	return nil
}

// Permanent reports whether a retry keeps failing until the request, a permission or a configuration changes.
func (k Kind) Permanent() bool {
	switch k {
	case Invalid, NotFound, Exists, Precondition, Denied, Unauthenticated, OutOfRange, Unsupported:
		return true
	default:
		return false
	}
}

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

// Unwrap returns the error that the kind was added to.
func (e *Error) Unwrap() error { return e.err }

// Errorf is fmt.Errorf with a kind.
func Errorf(kind Kind, format string, args ...any) error {
	return &Error{Kind: kind, err: fmt.Errorf(format, args...)}
}

// Field is an Invalid error that names the field.
func Field(field, format string, args ...any) error {
	return &Error{Kind: Invalid, Field: field, err: fmt.Errorf(format, args...)}
}

// KindOf returns the kind of the outermost fault error in err's chain. Without one, a context error is Timeout and any
// other error Unknown.
func KindOf(err error) Kind {
	if f := (*Error)(nil); errors.As(err, &f) {
		return f.Kind
	}
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled) {
		return Timeout
	}
	return Unknown
}

// Is reports whether err is of that kind.
func Is(err error, kind Kind) bool { return err != nil && KindOf(err) == kind }

// Message is an error as it travels to another process: its kind, its text and its page, without the chain.
type Message struct {
	Kind Kind   `json:"kind"`
	Text string `json:"text"`
	Page string `json:"page,omitempty"` // see See
}

// MessageOf returns the message for an error.
func MessageOf(err error) *Message { return &Message{KindOf(err), err.Error(), PageOf(err)} }

// Err returns the error that the message describes.
func (m *Message) Err() error { return See(m.Page, Errorf(m.Kind, "%s", m.Text)) }
