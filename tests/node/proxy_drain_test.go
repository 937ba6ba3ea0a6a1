//go:build !lane || ordinary

package node

import (
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig/rigtest"
)

// A client that stores its files after the last unpublish does so through the proxy whose password has changed meanwhile.
func TestAProxyWhosePasswordChangesDuringADrain(t *testing.T) {
	rigtest.ProcessOnly(t, "what a helper sends through a proxy does not depend on who started it")
	t.Parallel()
	e := newEnv(t)
	const host, first, second = "s3.proxied.test", "first$secret", "second$secret"
	e.secrets = append(e.secrets, first, second)
	upstream, err := url.Parse(e.proxy.Endpoint())
	if err != nil {
		t.Fatal(err)
	}
	p := startForwardProxy(t, "driver:"+first, map[string]string{host + ":80": upstream.Host})
	login, config := filepath.Join(t.TempDir(), "proxy"), filepath.Join(e.Dir, "config.yaml")
	write(t, login, "driver:"+first)
	write(t, config, fmt.Sprintf("backends:\n  default:\n    endpoint: http://%s\n    region: %s\n    addressing: path\n    proxy: {url: %q, credentialsFile: "+
		"%q}\n", host, e.Rig.S3.Region, p.URL, login))
	e.Driver = e.Drive(t, "node", "--config="+config)
	v := static("proxy-drain", rclone)
	target := e.publish(v, "proxy-drain")
	p.change("driver:" + second)
	write(t, filepath.Join(target, "file"), "content")
	e.awaitBusy(v, target, "draining: 1 upload")
	if err := os.WriteFile(login, []byte("driver:"+second), 0o600); err != nil {
		t.Fatal(err)
	}
	e.await(2*time.Minute, "the file to be stored", func() bool { return e.tryUnpublish(20*time.Second, v, target) == nil })
	if got := e.Object(t, rigtest.Bucket, "proxy-drain/file"); got != "content" {
		t.Errorf("stored %q", got)
	}
	e.noSecretInFiles(e.State)
	e.NothingLeft(t)
}
