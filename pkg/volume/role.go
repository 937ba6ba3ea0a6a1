package volume

import (
	"fmt"
	"strings"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// The values of parameter scope: whether a mount gets a session that is limited to its volume.
const (
	ScopeRequired = "required" // always, or the mount is refused
	ScopeAuto     = "auto"     // if the backend's configuration allows it
	ScopeOff      = "off"      // never
)

// maxRole bounds a role's ARN, in bytes, including IAM's longest path and name (IAM User Guide, "IAM and AWS STS quotas").
const maxRole = 640

// The templates of a role, and the keys with which kubelet sends their values (podInfoOnMount).
const (
	roleNamespace      = "pod.namespace"
	roleServiceAccount = "pod.serviceAccountName"
)

// Role is the ARN of a role, whose path and name may contain the templates ${pod.namespace} and ${pod.serviceAccountName}. "" is
// none.
type Role string

// rolePiece is a part of a role: literal text, or the name of a template.
type rolePiece struct{ text, template string }

// Check refuses a role that is not arn:<partition>:iam::<account>:role/<path and name>. On services other than AWS the account may
// be empty or a name. The error continues a sentence about the role.
func (r Role) Check() error {
	_, err := r.split()
	return err
}

// Templated reports whether a role depends on the pod.
func (r Role) Templated() bool { return strings.Contains(string(r), "${") }

// Expand replaces the templates by a pod's namespace and service account. The error is a Precondition if they are needed and
// unknown.
func (r Role) Expand(namespace, serviceAccount string) (string, error) {
	pieces, err := r.split()
	if err != nil {
		return "", fault.Errorf(fault.Invalid, "role %q %w", printableRole(r), err)
	}
	var b strings.Builder
	for _, p := range pieces {
		value := p.text
		switch p.template {
		case roleNamespace:
			value = namespace
		case roleServiceAccount:
			value = serviceAccount
		}
		if p.template != "" && !isSegment(value, 253) { // a DNS name (Kubernetes, "Object Names and IDs")
			if value == "" {
				return "", fault.Errorf(fault.Precondition, "role %s needs the pod's namespace and service account, and the request does not have them; "+
					"set podInfoOnMount: true in the CSIDriver object, or name a role without templates", r)
			}
			return "", fault.Errorf(fault.Precondition, "role %s: %q, the value of ${%s} in the request, is not valid in a role's name", r, printable(value), p.template)
		}
		b.WriteString(value)
	}
	return b.String(), nil
}

func (r Role) split() (pieces []rolePiece, err error) {
	if len(r) > maxRole {
		return nil, fmt.Errorf("has %d bytes, the maximum is %d", len(r), maxRole)
	}
	const form = "is not a role's ARN such as arn:aws:iam::111122223333:role/name"
	parts := strings.SplitN(string(r), ":", 6)
	if len(parts) != 6 || parts[0] != "arn" || !isName(parts[1], 32) || parts[2] != "iam" || parts[3] != "" || parts[4] != "" && !isSegment(parts[4], 64) {
		return nil, fmt.Errorf("%s", form)
	}
	name, ok := strings.CutPrefix(parts[5], "role/")
	if !ok || name == "" || strings.HasPrefix(name, "/") || strings.HasSuffix(name, "/") || strings.Contains(name, "//") {
		return nil, fmt.Errorf("%s", form)
	}
	pieces = []rolePiece{{text: strings.Join(parts[:5], ":") + ":role/"}}
	for name != "" {
		literal, rest, found := strings.Cut(name, "${")
		for i := range len(literal) {
			if c := literal[i]; !isSegmentByte(c) && !strings.ContainsRune("+=,@/", rune(c)) {
				return nil, fmt.Errorf("contains %q, which is not valid in a role's name", c)
			}
		}
		pieces = append(pieces, rolePiece{text: literal})
		if !found {
			break
		}
		template, rest, closed := strings.Cut(rest, "}")
		switch {
		case !closed:
			return nil, fmt.Errorf(`contains "${" without "}"`)
		case template != roleNamespace && template != roleServiceAccount:
			return nil, fmt.Errorf("contains the unknown template ${%s}; there are ${%s}, ${%s}", printable(template), roleNamespace, roleServiceAccount)
		}
		pieces = append(pieces, rolePiece{template: template})
		name = rest
	}
	return pieces, nil
}

// printableRole returns a role for an error text, on one line.
func printableRole(r Role) string { return printable(string(r)) }
