package minio

import (
	"crypto/sha1" // MinIO names a role with it, which protects nothing
	"encoding/base64"
)

// OpenID is the environment (see Start) that makes a server believe an OpenID Connect issuer's tokens of one audience.
// Sessions of theirs may do what the policy of that name allows ("readwrite" is built in) and the session policy too.
// The issuer is asked at the start, so it must be there.
func OpenID(issuer, audience, policy string) []string {
	return []string{
		"MINIO_IDENTITY_OPENID_CONFIG_URL=" + issuer + "/.well-known/openid-configuration",
		"MINIO_IDENTITY_OPENID_CLIENT_ID=" + audience,
		"MINIO_IDENTITY_OPENID_ROLE_POLICY=" + policy,
	}
}

// RoleARN is the role of the tokens of an audience. MinIO also says it in its log, in "IAM Roles:", but not to a quiet one.
func RoleARN(audience string) string {
	sum := sha1.Sum([]byte(audience))
	return "arn:minio:iam:::role/" + base64.RawURLEncoding.EncodeToString(sum[:])
}
