package s3server

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rsa"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"math/big"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/golang-jwt/jwt/v5"
)

// issuers are the OpenID Connect issuers whose tokens are believed, as AWS's IAM has them as identity providers.
type issuers struct {
	mu    sync.Mutex
	known map[string]*issuer // by URL
}

// issuer is one of them.
type issuer struct {
	audiences []string
	keys      map[string]crypto.PublicKey // by id, as last fetched
}

// claims are what a token that was verified says.
type claims struct {
	jwt.RegisteredClaims

	known string // the audience that the issuer is known for
}

// goodFor reports whether the token is what a role trusts.
func (c claims) goodFor(t TrustedIssuer) bool {
	audience := len(t.Audiences) == 0 || slices.ContainsFunc(t.Audiences, func(a string) bool { return slices.Contains(c.Audience, a) })
	subject := len(t.Subjects) == 0 || slices.ContainsFunc(t.Subjects, func(p string) bool { return matches(p, c.Subject) })
	return t.URL == c.Issuer && audience && subject
}

// matches reports whether a text is what a pattern describes, in which * stands for any characters.
func matches(pattern, text string) bool {
	parts := strings.Split(pattern, "*")
	rest, ok := strings.CutPrefix(text, parts[0])
	if !ok || len(parts) == 1 {
		return ok && rest == ""
	}
	for _, part := range parts[1 : len(parts)-1] {
		if _, rest, ok = strings.Cut(rest, part); !ok {
			return false
		}
	}
	return strings.HasSuffix(rest, parts[len(parts)-1])
}

// add makes an issuer's tokens for these audiences known.
func (i *issuers) add(url string, audiences []string) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.known == nil {
		i.known = map[string]*issuer{}
	}
	i.known[url] = &issuer{audiences: audiences}
}

// verify checks a token and says what is in it. Its times are by this machine's clock: issuers have no offset.
func (i *issuers) verify(ctx context.Context, token string) (claims, error) {
	var c claims
	var from *issuer
	_, err := jwt.ParseWithClaims(token, &c, func(t *jwt.Token) (any, error) {
		var err error
		if from, err = i.issuer(c.Issuer); err != nil {
			return nil, err
		}
		id, _ := t.Header["kid"].(string)
		return i.key(ctx, c.Issuer, from, id)
	}, jwt.WithValidMethods([]string{"RS256", "ES256"}), jwt.WithExpirationRequired(), jwt.WithIssuedAt())
	fail, ok := errors.AsType[*stsError](err)
	switch {
	case ok:
		return claims{}, fail
	case errors.Is(err, jwt.ErrTokenExpired):
		return claims{}, &stsError{http.StatusBadRequest, "ExpiredTokenException",
			fmt.Sprintf("Token expired: current date/time %s must be before the expiration date/time", time.Now().UTC().Format(time.RFC3339))}
	case err != nil:
		return claims{}, badToken("the token is not valid: %v", err) // which never holds the token
	}
	if c.Subject == "" {
		return claims{}, badToken("Missing a required claim: sub")
	}
	at := slices.IndexFunc(from.audiences, func(a string) bool { return slices.Contains(c.Audience, a) })
	if at < 0 {
		return claims{}, badToken("Incorrect token audience")
	}
	c.known = from.audiences[at]
	return c, nil
}

func (i *issuers) issuer(url string) (*issuer, error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if known, ok := i.known[url]; ok {
		return known, nil
	}
	return nil, badToken("No OpenIDConnect provider found in your account for %s", url)
}

// key is an issuer's key of that id. An id that is not known yet makes its keys be fetched again.
func (i *issuers) key(ctx context.Context, url string, from *issuer, id string) (crypto.PublicKey, error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if key, ok := from.keys[id]; ok {
		return key, nil
	}
	keys, err := fetchKeys(ctx, url)
	if err != nil {
		return nil, &stsError{http.StatusBadRequest, "IDPCommunicationError", err.Error()}
	}
	from.keys = keys
	if key, ok := keys[id]; ok {
		return key, nil
	}
	return nil, badToken("Couldn't retrieve verification key from your identity provider: it has none of that id")
}

const fetchTimeout = 5 * time.Second

// fetchKeys asks an issuer for its keys (OpenID Connect Discovery 1.0, RFC 7517).
func fetchKeys(ctx context.Context, url string) (map[string]crypto.PublicKey, error) {
	ctx, cancel := context.WithTimeout(ctx, fetchTimeout)
	defer cancel()
	var about struct {
		Issuer string `json:"issuer"`
		Keys   string `json:"jwks_uri"`
	}
	if err := fetch(ctx, strings.TrimSuffix(url, "/")+"/.well-known/openid-configuration", &about); err != nil {
		return nil, err
	}
	if about.Issuer != url {
		return nil, fmt.Errorf("%s says that it is %q", url, about.Issuer)
	}
	var set struct {
		Keys []jsonKey `json:"keys"`
	}
	if err := fetch(ctx, about.Keys, &set); err != nil {
		return nil, err
	}
	keys := map[string]crypto.PublicKey{}
	for _, k := range set.Keys {
		key, err := k.public()
		if err != nil {
			return nil, fmt.Errorf("key %q of %s: %w", k.ID, url, err)
		}
		keys[k.ID] = key
	}
	return keys, nil
}

func fetch(ctx context.Context, url string, into any) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	req.Close = true
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", url, resp.Status)
	}
	return json.NewDecoder(resp.Body).Decode(into)
}

// jsonKey is a public key as RFC 7517 and RFC 7518 write it.
type jsonKey struct {
	ID    string `json:"kid"`
	Type  string `json:"kty"`
	N     string `json:"n"`
	E     string `json:"e"`
	Curve string `json:"crv"`
	X     string `json:"x"`
	Y     string `json:"y"`
}

func (k jsonKey) public() (crypto.PublicKey, error) {
	number := func(text string) []byte {
		b, _ := base64.RawURLEncoding.DecodeString(text) // what is no number makes no key
		return b
	}
	switch {
	case k.Type == "RSA":
		return &rsa.PublicKey{N: new(big.Int).SetBytes(number(k.N)), E: int(new(big.Int).SetBytes(number(k.E)).Int64())}, nil
	case k.Type == "EC" && k.Curve == "P-256":
		return ecdsa.ParseUncompressedPublicKey(elliptic.P256(), slices.Concat([]byte{4}, number(k.X), number(k.Y)))
	default:
		return nil, fmt.Errorf("of a kind that is not known: %s %s", k.Type, k.Curve)
	}
}
