package volume

import (
	"errors"
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

// Check refuses a role that is not arn:<partition>:iam::<account>:role/<path and name>. On services other than AWS the account may
// be empty or a name. The error continues a sentence about the role.
func (r Role) Check() error {
	if len(r) > maxRole {
		return fmt.Errorf("has %d bytes, the maximum is %d", len(r), maxRole)
	}
	parts := strings.SplitN(string(r), ":", 6)
	valid := len(parts) == 6 && parts[0] == "arn" && IsName(parts[1], 32) && parts[2] == "iam" && parts[3] == "" && (parts[4] == "" || isSegment(parts[4], 64))
	name, ok := strings.CutPrefix(parts[len(parts)-1], "role/")
	if !valid || !ok || name == "" || strings.HasPrefix(name, "/") || strings.HasSuffix(name, "/") || strings.Contains(name, "//") {
		return errors.New("is not a role's ARN such as arn:aws:iam::111122223333:role/name")
	}
	name = fillTemplates(name, "x", "x")
	if _, rest, found := strings.Cut(name, "${"); found {
		template, _, closed := strings.Cut(rest, "}")
		if !closed {
			return errors.New(`contains "${" without "}"`)
		}
		return fmt.Errorf("contains the unknown template ${%s}; there are ${%s}, ${%s}", printable(template), roleNamespace, roleServiceAccount)
	}
	for i := range len(name) {
		if c := name[i]; !isSegmentByte(c) && !strings.ContainsRune("+=,@/", rune(c)) {
			return fmt.Errorf("contains %q, which is not valid in a role's name", c)
		}
	}
	return nil
}

func fillTemplates(text, namespace, serviceAccount string) string {
	return strings.NewReplacer("${"+roleNamespace+"}", namespace, "${"+roleServiceAccount+"}", serviceAccount).Replace(text)
}

// Templated reports whether a role depends on the pod.
func (r Role) Templated() bool { return strings.Contains(string(r), "${") }

// Expand replaces the templates by a pod's namespace and service account. The error is a Precondition if they are needed and
// unknown.
func (r Role) Expand(namespace, serviceAccount string) (string, error) {
	if err := r.Check(); err != nil {
		return "", fault.Errorf(fault.Invalid, "role %q %w", printable(string(r)), err)
	}
	for template, value := range map[string]string{roleNamespace: namespace, roleServiceAccount: serviceAccount} {
		switch used := strings.Contains(string(r), "${"+template+"}"); {
		case !used || isSegment(value, 253): // a DNS name (Kubernetes, "Object Names and IDs")
		case value == "":
			return "", fault.Errorf(fault.Precondition, "role %s needs the pod's namespace and service account, and the request does not have them; "+
				"set podInfoOnMount: true in the CSIDriver object, or name a role without templates", r)
		default:
			return "", fault.Errorf(fault.Precondition, "role %s: %q, the value of ${%s} in the request, is not valid in a role's name", r, printable(value), template)
		}
	}
	return fillTemplates(string(r), namespace, serviceAccount), nil
}
