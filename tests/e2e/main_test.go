package e2e

import (
	"context"
	"flag"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/tests/e2e/cluster"
	"github.com/s3-csi/s3-csi-driver/tests/internal/faultproxy"
	"github.com/s3-csi/s3-csi-driver/tests/internal/rig"
	"github.com/s3-csi/s3-csi-driver/tests/internal/s3server"
	"github.com/s3-csi/s3-csi-driver/tests/internal/systemd"
)

// envHold keeps the cluster until the process is interrupted, for looking around: HOLD=1 go test -run XXX.
const envHold = "S3CSI_E2E_HOLD"

// world is what all tests use: the cluster, the S3 service beside it, and the issuer of its tokens. It is nil where they cannot be.
var world *environment

// environment is a cluster with all that is around it.
type environment struct {
	*cluster.Cluster
	s3       *s3server.Process
	slow     *faultproxy.Proxy // before s3, for those who use the backend slow
	issuer   *issuer
	images   driverImages
	keys     credentials.Keys // the driver's own, for s3
	unusable string
}

func TestMain(m *testing.M) {
	systemd.Init()
	flag.Parse()
	os.Exit(run(m))
}

func run(m *testing.M) int {
	world = &environment{unusable: unusable()}
	if world.unusable != "" {
		return m.Run()
	}
	ctx, cancel := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer cancel()
	err := world.start(ctx)
	code := 1
	if err == nil && os.Getenv(envHold) != "" {
		fmt.Printf("KUBECONFIG=%s; nsenter -at %d; Ctrl-C ends it\n", world.Kubeconfig(), world.PID())
		<-ctx.Done()
	} else if err == nil {
		if code = m.Run(); code == 0 {
			if err := world.clear(ctx); err != nil {
				fmt.Fprintln(os.Stderr, "after all tests the node has of mounts:", err)
				code = 1
			}
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "starting the cluster:", err)
	}
	if err := world.stop(); err != nil {
		fmt.Fprintln(os.Stderr, "taking the cluster away:", err)
		code = 1
	}
	return code
}

// clear waits until the node has nothing of any mount.
func (w *environment) clear(ctx context.Context) error {
	for end := time.Now().Add(patience); ; time.Sleep(polling) {
		if err := leftovers(); err == nil || time.Now().After(end) || ctx.Err() != nil {
			return err
		}
	}
}

func unusable() string {
	if why := cluster.Unusable(); why != "" {
		return why
	}
	if os.Getenv(rig.EnvBin) == "" {
		return "needs the built programs: set " + rig.EnvBin + " to their directory (make sets it)"
	}
	if _, err := os.Stat(driverArchive(os.Getenv(rig.EnvBin))); err != nil {
		return "needs the driver's image: make image builds it, where Rust is installed"
	}
	for _, program := range []string{"HELM", "KUBECTL"} {
		if os.Getenv(program) == "" {
			return "needs " + strings.ToLower(program) + ": set " + program + " to it (make sets it)"
		}
	}
	if err := rig.Usable(); err != nil {
		return err.Error()
	}
	return ""
}

func (w *environment) start(ctx context.Context) (err error) {
	began := time.Now()
	step := func(what string) { fmt.Printf("cluster: %5.1f s: %s\n", time.Since(began).Seconds(), what) }
	if w.issuer, err = newIssuer(); err != nil {
		return err
	}
	if w.Cluster, err = cluster.Start(ctx, cluster.Options{Issuer: w.issuer.URL()}); err != nil {
		return err
	}
	step("the API server answers")
	w.issuer.publish(w.Cluster)
	dir := filepath.Join(w.Dir, "s3")
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	if w.s3, err = s3server.StartProcess(ctx, s3server.Options{Addr: net.JoinHostPort(w.MachineIP(), "9000"), STSAddr: net.JoinHostPort(w.MachineIP(), "9001"),
		Dir: dir}); err != nil {
		return err
	}
	if w.slow, err = faultproxy.StartAt(net.JoinHostPort(w.MachineIP(), "9002"), w.s3.Endpoint()); err != nil {
		return err
	}
	if err := w.Base(ctx); err != nil {
		return err
	}
	if err := w.Snapshots(ctx); err != nil {
		return err
	}
	if err := w.importDriver(ctx); err != nil {
		return err
	}
	step("images are there")
	if err := w.Ready(ctx); err != nil {
		return err
	}
	step("the node is ready")
	if err := w.install(ctx); err != nil {
		return err
	}
	step("the driver is deployed")
	return nil
}

func (w *environment) stop() error {
	var errs []string
	if w.slow != nil {
		_ = w.slow.Stop()
	}
	if w.s3 != nil {
		_ = w.s3.Stop()
	}
	if w.Cluster != nil {
		if err := w.Close(); err != nil {
			errs = append(errs, err.Error())
		}
	}
	if w.issuer != nil {
		w.issuer.server.Close()
	}
	if len(errs) > 0 {
		return fmt.Errorf("%s", strings.Join(errs, "; "))
	}
	return nil
}

// issuer publishes the keys of the cluster's service accounts where anybody can read them, as cloud providers do.
type issuer struct {
	url     string
	server  *http.Server
	cluster *cluster.Cluster
}

func newIssuer() (*issuer, error) {
	l, err := new(net.ListenConfig).Listen(context.Background(), "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	i := &issuer{url: "http://" + l.Addr().String()}
	i.server = &http.Server{ReadHeaderTimeout: 10 * time.Second, Handler: http.HandlerFunc(i.serve)}
	go func() { _ = i.server.Serve(l) }() // until Close
	return i, nil
}

// URL is what tokens name as their issuer.
func (i *issuer) URL() string { return i.url }

func (i *issuer) publish(c *cluster.Cluster) { i.cluster = c }

func (i *issuer) serve(w http.ResponseWriter, r *http.Request) {
	if i.cluster == nil {
		http.NotFound(w, r)
		return
	}
	const keys = "/keys"
	out := fmt.Sprintf(`{"issuer": %q, "jwks_uri": %q}`, i.url, i.url+keys)
	if r.URL.Path == keys {
		out = i.cluster.KeySet()
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = w.Write([]byte(out))
}
