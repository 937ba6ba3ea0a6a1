// Package registry runs a container registry for tests: distribution, which is what people run.
package registry

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"github.com/distribution/distribution/v3/configuration"
	_ "github.com/distribution/distribution/v3/registry/auth/htpasswd" // the kind of Auth
	"github.com/distribution/distribution/v3/registry/handlers"
	_ "github.com/distribution/distribution/v3/registry/storage/driver/filesystem" // the kind of Storage
	"github.com/sirupsen/logrus"
	"golang.org/x/crypto/bcrypt"
)

// Options of a registry.
type Options struct {
	Addr        string           // host:port; the port may be 0
	Dir         string           // for its content
	Certificate *tls.Certificate // nil: plain HTTP
	// User and Password are of the only user. If they are empty, everyone may do everything.
	User, Password string
}

// Registry is a running one.
type Registry struct {
	app    *handlers.App
	server *http.Server
	addr   string
	ended  chan struct{}
}

// Start starts a registry, which runs until Close.
func Start(ctx context.Context, o Options) (*Registry, error) {
	logrus.SetOutput(io.Discard) // it logs every request
	config := &configuration.Configuration{Storage: configuration.Storage{
		"filesystem":  {"rootdirectory": filepath.Join(o.Dir, "content")},
		"maintenance": {"uploadpurging": map[any]any{"enabled": false}},
	}}
	config.Catalog.MaxEntries = 1000
	if o.User != "" {
		hash, err := bcrypt.GenerateFromPassword([]byte(o.Password), bcrypt.MinCost)
		if err != nil {
			return nil, err
		}
		file := filepath.Join(o.Dir, "htpasswd")
		if err := os.WriteFile(file, fmt.Appendf(nil, "%s:%s\n", o.User, hash), 0o600); err != nil {
			return nil, err
		}
		config.Auth = configuration.Auth{"htpasswd": {"realm": "tests", "path": file}}
	}
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", o.Addr)
	if err != nil {
		return nil, err
	}
	r := &Registry{app: handlers.NewApp(context.Background(), config), addr: l.Addr().String(), ended: make(chan struct{})}
	r.server = &http.Server{Handler: r.app, ReadHeaderTimeout: time.Minute}
	if o.Certificate != nil {
		r.server.TLSConfig = &tls.Config{Certificates: []tls.Certificate{*o.Certificate}, MinVersion: tls.VersionTLS12}
	}
	go func() {
		defer close(r.ended)
		if o.Certificate != nil {
			_ = r.server.ServeTLS(l, "", "") // until Close
		} else {
			_ = r.server.Serve(l)
		}
	}()
	return r, nil
}

// Host is its address, as names of images begin.
func (r *Registry) Host() string { return r.addr }

// Close ends it. Its content stays.
func (r *Registry) Close() error {
	err := r.server.Close()
	<-r.ended
	return errors.Join(err, r.app.Shutdown())
}
