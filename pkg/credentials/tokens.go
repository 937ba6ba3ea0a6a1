package credentials

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// SecretTokens is the key of the pod's service account tokens in the secrets or the volume context of NodePublishVolume (Kubernetes
// CSI documentation, "Token Requests").
const SecretTokens = "csi.storage.k8s.io/serviceAccount.tokens" //nolint:gosec // a name, and no secret

// PodIdentityAudience is the audience of tokens for EKS Pod Identity's agent only (Amazon EKS User Guide, "Understand how EKS Pod
// Identity works").
const PodIdentityAudience = "pods.eks.amazonaws.com"

// Bounds in bytes. A token of Kubernetes has one or two thousand.
const (
	maxTokens = 256 << 10
	maxToken  = 16 << 10
)

// Token is a service account's token for one audience. It formats without its value.
type Token struct {
	Value   string
	Expires time.Time // zero: unknown
}

// String hides the token.
func (t Token) String() string { return "Token" }

// GoString hides the token from %#v.
func (t Token) GoString() string { return t.String() }

// MarshalJSON hides the token from structured logs.
func (t Token) MarshalJSON() ([]byte, error) { return json.Marshal(t.String()) }

// Tokens are a service account's tokens, by audience. They format as their audiences.
type Tokens map[string]Token

// String shows the audiences, which are not secret.
func (t Tokens) String() string {
	return "Tokens(" + strings.Join(slices.Sorted(maps.Keys(t)), ", ") + ")"
}

// GoString keeps %#v from printing the tokens.
func (t Tokens) GoString() string { return t.String() }

// Only returns the tokens of these audiences; "" is none.
func (t Tokens) Only(audiences ...string) Tokens {
	kept := Tokens{}
	for _, a := range audiences {
		if token, ok := t[a]; ok && a != "" {
			kept[a] = token
		}
	}
	return kept
}

// Secrets returns the values that must not be shown.
func (t Tokens) Secrets() []string {
	var all []string
	for _, token := range t {
		all = append(all, token.Value)
	}
	return all
}

// ParseTokens parses the tokens of a service account as kubelet writes them: an object of audiences, each with an object of token
// and expirationTimestamp (RFC 3339). "" has none. Errors are Invalid and do not show the value.
func ParseTokens(text string) (Tokens, error) {
	if text == "" {
		return Tokens{}, nil
	}
	if len(text) > maxTokens {
		return nil, fault.Field(SecretTokens, "have %d bytes, the maximum is %d", len(text), maxTokens)
	}
	audiences, err := object([]byte(text))
	if err != nil {
		return nil, fault.Field(SecretTokens, "are not a JSON object of audiences: %w", err)
	}
	tokens := make(Tokens, len(audiences))
	for audience, raw := range audiences {
		token, err := parseToken(raw)
		if err != nil {
			return nil, fault.Field(SecretTokens, "the token of audience %q %w", shorten(audience), err)
		}
		tokens[audience] = token
	}
	return tokens, nil
}

func parseToken(raw json.RawMessage) (Token, error) {
	fields, err := object(raw)
	if err != nil {
		return Token{}, errors.New("is not an object of token and expirationTimestamp")
	}
	var t Token
	value, ok := fields["token"]
	if !ok || json.Unmarshal(value, &t.Value) != nil || t.Value == "" {
		return Token{}, errors.New("is missing or not a string")
	}
	if len(t.Value) > maxToken {
		return Token{}, errors.New("is too long")
	}
	// The token goes into a header or a form. RFC 7519 uses base64url and dots; RFC 6750 allows a few more characters.
	if !made(t.Value, "-._~+/=") {
		return Token{}, errors.New("contains a character that tokens cannot have")
	}
	if value, ok := fields["expirationTimestamp"]; ok {
		var at string
		if json.Unmarshal(value, &at) != nil {
			return Token{}, errors.New("has an expirationTimestamp that is not a string")
		}
		if t.Expires, err = time.Parse(time.RFC3339, at); err != nil {
			return Token{}, errors.New("has an invalid expirationTimestamp")
		}
	}
	return t, nil
}

// object decodes exactly one JSON object with unique, case-sensitive keys.
func object(raw []byte) (map[string]json.RawMessage, error) {
	d := json.NewDecoder(bytes.NewReader(raw))
	if begin, err := d.Token(); err != nil || begin != json.Delim('{') {
		return nil, errors.New("not an object")
	}
	fields := map[string]json.RawMessage{}
	for d.More() {
		key, err := d.Token()
		name, ok := key.(string)
		if err != nil || !ok {
			return nil, errors.New("incomplete or malformed")
		}
		if _, twice := fields[name]; twice {
			return nil, errors.New("duplicate key")
		}
		var value json.RawMessage
		if err := d.Decode(&value); err != nil {
			return nil, errors.New("incomplete or malformed")
		}
		fields[name] = value
	}
	if _, err := d.Token(); err != nil {
		return nil, errors.New("incomplete or malformed")
	}
	if _, err := d.Token(); err != io.EOF {
		return nil, errors.New("trailing data")
	}
	return fields, nil
}

// shorten limits a foreign name in a message.
func shorten(s string) string {
	if len(s) > 100 {
		return strings.ToValidUTF8(s[:100], "") + "…"
	}
	return s
}
