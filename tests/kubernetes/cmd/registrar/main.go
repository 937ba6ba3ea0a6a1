// Command registrar stands in for kubernetes-csi/node-driver-registrar, which cannot be had as a Go module: it makes a CSI driver
// known to kubelet through the plugin watcher. It takes the flags of the real one that the chart uses, and works the same way.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"k8s.io/klog/v2"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

type options struct {
	csiAddress, kubeletPath, registrationDir, httpEndpoint string
	timeout                                                time.Duration
}

func main() {
	var o options
	flag.StringVar(&o.csiAddress, "csi-address", "/run/csi/socket", "the driver's socket")
	flag.StringVar(&o.kubeletPath, "kubelet-registration-path", "", "the driver's socket as kubelet sees it")
	flag.StringVar(&o.registrationDir, "plugin-registration-path", "/registration", "kubelet's directory of registration sockets")
	flag.StringVar(&o.httpEndpoint, "http-endpoint", "", "address that serves /healthz")
	flag.DurationVar(&o.timeout, "timeout", time.Second, "how long a call of the driver may take")
	klog.InitFlags(nil)
	flag.Parse()
	ctx, cancel := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	defer cancel()
	if err := run(ctx, o); err != nil {
		klog.ErrorS(err, "Registering the driver")
		klog.Flush()
		os.Exit(1) //nolint:gocritic // the signal handler goes with the process
	}
}

func run(ctx context.Context, o options) error {
	if o.kubeletPath == "" {
		return errors.New("--kubelet-registration-path is required")
	}
	name, err := driverName(ctx, o)
	if err != nil {
		return err
	}
	socket := filepath.Join(o.registrationDir, name+"-reg.sock")
	if err := os.Remove(socket); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	l, err := new(net.ListenConfig).Listen(ctx, "unix", socket)
	if err != nil {
		return err
	}
	r := &registrar{
		info:    &registration.PluginInfo{Type: registration.CSIPlugin, Name: name, Endpoint: o.kubeletPath, SupportedVersions: []string{"1.0.0"}},
		refused: make(chan string, 1),
	}
	server := grpc.NewServer()
	registration.RegisterRegistrationServer(server, r)
	ended := make(chan error, 2)
	go func() { ended <- server.Serve(l) }()
	if o.httpEndpoint != "" {
		go func() { ended <- serveHealth(o.httpEndpoint, socket) }()
	}
	defer server.Stop() // which removes the socket
	select {
	case <-ctx.Done():
		return nil
	case err := <-ended:
		return err
	case why := <-r.refused:
		return fmt.Errorf("kubelet refuses the driver: %s", why)
	}
}

// driverName asks the driver, for as long as it is not there.
func driverName(ctx context.Context, o options) (string, error) {
	conn, err := grpc.NewClient("unix://"+o.csiAddress, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return "", err
	}
	defer conn.Close()
	for {
		call, cancel := context.WithTimeout(ctx, o.timeout)
		info, err := csi.NewIdentityClient(conn).GetPluginInfo(call, &csi.GetPluginInfoRequest{}, grpc.WaitForReady(true))
		cancel()
		if err == nil {
			return info.GetName(), nil
		}
		if ctx.Err() != nil {
			return "", fmt.Errorf("asking the driver at %s for its name: %w", o.csiAddress, err)
		}
		klog.InfoS("The driver does not answer yet", "error", err)
	}
}

func serveHealth(addr, socket string) error {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		if _, err := os.Stat(socket); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
		}
	})
	return (&http.Server{Addr: addr, Handler: mux, ReadHeaderTimeout: 10 * time.Second}).ListenAndServe()
}

type registrar struct {
	registration.UnimplementedRegistrationServer
	info    *registration.PluginInfo
	refused chan string
}

// GetInfo tells kubelet of the driver.
func (r *registrar) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	return r.info, nil
}

// NotifyRegistrationStatus is kubelet's answer.
func (r *registrar) NotifyRegistrationStatus(_ context.Context, s *registration.RegistrationStatus) (*registration.RegistrationStatusResponse, error) {
	klog.InfoS("Kubelet has answered", "registered", s.GetPluginRegistered(), "error", s.GetError())
	if !s.GetPluginRegistered() {
		select {
		case r.refused <- s.GetError():
		default:
		}
	}
	return &registration.RegistrationStatusResponse{}, nil
}
