package bench

import (
	"os/exec"
	"testing"

	"github.com/s3-csi/s3-csi-driver/tests/internal/fuseclients"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// declaredClient is a client of Debian that the config file declares.
type declaredClient struct {
	name, program string
	config        func(s3 rig.S3, name string) string
	fusermount    bool // the bare client mounts by Debian's fusermount3
	static        bool // its volumes need a secret
}

func declaredClients() []declaredClient {
	rclone := func(fuse, command string) func(rig.S3, string) string {
		return func(s3 rig.S3, name string) string { return fuseclients.DeclareRclone(s3, name, fuse, command) }
	}
	return []declaredClient{
		{name: "debian-rclone-path", program: "rclone", config: rclone("path", "mount2")},
		{name: "debian-rclone-fusermount", program: "rclone", config: rclone("fusermount", "mount"), fusermount: true},
		{name: "debian-s3fs", program: "s3fs", config: fuseclients.DeclareS3fs, fusermount: true, static: true},
	}
}

// setup returns a node and its driver, which mounts with the client.
func (c declaredClient) setup(b *testing.B) (*rigtest.Node, *rig.Driver) {
	b.Helper()
	n := rigtest.New(b)
	if _, err := exec.LookPath("fusermount3"); c.fusermount && err != nil {
		b.Skip("the bare client needs fusermount3 of Debian: ", err)
	}
	b.ReportMetric(0, "ns/op") // has no meaning here
	return n, drive(b, n, c.name, fuseclients.Declare(b, n.Rig, c.program, c.name, c.config(n.Rig.S3, c.name)))
}

// secret is that of the client's volumes.
func (c declaredClient) secret(n *rigtest.Node) map[string]string {
	if !c.static {
		return nil
	}
	keys := n.Process.Keys()
	return map[string]string{"accessKeyID": keys.AccessKeyID, "secretAccessKey": keys.SecretAccessKey}
}
