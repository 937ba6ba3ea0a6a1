package create

import (
	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// admit refuses what no node would mount: a scope below the backend's, and what the operator's rules do not allow. Nodes check each
// publication against the same rules, with what only they know: the pod's service account and the secret.
func admit(be backend.Backend, r Request) error {
	node := r.Parameters.Node
	if _, err := be.ScopeOf(node.Scope); err != nil {
		return err
	}
	if err := backend.CheckTemplates(node.RoleARN); err != nil {
		return fault.Field("parameters.roleARN", "%q %w", node.RoleARN, err)
	}
	return be.Allows(backend.Use{
		Namespace: r.Namespace, Bucket: r.Parameters.BucketFor(r.Name), RoleARN: foreseeableRole(be, node, r.Namespace), Source: node.Credentials, Creation: true,
	})
}

// foreseeableRole returns the role that the volume's mounts assume, where that does not depend on the pod; "" otherwise. Pods use claims
// of their own namespace only.
func foreseeableRole(be backend.Backend, node volume.Attributes, namespace string) string {
	role := volume.Role(node.RoleARN)
	if role == "" && node.Credentials == credentials.SourceWorkload {
		role = volume.Role(be.WorkloadRoleARN)
	}
	if !role.Templated() {
		return string(role)
	}
	// If two service accounts result in the same role, it does not depend on them.
	one, err := role.Expand(namespace, "a")
	other, _ := role.Expand(namespace, "b")
	if err != nil || one != other {
		return ""
	}
	return one
}
