// Package credentials knows where a mount's or a request's S3 credentials come from.
//
// Nothing in this package prints a secret: Keys formats as its public half only.
package credentials

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// The sources that a volume parameter or a backend can name.
const (
	SourceDriver   = "driver"   // what the driver process itself has (the AWS SDK's default chain)
	SourceSecret   = "secret"   // the CSI request's secrets
	SourceWorkload = "workload" // the pod's service-account token
)

// The keys of a CSI secret that are read. Beside them it may say of which service they are (volume.SecretClaims), and which role
// to take on (SecretRoleARN); others are left alone.
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
	Expires         time.Time `json:"expires,omitzero"` // zero: they do not expire
	// Account is the account that a session belongs to, where the service that made it said so: 12 digits, or "".
	Account string `json:"account,omitempty"`
}

// IsZero tells whether there are no credentials.
func (k Keys) IsZero() bool { return k.AccessKeyID == "" && k.SecretAccessKey == "" }

// String shows the access key id, which is not secret, and nothing else.
func (k Keys) String() string { return "Keys(" + k.AccessKeyID + ")" }

// GoString keeps %#v from printing the secret.
func (k Keys) GoString() string { return k.String() }

// Digest is an opaque name of the whole set under a node's random salt: equal sets of keys have equal digests, and
// nothing can be learnt from it without the salt.
func (k Keys) Digest(salt []byte) string {
	mac := hmac.New(sha256.New, salt)
	for _, s := range []string{k.AccessKeyID, k.SecretAccessKey, k.SessionToken} {
		mac.Write([]byte(s))
		mac.Write([]byte{0})
	}
	return hex.EncodeToString(mac.Sum(nil)[:16])
}

// FromSecret reads keys from a CSI request's secrets. ok is false when the secrets hold none of our keys; half a set is
// an Invalid error that names the missing one.
func FromSecret(secrets map[string]string) (keys Keys, ok bool, err error) {
	keys = Keys{
		AccessKeyID:     secrets[SecretAccessKeyID],
		SecretAccessKey: secrets[SecretSecretAccessKey],
		SessionToken:    secrets[SecretSessionToken],
	}
	switch {
	case keys == Keys{}:
		return Keys{}, false, nil
	case keys.AccessKeyID == "":
		return Keys{}, false, fault.Field("secrets."+SecretAccessKeyID, "is missing beside %s", SecretSecretAccessKey)
	case keys.SecretAccessKey == "":
		return Keys{}, false, fault.Field("secrets."+SecretSecretAccessKey, "is missing beside %s", SecretAccessKeyID)
	}
	for name, value := range map[string]string{SecretAccessKeyID: keys.AccessKeyID, SecretSecretAccessKey: keys.SecretAccessKey, SecretSessionToken: keys.SessionToken} {
		for _, r := range value {
			if r <= ' ' || r == 0x7f {
				return Keys{}, false, fault.Field("secrets."+name, "holds white space or a control character")
			}
		}
	}
	return keys, true, nil
}
