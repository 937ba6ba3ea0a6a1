package e2e

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/s3-csi/s3-csi-driver/tests/e2e/cluster"
)

// A pod's own client serves containers that kubelet starts before it, and the pod is deleted without a trace.
func TestPodClients(t *testing.T) {
	t.Parallel()
	ns := newNamespace(t)
	b := bucket(t)
	k, err := world.s3.AddUser(t.Context(), "pod-client-"+ns, everything)
	if err != nil {
		t.Fatal(err)
	}
	apply(t, ns, secret("s3-keys", k))
	put(t, b, "p/file", "from the bucket\n")
	apply(t, ns, fmt.Sprintf(`
apiVersion: v1
kind: Pod
metadata: {name: own-client}
spec:
  terminationGracePeriodSeconds: 1
  containers:
    - {name: user, image: %q, command: [sh, -c, %q], volumeMounts: [{name: data, mountPath: /v}]}
    - name: client
      image: %q
      command:
        - /usr/local/bin/s3-csi-fuse-starter
        - --fd-passing-socket-path=/fd/data.sock
        - --
        - /usr/local/bin/s3-csi-mountpoint
        - %s
        - /dev/fd/3
        - --prefix=p/
        - --region=us-east-1
        - --endpoint-url=http://s3.storage.svc:9000
        - --force-path-style
        - --allow-other
        - --dir-mode=0777
      env:
        - {name: AWS_ACCESS_KEY_ID, valueFrom: {secretKeyRef: {name: s3-keys, key: accessKeyID}}}
        - {name: AWS_SECRET_ACCESS_KEY, valueFrom: {secretKeyRef: {name: s3-keys, key: secretAccessKey}}}
      securityContext: {runAsUser: 1000, runAsNonRoot: true, allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
      volumeMounts: [{name: fd, mountPath: /fd}]
  volumes:
    - {name: fd, emptyDir: {medium: Memory}}
    - {name: data, csi: {driver: %s, volumeAttributes: {fdPassingEmptyDirName: fd, fdPassingSocketName: data.sock}}}
`, cluster.Busybox, forever, world.images.driver, b, csiName))
	pod := podReady(t, ns, "own-client")
	eventually(t, "the container that was started before the client to see the bucket", func() error {
		out, err := tryExecute(ns, "own-client", "cat", "/v/file")
		if err == nil && out != "from the bucket\n" {
			err = fmt.Errorf("it reads %q", out)
		}
		return err
	})
	execute(t, ns, "own-client", "sh", "-c", "echo from the pod >/v/new")
	if got := content(t, b, "p/new"); got != "from the pod\n" {
		t.Errorf("the object is %q", got)
	}
	remove(t, "pod", ns, "own-client")
	eventually(t, "the node to have nothing of the pod", func() error {
		if left := inlineMounts(t, pod); len(left) > 0 {
			return errors.New(strings.Join(left, ""))
		}
		return nil
	})
}
