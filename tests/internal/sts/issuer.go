// Package sts stands in for what a Kubernetes cluster has that gives identity to pods: an issuer of service-account tokens,
// with the discovery that security token services use, and the agent of EKS Pod Identity.
package sts

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/golang-jwt/jwt/v5"
)

// Issuer is an OpenID Connect issuer on loopback that makes tokens as a Kubernetes API server does.
type Issuer struct {
	url    string
	server *http.Server

	mu   sync.Mutex
	keys []*signingKey // the last signs; all are published
	odd  *signingKey   // is published nowhere
}

type signingKey struct {
	id     string
	method jwt.SigningMethod
	key    crypto.Signer
}

// NewIssuer starts an issuer with an RSA key, as Kubernetes's are.
func NewIssuer() (*Issuer, error) {
	l, err := new(net.ListenConfig).Listen(context.Background(), "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("sts: %w", err)
	}
	i := &Issuer{url: "http://" + l.Addr().String()}
	if err := errors.Join(i.Rotate(jwt.SigningMethodRS256), i.makeOdd()); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /.well-known/openid-configuration", i.discovery)
	mux.HandleFunc("GET /openid/v1/jwks", i.jwks)
	i.server = &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second, ErrorLog: log.New(io.Discard, "", 0)}
	go func() { _ = i.server.Serve(l) }() // until Close
	return i, nil
}

// URL is the issuer, as it stands in tokens.
func (i *Issuer) URL() string { return i.url }

// Close ends the issuer. Its tokens stay what they are, for who has its keys.
func (i *Issuer) Close() error { return i.server.Close() }

// Rotate makes a new key that signs from now on (RS256 or ES256). Tokens of the earlier ones stay valid.
func (i *Issuer) Rotate(method jwt.SigningMethod) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	key, err := newKey("key-"+strconv.Itoa(len(i.keys)+1), method)
	if err == nil {
		i.keys = append(i.keys, key)
	}
	return err
}

// makeOdd makes the key that is not the issuer's, with the id of one that is.
func (i *Issuer) makeOdd() (err error) {
	i.odd, err = newKey(i.keys[0].id, jwt.SigningMethodRS256)
	return err
}

func newKey(id string, method jwt.SigningMethod) (*signingKey, error) {
	var key crypto.Signer
	var err error
	switch method {
	case jwt.SigningMethodRS256:
		key, err = rsa.GenerateKey(rand.Reader, 2048)
	case jwt.SigningMethodES256:
		key, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	default:
		err = fmt.Errorf("sts: no keys for %s", method.Alg())
	}
	return &signingKey{id, method, key}, err
}

func (i *Issuer) discovery(w http.ResponseWriter, _ *http.Request) {
	// What kube-apiserver answers (Kubernetes, "Service account issuer discovery"), and two fields that MinIO wants.
	writeJSON(w, map[string]any{
		"issuer": i.url, "jwks_uri": i.url + "/openid/v1/jwks",
		"response_types_supported": []string{"id_token"}, "subject_types_supported": []string{"public"},
		"id_token_signing_alg_values_supported": []string{"RS256", "ES256"},
		"authorization_endpoint":                i.url + "/none", "token_endpoint": i.url + "/none",
	})
}

func (i *Issuer) jwks(w http.ResponseWriter, _ *http.Request) {
	i.mu.Lock()
	defer i.mu.Unlock()
	var keys []map[string]string
	for _, k := range i.keys {
		keys = append(keys, k.public())
	}
	writeJSON(w, map[string]any{"keys": keys})
}

// public is the public key as RFC 7518 writes it.
func (k *signingKey) public() map[string]string {
	number := base64.RawURLEncoding.EncodeToString
	switch p := k.key.Public().(type) {
	case *rsa.PublicKey:
		return map[string]string{"kty": "RSA", "use": "sig", "alg": "RS256", "kid": k.id, "n": number(p.N.Bytes()), "e": number(big.NewInt(int64(p.E)).Bytes())}
	case *ecdsa.PublicKey:
		point, _ := p.Bytes() // it has just been made: 4, x, y
		return map[string]string{"kty": "EC", "use": "sig", "alg": "ES256", "kid": k.id, "crv": "P-256", "x": number(point[1:33]), "y": number(point[33:])}
	default:
		return nil
	}
}

func writeJSON(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v)
}

// TokenRequest says what token to make. Its zero value is one of the service account "default" in "default".
type TokenRequest struct {
	Namespace, ServiceAccount, Pod string
	Audiences                      []string
	Lifetime                       time.Duration // 0: an hour; negative: it has expired that long ago
	Subject                        string        // in place of the service account's
	Issuer                         string        // in place of this one
	WrongKey                       bool          // signed with another key
}

// Token is a service account's token.
type Token struct {
	Value   string
	Expires time.Time
}

// Token makes a token as kubelet gets it (Kubernetes, TokenRequest API).
func (i *Issuer) Token(r TokenRequest) (Token, error) {
	if r.Namespace == "" {
		r.Namespace = "default"
	}
	if r.ServiceAccount == "" {
		r.ServiceAccount = "default"
	}
	if r.Lifetime == 0 {
		r.Lifetime = time.Hour
	}
	if r.Subject == "" {
		r.Subject = "system:serviceaccount:" + r.Namespace + ":" + r.ServiceAccount
	}
	if r.Issuer == "" {
		r.Issuer = i.url
	}
	now := time.Now()
	about := map[string]any{"namespace": r.Namespace, "serviceaccount": map[string]string{"name": r.ServiceAccount, "uid": uid()}}
	if r.Pod != "" {
		about["pod"] = map[string]string{"name": r.Pod, "uid": uid()}
	}
	end, made := now.Add(r.Lifetime), now
	if r.Lifetime < 0 {
		made = end.Add(-time.Hour)
	}
	i.mu.Lock()
	key := i.keys[len(i.keys)-1]
	i.mu.Unlock()
	if r.WrongKey {
		key = i.odd
	}
	token := jwt.NewWithClaims(key.method, jwt.MapClaims{
		"iss": r.Issuer, "sub": r.Subject, "aud": r.Audiences, "exp": end.Unix(), "iat": made.Unix(), "nbf": made.Unix(), "jti": uid(),
		"kubernetes.io": about,
	})
	token.Header["kid"] = key.id
	signed, err := token.SignedString(key.key)
	if err != nil {
		return Token{}, fmt.Errorf("sts: token: %w", err)
	}
	return Token{signed, end}, nil
}

// Verify checks a token as the issuer's own cluster does, and tells whose it is.
func (i *Issuer) Verify(token, audience string) (namespace, serviceAccount string, err error) {
	var c struct {
		jwt.RegisteredClaims

		About struct {
			Namespace      string `json:"namespace"`
			ServiceAccount struct {
				Name string `json:"name"`
			} `json:"serviceaccount"`
		} `json:"kubernetes.io"`
	}
	_, err = jwt.ParseWithClaims(token, &c, func(t *jwt.Token) (any, error) {
		i.mu.Lock()
		defer i.mu.Unlock()
		at := slices.IndexFunc(i.keys, func(k *signingKey) bool { return k.id == t.Header["kid"] })
		if at < 0 {
			return nil, errors.New("no such key")
		}
		return i.keys[at].key.Public(), nil
	}, jwt.WithIssuer(i.url), jwt.WithAudience(audience), jwt.WithExpirationRequired())
	return c.About.Namespace, c.About.ServiceAccount.Name, err
}

// CSITokens are tokens by audience as a CSI driver gets them from kubelet, in the value of
// "csi.storage.k8s.io/serviceAccount.tokens" (Kubernetes CSI documentation, "Token Requests").
func CSITokens(byAudience map[string]Token) string {
	all := map[string]map[string]string{}
	for audience, t := range byAudience {
		all[audience] = map[string]string{"token": t.Value, "expirationTimestamp": t.Expires.UTC().Format(time.RFC3339)}
	}
	b, _ := json.Marshal(all) // strings only
	return string(b)
}

// uid looks like a Kubernetes object's.
func uid() string {
	b := make([]byte, 16)
	_, _ = rand.Read(b) // never fails, see crypto/rand
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}
