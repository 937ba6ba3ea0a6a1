package credentials

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

const kubelets = `{"sts.amazonaws.com":{"token":"eyJh.eyJz.c2ln","expirationTimestamp":"2026-11-20T10:00:00Z"},"":{"token":"x"}}`

func TestTokensAreReadAsKubeletWritesThem(t *testing.T) {
	got, err := ParseTokens(kubelets)
	if err != nil {
		t.Fatal(err)
	}
	want := Tokens{"sts.amazonaws.com": {"eyJh.eyJz.c2ln", time.Date(2026, 11, 20, 10, 0, 0, 0, time.UTC)}, "": {Value: "x"}}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %v", got)
	}
	if kept := got.Only("sts.amazonaws.com", "other", ""); len(kept) != 1 || kept["sts.amazonaws.com"].Value == "" {
		t.Errorf("kept %v", kept)
	}
	if none, err := ParseTokens(""); err != nil || len(none) != 0 {
		t.Errorf("nothing gives %v, %v", none, err)
	}
}

func TestWrongTokensAreInvalidAndNotRepeated(t *testing.T) {
	for name, text := range map[string]string{
		"no JSON":                       "canary",
		"a list":                        `["canary"]`,
		"null":                          "null",
		"cut off":                       `{"a":{"token":"canary"}`,
		"something behind":              kubelets + ` "canary"`,
		"an audience twice":             `{"a":{"token":"x"},"a":{"token":"canary"}}`,
		"a token twice":                 `{"a":{"token":"x","token":"canary"}}`,
		"no token":                      `{"a":{"expirationTimestamp":"2026-11-20T10:00:00Z"}}`,
		"another letter case":           `{"a":{"Token":"canary"}}`,
		"an empty token":                `{"a":{"token":""}}`,
		"a number":                      `{"a":{"token":7}}`,
		"a token for an object":         `{"a":"canary"}`,
		"a header in a token":           `{"a":{"token":"canary\r\nx: y"}}`,
		"a space":                       `{"a":{"token":"canary canary"}}`,
		"a form in a token":             `{"a":{"token":"canary&Action=x"}}`,
		"a time that is none":           `{"a":{"token":"canary","expirationTimestamp":"canary"}}`,
		"a time that is a number":       `{"a":{"token":"canary","expirationTimestamp":1}}`,
		"a token without an end":        `{"a":{"token":"` + strings.Repeat("canary", maxToken) + `"}}`,
		"more than a request can carry": `{"a":{"token":"` + strings.Repeat("canary", maxTokens) + `"}}`,
	} {
		t.Run(name, func(t *testing.T) {
			_, err := ParseTokens(text)
			if f := (*fault.Error)(nil); !errors.As(err, &f) || f.Kind != fault.Invalid || f.Field != SecretTokens {
				t.Fatalf("got %v", err)
			}
			if strings.Contains(err.Error(), "canary") {
				t.Errorf("the error shows a token: %v", err)
			}
		})
	}
}

func TestTokensAreNeverPrinted(t *testing.T) {
	tokens := Tokens{"aud": {Value: "canary"}}
	for _, format := range []string{"%v", "%+v", "%#v", "%s", "%q"} {
		for _, v := range []any{tokens, &tokens, tokens["aud"], struct{ T Tokens }{tokens}, []Token{tokens["aud"]}} {
			if s := fmt.Sprintf(format, v); strings.Contains(s, "canary") {
				t.Errorf("%s of %T shows a token: %s", format, v, s)
			}
		}
	}
	if b, err := json.Marshal(tokens); err != nil || strings.Contains(string(b), "canary") {
		t.Errorf("JSON shows a token: %s, %v", b, err)
	}
	if s := fmt.Sprint(tokens); !strings.Contains(s, "aud") {
		t.Errorf("%s does not name the audience", s)
	}
	if !slices.Contains(tokens.Secrets(), "canary") {
		t.Error("a token is not among what must not be shown")
	}
}

func FuzzParseTokens(f *testing.F) {
	f.Add(kubelets)
	f.Add(`{}`)
	f.Add(`{"a":{"token":"x","expirationTimestamp":"2026-11-20T10:00:00+01:00","more":[{}]}}`)
	f.Add(`{"a":{"token":"x"}} {}`)
	f.Add(`{"a":{"to\u006ben":"x"}}`)
	f.Fuzz(func(t *testing.T, text string) {
		tokens, err := ParseTokens(text)
		if err != nil {
			if !fault.Is(err, fault.Invalid) {
				t.Fatalf("not Invalid: %v", err)
			}
			return
		}
		for _, audience := range slices.Sorted(maps.Keys(tokens)) {
			v := tokens[audience].Value
			if v == "" || len(v) > maxToken || strings.ContainsAny(v, " \r\n&%\x00") {
				t.Fatalf("a token that was not checked: %q", v)
			}
		}
	})
}
