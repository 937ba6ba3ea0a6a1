package runner

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/launcher"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/creds"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/state"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// service is what a client's command line depends on, besides its mount.
type service struct {
	client  client.Client
	backend backend.Backend
	bucket  backend.BucketInfo
}

// setCommand sets a mount's command line and the settings that it depends on.
func (r *Runner) setCommand(ctx context.Context, m *state.Mount, to service) error {
	var err error
	if m.Command, err = r.command(ctx, *m, to); err != nil {
		return err
	}
	m.Backend, m.Region, m.Owner = to.backend.MountDigest(), to.bucket.Region, to.bucket.Owner
	return nil
}

// command returns a client's command line for a bucket.
func (r *Runner) command(ctx context.Context, m state.Mount, to service) (client.Command, error) {
	options, err := m.Spec.ParseOptions()
	if err != nil {
		return client.Command{}, err
	}
	in := r.invocation(m, to, to.backend.ClientOptions(options))
	if in.Endpoint, err = to.backend.ClientEndpoint(ctx, to.bucket.Region); err != nil {
		return client.Command{}, err
	}
	if in.Binary, err = r.Programs.Path(ctx, to.client); err != nil {
		return client.Command{}, err
	}
	return to.client.Command(in), nil
}

// invocation returns the input of a client's command line: the spec, with defaults for unset fields.
func (r *Runner) invocation(m state.Mount, to service, options []volume.Option) client.Invocation {
	spec, be, bucket := m.Spec, to.backend, to.bucket
	in := client.Invocation{
		Bucket: spec.Bucket, Prefix: spec.Prefix, Region: bucket.Region,
		Proxy: be.ProxyFor(be.Endpoint), PathStyle: be.PathStyle, ReadOnly: spec.ReadOnly, Options: options,
		ExpectedBucketOwner: bucket.Owner, UserAgent: "s3-csi-driver/" + r.Version,
		UID: m.UID, GID: m.UID, DirMode: 0o777, FileMode: 0o666,
		StateDir: r.Store.HelperDir(m.Name), CacheDir: r.Store.CacheDir(m.Name),
		MemoryLimit: r.limits(spec, to.client, options).MemoryMax, Cache: spec.Cache, CacheSize: spec.CacheSize,
		Consistency:       spec.Consistency,
		ConditionalWrites: !be.SingleController,
	}
	if be.CAFile != "" {
		in.CAFile = r.Store.CAFile(m.Name)
	}
	if spec.MountGroup != nil {
		in.GID, in.DirMode, in.FileMode = *spec.MountGroup, 0o770, 0o660
	}
	for _, given := range []struct{ to, from *uint32 }{{&in.UID, spec.UID}, {&in.GID, spec.GID}, {&in.DirMode, spec.DirMode}, {&in.FileMode, spec.FileMode}} {
		if given.from != nil {
			*given.to = *given.from
		}
	}
	return in
}

// updateCommand makes the client's command line again if the recorded one is outdated: the backend's configuration has changed, or
// the program was removed. The grant's credentials are proven with the new configuration first.
func (r *Runner) updateCommand(ctx context.Context, m *state.Mount, be backend.Backend, grant *creds.Grant) error {
	argv := m.Command.Argv
	removed, err := host.Call(ctx, r.Namespace, "looking for the client program of "+m.Name, nil, func() (bool, error) {
		if len(argv) == 0 {
			return true, nil
		}
		_, err := os.Stat(argv[0])
		return errors.Is(err, fs.ErrNotExist), nil
	})
	if err != nil {
		return err
	}
	if be.MountDigest() == m.Backend && !removed {
		return nil
	}
	cl, err := r.Clients.Of(m.Client)
	if err != nil {
		return err
	}
	bucket := backend.BucketInfo{Name: m.Spec.Bucket, Region: m.Region, Owner: m.Owner}
	if !grant.IsEmpty() {
		if err := r.Creds.Prove(ctx, grant, be, m.Spec); err != nil {
			return err
		}
		bucket = grant.Bucket()
	}
	if err := r.writeCA(ctx, m.Name, be); err != nil {
		return err
	}
	return r.setCommand(ctx, m, service{cl, be, bucket})
}

// prepareUnit returns the unit of a mount's helper, without its socket, and writes the certificates of the backend where the client can
// read them.
func (r *Runner) prepareUnit(ctx context.Context, m state.Mount, be backend.Backend) (launcher.Unit, error) {
	cl, err := r.Clients.Of(m.Client)
	if err != nil {
		return launcher.Unit{}, err
	}
	options, err := m.Spec.ParseOptions()
	if err != nil {
		return launcher.Unit{}, err
	}
	return launcher.Unit{
		Name: m.Unit(), Description: fmt.Sprintf("S3 volume %s (%s), mount %s", m.VolumeID, m.Client, m.Name),
		UID: m.UID, GID: m.UID, StateDir: r.Store.HelperDir(m.Name), CacheDir: r.Store.CacheDir(m.Name),
		Callers: cl.CallerPIDs, Needs: be.Addresses(m.Spec.Source), Limits: r.limits(m.Spec, cl, options),
	}, r.writeCA(ctx, m.Name, be)
}

func (r *Runner) writeCA(ctx context.Context, name string, be backend.Backend) error {
	if be.CAFile == "" {
		return nil
	}
	return r.Store.WriteCA(ctx, name, be.CA())
}

// limits returns the limits of a mount's processes: the volume's, or else the node's. The memory is never less than the client
// needs for its options.
func (r *Runner) limits(spec mount.Spec, cl client.Client, options []volume.Option) launcher.Limits {
	l := launcher.Limits{MemoryMax: spec.MemoryLimit, CPUWeight: spec.CPUWeight, TasksMax: spec.TasksMax}
	if l.MemoryMax == 0 && r.Limits.MemoryMax != 0 {
		l.MemoryMax = max(r.Limits.MemoryMax, cl.NeedsMemory(options))
	}
	return l
}

// MemoryLimit returns the memory limit that the mount's processes were started with; 0: none, or unknown.
func (r *Runner) MemoryLimit(m state.Mount) uint64 {
	cl, err := r.Clients.Of(m.Client)
	if err != nil {
		return m.Spec.MemoryLimit
	}
	options, _ := m.Spec.ParseOptions()
	return r.limits(m.Spec, cl, options).MemoryMax
}
