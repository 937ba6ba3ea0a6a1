package cluster

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"time"
)

// authority is the cluster's certificate authority.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pem  []byte
}

// pair is a certificate and its key, as PEM.
type pair struct{ cert, key []byte }

const certLife = 7 * 24 * time.Hour

func newAuthority() (*authority, error) {
	template := &x509.Certificate{
		Subject: pkix.Name{CommonName: "cluster"}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	}
	a := &authority{}
	der, key, err := a.sign(template)
	if err != nil {
		return nil, err
	}
	a.key, a.pem = key, encode("CERTIFICATE", der)
	a.cert, err = x509.ParseCertificate(der)
	return a, err
}

// sign signs a new key's certificate: the authority's, or, before it has one, with the key itself.
func (a *authority) sign(template *x509.Certificate) ([]byte, *ecdsa.PrivateKey, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	template.SerialNumber, err = rand.Int(rand.Reader, big.NewInt(1<<62))
	if err != nil {
		return nil, nil, err
	}
	template.NotBefore, template.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(certLife)
	parent, signer := a.cert, a.key
	if parent == nil {
		parent, signer = template, key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, key.Public(), signer)
	return der, key, err
}

// server is a certificate for a server with these names and addresses.
func (a *authority) server(name string, hosts ...string) (pair, error) {
	t := &x509.Certificate{Subject: pkix.Name{CommonName: name}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}
	for _, h := range hosts {
		if ip := net.ParseIP(h); ip != nil {
			t.IPAddresses = append(t.IPAddresses, ip)
		} else {
			t.DNSNames = append(t.DNSNames, h)
		}
	}
	return a.pair(t)
}

// client is a certificate that a user shows.
func (a *authority) client(name string, groups ...string) (pair, error) {
	return a.pair(&x509.Certificate{
		Subject: pkix.Name{CommonName: name, Organization: groups}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	})
}

func (a *authority) pair(t *x509.Certificate) (pair, error) {
	der, key, err := a.sign(t)
	if err != nil {
		return pair{}, err
	}
	private, err := x509.MarshalECPrivateKey(key)
	return pair{encode("CERTIFICATE", der), encode("EC PRIVATE KEY", private)}, err
}

// tokenKeys are what service accounts' tokens are signed and verified with.
func tokenKeys() (private, public []byte, set string, err error) {
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		return nil, nil, "", err
	}
	der, err := x509.MarshalPKIXPublicKey(key.Public())
	return encode("RSA PRIVATE KEY", x509.MarshalPKCS1PrivateKey(key)), encode("PUBLIC KEY", der), keySet(&key.PublicKey, der), err
}

// keySet is a key as RFC 7517 writes it, under the id that tokens of Kubernetes name it by: the hash of its DER form.
func keySet(key *rsa.PublicKey, der []byte) string {
	id, number := sha256.Sum256(der), base64.RawURLEncoding.EncodeToString
	return fmt.Sprintf(`{"keys": [{"kty": "RSA", "use": "sig", "alg": "RS256", "kid": %q, "n": %q, "e": %q}]}`,
		number(id[:]), number(key.N.Bytes()), number(big.NewInt(int64(key.E)).Bytes()))
}

func encode(kind string, der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
}
