package main

import (
	"context"
	"fmt"
	"time"

	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/driver"
	"github.com/s3-csi/s3-csi-driver/pkg/provision"
	"github.com/s3-csi/s3-csi-driver/pkg/session"
)

// serve wires the driver's components and runs them until ctx ends. It contains no other logic.
func serve(ctx context.Context, o driver.Options, version string) error {
	logger := klog.FromContext(ctx)
	logger.Info("Starting driver", "version", version, "mode", o.Mode, "driverName", o.Common.DriverName)
	storage, err := newStorage(o, version)
	if err != nil {
		return err
	}
	defer storage.close()
	metrics := driver.NewMetrics(o.Common.DriverName, version)
	if err := storage.config.Register(metrics.Registerer()); err != nil {
		return fmt.Errorf("register metrics: %w", err)
	}
	health := &driver.Health{}
	cfg := driver.Config{
		Endpoint:        o.Common.Endpoint,
		HTTPEndpoint:    o.Common.HTTPEndpoint,
		ShutdownTimeout: o.Common.ShutdownTimeout,
		Identity:        driver.NewIdentity(o.Common.DriverName, version, health),
		Metrics:         metrics,
		Health:          health,
		Background:      []driver.Background{{Name: "reloading of the config file", Run: storage.config.Run}, {Name: "returning of unused memory", Run: trimMemory}},
	}
	if o.Mode.Controller() {
		if err := addController(&cfg, o, storage); err != nil {
			return fmt.Errorf("controller: %w", err)
		}
	}
	if o.Mode.Node() {
		if err := addNode(ctx, &cfg, nodeParts{options: o, storage: storage, version: version}); err != nil {
			return fmt.Errorf("node: %w", err)
		}
	}
	return cfg.Serve(ctx)
}

// storage holds what controller and node use to access S3.
type storage struct {
	config   *backend.Live
	clients  *backend.Clients
	buckets  *backend.Buckets
	sessions sessions
}

func (s storage) close() {
	s.sessions.maker.Close()
	s.clients.Close()
}

// sessions plans sessions and makes them.
type sessions struct {
	planner *session.Planner
	maker   *session.Maker
}

// Plan returns the order for a session.
func (s sessions) Plan(ctx context.Context, r session.Request) (credentials.Order, error) {
	return s.planner.Plan(ctx, r)
}

// Make makes a session.
func (s sessions) Make(ctx context.Context, o credentials.Order) (credentials.Keys, error) {
	return s.maker.Make(ctx, o)
}

func newStorage(o driver.Options, version string) (s storage, err error) {
	if s.config, err = backend.NewLive(o.Common.Config, o.DefaultRegion, o.DefaultEndpoint); err != nil {
		return s, err
	}
	if s.clients, err = backend.NewClients(s.config, backend.WithVersion(version)); err != nil {
		return s, err
	}
	s.sessions = sessions{session.NewPlanner(s.clients), session.NewMaker(version)}
	s.buckets, err = backend.NewBuckets(s.clients, time.Now)
	return s, err
}

func addController(cfg *driver.Config, o driver.Options, s storage) error {
	p, err := provision.New(provision.Options{
		Config:      s.config,
		Clients:     s.clients,
		Buckets:     s.buckets,
		Sessions:    s.sessions,
		DriverName:  o.Common.DriverName,
		ClusterID:   o.Controller.ClusterID,
		Runs:        o.Controller.DeletionWorkers,
		CopyWorkers: o.Controller.CopyWorkers,
	})
	if err != nil {
		return err
	}
	cfg.Background = append(cfg.Background, driver.Background{Name: "deletions and copies", Run: p.Run})
	c := driver.NewController(p, p, s.config)
	c.VolumeHealth, c.DriverName = o.Common.VolumeHealth, o.Common.DriverName
	cfg.Controller = c
	return nil
}
