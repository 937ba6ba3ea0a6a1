// Package credentials has the types of S3 credentials and the orders from which sessions are made.
//
// Nothing in this package prints a secret: Keys formats as its access key id only.
package credentials

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"strings"
	"time"
	"unicode"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// Page explains errors of credentials and sessions.
const Page = "docs/reference/errors.md#publishing-credentials-and-sessions"

// The sources that a volume parameter or a backend can name.
const (
	SourceDriver   = "driver"   // the driver's own (the AWS SDK's default chain)
	SourceSecret   = "secret"   // the CSI request's secrets
	SourceWorkload = "workload" // the pod's service-account token
)

// The keys of a CSI secret. It may also name the service (volume.SecretClaims) and a role (SecretRoleARN).
const (
	SecretAccessKeyID     = "accessKeyID"
	SecretSecretAccessKey = "secretAccessKey"
	SecretSessionToken    = "sessionToken"
)

// Keys is one set of S3 credentials. The zero value is no credentials.
type Keys struct {
	AccessKeyID     string    `json:"accessKeyID"`
	SecretAccessKey string    `json:"secretAccessKey"`
	SessionToken    string    `json:"sessionToken,omitempty"`
	Expires         time.Time `json:"expires,omitzero"` // zero: never
	// Account is the account of a session, if the service named it: 12 digits, or "".
	Account string `json:"account,omitempty"`
}

// IsZero reports whether there are no credentials.
func (k Keys) IsZero() bool { return k.AccessKeyID == "" && k.SecretAccessKey == "" }

// String shows only the access key id, which is not secret.
func (k Keys) String() string { return "Keys(" + k.AccessKeyID + ")" }

// GoString keeps %#v from printing the secret.
func (k Keys) GoString() string { return k.String() }

// Digest returns an opaque name of the keys: equal keys have equal digests under one salt, and a digest reveals nothing without
// the salt.
func (k Keys) Digest(salt []byte) string {
	return digest(salt, k.AccessKeyID+"\x00"+k.SecretAccessKey+"\x00"+k.SessionToken+"\x00")
}

func digest(salt []byte, secret string) string {
	mac := hmac.New(sha256.New, salt)
	mac.Write([]byte(secret))
	return hex.EncodeToString(mac.Sum(nil)[:16])
}

// FromSecret reads keys from a CSI request's secrets and reports whether there are any. An incomplete set is an Invalid error that
// names the missing key.
func FromSecret(secrets map[string]string) (keys Keys, ok bool, err error) {
	keys = Keys{
		AccessKeyID:     secrets[SecretAccessKeyID],
		SecretAccessKey: secrets[SecretSecretAccessKey],
		SessionToken:    secrets[SecretSessionToken],
	}
	if keys == (Keys{}) {
		return Keys{}, false, nil
	}
	for _, name := range []string{SecretAccessKeyID, SecretSecretAccessKey, SecretSessionToken} {
		if secrets[name] == "" && name != SecretSessionToken {
			return Keys{}, false, fault.Field("secrets."+name, "is missing or empty: a secret has both %s and %s", SecretAccessKeyID, SecretSecretAccessKey)
		}
		if strings.ContainsFunc(secrets[name], func(r rune) bool { return r == ' ' || !unicode.IsPrint(r) }) {
			return Keys{}, false, fault.Field("secrets."+name, "contains white space, or a control or invisible character")
		}
	}
	return keys, true, nil
}
