package main

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"

	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/driver"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/launcher"
	"github.com/s3-csi/s3-csi-driver/pkg/node"
	"github.com/s3-csi/s3-csi-driver/pkg/status"
)

// programs returns the paths of the programs of mounts. The helper's is installed beside the driver's.
func (p nodeParts) programs() (programPaths, error) {
	executable, err := os.Executable()
	if err != nil {
		return programPaths{}, fmt.Errorf("find the driver's executable: %w", err)
	}
	dir := filepath.Dir(executable)
	return programPaths{
		helper: filepath.Join(dir, "s3-csi-helper"), clientDir: cmp.Or(p.options.Node.ClientDir, dir), clients: p.storage.config.Config().Clients(),
	}, nil
}

// nodeParts is what the node service, and the node of a check of a client, are made from.
type nodeParts struct {
	options   driver.Options
	storage   storage
	version   string
	namespace *host.Namespace
	isolated  error // why no volume may be published; nil: the driver sees the host
}

// nodeOptions returns the options of a node whose helpers a launcher starts. It shows nothing but mounts.
func (p nodeParts) nodeOptions(l launch) node.Options {
	o, s := p.options.Node, p.storage
	return node.Options{
		Namespace:     p.namespace,
		Launcher:      l.hostLauncher,
		Backends:      mountBackends{s.config, s.buckets},
		Sessions:      s.sessions,
		Clients:       s.config,
		StateDir:      o.StateDir,
		CacheDir:      o.CacheDir,
		Programs:      l.programs,
		DefaultClient: o.DefaultClient,
		TargetRoot:    o.TargetRoot,
		UIDs:          launcher.UIDRange(o.UIDs),
		MountTimeout:  o.MountTimeout,
		DrainTimeout:  o.DrainTimeout,
		Version:       p.version,
		Limits:        l.limits,
		Heal:          o.Heal,
		HangTimeout:   o.HangTimeout,
		Refused:       p.isolated,
		Reach:         s.clients.Reach,
		Declared:      func() []backend.Backend { return s.config.Config().Declared() },
		Status:        node.Status{Notes: func() []string { return nil }},
	}
}

// addNode adds the node service. Its resources are released when the process exits.
func addNode(ctx context.Context, cfg *driver.Config, p nodeParts) (err error) {
	o := p.options.Node
	paths, err := p.programs()
	if err != nil {
		return err
	}
	if _, err := os.Stat(paths.helper); err != nil {
		return fmt.Errorf("find the helper program: %w; install it in the directory of s3-csi-driver", err)
	}
	if p.namespace, err = host.NewNamespace(); err != nil {
		return err
	}
	p.isolated = isolation(ctx, p.namespace, cfg.Health, o)
	if err := host.HostPID(); err != nil && p.isolated == nil {
		klog.FromContext(ctx).Info("Clients that need callers' PIDs are unavailable", "reason", err.Error())
		cfg.Health.Note(err.Error())
	}
	l, err := p.launch(ctx)
	if err != nil {
		return err
	}
	l.report(ctx, cfg, o)
	options := p.nodeOptions(l)
	options.Preparer, options.CleanPrograms, options.Linger, options.UsageRequests = l.hostLauncher, l.clean, l.linger, o.UsageMaxRequests
	options.Status = node.Status{
		Driver:   status.Driver{Name: p.options.Common.DriverName, Version: p.version, NodeID: o.NodeID},
		Launcher: l.name(), EnforcesLimits: l.systemd != nil, Notes: cfg.Health.Notes, Volumes: o.VolumeMetrics,
	}
	m, err := node.New(ctx, options)
	if err != nil {
		return err
	}
	cfg.Metrics.Registerer().MustRegister(m.Collectors()...)
	cfg.Background = append(cfg.Background, driver.Background{Name: "monitoring of mounts", Run: m.Run},
		driver.Background{Name: "checking of the clients' programs", Run: l.programs.Run})
	if l.dns != nil {
		cfg.Background = append(cfg.Background, driver.Background{Name: "copying of resolv.conf", Run: l.dns.Run})
	}
	n := driver.NewNode(m, p.options.Common.DriverName, o)
	n.PodClients = m.PodClients()
	n.VolumeHealth = p.options.Common.VolumeHealth
	n.MaxVolumes = o.VolumeAttachLimit.Of(l.enforced())
	cfg.Node = n
	if c, ok := cfg.Controller.(*driver.Controller); ok {
		c.InUse = m
	}
	return nil
}

// isolation returns an error if the driver cannot see the host and therefore must not publish volumes. It reports this in the log and in
// /readyz.
func isolation(ctx context.Context, namespace *host.Namespace, health *driver.Health, o driver.NodeOptions) error {
	err := namespace.Isolated(ctx, ownDirs(o)...)
	switch {
	case err == nil:
		return nil
	case o.AllowIsolated:
		klog.FromContext(ctx).Info("Driver is isolated, publishing because of --allow-isolated", "reason", err.Error())
		health.Note(err.Error())
		return nil
	}
	klog.FromContext(ctx).Error(err, "Driver is isolated, refusing to publish volumes")
	health.Unfit("no volume can be published: " + err.Error())
	return err
}

// ownDirs returns the driver's directories on the host.
func ownDirs(o driver.NodeOptions) []host.OwnDir {
	return []host.OwnDir{{Flag: "--state-dir", Path: o.StateDir}, {Flag: "--cache-dir", Path: o.CacheDir}}
}

// mountBackends gives the node service access to the S3 services.
type mountBackends struct {
	*backend.Live
	*backend.Buckets
}
