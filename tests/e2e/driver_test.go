package e2e

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/tests/e2e/cluster"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
)

const (
	chartPath       = "charts/s3-csi-driver" // in a checkout
	chart           = root + "/" + chartPath
	driverNamespace = "s3-csi"
	release         = "s3-csi-driver"
	csiName         = "s3.csi.driver"
)

// driverImages are the images that the chart names.
type driverImages struct{ driver, provisioner, snapshotter, resizer, registrar, liveness string }

// chartImages asks the chart, so that it is deployed with its own words.
func (w *environment) chartImages(ctx context.Context) (i driverImages, err error) {
	out, err := w.Helm(ctx, "template", release, chart, "--namespace", driverNamespace, "--set", "snapshots.enabled=true,sidecars.resizer.enabled=true")
	if err != nil {
		return i, err
	}
	for _, m := range regexp.MustCompile(`(?m)^\s*image: "?([^\s"]+)"?$`).FindAllStringSubmatch(pinned.ReplaceAllString(out, ""), -1) {
		switch name := m[1]; {
		case strings.Contains(name, "csi-provisioner"):
			i.provisioner = name
		case strings.Contains(name, "csi-snapshotter"):
			i.snapshotter = name
		case strings.Contains(name, "csi-resizer"):
			i.resizer = name
		case strings.Contains(name, "registrar"):
			i.registrar = name
		case strings.Contains(name, "livenessprobe"):
			i.liveness = name
		default:
			i.driver = name
		}
	}
	if i.driver == "" || i.provisioner == "" || i.snapshotter == "" || i.resizer == "" || i.registrar == "" || i.liveness == "" {
		return i, fmt.Errorf("images of the chart: %+v", i)
	}
	return i, nil
}

// driverPrograms are the programs in the driver's image.
var driverPrograms = []string{"s3-csi-driver", "s3-csi-fuse-starter", "s3-csi-fusermount", "s3-csi-helper", "s3-csi-rclone", rig.OwnMountpoint}

// driverArchive is the file that make image writes below the directory of the built programs.
func driverArchive(bin string) string { return filepath.Join(bin, "image", runtime.GOARCH+".tar") }

// importDriver imports the images that the chart names: the driver's, which make image has built, the real external-provisioner,
// external-snapshotter and external-resizer, and stand-ins for node-driver-registrar and livenessprobe.
func (w *environment) importDriver(ctx context.Context) (err error) {
	if w.images, err = w.chartImages(ctx); err != nil {
		return err
	}
	sidecar := func(name, program string) cluster.Image {
		path := "/" + program
		return cluster.Image{Name: name, Dirs: []string{"tmp"}, Files: map[string]string{path: w.Program(program)}, Entrypoint: []string{path}}
	}
	if err := w.ImportArchive(ctx, w.images.driver, driverArchive(os.Getenv(rig.EnvBin))); err != nil {
		return err
	}
	return w.Import(ctx,
		sidecar(w.images.provisioner, "csi-provisioner"), sidecar(w.images.snapshotter, "csi-snapshotter"), sidecar(w.images.resizer, "csi-resizer"),
		sidecar(w.images.registrar, "registrar"), sidecar(w.images.liveness, "livenessprobe"))
}

// values are the chart's. They tell the driver of the S3 service by the names of Services in the cluster, which nodes cannot
// resolve by themselves.
const values = `
backends:
  default:
    endpoint: http://s3.storage.svc:9000
    region: us-east-1
    sts:
      endpoint: http://s3.storage.svc:9001
      kinds: [assumeRole, webIdentity, federationToken]
      audience: ` + audience + `
  tenants:
    endpoint: http://s3.storage.svc:9000
    region: us-east-1
    controllerCredentials: secret
    sts:
      endpoint: http://s3.storage.svc:9001
      kinds: [assumeRole, webIdentity, federationToken]
  slow:
    endpoint: http://s3.storage.svc:9002
    region: us-east-1
    sts:
      endpoint: http://s3.storage.svc:9001
      kinds: [assumeRole, webIdentity, federationToken]
  minio: # as examples/ have it
    endpoint: http://s3.storage.svc:9000
    region: us-east-1
    controllerCredentials: secret
    adoptUntaggedBuckets: true
    sts:
      endpoint: http://s3.storage.svc:9001
      kinds: [federationToken]
driverCredentials: {secretName: s3-keys, controller: true, node: true}
rbac: {secrets: true}
inlineVolumes: true
podClients: {enabled: true}
snapshots: {enabled: true}
clones: {enabled: true}
sidecars:
  resizer: {enabled: true, image: {digest: ""}}
` + sidecarTags

// noDigests are values of the chart by which it names images by their tags alone: those of the tests' cluster are made here.
const noDigests = "sidecars:\n" + sidecarTags

// sidecarTags are the sidecars that every installation has, in noDigests.
const sidecarTags = `
  provisioner: {image: {digest: ""}}
  snapshotter: {image: {digest: ""}}
  nodeDriverRegistrar: {image: {digest: ""}}
  livenessProbe: {image: {digest: ""}}
`

// pinned is an image's digest in a manifest.
var pinned = regexp.MustCompile(`(?m)@sha256:[0-9a-f]{64}$`)

// audience is that of the tokens which the S3 service's STS takes.
const audience = "s3.e2e.test"

// s3Service lets pods find the S3 service, which is outside of the cluster, by a name.
const s3Service = `
apiVersion: v1
kind: Namespace
metadata: {name: storage}
---
apiVersion: v1
kind: Service
metadata: {name: s3, namespace: storage}
spec: {ports: [{name: s3, port: 9000}, {name: sts, port: 9001}, {name: slow, port: 9002}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: s3, namespace: storage, labels: {kubernetes.io/service-name: s3}}
addressType: IPv4
endpoints: [{addresses: [MACHINE]}]
ports: [{name: s3, port: 9000}, {name: sts, port: 9001}, {name: slow, port: 9002}]
---
apiVersion: v1
kind: Namespace
metadata: {name: ` + driverNamespace + `, labels: {pod-security.kubernetes.io/enforce: privileged}}
`

// everything is the policy of the driver's own user.
const everything = `{"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": ["s3:*", "sts:*"], "Resource": "*"}]}`

// install installs the driver with the chart, and waits until it is there.
func (w *environment) install(ctx context.Context) error {
	k, err := w.s3.AddUser(ctx, "driver", everything)
	if err != nil {
		return err
	}
	if err := w.s3.AddIssuer(ctx, w.issuer.URL(), audience); err != nil {
		return err
	}
	w.keys = k
	if err := w.surround(ctx); err != nil {
		return err
	}
	return w.upgrade(ctx, "install")
}

// surround makes what the chart's values name: the driver's namespace with its keys, and the Service of the S3 service.
func (w *environment) surround(ctx context.Context) error {
	if _, err := w.Kubectl(ctx, []byte(strings.ReplaceAll(s3Service, "MACHINE", w.MachineIP())), "apply", "-f", "-"); err != nil {
		return err
	}
	_, err := w.Kubectl(ctx, []byte(secret("s3-keys", w.keys)), "apply", "-n", driverNamespace, "-f", "-")
	return err
}

// secret is a Secret with keys.
func secret(name string, k credentials.Keys) string {
	return fmt.Sprintf("apiVersion: v1\nkind: Secret\nmetadata: {name: %s}\nstringData: {accessKeyID: %q, secretAccessKey: %q}\n", name, k.AccessKeyID,
		k.SecretAccessKey)
}

// upgrade brings the driver to what the chart makes of the values and settings (name=value), and waits until it is there.
func (w *environment) upgrade(ctx context.Context, verb string, settings ...string) error {
	file := filepath.Join(w.Dir, "values.yaml")
	if err := os.WriteFile(file, []byte(values), 0o600); err != nil {
		return err
	}
	args := []string{verb, release, chart, "--namespace", driverNamespace, "--values", file}
	for _, s := range settings {
		args = append(args, "--set", s)
	}
	if _, err := w.Helm(ctx, args...); err != nil {
		return err
	}
	return w.deployed(ctx)
}

// deployed waits until all pods of the driver are there and ready.
func (w *environment) deployed(ctx context.Context) error {
	for _, name := range []string{"daemonset/" + release + "-node", "deployment/" + release + "-controller"} {
		if _, err := w.Kubectl(ctx, nil, "rollout", "status", "-n", driverNamespace, name, "--timeout=2m"); err != nil {
			pods, _ := w.Kubectl(ctx, nil, "describe", "pods", "-n", driverNamespace)
			events, _ := w.Kubectl(ctx, nil, "get", "events", "-n", driverNamespace, "--field-selector=type=Warning")
			logs, _ := w.Kubectl(ctx, nil, "logs", "-n", driverNamespace, name, "--all-containers", "--tail=30")
			return fmt.Errorf("%w\n%s\n%s\n%s", err, pods, events, logs)
		}
	}
	return nil
}
