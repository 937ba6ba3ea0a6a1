//go:build !lane || deploy

package e2e

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
)

// TestOffClusterController: the controller and its provisioner run on a machine outside of the cluster, with the command lines and
// the rights that deploy/off-cluster gives them, and make and delete volumes of the cluster's nodes.
func TestOffClusterController(t *testing.T) {
	ns := newNamespace(t)
	b := bucket(t)
	t.Cleanup(func() { // after all that the test starts has ended
		if _, err := try("delete", "--ignore-not-found", "-k", offCluster); err != nil {
			t.Error(err)
		}
		deploy(t)
	})
	if _, err := world.Helm(t.Context(), "upgrade", release, chart, "--namespace", driverNamespace, "--values", filepath.Join(world.Dir, "values.yaml"), "--set",
		"nodeComponentOnly=true"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the controllers in the cluster to be gone", func() error {
		if pods := list(t, "pods", driverNamespace, "-l", "app.kubernetes.io/component=controller"); len(pods) > 0 {
			return fmt.Errorf("there are %d", len(pods))
		}
		return nil
	})
	kubectl(t, "apply", "-k", offCluster)
	dir := machineDir(t)
	controller := dir.start(t, "s3-csi-controller", dir.keys(t))
	provisioner := dir.start(t, "s3-csi-provisioner")

	claim(t, ns, "data", class(t, map[string]string{"bucketName": b, "prefix": "${pvc.namespace}/", "client": "rclone"}), "ReadWriteMany")
	claim(t, ns, "failing", class(t, map[string]string{"bucketName": b + "-gone"}), "ReadWriteMany")
	v := bound(t, ns, "data")
	if !strings.HasPrefix(v.Spec.CSI.VolumeHandle, "default:"+b+"/"+ns+"/") {
		t.Errorf("the volume is %s", v.Spec.CSI.VolumeHandle)
	}
	event(t, ns, "failing", "parameters.bucketName")
	_, prefix := place(t, v)
	podSpec{name: "p", claims: map[string]string{"/v": "data"}, command: "echo written >/v/file && " + forever}.run(t, ns)
	remove(t, "pod", ns, "p")
	if all := keys(t, b, prefix); !slices.Equal(all, []string{prefix + "file"}) {
		t.Errorf("S3 has %q", all)
	}
	remove(t, "pvc", ns, "data")
	remove(t, "pvc", ns, "failing")
	erased(t, v)
	for _, p := range []*unitProcess{provisioner, controller} {
		if said := p.said.String(); strings.Contains(said, "forbidden") {
			t.Errorf("%s was refused something:\n%s", p.name, said)
		}
	}
	_ = provisioner.stop(t) // how it ends is its own affair
	if err := controller.stop(t); err != nil {
		t.Errorf("the controller ended with %v:\n%s", err, controller.said.String())
	}
}

// machineDir makes it.
func machineDir(t testing.TB) outside {
	t.Helper()
	path, err := os.MkdirTemp("", "s3csi-machine-") //nolint:usetesting // only root may enter t.TempDir
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(path) })
	dir := outside(path)
	config := fmt.Sprintf(`
backends:
  default:
    endpoint: %s
    region: %s
    sts:
      endpoint: %s
      kinds: [assumeRole, webIdentity, federationToken]
`, world.s3.Endpoint(), world.s3.Region(), world.s3.STS())
	err = errors.Join(os.Chmod(path, 0o755), os.Mkdir(dir.in("run"), 0o755), os.Chmod(dir.in("run"), 0o700),
		os.Chown(dir.in("run"), offClusterUser, offClusterUser),
		os.Mkdir(dir.in("bin"), 0o755), os.Symlink(os.Getenv("KUBECTL"), dir.in("bin/kubectl")),
		rig.CopyProgram(filepath.Join(os.Getenv(rig.EnvBin), "s3-csi-driver"), dir.in("bin/s3-csi-driver")),
		rig.CopyProgram(world.Program("csi-provisioner"), dir.in("bin/csi-provisioner")),
		os.WriteFile(dir.in("config.yaml"), []byte(config), 0o644))
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the provisioner's kubeconfig", func() error { // its token is made by a controller of the cluster
		cmd := exec.CommandContext(t.Context(), filepath.Join(offCluster, "kubeconfig"))
		cmd.Env = append(os.Environ(), "KUBECONFIG="+world.Kubeconfig(), "PATH="+dir.in("bin")+":"+os.Getenv("PATH"))
		out, err := cmd.Output()
		if exit, ok := errors.AsType[*exec.ExitError](err); ok {
			err = fmt.Errorf("%w: %s", err, exit.Stderr)
		}
		if err == nil {
			err = errors.Join(os.WriteFile(dir.in("kubeconfig"), out, 0o600), os.Chown(dir.in("kubeconfig"), offClusterUser, offClusterUser))
		}
		return err
	})
	return dir
}
