package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/check"
	"github.com/s3-csi/s3-csi-driver/pkg/check/clientcheck"
	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/driver"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/launcher"
	"github.com/s3-csi/s3-csi-driver/pkg/node"
	"github.com/s3-csi/s3-csi-driver/pkg/provision/buckets"
	"github.com/s3-csi/s3-csi-driver/pkg/status"
)

const (
	// checkUIDs is the number of uids of a check. Those of the node service may be in use: it kills processes that belong to no mount of its
	// own, and so does the node of a check.
	checkUIDs   = 16
	checkPrefix = "s3-csi-check-" // the prefix of what a check of a client writes, below --prefix
	// largeFile needs a multipart upload with every client: rclone's threshold is 200 MiB. mountpoint-s3 always uses one, of parts of 8 MiB.
	largeFile      = 201 << 20
	largeOfDefault = 9 << 20
)

// checkClient checks one client in a mount of its own:
//
//  1. choose the backend, the client and the keys
//  2. check the operations of the service that the client needs
//  3. make directories, and a node on them with uids of its own
//  4. run the node, and the check on its only volume
//  5. stop the node, and remove what is left
func checkClient(ctx context.Context, p nodeParts) ([]check.Section, error) {
	o, s := p.options, p.storage
	options, err := o.Check.ParseMountOptions()
	if err != nil {
		return nil, err
	}
	c := clientcheck.Check{Renewal: o.Check.SessionDuration, Timeout: o.Check.StepTimeout, Large: largeFile}
	volume, objects, err := volumeToCheck(ctx, p, &c)
	if err != nil {
		return nil, err
	}
	if c.Client == client.Default {
		c.Large = largeOfDefault
	}
	services := check.Services{
		Clients: s.clients, Buckets: s.buckets, Bucket: o.Check.Bucket, Checksums: sendsChecksums(c.Client, options),
		Below: strings.TrimSuffix(objects.Prefix, "/") + "-s3-",
	}
	operations := services.Check(ctx, objects.Bucket.Backend)
	section, err := mountAndCheck(ctx, p, volume, c)
	return []check.Section{operations, section}, err
}

// mountAndCheck checks a client in a mount, of a node like the node service's.
func mountAndCheck(ctx context.Context, p nodeParts, volume checkVolume, c clientcheck.Check) (section check.Section, err error) {
	if p.namespace, err = host.NewNamespace(); err != nil {
		return section, err
	}
	o := &p.options.Node
	if !o.AllowIsolated {
		p.isolated = p.namespace.Isolated(ctx, ownDirs(*o)...)
	}
	if o.UIDs, err = uidsBeside(o.UIDs); err != nil {
		return section, err
	}
	release, err := onlyCheck(ctx, o.UIDs)
	if err != nil {
		return section, err
	}
	defer release()
	place, err := clientcheck.NewPlace(ctx, p.namespace, o.StateDir, o.CacheDir)
	if err != nil {
		return section, err
	}
	// The node has stopped by then: it would restart a client that is killed.
	defer func() {
		if cerr := place.Close(ctx); cerr != nil && err == nil {
			section.Rows = append(section.Rows, clientcheck.NotRemoved(cerr))
		} else {
			err = errors.Join(err, cerr)
		}
	}()
	paths, err := p.programs()
	if err != nil {
		return section, err
	}
	place.UIDs, place.Helper = launcher.UIDRange(o.UIDs), filepath.Base(paths.helper)
	o.StateDir, o.CacheDir, o.Heal, o.DefaultClient = place.State, place.Cache, true, c.Client
	o.MountTimeout, o.DrainTimeout, o.HangTimeout = c.Timeout, c.Timeout, c.Timeout
	o.Launcher, o.NodeID, p.options.Common.DriverName = driver.LauncherProcess, "check", "check-"+strings.ToLower(rand.Text())[:10]
	uninstall, err := check.Uninstaller(ctx, p.namespace, o.HostDir, p.options.Common.DriverName) // a random name
	if err != nil {
		return section, err
	}
	defer func() {
		if err := uninstall(); err != nil {
			klog.FromContext(ctx).Error(err, "Cannot remove installed programs", "directory", filepath.Join(o.HostDir, p.options.Common.DriverName))
		}
	}()
	l, err := p.launch(ctx)
	if err != nil {
		return section, err
	}
	place.Launcher = l.hostLauncher
	n, err := node.New(ctx, p.nodeOptions(l))
	if err != nil {
		return section, err
	}
	defer runNode(ctx, n, l)()
	volume.node, volume.target, volume.status = driver.NewNode(n, p.options.Common.DriverName, *o), place.Target, n.Status
	c.Volume, c.Host, c.Target = volume, place, place.Target
	return c.Run(ctx), nil
}

// uidsBeside returns uids beside those of the node service.
func uidsBeside(used driver.UIDRange) (driver.UIDRange, error) {
	switch {
	case used.Last < launcher.DefaultUIDs().Last-checkUIDs:
		return driver.UIDRange{First: used.Last + 1, Last: used.Last + checkUIDs}, nil
	case used.First > launcher.DefaultUIDs().First+checkUIDs:
		return driver.UIDRange{First: used.First - checkUIDs, Last: used.First - 1}, nil
	}
	return used, fmt.Errorf("--uid-range: there are no %d user ids beside it for the check", checkUIDs)
}

// onlyCheck returns an error if another check uses the uids. The sign is an abstract UNIX socket, which vanishes with its process.
func onlyCheck(ctx context.Context, uids driver.UIDRange) (release func(), err error) {
	sign, err := new(net.ListenConfig).Listen(ctx, "unix", fmt.Sprintf("@s3-csi-check-uids-%d", uids.First))
	if err != nil {
		return nil, fmt.Errorf("another check of a client runs on this node: %w", err)
	}
	return func() { _ = sign.Close() }, nil
}

// volumeToCheck returns the volume, which has a new prefix, and adds it and its client to the check.
func volumeToCheck(ctx context.Context, p nodeParts, c *clientcheck.Check) (v checkVolume, objects clientcheck.Below, err error) {
	o, s := p.options.Check, p.storage
	backends, err := chosen(s.config.Config(), p.options)
	if err != nil {
		return v, objects, err
	}
	if len(backends) != 1 {
		return v, objects, fmt.Errorf("--client: the config file declares %d backends; name one with --backend", len(backends))
	}
	be := backends[0]
	cl, err := s.config.Clients().Get(o.Client)
	if err != nil {
		return v, objects, fmt.Errorf("--client: %w", err)
	}
	keys, err := s.clients.DriverKeys(ctx)
	if err != nil {
		return v, objects, err
	}
	opener := buckets.NewOpener(s.clients, s.buckets, time.Now)
	b, err := opener.Open(ctx, be, keys, o.Bucket, "")
	if err != nil {
		return v, objects, fmt.Errorf("--bucket: %w", err)
	}
	base := strings.TrimSuffix(o.Prefix, "/")
	if base != "" {
		base += "/"
	}
	id := checkPrefix + strings.ToLower(rand.Text())
	objects = clientcheck.Below{Bucket: b, Opener: opener, Prefix: base + id + "/"}
	c.Client, c.ExitsEarly, c.StaticKeys, c.Objects = cl.Name, cl.ExitsEarly, cl.StaticKeys, objects
	v = checkVolume{id: id, attributes: map[string]string{"backend": be.Name, "bucketName": o.Bucket, "prefix": objects.Prefix, "client": cl.Name}}
	if o.MountOptions != "" {
		v.attributes["mountOptions"] = o.MountOptions
	}
	switch {
	case cl.StaticKeys: // such a client can only have the keys of a secret
		v.secrets = map[string]string{credentials.SecretAccessKeyID: keys.AccessKeyID, credentials.SecretSecretAccessKey: keys.SecretAccessKey}
		if keys.SessionToken != "" {
			v.secrets[credentials.SecretSessionToken] = keys.SessionToken
		}
	case o.SessionDuration != 0:
		v.attributes["sessionDuration"] = o.SessionDuration.String()
	}
	return v, objects, nil
}

// runNode runs a node until stop is called, also after ctx has ended.
func runNode(ctx context.Context, n *node.Node, l launch) (stop func()) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	var running sync.WaitGroup
	run := func(what string, run func(context.Context) error) {
		running.Go(func() {
			if err := run(ctx); err != nil && ctx.Err() == nil {
				klog.FromContext(ctx).Error(err, "Node of the check failed", "part", what)
			}
		})
	}
	run("monitoring of mounts", n.Run)
	// l.programs does not run: some clients, such as rclone without its cache, take the start of a program for the end of the file that is
	// being written, because the copies of its descriptor are closed.
	if l.dns != nil {
		run("copying of resolv.conf", l.dns.Run)
	}
	return func() {
		cancel()
		running.Wait()
	}
}

// checkVolume implements clientcheck.Volume by requests to the node service.
type checkVolume struct {
	node       csi.NodeServer
	id, target string
	attributes map[string]string
	secrets    map[string]string
	status     func(ctx context.Context) (status.Document, error)
}

// Publish implements clientcheck.Volume.
func (v checkVolume) Publish(ctx context.Context) error {
	_, err := v.node.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{
		VolumeId: v.id, TargetPath: v.target, VolumeContext: v.attributes, Secrets: v.secrets,
		VolumeCapability: &csi.VolumeCapability{
			AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER},
			AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{}},
		},
	})
	return err
}

// Unpublish implements clientcheck.Volume.
func (v checkVolume) Unpublish(ctx context.Context) error {
	_, err := v.node.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: v.id, TargetPath: v.target})
	return err
}

// Session implements clientcheck.Volume.
func (v checkVolume) Session(ctx context.Context) (clientcheck.Session, error) {
	d, err := v.status(ctx)
	if err != nil {
		return clientcheck.Session{}, err
	}
	for _, m := range d.Mounts {
		if m.VolumeID != v.id || m.Session.State == "" { // the helper has not reported
			continue
		}
		s := clientcheck.Session{Expires: m.Session.Expires}
		for _, p := range m.Problems {
			if p.Reason == status.ReasonSession {
				s.Problem = p.Message
			}
		}
		return s, nil
	}
	return clientcheck.Session{}, errors.New("the helper of the mount does not report its session")
}
