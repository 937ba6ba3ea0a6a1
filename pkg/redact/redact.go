// Package redact is the only way to log a CSI message.
//
// It hides fields that the CSI specification marks as secret, and service account tokens in volume contexts, credentials in
// parameters, and the values of mount flags, which may be sensitive.
package redact

import (
	"fmt"
	"strings"

	"github.com/kubernetes-csi/csi-lib-utils/protosanitizer"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// Stripped replaces hidden values; it is the text of protosanitizer.
const Stripped = "***stripped***"

// Message formats a CSI message as one line of JSON without its secrets. It works on a copy, when the result is printed. Other
// values show only their type.
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

// GoString redacts %#v.
func (m message) GoString() string { return m.String() }

// MarshalText redacts the output of the JSON logger.
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
		// "name=value", "--name value", or a value alone: the name is the first word.
		if end := strings.IndexAny(strings.TrimLeft(flag, " "), "= \t\n"); end >= 0 {
			flags.Set(i, protoreflect.ValueOfString(strings.TrimLeft(flag, " ")[:end+1]+Stripped))
		}
	}
}

// Sensitive reports whether a key of a context or of parameters may have a secret value.
func Sensitive(key string) bool {
	key = strings.NewReplacer("-", "", "_", "", ".", "").Replace(strings.ToLower(key))
	for _, word := range []string{"token", "secret", "password", "passwd", "passphrase", "privatekey", "accesskey", "sessionkey", "apikey", "customerkey"} {
		if strings.Contains(key, word) {
			return true
		}
	}
	return false
}
