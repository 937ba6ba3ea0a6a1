package rig

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/s3-csi/s3-csi-driver/tests/internal/ports"
)

// Driver is a running driver process and a connection to it.
type Driver struct {
	csi.IdentityClient
	csi.ControllerClient
	csi.NodeClient

	Mode     string
	Endpoint string // "unix:///…"
	HTTP     string // host:port of metrics and health
	cmd      *exec.Cmd
	conn     *grpc.ClientConn
	exited   chan struct{}
}

// Start starts a driver in a mode ("all", "controller", "node") with more flags and waits until it is ready. Drivers of one
// rig share the state directory, so one node at a time can run.
func (r *Rig) Start(ctx context.Context, mode string, flags ...string) (*Driver, error) {
	r.mu.Lock()
	r.sockets++
	n := r.sockets
	r.mu.Unlock()
	http, err := ports.Free()
	if err != nil {
		return nil, err
	}
	d := &Driver{Mode: mode, Endpoint: fmt.Sprintf("unix://%s/csi-%d.sock", r.Dir, n), HTTP: http, exited: make(chan struct{})}
	args := []string{mode, "--endpoint=" + d.Endpoint, "--http-endpoint=" + http, "--v=5"}
	if mode != "controller" {
		args = append(args, "--node-id=node-1", "--state-dir="+r.State, "--cache-dir="+r.Cache, "--client-dir="+r.Clients,
			"--launcher="+r.Launcher, fmt.Sprintf("--uid-range=%d-%d", r.FirstUID, r.LastUID))
	}
	if mode != "controller" {
		args = append(args, r.Isolation...)
	}
	if mode != "controller" && r.HostDir != "" {
		args = append(args, "--host-dir="+r.HostDir)
	}
	argv := slices.Concat(r.Wrapper, []string{r.Program}, args, flags)
	d.cmd, err = r.run(ctx, d.exited, r.Environment(), argv[0], argv[1:]...)
	if err != nil {
		return nil, err
	}
	r.mu.Lock()
	r.drivers = append(r.drivers, d)
	r.mu.Unlock()
	d.conn, err = Dial(d.Endpoint)
	if err != nil {
		return nil, err
	}
	d.IdentityClient, d.ControllerClient, d.NodeClient = csi.NewIdentityClient(d.conn), csi.NewControllerClient(d.conn), csi.NewNodeClient(d.conn)
	if err := d.awaitReady(ctx); err != nil {
		return nil, fmt.Errorf("starting the driver: %w; its log:\n%s", err, r.Logs())
	}
	return d, nil
}

// Dial connects to a driver's endpoint, soon after it is there: gRPC's own first pause is a second.
func Dial(endpoint string) (*grpc.ClientConn, error) {
	return grpc.NewClient(strings.TrimPrefix(endpoint, "tcp://"), grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff: backoff.Config{BaseDelay: 10 * time.Millisecond, Multiplier: 1.5, MaxDelay: 200 * time.Millisecond}, MinConnectTimeout: 5 * time.Second,
		}))
}

// Environment is what the rig's drivers are started with.
func (r *Rig) Environment() []string {
	return append(r.raceEnvironment(),
		"PATH=/usr/bin:/bin", "HOME=/nonexistent", "AWS_EC2_METADATA_DISABLED=true",
		"AWS_REGION="+r.S3.Region, "AWS_ENDPOINT_URL="+r.S3.Endpoint,
		"AWS_ACCESS_KEY_ID="+r.S3.Keys.AccessKeyID, "AWS_SECRET_ACCESS_KEY="+r.S3.Keys.SecretAccessKey, "AWS_SESSION_TOKEN="+r.S3.Keys.SessionToken)
}

func (d *Driver) awaitReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	for {
		rep, err := d.Probe(ctx, &csi.ProbeRequest{})
		if err == nil && (rep.GetReady() == nil || rep.GetReady().GetValue()) {
			return nil
		}
		select {
		case <-d.exited:
			return fmt.Errorf("it exited: %s", d.cmd.ProcessState)
		case <-ctx.Done():
			return fmt.Errorf("it is not ready: %w", errors.Join(ctx.Err(), err))
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// Conn is the connection to the driver.
func (d *Driver) Conn() *grpc.ClientConn { return d.conn }

// PID is the driver's process id.
func (d *Driver) PID() int { return d.cmd.Process.Pid }

// Signal sends a signal to the driver.
func (d *Driver) Signal(sig unix.Signal) error { return unix.Kill(d.PID(), sig) }

// Kill ends the driver as a crash would, and waits until it is gone.
func (d *Driver) Kill() {
	select {
	case <-d.exited:
	default:
		_ = d.Signal(unix.SIGKILL)
		<-d.exited
	}
	if d.conn != nil {
		_ = d.conn.Close()
	}
}

// Stop asks the driver to end and returns its exit code.
func (d *Driver) Stop(ctx context.Context) (int, error) {
	if err := d.Signal(unix.SIGTERM); err != nil {
		return 0, err
	}
	return d.Wait(ctx)
}

// Wait waits for the driver's end and returns its exit code.
func (d *Driver) Wait(ctx context.Context) (int, error) {
	select {
	case <-d.exited:
		_ = d.conn.Close()
		return d.cmd.ProcessState.ExitCode(), nil
	case <-ctx.Done():
		return 0, fmt.Errorf("the driver has not exited: %w", ctx.Err())
	}
}

// Exited is closed when the driver has ended.
func (d *Driver) Exited() <-chan struct{} { return d.exited }

// Mounter is the access of an ordinary read-write volume.
func Mounter(mode csi.VolumeCapability_AccessMode_Mode, flags ...string) *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: mode},
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{MountFlags: flags}},
	}
}

// Writer is a capability that any number of nodes and pods share.
func Writer(flags ...string) *csi.VolumeCapability {
	return Mounter(csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER, flags...)
}
