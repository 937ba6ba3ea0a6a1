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

// SecretTokens is the key under which kubelet puts the tokens of the pod's service account into a publication's secrets, or
// else into its volume context (Kubernetes CSI documentation, "Token Requests").
const SecretTokens = "csi.storage.k8s.io/serviceAccount.tokens" //nolint:gosec // a name, and no secret

// PodIdentityAudience is the audience of tokens for EKS Pod Identity's agent, and for nobody else (Amazon EKS User Guide,
// "Understand how EKS Pod Identity works").
const PodIdentityAudience = "pods.eks.amazonaws.com"

// Bounds of what is read, in bytes. A token of Kubernetes has one or two thousand.
const (
	maxTokens = 256 << 10
	maxToken  = 16 << 10
)

// Token is a service account's token for one audience. It formats as nothing.
type Token struct {
	Value   string
	Expires time.Time // zero: not told
}

// String shows nothing of the token.
func (t Token) String() string { return "Token" }

// GoString keeps %#v from printing it.
func (t Token) GoString() string { return t.String() }

// MarshalJSON keeps it out of structured logs.
func (t Token) MarshalJSON() ([]byte, error) { return json.Marshal(t.String()) }

// Tokens are a service account's tokens, by audience. They format as their audiences.
type Tokens map[string]Token

// String shows the audiences, which are not secret.
func (t Tokens) String() string {
	return "Tokens(" + strings.Join(slices.Sorted(maps.Keys(t)), ", ") + ")"
}

// GoString keeps %#v from printing the tokens.
func (t Tokens) GoString() string { return t.String() }

// Only are the tokens of these audiences; "" is none. What a volume's services do not ask for is not kept.
func (t Tokens) Only(audiences ...string) Tokens {
	kept := Tokens{}
	for _, a := range audiences {
		if token, ok := t[a]; ok && a != "" {
			kept[a] = token
		}
	}
	return kept
}

// Secrets are the values that must not be shown anywhere.
func (t Tokens) Secrets() []string {
	var all []string
	for _, token := range t {
		all = append(all, token.Value)
	}
	return all
}

// ParseTokens reads the tokens of a service account as kubelet writes them: an object of audiences, each with an object of
// token and expirationTimestamp (RFC 3339). "" has none. Errors are Invalid and repeat nothing of the value.
func ParseTokens(text string) (Tokens, error) {
	if text == "" {
		return Tokens{}, nil
	}
	if len(text) > maxTokens {
		return nil, fault.Field(SecretTokens, "have %d bytes, more than the %d that are read", len(text), maxTokens)
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
		return Token{}, errors.New("is missing or no text")
	}
	if len(t.Value) > maxToken {
		return Token{}, errors.New("is too long")
	}
	// The token goes into a header or a form. RFC 7519 makes it of base64url and dots; RFC 6750 allows a little more.
	for _, c := range []byte(t.Value) {
		if (c < '0' || c > '9') && (c < 'A' || c > 'Z') && (c < 'a' || c > 'z') && !strings.ContainsRune("-._~+/=", rune(c)) {
			return Token{}, errors.New("holds a character that no token has")
		}
	}
	if value, ok := fields["expirationTimestamp"]; ok {
		var at string
		if json.Unmarshal(value, &at) != nil {
			return Token{}, errors.New("has an expirationTimestamp that is no text")
		}
		if t.Expires, err = time.Parse(time.RFC3339, at); err != nil {
			return Token{}, errors.New("has an expirationTimestamp that is no time")
		}
	}
	return t, nil
}

// object reads exactly one JSON object, with each key once and in its own letter case.
func object(raw []byte) (map[string]json.RawMessage, error) {
	d := json.NewDecoder(bytes.NewReader(raw))
	if begin, err := d.Token(); err != nil || begin != json.Delim('{') {
		return nil, errors.New("it is none")
	}
	fields := map[string]json.RawMessage{}
	for d.More() {
		key, err := d.Token()
		name, ok := key.(string)
		if err != nil || !ok {
			return nil, errors.New("it is cut off or malformed")
		}
		if _, twice := fields[name]; twice {
			return nil, errors.New("a key is there twice")
		}
		var value json.RawMessage
		if err := d.Decode(&value); err != nil {
			return nil, errors.New("it is cut off or malformed")
		}
		fields[name] = value
	}
	if _, err := d.Token(); err != nil {
		return nil, errors.New("it is cut off or malformed")
	}
	if _, err := d.Token(); err != io.EOF {
		return nil, errors.New("something follows it")
	}
	return fields, nil
}

// shorten keeps a foreign name from filling a message.
func shorten(s string) string {
	if len(s) > 100 {
		return strings.ToValidUTF8(s[:100], "") + "…"
	}
	return s
}
