package redact

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/dynamicpb"
)

const canary = "canary-" // begins every value that must not be shown

// filler fills messages: every string that must be hidden begins with canary, every other one with "visible-".
type filler struct{ n int }

func (f *filler) text(hidden bool) string {
	f.n++
	if hidden {
		return fmt.Sprint(canary, f.n)
	}
	return fmt.Sprint("visible-", f.n)
}

func (f *filler) fill(m protoreflect.Message, depth int) {
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		field := fields.Get(i)
		secret := proto.GetExtension(field.Options(), csi.E_CsiSecret).(bool)
		switch {
		case field.IsMap():
			entries := m.Mutable(field).Map()
			if field.MapValue().Kind() != protoreflect.StringKind {
				continue
			}
			put := func(key, value string) {
				entries.Set(protoreflect.ValueOfString(key).MapKey(), protoreflect.ValueOfString(value))
			}
			put("bucketName", f.text(secret))
			for _, key := range []string{"csi.storage.k8s.io/serviceAccount.tokens", "secretAccessKey", "session-token", "Password", "AWS_SECRET_ACCESS_KEY",
				"accessKeyID"} {
				put(key, f.text(true))
			}
		case field.IsList() && field.Kind() == protoreflect.StringKind:
			list := m.Mutable(field).List()
			if field.Name() == "mount_flags" {
				for _, form := range []string{"uid=%s", "--passwd %s", " -o %s", "=%s", "a\t%s"} {
					list.Append(protoreflect.ValueOfString(fmt.Sprintf(form, f.text(true))))
				}
				list.Append(protoreflect.ValueOfString(f.text(false)))
			} else {
				list.Append(protoreflect.ValueOfString(f.text(secret)))
			}
		case field.Kind() == protoreflect.StringKind:
			m.Set(field, protoreflect.ValueOfString(f.text(secret)))
		case field.Message() != nil && depth > 0:
			if field.IsList() {
				element := m.Mutable(field).List().AppendMutable().Message()
				f.fill(element, depth-1)
			} else {
				f.fill(m.Mutable(field).Message(), depth-1)
			}
		}
	}
}

// methods calls do for every input and output of every CSI service.
func methods(t *testing.T, do func(name protoreflect.FullName)) {
	t.Helper()
	services := csi.File_csi_proto.Services()
	if services.Len() < 3 {
		t.Fatalf("%d services", services.Len())
	}
	for i := range services.Len() {
		list := services.Get(i).Methods()
		for j := range list.Len() {
			do(list.Get(j).Input().FullName())
			do(list.Get(j).Output().FullName())
		}
	}
}

func TestNoMessageOfAnyServiceShowsASecret(t *testing.T) {
	seen := 0
	methods(t, func(name protoreflect.FullName) {
		kind, err := protoregistry.GlobalTypes.FindMessageByName(name)
		if err != nil {
			t.Fatal(err)
		}
		msg := kind.New()
		f := &filler{}
		f.fill(msg, 5)
		before := proto.Clone(msg.Interface())
		for _, shown := range []string{
			Message(msg.Interface()).String(), fmt.Sprintf("%v", Message(msg.Interface())), fmt.Sprintf("%+v", Message(msg.Interface())),
			fmt.Sprintf("%#v", Message(msg.Interface())), asJSON(t, Message(msg.Interface())),
		} {
			if at := strings.Index(shown, canary); at >= 0 {
				t.Errorf("%s shows a secret: …%.60s", name, shown[max(0, at-40):])
			}
			for n := range f.n {
				if text := fmt.Sprintf("visible-%d\"", n+1); strings.Contains(fmt.Sprint(msg.Interface()), text) &&
					!strings.Contains(strings.ReplaceAll(shown, `\"`, `"`), text) {
					t.Errorf("%s hides %s, which is no secret", name, text)
				}
			}
		}
		if !proto.Equal(before, msg.Interface()) {
			t.Errorf("%s: the live message was changed", name)
		}
		seen += f.n
	})
	if seen < 500 {
		t.Errorf("only %d values were tried", seen)
	}
}

func asJSON(t *testing.T, v any) string {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestOtherValuesShowTheirTypeOnly(t *testing.T) {
	for _, v := range []any{nil, "canary", map[string]string{"a": "canary"}, (*csi.NodePublishVolumeRequest)(nil), struct{ S string }{"canary"}} {
		if shown := fmt.Sprint(Message(v)); strings.Contains(shown, "canary") {
			t.Errorf("%T: %s", v, shown)
		}
	}
}

func TestDynamicMessagesAreRedactedToo(t *testing.T) {
	m := dynamicpb.NewMessage((&csi.NodePublishVolumeRequest{}).ProtoReflect().Descriptor())
	f := &filler{}
	f.fill(m, 5)
	if shown := Message(m).String(); strings.Contains(shown, canary) {
		t.Error(shown)
	}
}

func TestSensitiveKeys(t *testing.T) {
	for key, want := range map[string]bool{
		"csi.storage.k8s.io/serviceAccount.tokens": true, "sessionToken": true, "secret_access_key": true, "private-key": true, "accessKeyID": true,
		"bucketName": false, "prefix": false, "credentials": false, "onDelete": false, "csi.storage.k8s.io/pvc/name": false,
	} {
		if Sensitive(key) != want {
			t.Errorf("%s: %v", key, !want)
		}
	}
}
