// Command livenessprobe stands in for kubernetes-csi/livenessprobe, which cannot be had as a Go module: it serves /healthz, and
// answers with what the driver says to a CSI Probe. It takes the flags of the real one that the chart uses, and works the same way.
package main

import (
	"context"
	"flag"
	"net"
	"net/http"
	"os"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"k8s.io/klog/v2"
)

func main() {
	csiAddress := flag.String("csi-address", "/run/csi/socket", "the driver's socket")
	timeout := flag.Duration("probe-timeout", time.Second, "how long a Probe may take")
	port := flag.String("health-port", "9808", "port of /healthz on all addresses")
	endpoint := flag.String("http-endpoint", "", "address of /healthz, in place of --health-port")
	klog.InitFlags(nil)
	flag.Parse()
	addr := *endpoint
	if addr == "" {
		addr = net.JoinHostPort("", *port)
	}
	if err := serve(*csiAddress, addr, *timeout); err != nil {
		klog.ErrorS(err, "Serving /healthz")
		klog.Flush()
		os.Exit(1)
	}
}

func serve(csiAddress, addr string, timeout time.Duration) error {
	conn, err := grpc.NewClient("unix://"+csiAddress, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer conn.Close()
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithTimeout(r.Context(), timeout)
		defer cancel()
		rep, err := csi.NewIdentityClient(conn).Probe(ctx, &csi.ProbeRequest{})
		switch {
		case err != nil:
			klog.ErrorS(err, "The driver does not answer the probe")
			http.Error(w, err.Error(), http.StatusInternalServerError)
		case rep.GetReady() != nil && !rep.GetReady().GetValue():
			http.Error(w, "the driver is not ready", http.StatusInternalServerError)
		}
	})
	return (&http.Server{Addr: addr, Handler: mux, ReadHeaderTimeout: 10 * time.Second}).ListenAndServe()
}
