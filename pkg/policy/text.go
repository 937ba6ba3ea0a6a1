package policy

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// CheckPrefix is the prefix of the test objects of s3-csi-driver check. No volume is below it.
const CheckPrefix = volume.RecordPrefix + "/check/"

// pattern returns a policy's pattern for exactly that key, or prefix of keys. The error is a Precondition.
func (s Scope) pattern(key string) (string, error) {
	if problem := unfit(key); problem != "" {
		return "", s.refusal(problem, "use another prefix")
	}
	if key == s.Prefix && key != "" {
		switch {
		case !strings.HasSuffix(key, "/"):
			return "", s.refusal(`has a prefix that does not end in "/"`, `end it in "/"`)
		case strings.HasPrefix(key, volume.RecordPrefix+"/") && !below(key, CheckPrefix) && !below(key, volume.SnapshotsPrefix):
			return "", s.refusal("is where the driver keeps its records", "use another prefix")
		}
	}
	if !strings.ContainsAny(key, "*?$") {
		return key, nil
	}
	if !s.AWS {
		return "", s.refusal("has one of * ? $ in its prefix, which services other than AWS read as a wildcard or a variable", "use another prefix, or "+scopeOff)
	}
	// IAM User Guide, "Policy variables", "Special characters".
	return strings.NewReplacer("*", "${*}", "?", "${?}", "$", "${$}").Replace(key), nil
}

func below(key, prefix string) bool { return strings.HasPrefix(key, prefix) && key != prefix }

// unfit returns why no policy can describe a key; "": it can.
func unfit(key string) string {
	switch {
	case !utf8.ValidString(key):
		return "has a prefix that is not UTF-8"
	case strings.HasPrefix(key, "/"), strings.Contains(key, "//"):
		return "has a prefix with an empty path segment"
	}
	for _, r := range key {
		if unicode.IsControl(r) || r == '\u2028' || r == '\u2029' {
			return fmt.Sprintf("has the control character %U in its prefix", r)
		}
	}
	for segment := range strings.SplitSeq(key, "/") {
		if segment == "." || segment == ".." {
			// Services that keep objects as files may take it for a directory.
			return fmt.Sprintf("has the path segment %q in its prefix", segment)
		}
	}
	return ""
}

// finish returns the policy in ASCII, which every service reads and which STS counts.
func (s Scope) finish(statements []statement) (string, error) {
	plain, err := encode(document{Version: "2012-10-17", Statement: statements})
	if err != nil {
		return "", fault.Errorf(fault.Unknown, "encoding a session policy: %w", err)
	}
	text := ascii(string(plain))
	if len(text) > MaxSize {
		return "", s.refusal(fmt.Sprintf("needs %d characters, and a security token service accepts %d", len(text), MaxSize), "use a shorter prefix, or "+scopeOff)
	}
	return text, nil
}

// encode is json.Marshal without the escapes for HTML.
func encode(v any) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	err := e.Encode(v)
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), err
}

// ascii escapes what is not ASCII in a JSON text.
func ascii(text string) string {
	var b strings.Builder
	for _, r := range text {
		if r < 0x7f {
			b.WriteRune(r)
			continue
		}
		for _, unit := range utf16.AppendRune(nil, r) {
			fmt.Fprintf(&b, `\u%04x`, unit)
		}
	}
	return b.String()
}

// refusal is the error for a scope that no policy can express.
func (s Scope) refusal(problem, advice string) error {
	return fault.Errorf(fault.Precondition, "no session policy can be limited to %s: it %s; %s", quote(s.Bucket+"/"+s.Prefix), problem, advice)
}

// quote shortens and quotes a text of a user for a message.
func quote(text string) string {
	if len(text) > 200 {
		text = strings.ToValidUTF8(text[:200], "") + "…"
	}
	return strconv.Quote(text)
}
