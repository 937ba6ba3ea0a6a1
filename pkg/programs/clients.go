package programs

import (
	"context"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/conc"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
)

// Find returns the file name of a client's program in a directory, in the view of this process. If there is none it is the name that
// was looked for, and ok is false.
func Find(c client.Client, dir string) (name string, ok bool) {
	for _, name := range c.Programs {
		if fi, err := os.Stat(filepath.Join(dir, name)); err == nil && fi.Mode().IsRegular() && fi.Mode().Perm()&0o111 != 0 {
			return name, true
		}
	}
	return c.Programs[0], false
}

// Files returns the paths of the programs of clients that exist in a directory, in the view of this process, with the program that clients
// execute as fusermount.
func Files(all []client.Client, dir string) []string {
	var files []string
	for _, c := range append([]client.Client{{Programs: []string{client.FusermountProgram}}}, all...) {
		name, ok := Find(c, dir)
		if path := filepath.Join(dir, name); ok && !slices.Contains(files, path) { // several may be declared with one program
			files = append(files, path)
		}
	}
	return files
}

// Clients are the programs of the clients in a directory of the host.
type Clients struct {
	ns    host.Doer
	dir   string
	names map[string]string // of files, by clients

	mu       sync.Mutex
	failures map[string]error // why the host could not run it, by client
}

// NewClients returns the programs of clients that are in the directory found, in the view of this process. On the host the
// directory is dir.
func NewClients(ns host.Doer, all []client.Client, found, dir string) *Clients {
	c := &Clients{ns: ns, dir: dir, names: map[string]string{}, failures: map[string]error{}}
	for _, cl := range all {
		name, ok := Find(cl, found)
		if !ok {
			c.failures[cl.Name] = fault.Errorf(fault.Precondition, "program %s not found in %s; install it there, or set --client-dir to its directory", name, found)
		} else if err := Check(cl, filepath.Join(found, name)); err != nil {
			c.failures[cl.Name] = err
		} else {
			c.names[cl.Name] = name
		}
	}
	return c
}

// Check checks that only root can change the program of a declared client, and that it has the declared digest. The error is a
// fault.Precondition.
func Check(cl client.Client, path string) error {
	if !cl.Declared {
		return nil
	}
	if beside := filepath.Join(filepath.Dir(path), client.FusermountProgram); cl.Fusermount {
		if _, err := os.Stat(beside); err != nil {
			return fault.Errorf(fault.Precondition, "program %s not found; it is part of the driver, so copy it there: %w", beside, err)
		}
	}
	f, err := os.Open(path)
	if err != nil {
		return fault.Errorf(fault.Precondition, "open its program: %w", err)
	}
	defer f.Close()
	fi, err := f.Stat()
	if err != nil {
		return fault.Errorf(fault.Precondition, "stat its program: %w", err)
	}
	if st, ok := fi.Sys().(*syscall.Stat_t); !ok || st.Uid != 0 || fi.Mode().Perm()&0o022 != 0 {
		return fault.Errorf(fault.Precondition, "program %s must be owned by root, and only root may write it (chown 0:0, chmod 0755)", path)
	}
	if cl.SHA256 == "" {
		return nil
	}
	sum, err := digest(context.Background(), io.Discard, f, fi.Size())
	if err != nil {
		return fault.Errorf(fault.Precondition, "read its program: %w", err)
	}
	if got := hex.EncodeToString(sum[:]); got != cl.SHA256 {
		return fault.Errorf(fault.Precondition, "program %s has the digest %s, not the declared %s; "+
			"install the declared program, or correct sha256 in the config file", path, got, cl.SHA256)
	}
	return nil
}

// tryDelay is how long Run waits: healing and the publishes that wait for a driver go first.
const tryDelay = 2 * time.Second

// Run runs each program once with --version, logs which ones the host cannot run, and waits until ctx ends.
func (c *Clients) Run(ctx context.Context) error {
	if conc.Sleep(ctx, tryDelay) {
		c.tryAll(ctx)
		<-ctx.Done()
	}
	return nil
}

func (c *Clients) tryAll(ctx context.Context) {
	var g errgroup.Group
	for name := range c.names {
		g.Go(func() error {
			if version, err := c.try(ctx, name); err != nil && ctx.Err() == nil {
				klog.FromContext(ctx).Error(err, "Client cannot run on this node", "client", name, "effect", "volumes with this client cannot be published")
			} else if err == nil {
				klog.FromContext(ctx).V(2).Info("Client runs on this node", "client", name, "program", c.names[name], "version", version)
			}
			return nil
		})
	}
	_ = g.Wait()
}

// Path returns the path of a client's program on the host. If the program is missing, or the host could not run it and still cannot,
// the error is a fault.Precondition.
func (c *Clients) Path(ctx context.Context, cl client.Client) (string, error) {
	c.mu.Lock()
	err := c.failures[cl.Name]
	c.mu.Unlock()
	name, found := c.names[cl.Name]
	if err == nil && !found {
		err = fault.Errorf(fault.Precondition, "it was declared after the driver started; restart the driver on this node")
	}
	if err != nil && found { // the missing program may have been installed on the host since
		_, err = c.try(ctx, cl.Name)
	}
	if err != nil {
		return "", fault.See("docs/reference/errors.md#publishing-clients-and-the-node", fmt.Errorf("client %s cannot run on this node: %w", cl.Name, err))
	}
	return filepath.Join(c.dir, name), nil
}

func (c *Clients) try(ctx context.Context, name string) (version string, err error) {
	version, err = Try(ctx, c.ns, filepath.Join(c.dir, c.names[name]))
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.failures, name)
	if fault.Is(err, fault.Precondition) {
		c.failures[name] = err
	}
	return version, err
}
