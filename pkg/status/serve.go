package status

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
)

const (
	path = "/" + Version + "/status" // the path of the document in URLs
	// collectBound bounds the making of a document, fetchBound a request, and listenBound the making of the socket.
	collectBound = 800 * time.Millisecond
	fetchBound   = 5 * time.Second
	listenBound  = 10 * time.Second
	stopBound    = time.Second
	maxDocument  = 64 << 20 // the most bytes that a reader takes
)

// Server serves documents on a UNIX socket of the host, to root alone.
type Server struct {
	Namespace *host.Namespace
	Socket    string
	Collect   func(ctx context.Context) (Document, error)
}

// Run serves until ctx ends. A socket that an earlier driver left is replaced, so the caller must have the state directory's lock. If the
// socket cannot be made, it is logged and Run returns: mounts do not depend on it.
func (s Server) Run(ctx context.Context) {
	lis, err := s.listen(ctx)
	if err != nil {
		klog.FromContext(ctx).Error(err, "Cannot serve node status", "socket", s.Socket)
		return
	}
	server := &http.Server{Handler: s, ReadTimeout: fetchBound, WriteTimeout: fetchBound, MaxHeaderBytes: 1 << 14}
	stop := context.AfterFunc(ctx, func() {
		sctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopBound)
		defer cancel()
		if server.Shutdown(sctx) != nil {
			_ = server.Close()
		}
	})
	defer stop()
	if err := server.Serve(lis); !errors.Is(err, http.ErrServerClosed) {
		klog.FromContext(ctx).Error(err, "Node status is not served any more", "socket", s.Socket)
	}
}

func (s Server) listen(ctx context.Context) (net.Listener, error) {
	ctx, cancel := context.WithTimeout(ctx, listenBound)
	defer cancel()
	return host.Call(ctx, s.Namespace, "creating "+s.Socket, func(l net.Listener) { l.Close() }, func() (net.Listener, error) {
		if err := os.Remove(s.Socket); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		// bind(2) gives the file the mode of the socket's inode, so it is never open to other users.
		private := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
			var chmod error
			err := c.Control(func(fd uintptr) { chmod = unix.Fchmod(int(fd), 0o600) })
			return errors.Join(err, chmod)
		}}
		lis, err := private.Listen(context.Background(), "unix", s.Socket)
		if u, ok := lis.(*net.UnixListener); ok {
			u.SetUnlinkOnClose(false) // it is closed outside of the host's mount namespace
		}
		return lis, err
	})
}

// ServeHTTP implements http.Handler.
func (s Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path != path {
		http.Error(w, "this driver serves "+path, http.StatusNotFound)
		return
	}
	if r.Method != http.MethodGet {
		http.Error(w, "the status is read-only", http.StatusMethodNotAllowed)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), collectBound)
	defer cancel()
	d, err := s.Collect(ctx)
	if err != nil {
		http.Error(w, err.Error(), http.StatusServiceUnavailable)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = d.JSON(w) // an error means that the reader is gone
}

// JSON writes the document as it is served.
func (d Document) JSON(w io.Writer) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(d)
}

// Fetch gets the document of the driver that serves on a socket of the host, as it is.
func Fetch(ctx context.Context, ns *host.Namespace, socket string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, fetchBound)
	defer cancel()
	client := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return host.Call(ctx, ns, "connecting to "+socket, func(c *net.UnixConn) { c.Close() }, func() (*net.UnixConn, error) {
				return net.DialUnix("unix", nil, &net.UnixAddr{Name: socket, Net: "unix"})
			})
		},
	}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://s3-csi-driver"+path, http.NoBody)
	if err != nil {
		return nil, err
	}
	resp, err := client.Do(req)
	switch {
	case errors.Is(err, syscall.ENOENT), errors.Is(err, syscall.ECONNREFUSED):
		return nil, fault.Errorf(fault.Unavailable, "no driver serves %s: it is not running, or has another --state-dir, or is too old: %w", socket, err)
	case errors.Is(err, fs.ErrPermission):
		return nil, fault.Errorf(fault.Denied, "%s: only root may read the status: %w", socket, err)
	case err != nil:
		return nil, fmt.Errorf("read the status: %w", err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxDocument))
	if err != nil {
		return nil, fmt.Errorf("read the status: %w", err)
	}
	if resp.StatusCode != http.StatusOK {
		return nil, fault.Errorf(fault.Unavailable, "the driver answered %s: %s", resp.Status, string(body))
	}
	return body, nil
}
