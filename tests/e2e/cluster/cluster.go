// Package cluster runs a real Kubernetes of one node for tests: etcd, API server, controller manager, scheduler, kubelet and
// kube-proxy, containerd and runc, as units of a systemd that is PID 1 of namespaces of its own. It is no container of the
// machine: the node has its own mounts, processes, network and cgroups, and can be switched off.
//
//	machine ── 10.80.0.1 ═ cable ═ 10.80.0.2 ── node ── 10.85.0.0/24 pods
//
// The second number of the cable's addresses is another one for each cluster of the machine.
//
// What is on the machine (S3 servers, the tests) is a host of its own to the cluster. Nothing outlives the process that runs it.
package cluster

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/s3-csi/s3-csi-driver/tests/internal/systemd"
)

// EnvPrograms names the directory of the cluster's programs, as make builds them.
const EnvPrograms = "S3CSI_CLUSTER_BIN"

const (
	readyTimeout = 2 * time.Minute
	offTimeout   = 90 * time.Second
	runTimeout   = 5 * time.Minute
)

// Cluster is a running Kubernetes.
type Cluster struct {
	// Dir holds what the machine has of the cluster: kubeconfigs, certificates.
	Dir      string
	programs string
	node     *systemd.Instance
	net      int       // the cable's network is one of these
	lock     io.Closer // on it
	ca       *authority
	keySet   string
	api      *api
}

// Options say what a cluster is to be like.
type Options struct {
	// Issuer is the URL that service accounts' tokens name as their issuer. The caller publishes KeySet there.
	Issuer string
}

// Unusable says why no cluster can run here; "": it can.
func Unusable() string {
	if os.Getuid() != 0 {
		return "needs root: it boots a node in namespaces"
	}
	dir := os.Getenv(EnvPrograms)
	if dir == "" {
		return "needs the cluster's programs: set " + EnvPrograms + " to their directory (make e2e builds them)"
	}
	for _, name := range []string{"kube", "containerd", "containerd-shim-runc-v2", "ctr", "runc", "coredns", "csi-provisioner", "csi-snapshotter",
		"snapshot-controller", "snapshot-crds", "registrar", "livenessprobe", "pause", "agnhost"} {
		if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
			return "needs the cluster's programs: " + err.Error()
		}
	}
	for _, file := range []string{"/usr/lib/cni/bridge", "/usr/sbin/iptables", "/usr/sbin/ip", "/bin/busybox"} {
		if _, err := os.Stat(file); err != nil {
			return "needs the packages containernetworking-plugins, iptables, iproute2 and busybox-static: " + err.Error()
		}
	}
	return ""
}

// Start boots a cluster and returns when its node is ready. Close takes it away.
func Start(ctx context.Context, o Options) (*Cluster, error) {
	if why := Unusable(); why != "" {
		return nil, errors.New(why)
	}
	c := &Cluster{programs: os.Getenv(EnvPrograms)}
	err := c.chooseNetwork(ctx)
	if err != nil {
		return nil, err
	}
	if c.Dir, err = os.MkdirTemp("", "s3csi-cluster-"); err != nil {
		return nil, errors.Join(err, c.lock.Close())
	}
	c.node, err = systemd.NewInstance(systemd.Options{
		Network: true, Disk: true, Kubelet: true,
		Binds: map[string]string{programs: c.programs},
		Plain: []string{"/var/lib/containerd", "/var/lib/etcd", "/var/lib/kubelet"},
	})
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(c.Dir), c.lock.Close())
	}
	if err := c.prepare(o); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	if err := c.Boot(ctx); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

// prepare writes the node's files, before its first boot.
func (c *Cluster) prepare(o Options) error {
	ca, err := newAuthority()
	if err != nil {
		return err
	}
	apiserver, err1 := ca.server("kube-apiserver", "127.0.0.1", c.NodeIP(), apiIP, "localhost", "kubernetes.default.svc")
	kubelet, err2 := ca.server("kubelet", c.NodeIP(), Node)
	toKubelet, err3 := ca.client("kube-apiserver-kubelet-client", "system:masters")
	private, public, set, err4 := tokenKeys()
	c.ca, c.keySet = ca, set
	if err := errors.Join(err1, err2, err3, err4); err != nil {
		return err
	}
	p := parameters{
		MachineIP: c.MachineIP(), NodeIP: c.NodeIP(), ServiceIPs: ServiceIPs, PodIPs: PodIPs, DNSIP: DNSIP, Node: Node, Etc: etc, Programs: programs,
		Socket: ContainerdSocket, Issuer: o.Issuer, APIPort: APIPort, Registry: c.Registry(),
	}
	files, err := p.files()
	if err != nil {
		return err
	}
	maps.Copy(files, map[string]string{
		etc + "/ca.crt":        string(ca.pem),
		etc + "/apiserver.crt": string(apiserver.cert), etc + "/apiserver.key": string(apiserver.key),
		etc + "/kubelet.crt": string(kubelet.cert), etc + "/kubelet.key": string(kubelet.key),
		etc + "/kubelet-client.crt": string(toKubelet.cert), etc + "/kubelet-client.key": string(toKubelet.key),
		etc + "/sa.key": string(private), etc + "/sa.pub": string(public),
	})
	var tokens strings.Builder
	admin := ""
	for _, u := range []user{
		{file: "admin.conf", name: "admin", groups: "system:masters"},
		{file: "controller-manager.conf", name: "system:kube-controller-manager"},
		{file: "scheduler.conf", name: "system:kube-scheduler"},
		{file: "proxy.conf", name: "system:kube-proxy"},
		{file: "kubelet.conf", name: "system:node:" + Node, groups: "system:nodes"},
	} {
		b := make([]byte, 16)
		_, _ = rand.Read(b) // never fails, see crypto/rand
		u.token = hex.EncodeToString(b)
		fmt.Fprintf(&tokens, "%s,%s,%s,%q\n", u.token, u.name, u.name, u.groups)
		files[filepath.Join(etc, u.file)] = kubeconfig(c.NodeIP(), etc+"/ca.crt", u.token)
		if u.file == "admin.conf" {
			admin = u.token
		}
	}
	files[etc+"/tokens.csv"] = tokens.String()
	if c.api, err = newAPI(c.NodeIP(), admin, ca.pem); err != nil {
		return err
	}
	return errors.Join(writeFiles(c.node.File("/"), files),
		writeFiles(c.Dir, map[string]string{caFile: string(ca.pem), "admin.conf": kubeconfig(c.NodeIP(), c.CA(), admin)}))
}

// Boot switches the node on and returns when it is ready. Only images that were there before its last end are there.
func (c *Cluster) Boot(ctx context.Context) error {
	if err := c.node.Boot(); err != nil {
		return err
	}
	if err := c.connect(ctx); err != nil {
		return fmt.Errorf("connecting the node: %w", err)
	}
	if out, err := c.node.Output("/usr/bin/systemctl", "start", startTarget); err != nil {
		return fmt.Errorf("starting Kubernetes: %w: %s", err, out)
	}
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	ready := func(ctx context.Context) error {
		_, err := c.Get(ctx, "/readyz")
		return err
	}
	if err := await(ctx, ready); err != nil {
		return fmt.Errorf("the API server is not ready: %w\n%s", err, c.Journal("kube-apiserver", 20))
	}
	return nil
}

// Ready waits until the node is ready for pods.
func (c *Cluster) Ready(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	err := await(ctx, func(ctx context.Context) error {
		body, err := c.Get(ctx, "/api/v1/nodes/"+Node)
		if err != nil {
			return err
		}
		var node struct {
			Status struct {
				Conditions []struct{ Type, Status string }
			}
		}
		if err := json.Unmarshal(body, &node); err != nil {
			return err
		}
		if !slices.Contains(node.Status.Conditions, struct{ Type, Status string }{"Ready", "True"}) {
			return fmt.Errorf("the node is not ready: %v", node.Status.Conditions)
		}
		_, err = c.Get(ctx, "/api/v1/namespaces/default/serviceaccounts/default")
		return err
	})
	if err != nil {
		return fmt.Errorf("%w\n%s\n%s", err, c.Journal("kubelet", 20), c.Journal("containerd", 20))
	}
	return nil
}

// connect plugs the cable in. It goes with the node's network.
func (c *Cluster) connect(ctx context.Context) error {
	cable := fmt.Sprintf("s3csi%d", os.Getpid())
	// That of the node's last life, if the kernel has not taken it away yet.
	_ = exec.CommandContext(ctx, "ip", "link", "delete", cable).Run()
	for _, args := range [][]string{
		{"link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", fmt.Sprint(c.node.PID())},
		{"address", "add", c.MachineIP() + "/24", "dev", cable},
		{"link", "set", cable, "up"},
	} {
		if out, err := exec.CommandContext(ctx, "ip", args...).CombinedOutput(); err != nil {
			return fmt.Errorf("ip %s: %w: %s", strings.Join(args, " "), err, bytes.TrimSpace(out))
		}
	}
	return nil
}

// PowerOff shuts the node down in order.
func (c *Cluster) PowerOff() error { return c.node.PowerOff(offTimeout) }

// Cut takes the power away.
func (c *Cluster) Cut() error { return c.node.Cut() }

// Close takes the cluster away.
func (c *Cluster) Close() error {
	return errors.Join(c.node.Close(), os.RemoveAll(c.Dir), c.lock.Close())
}

// The networks of cables: how many clusters a machine can have at a time.
const (
	firstNet = 80
	lastNet  = 84
)

// chooseNetwork takes a network that no other cluster of the machine has. A name of the abstract kind is the lock: it goes with
// the process.
func (c *Cluster) chooseNetwork(ctx context.Context) error {
	var errs []error
	for c.net = firstNet; c.net <= lastNet; c.net++ {
		l, err := new(net.ListenConfig).Listen(ctx, "unix", fmt.Sprintf("@s3csi-cluster-%d", c.net))
		if err == nil {
			c.lock = l
			return nil
		}
		errs = append(errs, err)
	}
	return fmt.Errorf("all networks of clusters are taken: %w", errors.Join(errs...))
}

// MachineIP is the machine's address to the cluster.
func (c *Cluster) MachineIP() string { return fmt.Sprintf("10.%d.0.1", c.net) }

// NodeIP is the node's address.
func (c *Cluster) NodeIP() string { return fmt.Sprintf("10.%d.0.2", c.net) }

// Registry is the address of a container registry on the machine from which the node pulls images, if there is one, and if its
// certificate is of the cluster's authority.
func (c *Cluster) Registry() string { return net.JoinHostPort(c.MachineIP(), "5000") }

const caFile = "ca.crt"

// CA is the file on the machine with the certificate of the cluster's authority.
func (c *Cluster) CA() string { return filepath.Join(c.Dir, caFile) }

// Certificate is one of the cluster's authority for a server on the machine.
func (c *Cluster) Certificate(name string) (tls.Certificate, error) {
	p, err := c.ca.server(name, c.MachineIP())
	if err != nil {
		return tls.Certificate{}, err
	}
	return tls.X509KeyPair(p.cert, p.key)
}

// Node runs a command on the node, and gives what it says.
func (c *Cluster) Node(argv ...string) (string, error) { return c.node.Output(argv...) }

// Path is a path of the node's, from outside.
func (c *Cluster) Path(path string) string { return c.node.Path(path) }

// PID is the process id of the node's init, from outside.
func (c *Cluster) PID() int { return c.node.PID() }

// Journal is the end of what a unit of the node has said.
func (c *Cluster) Journal(unit string, lines int) string {
	out, _ := c.node.Output("/usr/bin/journalctl", "--no-pager", "-o", "cat", "-n", fmt.Sprint(lines), "-u", unit)
	return unit + ":\n" + out
}

// Kubeconfig lets its holder do everything in the cluster, from the machine.
func (c *Cluster) Kubeconfig() string { return filepath.Join(c.Dir, "admin.conf") }

// KeySet are the public keys of service accounts' tokens. The API server itself publishes them for an issuer of https:// only.
func (c *Cluster) KeySet() string { return c.keySet }

// Program is the path of one of the cluster's programs on the machine.
func (c *Cluster) Program(name string) string { return filepath.Join(c.programs, name) }

// Kubectl runs kubectl on the machine, and gives what it writes to standard output.
func (c *Cluster) Kubectl(ctx context.Context, in []byte, args ...string) (string, error) {
	return c.run(ctx, in, os.Getenv("KUBECTL"), append([]string{"--kubeconfig=" + c.Kubeconfig()}, args...)...)
}

// Helm runs helm on the machine.
func (c *Cluster) Helm(ctx context.Context, args ...string) (string, error) {
	return c.run(ctx, nil, os.Getenv("HELM"), append([]string{"--kubeconfig=" + c.Kubeconfig()}, args...)...)
}

func (c *Cluster) run(ctx context.Context, in []byte, program string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, runTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, args...) //nolint:gosec // programs of the test, with its own arguments
	// They end before a garbage collection is worth its time.
	cmd.Env = append(os.Environ(), "GOGC=off", "HOME="+c.Dir, "HELM_CACHE_HOME="+c.Dir, "HELM_CONFIG_HOME="+c.Dir, "HELM_DATA_HOME="+c.Dir)
	var out, errs bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(in), &out, &errs
	if err := cmd.Run(); err != nil {
		return out.String(), fmt.Errorf("%s %s: %w: %s", filepath.Base(program), strings.Join(args, " "), errors.Join(ctx.Err(), err),
			strings.TrimSpace(errs.String()))
	}
	return out.String(), nil
}

// Import brings images onto the node.
func (c *Cluster) Import(ctx context.Context, images ...Image) error {
	for _, i := range images {
		f, err := os.CreateTemp(c.Dir, "image-*.tar") // tests bring their images at the same time
		if err != nil {
			return err
		}
		err = errors.Join(i.Write(f), f.Close())
		if err == nil {
			err = c.importFile(ctx, i.Name, f.Name())
		}
		if err := errors.Join(err, os.Remove(f.Name())); err != nil {
			return err
		}
	}
	return nil
}

// ImportArchive brings the image of an OCI archive onto the node, under that name.
func (c *Cluster) ImportArchive(ctx context.Context, name, file string) error {
	return c.importFile(ctx, name, file, "--index-name="+name)
}

func (c *Cluster) importFile(ctx context.Context, name, file string, options ...string) error {
	args := append([]string{"images", "import", "--local=false"}, options...)
	if out, err := c.ctr(ctx, append(args, file)...); err != nil {
		return fmt.Errorf("importing image %s: %w: %s", name, err, out)
	}
	return nil
}

// RemoveImage removes an image from the node.
func (c *Cluster) RemoveImage(ctx context.Context, name string) error {
	if out, err := c.ctr(ctx, "images", "rm", "--sync", name); err != nil {
		return fmt.Errorf("removing image %s: %w: %s", name, err, out)
	}
	return nil
}

func (c *Cluster) ctr(ctx context.Context, args ...string) (string, error) {
	return c.run(ctx, nil, c.Program("ctr"), append([]string{"--address", c.node.Path(ContainerdSocket), "--namespace=k8s.io"}, args...)...)
}

// busybox is what an image of busybox-static holds.
func busybox(ctx context.Context) (Image, error) {
	out, err := exec.CommandContext(ctx, "/bin/busybox", "--list").Output()
	if err != nil {
		return Image{}, err
	}
	i := Image{Files: map[string]string{"bin/busybox": "/bin/busybox"}, Links: map[string]string{}, Dirs: []string{"tmp", "etc", "root"}, Cmd: []string{"sh"}}
	for name := range strings.FieldsSeq(string(out)) {
		if name != "busybox" {
			i.Links["bin/"+name] = "busybox"
		}
	}
	return i, nil
}

// ImportBusybox brings an image with a shell onto the node, under that name.
func (c *Cluster) ImportBusybox(ctx context.Context, name string) error {
	shell, err := busybox(ctx)
	if err != nil {
		return err
	}
	shell.Name = name
	return c.Import(ctx, shell)
}

// Base brings what every cluster needs: the image of pods' sandboxes, busybox, and CoreDNS, which is started.
func (c *Cluster) Base(ctx context.Context) error {
	shell, err := busybox(ctx)
	if err != nil {
		return err
	}
	shell.Name = Busybox
	err = c.Import(ctx,
		Image{Name: "cluster.local/pause:1", Files: map[string]string{"pause": c.Program("pause")}, Entrypoint: []string{"/pause"}},
		shell,
		Image{Name: "cluster.local/coredns:1", Files: map[string]string{"coredns": c.Program("coredns")}, Entrypoint: []string{"/coredns"}})
	if err != nil {
		return err
	}
	_, err = c.Kubectl(ctx, []byte(strings.ReplaceAll(coreDNS, "$DNSIP", DNSIP)), "apply", "-f", "-")
	return err
}

// Snapshots brings the CRDs of snapshots and starts the snapshot controller, which a Kubernetes has beside itself.
func (c *Cluster) Snapshots(ctx context.Context) error {
	image := Image{Name: "cluster.local/snapshot-controller:1", Files: map[string]string{"snapshot-controller": c.Program("snapshot-controller")},
		Entrypoint: []string{"/snapshot-controller"}}
	if err := c.Import(ctx, image); err != nil {
		return err
	}
	for _, args := range [][]string{{"create", "-f", c.Program("snapshot-crds")}, {"wait", "--for=condition=Established", "crd", "--all",
		"--timeout=" + readyTimeout.String()}} {
		if _, err := c.Kubectl(ctx, nil, args...); err != nil {
			return err
		}
	}
	_, err := c.Kubectl(ctx, []byte(snapshotController), "apply", "-f", "-")
	return err
}

// SuiteImages are those that the upstream test suite's pods run.
func (c *Cluster) SuiteImages(ctx context.Context) error {
	shell, err := busybox(ctx)
	if err != nil {
		return err
	}
	agnhost := shell
	agnhost.Files = maps.Clone(shell.Files)
	agnhost.Files["agnhost"] = c.Program("agnhost")
	agnhost.Name, agnhost.Entrypoint, agnhost.Cmd = "registry.k8s.io/e2e-test-images/agnhost:2.63.0", []string{"/agnhost"}, []string{"pause"}
	images := []Image{agnhost}
	for _, name := range []string{"busybox:1.37.0-1", "nginx:1.15-4", "glibc-dns-testing:2.0.0"} { // of which it uses the shell
		shell.Name = "registry.k8s.io/e2e-test-images/" + name
		images = append(images, shell)
	}
	return c.Import(ctx, images...)
}

// Busybox is an image with a shell.
const Busybox = "cluster.local/busybox:1"

// await tries until there is no error or no time.
func await(ctx context.Context, try func(context.Context) error) error {
	for {
		err := try(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return errors.Join(ctx.Err(), err)
		case <-time.After(100 * time.Millisecond):
		}
	}
}
