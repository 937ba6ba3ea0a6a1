package main

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
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
	checkUIDs = 16
	// checkPrefix is the prefix of what a check of a client writes, below --prefix.
	checkPrefix = "s3-csi-check-"
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
func checkClient(ctx context.Context, o driver.Options, version string) (sections []check.Section, err error) {
	s, err := newStorage(o, version)
	if err != nil {
		return nil, err
	}
	defer s.clients.Close()
	defer s.sessions.Close()
	volume, objects, declared, err := volumeToCheck(ctx, o, s)
	if err != nil {
		return nil, err
	}
	options, err := o.Check.ParseMountOptions()
	if err != nil {
		return nil, err
	}
	services := check.Services{
		Clients: s.clients, Buckets: s.buckets, Bucket: o.Check.Bucket, Checksums: sendsChecksums(declared.Name, options),
		Below: strings.TrimSuffix(objects.Prefix, "/") + "-s3-",
	}
	operations := services.Check(ctx, objects.Bucket.Backend)
	c := clientcheck.Check{
		Client: declared.Name, Renewal: o.Check.SessionDuration, Timeout: o.Check.StepTimeout, ExitsEarly: declared.ExitsEarly, StaticKeys: declared.StaticKeys,
		Objects: objects, Large: largeFile,
	}
	if declared.Name == client.Default {
		c.Large = largeOfDefault
	}
	section, err := mountAndCheck(ctx, o, s, volume, c, version)
	return []check.Section{operations, section}, err
}

// mountAndCheck checks a client in a mount.
func mountAndCheck(ctx context.Context, o driver.Options, s storage, volume checkVolume, c clientcheck.Check, version string) (
	section check.Section, err error,
) {
	ns, err := host.NewNamespace()
	if err != nil {
		return section, err
	}
	var refused error
	if !o.Node.AllowIsolated {
		refused = ns.Isolated(ctx, host.OwnDir{Flag: "--state-dir", Path: o.Node.StateDir}, host.OwnDir{Flag: "--cache-dir", Path: o.Node.CacheDir})
	}
	if o.Node.UIDs, err = uidsBeside(o.Node.UIDs); err != nil {
		return section, err
	}
	release, err := onlyCheck(ctx, o.Node.UIDs)
	if err != nil {
		return section, err
	}
	defer release()
	place, err := clientcheck.NewPlace(ctx, ns, o.Node.StateDir, o.Node.CacheDir)
	if err != nil {
		return section, err
	}
	place.UIDs, place.Helper = launcher.UIDRange(o.Node.UIDs), filepath.Base(helperProgram(""))
	// The node has stopped by then: it would restart a client that is killed.
	defer func() {
		if cerr := place.Close(ctx); cerr != nil && err == nil {
			section.Rows = append(section.Rows, clientcheck.NotRemoved(cerr))
		} else {
			err = errors.Join(err, cerr)
		}
	}()
	o.Node.StateDir, o.Node.CacheDir = place.State, place.Cache
	o.Node.Launcher, o.Node.NodeID, o.Common.DriverName = driver.LauncherProcess, "check", "check-"+strings.ToLower(rand.Text())[:10]
	n, stop, err := nodeOfCheck(ctx, ns, place, o, s, refused, version)
	if err != nil {
		return section, err
	}
	defer stop()
	service, err := driver.NewNode(n, o.Common.DriverName, o.Node)
	if err != nil {
		return section, err
	}
	volume.node, volume.target, volume.status = service, place.Target, n.Status
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

// volumeToCheck returns the volume, which has a new prefix, and its objects.
func volumeToCheck(ctx context.Context, o driver.Options, s storage) (v checkVolume, objects clientcheck.Below, cl client.Client, err error) {
	config := s.config.Config()
	backends, err := chosen(config, o)
	if err != nil {
		return v, objects, cl, err
	}
	if len(backends) != 1 {
		return v, objects, cl, fmt.Errorf("--client: the config file declares %d backends; name one with --backend", len(backends))
	}
	be := backends[0]
	if cl, err = config.Clients().Get(o.Check.Client); err != nil {
		return v, objects, cl, fmt.Errorf("--client: %w", err)
	}
	keys, err := s.clients.DriverKeys(ctx)
	if err != nil {
		return v, objects, cl, err
	}
	opener := buckets.NewOpener(s.clients, s.buckets, time.Now)
	b, err := opener.Open(ctx, be, keys, o.Check.Bucket, "")
	if err != nil {
		return v, objects, cl, fmt.Errorf("--bucket: %w", err)
	}
	base := strings.TrimSuffix(o.Check.Prefix, "/")
	if base != "" {
		base += "/"
	}
	id := checkPrefix + strings.ToLower(rand.Text())
	objects = clientcheck.Below{Bucket: b, Opener: opener, Prefix: base + id + "/"}
	v = checkVolume{id: id, attributes: map[string]string{"backend": be.Name, "bucketName": o.Check.Bucket, "prefix": objects.Prefix, "client": cl.Name}}
	if o.Check.MountOptions != "" {
		v.attributes["mountOptions"] = o.Check.MountOptions
	}
	switch {
	case cl.StaticKeys: // such a client can only have the keys of a secret
		v.secrets = map[string]string{credentials.SecretAccessKeyID: keys.AccessKeyID, credentials.SecretSecretAccessKey: keys.SecretAccessKey}
		if keys.SessionToken != "" {
			v.secrets[credentials.SecretSessionToken] = keys.SessionToken
		}
	case o.Check.SessionDuration != 0:
		v.attributes["sessionDuration"] = o.Check.SessionDuration.String()
	}
	return v, objects, cl, nil
}

// nodeOfCheck assembles a node like addNode, and runs it until stop is called. It also runs after ctx has ended.
func nodeOfCheck(ctx context.Context, ns *host.Namespace, place *clientcheck.Place, o driver.Options, s storage, refused error, version string) (n *node.Node, stop func(), err error) {
	executable, err := os.Executable()
	if err != nil {
		return nil, nil, fmt.Errorf("find the driver's executable: %w", err)
	}
	paths := programPaths{helperProgram(executable), cmp.Or(o.Node.ClientDir, filepath.Dir(executable)), s.config.Clients()}
	hostDir := o.Node.HostDir
	var had bool
	if err := ns.Do(ctx, "stat "+hostDir, func() error {
		_, err := os.Lstat(hostDir)
		had = err == nil
		return nil
	}); err != nil {
		return nil, nil, err
	}
	uninstall := func() {
		cctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), uninstallBound)
		defer cancel()
		own := filepath.Join(hostDir, o.Common.DriverName) // of this check: the name is random
		if err := ns.Do(cctx, "remove "+own, func() error {
			err := os.RemoveAll(own)
			if !had { // fails if it is not empty
				_ = os.Remove(hostDir)
			}
			return err
		}); err != nil {
			klog.FromContext(ctx).Error(err, "Cannot remove installed programs", "directory", own)
		}
	}
	l, err := launchOn(ctx, ns, paths, o, version)
	if err != nil {
		uninstall()
		return nil, nil, err
	}
	place.Launcher = l
	if n, err = node.New(ctx, node.Options{
		Namespace: ns, Launcher: l, Backends: mountBackends{s.config, s.buckets}, Sessions: s.sessions, Clients: s.config,
		StateDir: o.Node.StateDir, CacheDir: o.Node.CacheDir, Programs: l.programs, DefaultClient: o.Check.Client, UIDs: launcher.UIDRange(o.Node.UIDs),
		MountTimeout: o.Check.StepTimeout, DrainTimeout: o.Check.StepTimeout, Version: version, Limits: l.limits, Heal: true, HangTimeout: o.Check.StepTimeout,
		Refused: refused, Reach: s.clients.Reach, Declared: func() []backend.Backend { return s.config.Config().Declared() },
		Status: node.Status{Notes: func() []string { return nil }},
	}); err != nil {
		uninstall()
		return nil, nil, err
	}
	rctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	var running sync.WaitGroup
	run := func(what string, run func(context.Context) error) {
		running.Go(func() {
			if err := run(rctx); err != nil && rctx.Err() == nil {
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
	return n, func() {
		cancel()
		running.Wait()
		uninstall()
	}, nil
}

// uninstallBound bounds the removal of installed programs.
const uninstallBound = 20 * time.Second

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
