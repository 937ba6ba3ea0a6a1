package creds

import (
	"testing"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/mounttest"
	"github.com/s3-csi/s3-csi-driver/pkg/policy"
)

// A measurement has a session of its own, from the publication's credentials and by the operator's rules. No helper gets it.
func TestSessionsForUsage(t *testing.T) {
	f := newFixture(t, mounttest.S3{}, credentials.AssumeRole)
	r := mount.Request{Source: credentials.SourceSecret, Keys: credentials.Keys{AccessKeyID: "k", SecretAccessKey: "s"}, SecretRoleARN: "role",
		PodNamespace: "team-a", Ephemeral: true}
	spec := mount.Spec{Bucket: "bucket", Prefix: "v/", Source: credentials.SourceSecret, RoleARN: "arn:aws:iam::1:role/a", Scope: "required"}
	const record = ".s3-csi/volumes/v"
	keys, err := f.UsageKeys(t.Context(), r, spec, mount.RecordPlace{Key: record})
	if err != nil || keys.SessionToken == "" {
		t.Fatalf("%v", err)
	}
	if len(f.helper.Given()) > 0 {
		t.Error("the helper was given something")
	}
	q := f.tokens.Planned[0]
	if q.Allowed || !q.Ephemeral || q.Keys != r.Keys || q.SecretRoleARN != "role" || q.Pod.Namespace != "team-a" || q.RoleARN != spec.RoleARN ||
		q.Scope != "required" {
		t.Errorf("planned for another publication: bucket %s, role %s, scope %s, pod %+v, allowed %t", q.Bucket, q.RoleARN, q.Scope, q.Pod, q.Allowed)
	}
	got, err := q.Policy(true, "aws-cn")
	want, wantErr := policy.Scope{Partition: "aws-cn", Bucket: "bucket", Prefix: "v/", AWS: true, KMS: true}.Usage(record, false)
	if err != nil || wantErr != nil || got != want {
		t.Errorf("policy %s, %v; want %s, %v", got, err, want, wantErr)
	}
}
