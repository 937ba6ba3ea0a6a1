//go:build !lane || ordinary

package credentials

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
	"github.com/s3-csi/s3-csi-driver/tests/internal/s3server"
	"github.com/s3-csi/s3-csi-driver/tests/policy"
)

// A mount works with all that its pod does, and its session, taken from where its client has it, does nothing else.
func TestAMountsSessionReachesItsVolumeAlone(t *testing.T) {
	e := start(t)
	type mount struct {
		client string
		from   source
		scope  policy.Scope
		pairs  []string
		flags  []string
	}
	var mounts []mount
	for _, from := range e.sources() {
		mounts = append(mounts, mount{rclone, from, policy.Writing, nil, nil})
	}
	mounts = append(mounts,
		mount{mountpoint, e.workload(true), policy.Keeping, nil, []string{"allow-delete=false"}},
		mount{mountpoint, e.secretOf(e.user), policy.Writing, nil, nil},
		mount{mountpoint, e.own(), policy.Reading, []string{"readOnly", "true"}, nil},
		mount{rclone, e.workload(true), policy.Reading, []string{"readOnly", "true"}, nil},
		mount{rclone, e.secretWithRole(), policy.Whole, []string{"prefix", ""}, nil},
		mount{mountpoint, e.own(), policy.WholeRead, []string{"prefix", "", "readOnly", "true"}, nil},
	)
	for _, m := range mounts {
		t.Run(fmt.Sprintf("%s, %s, %s", m.client, m.from.name, m.scope), func(t *testing.T) {
			e.t = t
			p := policy.NewPlace(t, e.service(), true)
			v := volume("scoped-"+p.Bucket, m.client, slices.Concat([]string{"bucketName", p.Bucket, "prefix", policy.Prefix}, m.pairs)...)
			if v.GetVolumeContext()["prefix"] == "" {
				delete(v.GetVolumeContext(), "prefix")
			}
			target := e.publish(v, "t", source{m.from.name, func(r *csi.NodePublishVolumeRequest) {
				m.from.bring(r)
				r.GetVolumeCapability().GetMount().MountFlags = m.flags
			}})
			root := target
			if m.scope == policy.Whole || m.scope == policy.WholeRead {
				root = filepath.Join(target, policy.Prefix)
			}
			useMount(t, root, m.scope)
			policy.Try(t, p, m.scope, e.session(m.client))
			e.unpublish(v, target)
			e.NothingLeft(t)
		})
	}
	e.t = t
}

// useMount does with a volume's files what the scope lets a client do.
func useMount(t *testing.T, root string, scope policy.Scope) {
	t.Helper()
	if b, err := os.ReadFile(filepath.Join(root, "dir", "b")); err != nil || string(b) != policy.Prefix+"dir/b" {
		t.Errorf("reading: %q, %v", b, err)
	}
	entries, err := os.ReadDir(root)
	if err != nil || !slices.ContainsFunc(entries, func(d fs.DirEntry) bool { return d.Name() == "a" }) {
		t.Errorf("listing: %v, %v", entries, err)
	}
	file := filepath.Join(root, "through-the-mount")
	err = os.WriteFile(file, []byte("x"), 0o644)
	switch scope {
	case policy.Reading, policy.WholeRead:
		if !errors.Is(err, fs.ErrPermission) && (err == nil || !strings.Contains(err.Error(), "read-only")) {
			t.Errorf("writing to a read-only volume: %v", err)
		}
		return
	case policy.Keeping:
		if err != nil {
			t.Errorf("writing: %v", err)
		}
		return
	}
	if err != nil {
		t.Errorf("writing: %v", err)
	}
	// Some clients store a file when its last handle is released, which may be after close.
	rigtest.Await(t, 10*time.Second, "the file to be stored and removed", func() bool {
		err = os.Remove(file)
		return !errors.Is(err, fs.ErrNotExist)
	})
	if err != nil {
		t.Errorf("removing: %v", err)
	}
}

// A service that takes session policies and does not enforce them is found out, and nothing is mounted.
func TestAServiceThatIgnoresPoliciesIsRefusedWhereScopeIsRequired(t *testing.T) {
	e := start(t)
	e.sts(s3server.STS{IgnorePolicies: true})
	v := volume("wide", rclone)
	err := e.tryPublish(v, e.Target("t"), e.workload(true))
	if status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "enforce") {
		t.Errorf("publishing: %v, want FAILED_PRECONDITION that says that policies are not enforced", err)
	}
	e.NothingLeft(t)
}

// A refusal of the token service is reported at once, with its own code.
func TestTokenService_RefusalsAreReported(t *testing.T) {
	e := start(t)
	other := source{"a role that does not trust the pod", func(r *csi.NodePublishVolumeRequest) {
		e.workload(true).bring(r)
		r.VolumeContext["roleARN"] = s3server.RoleARN("somebody-elses")
	}}
	expired := source{"an expired token", func(r *csi.NodePublishVolumeRequest) {
		e.workload(true).bring(r)
		r.Secrets[tokensKey] = tokens(e, -1)
	}}
	for _, tt := range []struct {
		from      source
		behaviour s3server.STS
		code      codes.Code
		words     []string
	}{
		{other, s3server.STS{}, codes.PermissionDenied, []string{"somebody-elses"}},
		{expired, s3server.STS{}, codes.Unauthenticated, []string{"expired"}},
		{e.workload(true), s3server.STS{Fault: s3server.FaultRefuse}, codes.PermissionDenied, []string{e.role}},
		{e.workload(true), s3server.STS{Fault: s3server.FaultThrottle}, codes.Aborted, []string{"Throttling"}},
		{e.workload(true), s3server.STS{Fault: s3server.FaultDown}, codes.Unavailable, []string{"connection refused"}},
		{e.workload(true), s3server.STS{Fault: s3server.FaultUnavailable}, codes.Unavailable, []string{"503"}},
		{e.workload(true), s3server.STS{MaxPacked: 1}, codes.FailedPrecondition, []string{"PackedPolicyTooLarge"}},
	} {
		e.sts(tt.behaviour)
		err := e.tryPublish(volume("refused", rclone), e.Target("t"), tt.from)
		if status.Code(err) != tt.code {
			t.Errorf("%s, %+v: %v, want %s", tt.from.name, tt.behaviour, err, tt.code)
			continue
		}
		for _, w := range tt.words {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%s, %+v: the error does not say %q: %v", tt.from.name, tt.behaviour, w, err)
			}
		}
	}
	e.NothingLeft(t)
}
