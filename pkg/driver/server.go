package driver

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"k8s.io/klog/v2"
)

// afterStop is how long cancelled requests and background work may take to return.
const afterStop = 5 * time.Second

// Bounds of what a process can send that reaches an endpoint. The maps of a CSI request have at most 4 KiB each (CSI specification, "Size
// Limits").
const (
	headTimeout = 5 * time.Second
	maxHeader   = 4 << 10
	maxRequest  = 1 << 20
	maxStreams  = 1000 // of a connection: a CO that publishes many volumes at once
)

// Background is work that runs beside requests. Run returns nil or ctx's error when ctx ends. If it returns otherwise, the driver stops.
type Background struct {
	Name string
	Run  func(ctx context.Context) error
}

// Config is what a driver serves: the identity service and at least one of the others.
type Config struct {
	Endpoint        string
	HTTPEndpoint    string // "": none
	ShutdownTimeout time.Duration
	Identity        csi.IdentityServer
	Controller      csi.ControllerServer // nil: not served
	Node            csi.NodeServer       // nil: not served
	Background      []Background
	Metrics         *Metrics
	Health          *Health
}

// Serve serves until ctx ends or a component fails, and then shuts down:
//
//  1. report not ready
//  2. wait for the requests in flight, cancel them after ShutdownTimeout
//  3. stop the background work
//  4. close the HTTP endpoint and remove the socket
//
// It never unmounts anything. After a clean shutdown it returns nil. Everything that Serve started has then ended, except for requests in
// the log that did not return.
func (c Config) Serve(ctx context.Context) (err error) {
	logger := klog.FromContext(ctx)
	lis, cleanup, err := Listen(ctx, c.Endpoint)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, cleanup()) }()
	web, err := c.openHTTP(ctx)
	if err != nil {
		return err
	}

	running := &inflight{}
	chain := interceptors(logger, c.Metrics, running)
	if _, ok := lis.Addr().(*net.TCPAddr); ok { // a UNIX socket is root's
		bounded := &boundedListener{Listener: lis}
		lis, chain = bounded, append(chain, bounded.intercept)
	}
	rpc := grpc.NewServer(grpc.ChainUnaryInterceptor(chain...), grpc.WaitForHandlers(true), grpc.ConnectionTimeout(headTimeout),
		grpc.MaxConcurrentStreams(maxStreams), grpc.MaxHeaderListSize(maxHeader), grpc.MaxRecvMsgSize(maxRequest))
	c.register(rpc)

	// Background work continues after ctx ends, because the requests in flight depend on it.
	work, stopWork := context.WithCancel(context.WithoutCancel(ctx))
	defer stopWork()
	group, failed := errgroup.WithContext(work)
	for _, b := range c.Background {
		group.Go(func() error { return b.run(failed) })
	}
	if web != nil {
		group.Go(web.serve)
	}
	group.Go(func() error {
		if err := rpc.Serve(lis); err != nil {
			return fmt.Errorf("serve %s: %w", c.Endpoint, err)
		}
		return nil
	})
	c.Health.Serving()
	logger.Info("Serving", "endpoint", c.Endpoint, "address", lis.Addr().String(), "httpEndpoint", c.HTTPEndpoint)

	select {
	case <-ctx.Done():
		logger.Info("Shutting down, mounts keep running", "reason", context.Cause(ctx).Error(), "running", running.list())
	case <-failed.Done():
		logger.Info("Component failed, shutting down", "reason", context.Cause(failed).Error())
	}
	c.Health.Stopping()
	c.stop(logger, rpc, running)
	stopWork()
	if web != nil {
		web.stop()
	}
	return wait(group)
}

func (c Config) register(rpc *grpc.Server) {
	csi.RegisterIdentityServer(rpc, c.Identity)
	if c.Controller != nil {
		csi.RegisterControllerServer(rpc, c.Controller)
	}
	if c.Node != nil {
		csi.RegisterNodeServer(rpc, c.Node)
	}
}

// stop waits for the requests in flight. After ShutdownTimeout it cancels them, and after afterStop it stops waiting.
func (c Config) stop(logger klog.Logger, rpc *grpc.Server, running *inflight) {
	done := make(chan struct{})
	go func() { rpc.GracefulStop(); close(done) }()
	if ended(done, c.ShutdownTimeout) {
		return
	}
	logger.Info("Shutdown timed out, cancelling requests", "shutdownTimeout", c.ShutdownTimeout, "running", running.list())
	go rpc.Stop() // GracefulStop then returns after the handlers
	if !ended(done, afterStop) {
		logger.Error(nil, "Cancelled requests did not return", "running", running.list())
	}
}

func ended(done <-chan struct{}, limit time.Duration) bool {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-done:
		return true
	case <-timer.C:
		return false
	}
}

// wait is group.Wait with a timeout, so that background work in a blocked system call does not prevent the exit.
func wait(group *errgroup.Group) error {
	done := make(chan struct{})
	var err error
	go func() { err = group.Wait(); close(done) }()
	if !ended(done, afterStop) {
		return fmt.Errorf("background work did not stop within %v", afterStop)
	}
	return err
}

func (b Background) run(ctx context.Context) error {
	err := b.Run(ctx)
	switch {
	case ctx.Err() != nil && (err == nil || errors.Is(err, ctx.Err()) || errors.Is(err, context.Cause(ctx))):
		return nil
	case err == nil:
		return fmt.Errorf("%s stopped unexpectedly", b.Name)
	}
	return fmt.Errorf("%s: %w", b.Name, err)
}

// webServer serves metrics and health.
type webServer struct {
	lis    net.Listener
	server *http.Server
}

func (c Config) openHTTP(ctx context.Context) (*webServer, error) {
	if c.HTTPEndpoint == "" {
		return nil, nil
	}
	tcp, err := new(net.ListenConfig).Listen(ctx, "tcp", c.HTTPEndpoint)
	if err != nil {
		return nil, fmt.Errorf("--http-endpoint: %w", err)
	}
	lis := &boundedListener{Listener: tcp}
	mux := http.NewServeMux()
	c.Metrics.addTo(mux)
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { respond(w, c.Health.Alive(), nil) })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) { respond(w, c.Health.Fit(), c.Health.Notes()) })
	return &webServer{lis: lis, server: &http.Server{
		Handler:           lis.handler(mux),
		ReadHeaderTimeout: headTimeout,
		ReadTimeout:       2 * headTimeout,
		WriteTimeout:      6 * headTimeout,
		IdleTimeout:       headTimeout,
		MaxHeaderBytes:    maxHeader,
	}}, nil
}

func respond(w http.ResponseWriter, ok bool, notes []string) {
	text := "ok\n"
	if !ok {
		w.WriteHeader(http.StatusServiceUnavailable)
		text = "not ready\n"
	}
	for _, note := range notes {
		text += "note: " + note + "\n"
	}
	_, _ = w.Write([]byte(text)) // fails only if the client disconnected
}

func (w *webServer) serve() error {
	if err := w.server.Serve(w.lis); err != nil && !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve --http-endpoint: %w", err)
	}
	return nil
}

// stop closes the HTTP endpoint. It is called last, so that probes see a driver in shutdown as not ready.
func (w *webServer) stop() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	if w.server.Shutdown(ctx) != nil {
		_ = w.server.Close()
	}
}
