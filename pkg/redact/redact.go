// Package redact is the one way from a CSI message to a log line.
//
// It hides what the CSI specification marks as secret and what it does not: service-account tokens that kubelet puts into
// a volume context, keys that an author put among parameters by mistake, and the values of mount flags, which the
// specification allows to be sensitive.
package redact

import (
	"fmt"
	"strings"

	"github.com/kubernetes-csi/csi-lib-utils/protosanitizer"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// Stripped stands where something was hidden; it is protosanitizer's word.
const Stripped = "***stripped***"

// Message shows a CSI message as one line of JSON without its secrets. The work is done when the result is printed, and
// on a copy: the live message is never changed. What is not a protobuf message shows as its type only.
func Message(msg any) fmt.Stringer {
	m, _ := msg.(proto.Message)
	return message{m, msg}
}

type message struct {
	proto proto.Message
	any   any
}

// String implements fmt.Stringer.
func (m message) String() string {
	if m.proto == nil || !m.proto.ProtoReflect().IsValid() {
		return fmt.Sprintf("<%T>", m.any)
	}
	safe := proto.Clone(m.proto)
	strip(safe.ProtoReflect())
	return protosanitizer.StripSecrets(safe).String()
}

// GoString keeps %#v from printing the live message.
func (m message) GoString() string { return m.String() }

// MarshalJSON is the JSON logger's way; it must not find the live message either.
func (m message) MarshalText() ([]byte, error) { return []byte(m.String()), nil }

// strip hides sensitive map values and mount flags anywhere in a message.
func strip(m protoreflect.Message) {
	m.Range(func(field protoreflect.FieldDescriptor, value protoreflect.Value) bool {
		switch {
		case field.IsMap():
			stripMap(field, value.Map())
		case field.IsList() && field.Name() == "mount_flags":
			stripFlags(value.List())
		case field.IsList() && field.Message() != nil:
			for i := range value.List().Len() {
				strip(value.List().Get(i).Message())
			}
		case !field.IsList() && field.Message() != nil:
			strip(value.Message())
		}
		return true
	})
}

func stripMap(field protoreflect.FieldDescriptor, m protoreflect.Map) {
	kind := field.MapValue().Kind()
	m.Range(func(key protoreflect.MapKey, value protoreflect.Value) bool {
		switch {
		case kind == protoreflect.MessageKind:
			strip(value.Message())
		case kind == protoreflect.StringKind && Sensitive(key.String()):
			m.Set(key, protoreflect.ValueOfString(Stripped))
		}
		return true
	})
}

func stripFlags(flags protoreflect.List) {
	for i := range flags.Len() {
		flag := flags.Get(i).String()
		// "name=value", "--name value" and a value in front of nothing at all: the name is the first word.
		if end := strings.IndexAny(strings.TrimLeft(flag, " "), "= \t\n"); end >= 0 {
			flags.Set(i, protoreflect.ValueOfString(strings.TrimLeft(flag, " ")[:end+1]+Stripped))
		}
	}
}

// Sensitive tells whether the value under a key of a context or of parameters may be a secret, by the key.
func Sensitive(key string) bool {
	key = strings.NewReplacer("-", "", "_", "", ".", "").Replace(strings.ToLower(key))
	for _, word := range []string{"token", "secret", "password", "passwd", "passphrase", "privatekey", "accesskey", "sessionkey", "apikey", "customerkey"} {
		if strings.Contains(key, word) {
			return true
		}
	}
	return false
}
