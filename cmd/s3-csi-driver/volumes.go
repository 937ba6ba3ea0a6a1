package main

import (
	"context"
	"encoding/json"
	"io"
	"time"

	"github.com/s3-csi/s3-csi-driver/pkg/driver"
	"github.com/s3-csi/s3-csi-driver/pkg/inventory"
	"github.com/s3-csi/s3-csi-driver/pkg/provision"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/records"
)

// volumesBound bounds mode volumes.
const volumesBound = 10 * time.Minute

// showVolumes prints the volumes that records and tags tell of. The exit code is exitFailure if a backend or a bucket could not be read.
func showVolumes(ctx context.Context, o driver.Options, version string, out output) int {
	ctx, cancel := context.WithTimeout(ctx, volumesBound)
	defer cancel()
	d, err := volumes(ctx, o, version)
	if err != nil {
		return out.fail(err)
	}
	write := d.Text
	if o.Volumes.Output == driver.OutputJSON {
		write = func(w io.Writer) error {
			enc := json.NewEncoder(w)
			enc.SetIndent("", "  ")
			return enc.Encode(d)
		}
	}
	if err := write(out.stdout); err != nil || len(d.Unread) > 0 {
		return exitFailure
	}
	return exitOK
}

func volumes(ctx context.Context, o driver.Options, version string) (inventory.Document, error) {
	s, err := newStorage(o, version)
	if err != nil {
		return inventory.Document{}, err
	}
	defer s.close()
	p, err := provision.New(provision.Options{
		Config: s.config, Clients: s.clients, Buckets: s.buckets, Sessions: s.sessions, DriverName: o.Common.DriverName, ClusterID: o.Controller.ClusterID,
	})
	if err != nil {
		return inventory.Document{}, err
	}
	entries, unread, err := p.Inventory(ctx, o.Volumes.Backend)
	if err != nil {
		return inventory.Document{}, err
	}
	owner := records.Owner{Driver: o.Common.DriverName, Cluster: o.Controller.ClusterID}
	return inventory.New(inventory.Found{Owner: owner, Entries: entries, Unread: unread, Time: time.Now()}, o.Volumes.All), nil
}
