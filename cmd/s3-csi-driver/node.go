package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/driver"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/mount"
)

// smallHelper is the file name of the program that does nothing but what helpers do.
const smallHelper = "s3-csi-helper"

// helperProgram is the program that mounts' helpers are made of: the small one beside this one, or, where a driver stands
// alone, this one in its helper mode. They do the same; the small one starts faster and takes less memory.
func helperProgram(executable string) string {
	small := filepath.Join(filepath.Dir(executable), smallHelper)
	if fi, err := os.Stat(small); err == nil && fi.Mode().IsRegular() {
		return small
	}
	return executable
}

// addNode adds the node service. What it gives, the end of the process releases.
func addNode(ctx context.Context, cfg *driver.Config, o driver.Options, s storage, version string) error {
	executable, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find the driver's own program, which helpers are made of: %w", err)
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
		klog.FromContext(ctx).Info("Volumes of clients that must see their callers, mountpoint-s3 for one, cannot be published", "reason", err.Error())
		cfg.Health.Note(err.Error())
	}
	l, err := launchOn(ctx, namespace, programs{helperProgram(executable), clientDir}, o, version)
	if err != nil {
		return err
	}
	if err := l.report(ctx, cfg, o.Node); err != nil {
		return err
	}
	m, err := mount.New(ctx, mount.Options{
		Namespace:     namespace,
		Launcher:      l,
		Backends:      mountBackends{s.config, s.buckets},
		Sessions:      s.sessions,
		Client:        client.Get,
		StateDir:      o.Node.StateDir,
		CacheDir:      o.Node.CacheDir,
		ClientDir:     l.clientDir,
		DefaultClient: o.Node.DefaultClient,
		TargetRoot:    o.Node.TargetRoot,
		UIDs:          mount.UIDRange(o.Node.UIDs),
		MountTimeout:  o.Node.MountTimeout,
		DrainTimeout:  o.Node.DrainTimeout,
		Version:       version,
		Limits:        l.limits,
		Heal:          o.Node.Heal,
		HangTimeout:   o.Node.HangTimeout,
		CleanPrograms: l.clean,
	})
	if err != nil {
		return err
	}
	for _, collector := range m.Collectors() {
		if err := cfg.Metrics.Registerer().Register(collector); err != nil {
			return fmt.Errorf("metrics of mounts: %w", err)
		}
	}
	cfg.Background = append(cfg.Background, driver.Background{Name: "looking after mounts", Run: m.Run})
	if l.dns != nil {
		cfg.Background = append(cfg.Background, driver.Background{Name: "keeping the resolv.conf of mounts", Run: l.dns.Run})
	}
	cfg.Node, err = driver.NewNode(mounter{m, isolated}, o.Common.DriverName, o.Node)
	return err
}

// isolation returns why no volume may be published by a driver that cannot see the host, and reports it in the log and in /readyz.
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

// mounter is mount.Manager as the node service wants it.
type mounter struct {
	m        *mount.Manager
	isolated error // why nothing may be published; nil: it may
}

func (a mounter) Publish(ctx context.Context, p driver.Publication) error {
	if a.isolated != nil {
		return a.m.Refusal(ctx, p.Target, a.isolated)
	}
	return a.m.Publish(ctx, mount.Request(p))
}

func (a mounter) Refusal(ctx context.Context, target string, err error) error {
	return a.m.Refusal(ctx, target, err)
}

func (a mounter) Unpublish(ctx context.Context, volumeID, target string) error {
	return a.m.Unpublish(ctx, volumeID, target)
}

func (a mounter) Stats(ctx context.Context, volumeID, path string) (driver.Stats, error) {
	s, err := a.m.Stats(ctx, volumeID, path)
	return driver.Stats(s), err
}

// mountBackends is S3 as the mount manager sees it: each part has what its name says.
type mountBackends struct {
	*backend.Live
	*backend.Buckets
}
