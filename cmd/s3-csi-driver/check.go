package main

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/check"
	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/driver"
	"github.com/s3-csi/s3-csi-driver/pkg/launcher"
	"github.com/s3-csi/s3-csi-driver/pkg/session"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// checkAll checks backends and, with --node, the host; or, with --client, one client. The exit code is exitOK if everything that the driver
// needs is available.
func checkAll(ctx context.Context, o driver.Options, version string, out output) int {
	sections, err := checks(ctx, o, version)
	if err != nil {
		return out.fail(err)
	}
	report := check.NewReport(sections...)
	write := report.Table
	if o.Check.Output == driver.OutputJSON {
		write = report.JSON
	}
	if err := write(out.stdout); err != nil || !report.OK {
		return exitFailure
	}
	return exitOK
}

func checks(ctx context.Context, o driver.Options, version string) (sections []check.Section, err error) {
	s, err := newStorage(o, version)
	if err != nil {
		return nil, err
	}
	defer s.close()
	p := nodeParts{options: o, storage: s, version: version}
	if o.Check.Client != "" {
		return checkClient(ctx, p)
	}
	backends, err := chosen(s.config.Config(), o)
	if err != nil {
		return nil, err
	}
	workload, err := workloadOf(o.Check, backends)
	if err != nil {
		return nil, err
	}
	options, err := o.Check.ParseMountOptions()
	if err != nil {
		return nil, err
	}
	services := check.Services{
		Clients: s.clients, Buckets: s.buckets, Sessions: s.sessions, Bucket: o.Check.Bucket, CreateBucket: o.Check.CreateBucket, NeedNoKeys: o.Check.Node,
		Workload: workload,
	}
	for _, b := range backends {
		services.Checksums = sendsChecksums(cmp.Or(b.DefaultClient, o.Node.DefaultClient), options)
		sections = append(sections, services.Check(ctx, b))
	}
	if o.Check.Node {
		paths, err := p.programs()
		if err != nil {
			return nil, err
		}
		dirs := ownDirs(o.Node)
		n := check.Node{
			Program: paths.helper, ClientDir: paths.clientDir, Clients: paths.clients, DefaultClient: o.Node.DefaultClient,
			StateDir: dirs[0], CacheDir: dirs[1], HostDir: o.Node.HostDir, AllowIsolated: o.Node.AllowIsolated,
			Launcher: o.Node.Launcher, PodDNS: o.Node.DNS == driver.DNSPod, UIDs: launcher.UIDRange(o.Node.UIDs), Version: version,
			Backends: backends,
		}
		sections = append(sections, n.Check(ctx))
	}
	return sections, nil
}

// sendsChecksums reports whether a client sends checksums with these mount options.
func sendsChecksums(clientName string, options []volume.Option) bool {
	off := func(o volume.Option) bool { return o.Name == "upload-checksums" && o.Value == "off" }
	return clientName == client.Default && !slices.ContainsFunc(options, off)
}

// workloadOf returns the workload to check. Its token goes to the token service of one backend: others could use it.
func workloadOf(o driver.CheckOptions, backends []backend.Backend) (check.Workload, error) {
	if o.RoleARN == "" {
		return check.Workload{}, nil
	}
	if len(backends) != 1 {
		return check.Workload{}, fmt.Errorf("--role: %d backends would be checked; name the one that may see the token with --backend", len(backends))
	}
	token, err := session.ReadToken(o.TokenFile)
	if err != nil {
		return check.Workload{}, fmt.Errorf("--token-file: %w", err)
	}
	return check.Workload{RoleARN: o.RoleARN, Token: token, Prefix: o.Prefix}, nil
}

// chosen returns the backends to check. If the config file declares other backends, but not "default", then "default" is skipped.
func chosen(config *backend.Config, o driver.Options) ([]backend.Backend, error) {
	if o.Check.Backend != "" {
		b, err := config.Backend(o.Check.Backend)
		return []backend.Backend{b}, err
	}
	all := config.Backends()
	undeclared, err := backend.DefaultConfig(o.DefaultRegion, o.DefaultEndpoint)
	if err != nil || len(all) == 1 {
		return all, err
	}
	same := func(b backend.Backend) bool { return b.Revision() == undeclared.Backends()[0].Revision() }
	return slices.DeleteFunc(all, same), nil
}
