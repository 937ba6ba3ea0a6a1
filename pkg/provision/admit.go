package provision

import (
	"slices"
	"strings"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/policy"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// admit refuses what no node would mount: a scope below the backend's, and what the operator's rules do not allow. What only a
// node can know (the pod's service account, what is in a secret) is not looked at here; nodes hold each publication against the
// same rules.
func admit(be backend.Backend, r CreateRequest) error {
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

// foreseeableRole is the role that the volume's mounts take on, where that does not depend on the pod; "" otherwise. Pods use
// claims of their own namespace only.
func foreseeableRole(be backend.Backend, node volume.Attributes, namespace string) string {
	role := volume.Role(node.RoleARN)
	if role == "" && node.Credentials == credentials.SourceWorkload {
		role = volume.Role(be.WorkloadRoleARN)
	}
	if !role.Templated() {
		return string(role)
	}
	// Two service accounts that make one role of it are no part of it.
	one, err := role.Expand(namespace, "a")
	other, _ := role.Expand(namespace, "b")
	if err != nil || one != other {
		return ""
	}
	return one
}

// scopeRequired tells whether mounts of the volume must have a session that reaches no further than the volume.
func scopeRequired(be backend.Backend, params volume.Parameters) bool {
	scope, err := be.ScopeOf(params.Node.Scope)
	return err == nil && scope == volume.ScopeRequired
}

// expressible refuses a volume with scope: required that no session can be limited to, whatever it is made from: because the
// backend's service makes none, or because no policy can describe the place.
func expressible(be backend.Backend, bucket, prefix string, node volume.Attributes) error {
	source := node.Credentials
	if source == "" {
		source = credentials.SourceDriver // or a secret, which is the same here
	}
	kinds := []credentials.Kind{credentials.AssumeRole, credentials.WebIdentity, credentials.FederationToken}
	switch source {
	case credentials.SourceWorkload:
		kinds = []credentials.Kind{credentials.WebIdentity, credentials.PodIdentity}
	case credentials.SourceSecret:
		kinds = []credentials.Kind{credentials.AssumeRole, credentials.FederationToken}
	}
	if !slices.ContainsFunc(kinds, be.Makes) {
		return fault.Errorf(fault.Precondition, "scope: required cannot be had with credentials: %s on %s: its service is not known to make sessions. "+
			"If it has a security token service, declare it for the backend (sts, sts.kinds); else give the volume another scope", source, be)
	}
	_, err := policy.Scope{Partition: be.Partition(), Bucket: bucket, Prefix: prefix, ReadOnly: node.ReadOnly, Needs: policy.Needs{Delete: true}, KMS: be.AWS(), AWS: be.AWS()}.Session() // the longest that a client may need
	if err != nil {
		where := "parameters.prefix"
		if prefix == "" {
			where = "parameters.bucketNamePrefix"
		} else if strings.HasSuffix(bucket, "--x-s3") {
			where = "parameters.bucketName"
		}
		return fault.Errorf(fault.Precondition, "%s: scope: required cannot be had: %w", where, err)
	}
	return nil
}
