package credentials

import (
	"errors"
	"strings"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// SecretRoleARN is the key of a CSI secret for the role to assume with its keys, if the volume has none.
const SecretRoleARN = "roleARN"

// maxRoleARN bounds a role's ARN, in bytes (STS API Reference, AssumeRole, RoleArn).
const maxRoleARN = 2048

// Role is a parsed ARN of a role.
type Role struct {
	Partition string // "aws", "aws-cn", "minio"
	Account   string // 12 digits on AWS; "" or a name on other services
	Name      string // with its path: "team/reader"
}

// ParseRole parses arn:<partition>:iam::<account>:role/<path and name>. On services other than AWS the account is empty
// (arn:minio:iam:::role/…) or a name. The error continues a sentence about the ARN and does not repeat it.
func ParseRole(arn string) (Role, error) {
	if len(arn) > maxRoleARN {
		return Role{}, errors.New("is too long for a role's ARN")
	}
	p := strings.SplitN(arn, ":", 6)
	if len(p) != 6 || p[0] != "arn" || p[2] != "iam" || p[3] != "" {
		return Role{}, errors.New("is not a role's ARN such as arn:aws:iam::111122223333:role/name")
	}
	name, ok := strings.CutPrefix(p[5], "role/")
	r := Role{Partition: p[1], Account: p[4], Name: name}
	switch {
	case r.Partition == "" || !made(r.Partition, "-"):
		return Role{}, errors.New("has an invalid partition")
	case !made(r.Account, "-_."):
		return Role{}, errors.New("has an invalid account")
	case (r.Partition == "aws" || strings.HasPrefix(r.Partition, "aws-")) && r.Account != "" &&
		!IsAccount(r.Account):
		return Role{}, errors.New("has an account that is not 12 digits")
	case !ok:
		return Role{}, errors.New("is not a role's ARN: :role/ is missing")
	case strings.HasPrefix(name, "/") || strings.HasSuffix(name, "/") || strings.Contains(name, "//") || name == "" || !made(name, "+=,.@-_/"):
		return Role{}, errors.New("has an invalid role name")
	}
	return r, nil
}

// RoleFromSecret returns the role in a CSI request's secrets, or "". The error is Invalid and names the key.
func RoleFromSecret(secrets map[string]string) (string, error) {
	arn := secrets[SecretRoleARN]
	if arn == "" {
		return "", nil
	}
	if _, err := ParseRole(arn); err != nil {
		return "", fault.Field("secrets."+SecretRoleARN, "%w", err)
	}
	return arn, nil
}

// made reports whether s has only ASCII letters, digits and the others.
func made(s, others string) bool {
	for _, c := range []byte(s) {
		if (c < '0' || c > '9') && (c < 'A' || c > 'Z') && (c < 'a' || c > 'z') && strings.IndexByte(others, c) < 0 {
			return false
		}
	}
	return true
}

// IsAccount reports whether s is the id of an AWS account.
func IsAccount(s string) bool { return len(s) == 12 && strings.Trim(s, "0123456789") == "" }
