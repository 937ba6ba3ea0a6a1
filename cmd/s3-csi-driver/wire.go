package main

import (
	"context"
	"fmt"
	"time"

	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/driver"
	"github.com/s3-csi/s3-csi-driver/pkg/provision"
	"github.com/s3-csi/s3-csi-driver/pkg/session"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// serve wires the driver's components and runs them until ctx ends. It contains no other logic.
func serve(ctx context.Context, o driver.Options, version string) error {
	logger := klog.FromContext(ctx)
	logger.Info("Starting driver", "version", version, "mode", o.Mode, "driverName", o.Common.DriverName)
	storage, err := newStorage(o, version)
	if err != nil {
		return err
	}
	defer storage.clients.Close()
	defer storage.sessions.Close()
	metrics, err := driver.NewMetrics(o.Common.DriverName, version)
	if err != nil {
		return fmt.Errorf("register metrics: %w", err)
	}
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
		if err := addNode(ctx, &cfg, o, storage, version); err != nil {
			return fmt.Errorf("node: %w", err)
		}
	}
	server, err := driver.NewServer(cfg)
	if err != nil {
		return err
	}
	return server.Run(ctx)
}

// storage holds what controller and node use to access S3.
type storage struct {
	config   *backend.Live
	clients  *backend.Clients
	buckets  *backend.Buckets
	sessions sessions
}

// sessions plans sessions and makes them.
type sessions struct {
	*session.Planner
	*session.Maker
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
	c, err := driver.NewController(provisioner{p}, snapshots{p}, s.config)
	if err != nil {
		return err
	}
	c.VolumeHealth, c.DriverName = o.Common.VolumeHealth, o.Common.DriverName
	cfg.Controller = c
	return nil
}

// provisioner adapts provision.Provisioner to driver.Provisioner.
type provisioner struct{ p *provision.Provisioner }

func (a provisioner) Create(ctx context.Context, v driver.NewVolume) (volume.ID, error) {
	return a.p.Create(ctx, provision.CreateRequest{
		Name: v.Name, Namespace: v.Namespace, Parameters: v.Parameters, Options: v.Options, Keys: v.Secret.Keys, RoleARN: v.Secret.RoleARN,
	})
}

func (a provisioner) Delete(ctx context.Context, id volume.ID, secret driver.Secret) error {
	return a.p.Delete(ctx, provision.DeleteRequest{ID: id, Keys: secret.Keys, RoleARN: secret.RoleARN})
}

func (a provisioner) Expand(ctx context.Context, id volume.ID, size driver.SizeRange, secret driver.Secret) (int64, error) {
	return a.p.Modify(ctx, provision.ModifyRequest{
		ID: id, Keys: secret.Keys, RoleARN: secret.RoleARN, Change: provision.Change{Required: size.Required, Limit: size.Limit},
	})
}

func (a provisioner) Modify(ctx context.Context, id volume.ID, set volume.Mutable, secret driver.Secret) error {
	_, err := a.p.Modify(ctx, provision.ModifyRequest{ID: id, Keys: secret.Keys, RoleARN: secret.RoleARN, Change: provision.Change{Set: set}})
	return err
}

func (a provisioner) CanList() bool { return a.p.CanList() }

func (a provisioner) List(ctx context.Context, limit int, token string) (page []driver.VolumeInfo, next string, err error) {
	found, next, err := a.p.List(ctx, limit, token)
	for _, v := range found {
		page = append(page, driver.VolumeInfo(v))
	}
	return page, next, err
}

func (a provisioner) Get(ctx context.Context, id volume.ID) (driver.VolumeInfo, error) {
	v, err := a.p.Get(ctx, id)
	return driver.VolumeInfo(v), err
}

func (a provisioner) Lookup(ctx context.Context, id volume.ID, secret driver.Secret) error {
	return a.p.Lookup(ctx, provision.LookupRequest{ID: id, Keys: secret.Keys, RoleARN: secret.RoleARN})
}

func (a provisioner) LookupPlace(ctx context.Context, id volume.ID, secret driver.Secret) error {
	return a.p.LookupPlace(ctx, provision.LookupRequest{ID: id, Keys: secret.Keys, RoleARN: secret.RoleARN})
}

// snapshots adapts provision.Provisioner to driver.Snapshots.
type snapshots struct{ p *provision.Provisioner }

func (a snapshots) Create(ctx context.Context, s driver.NewSnapshot) (driver.Snapshot, error) {
	made, err := a.p.CreateSnapshot(ctx, provision.SnapshotRequest{
		Name: s.Name, Namespace: s.Namespace, Source: s.Source, Parameters: s.Parameters, Keys: s.Secret.Keys, RoleARN: s.Secret.RoleARN,
	})
	return shown(made), err
}

func (a snapshots) Delete(ctx context.Context, id volume.SnapshotID, secret driver.Secret) error {
	return a.p.DeleteSnapshot(ctx, provision.DeleteSnapshotRequest{ID: id, Keys: secret.Keys, RoleARN: secret.RoleARN})
}

func (a snapshots) Get(ctx context.Context, id volume.SnapshotID, secret driver.Secret) (driver.Snapshot, error) {
	found, err := a.p.GetSnapshot(ctx, id, provision.SnapshotCredentials{Keys: secret.Keys, RoleARN: secret.RoleARN})
	return shown(found), err
}

func (a snapshots) List(ctx context.Context, q driver.SnapshotQuery) (list []driver.Snapshot, next string, err error) {
	found, next, err := a.p.ListSnapshots(ctx, provision.ListSnapshotsRequest{
		Source: q.Source, Max: q.Max, Token: q.Token, Secret: provision.SnapshotCredentials{Keys: q.Secret.Keys, RoleARN: q.Secret.RoleARN},
	})
	for _, s := range found {
		list = append(list, shown(s))
	}
	return list, next, err
}

func shown(s provision.Snapshot) driver.Snapshot {
	return driver.Snapshot{ID: s.ID, Source: s.Source, Bytes: s.Bytes, Cut: s.Cut, Ready: s.Ready}
}
