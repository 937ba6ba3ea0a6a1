package main

import (
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

// helperProgram returns the helper's program, which is installed beside the driver's.
func helperProgram(executable string) string {
	return filepath.Join(filepath.Dir(executable), "s3-csi-helper")
}

// addNode adds the node service. Its resources are released when the process exits.
func addNode(ctx context.Context, cfg *driver.Config, o driver.Options, s storage, version string) error {
	executable, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find the driver's executable: %w", err)
	}
	program := helperProgram(executable)
	if _, err := os.Stat(program); err != nil {
		return fmt.Errorf("find the helper program: %w; install it in the directory of s3-csi-driver", err)
	}
	clientDir := o.Node.ClientDir
	if clientDir == "" {
		clientDir = filepath.Dir(executable)
	}
	namespace, err := host.NewNamespace()
	if err != nil {
		return err
	}
	isolated := isolation(ctx, namespace, cfg.Health, o.Node)
	if err := host.HostPID(); err != nil && isolated == nil {
		klog.FromContext(ctx).Info("Clients that need callers' PIDs are unavailable", "reason", err.Error())
		cfg.Health.Note(err.Error())
	}
	l, err := launchOn(ctx, namespace, programPaths{program, clientDir, s.config.Clients()}, o, version)
	if err != nil {
		return err
	}
	if err := l.report(ctx, cfg, o.Node); err != nil {
		return err
	}
	linger, err := lingerLimits(o.Node)
	if err != nil {
		return err
	}
	m, err := node.New(ctx, node.Options{
		Namespace:     namespace,
		Launcher:      l,
		Preparer:      l,
		Backends:      mountBackends{s.config, s.buckets},
		Sessions:      s.sessions,
		Clients:       s.config,
		StateDir:      o.Node.StateDir,
		CacheDir:      o.Node.CacheDir,
		Programs:      l.programs,
		DefaultClient: o.Node.DefaultClient,
		TargetRoot:    o.Node.TargetRoot,
		UIDs:          launcher.UIDRange(o.Node.UIDs),
		MountTimeout:  o.Node.MountTimeout,
		DrainTimeout:  o.Node.DrainTimeout,
		Version:       version,
		Limits:        l.limits,
		Heal:          o.Node.Heal,
		HangTimeout:   o.Node.HangTimeout,
		CleanPrograms: l.clean,
		Refused:       isolated,
		Linger:        linger,
		UsageRequests: o.Node.UsageMaxRequests,
		Reach:         s.clients.Reach,
		Declared:      func() []backend.Backend { return s.config.Config().Declared() },
		Status: node.Status{
			Driver:   status.Driver{Name: o.Common.DriverName, Version: version, NodeID: o.Node.NodeID},
			Launcher: l.name(), EnforcesLimits: l.systemd != nil, Notes: cfg.Health.Notes, Volumes: o.Node.VolumeMetrics,
		},
	})
	if err != nil {
		return err
	}
	for _, collector := range m.Collectors() {
		if err := cfg.Metrics.Registerer().Register(collector); err != nil {
			return fmt.Errorf("register metrics of mounts: %w", err)
		}
	}
	cfg.Background = append(cfg.Background, driver.Background{Name: "monitoring of mounts", Run: m.Run},
		driver.Background{Name: "checking of the clients' programs", Run: l.programs.Run})
	if l.dns != nil {
		cfg.Background = append(cfg.Background, driver.Background{Name: "copying of resolv.conf", Run: l.dns.Run})
	}
	n, err := driver.NewNode(m, o.Common.DriverName, o.Node)
	if err != nil {
		return err
	}
	n.PodClients = m.PodClients()
	n.VolumeHealth = o.Common.VolumeHealth
	n.MaxVolumes = o.Node.VolumeAttachLimit.Of(l.enforced())
	cfg.Node = n
	if c, ok := cfg.Controller.(*driver.Controller); ok {
		c.InUse = m
	}
	return nil
}

// isolation returns an error if the driver cannot see the host and therefore must not publish volumes. It reports this in the log and in
// /readyz.
func isolation(ctx context.Context, namespace *host.Namespace, health *driver.Health, o driver.NodeOptions) error {
	err := namespace.Isolated(ctx, host.OwnDir{Flag: "--state-dir", Path: o.StateDir}, host.OwnDir{Flag: "--cache-dir", Path: o.CacheDir})
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

// mountBackends gives the node service access to the S3 services.
type mountBackends struct {
	*backend.Live
	*backend.Buckets
}
