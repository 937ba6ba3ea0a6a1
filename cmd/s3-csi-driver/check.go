package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/backend"
	"github.com/s3-csi/s3-csi-driver/pkg/check"
	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/driver"
	"github.com/s3-csi/s3-csi-driver/pkg/launcher"
	"github.com/s3-csi/s3-csi-driver/pkg/session"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// checkAll checks backends and, with --node, the host; or, with --client, one client. The exit code is exitOK if everything that the driver needs is available.
func checkAll(ctx context.Context, o driver.Options, version string, stdout, stderr io.Writer) int {
	if o.Common.Verbosity == 0 { // the result already contains what would be logged
		ctx = klog.NewContext(ctx, klog.Logger{})
	}
	report, err := checks(ctx, o, version)
	if err != nil {
		return fail(stderr, err)
	}
	write := report.Table
	if o.Check.Output == driver.OutputJSON {
		write = report.JSON
	}
	if err := write(stdout); err != nil || !report.OK {
		return exitFailure
	}
	return exitOK
}

func checks(ctx context.Context, o driver.Options, version string) (check.Report, error) {
	if o.Check.Client != "" {
		sections, err := checkClient(ctx, o, version)
		return check.NewReport(sections...), err
	}
	config, err := backend.DefaultConfig(o.DefaultRegion, o.DefaultEndpoint)
	if o.Common.Config != "" {
		config, err = backend.LoadConfig(o.Common.Config, o.DefaultRegion, o.DefaultEndpoint)
	}
	if err != nil {
		return check.Report{}, err
	}
	backends, err := chosen(config, o)
	if err != nil {
		return check.Report{}, err
	}
	clients, err := backend.NewClients(config, backend.WithVersion(version))
	if err != nil {
		return check.Report{}, err
	}
	defer clients.Close()
	buckets, err := backend.NewBuckets(clients, time.Now)
	if err != nil {
		return check.Report{}, err
	}
	made := sessions{session.NewPlanner(clients), session.NewMaker(version)}
	defer made.Close()
	workload, err := workloadOf(o.Check, backends)
	if err != nil {
		return check.Report{}, err
	}
	options, err := o.Check.ParseMountOptions()
	if err != nil {
		return check.Report{}, err
	}
	services := check.Services{
		Clients: clients, Buckets: buckets, Sessions: made, Bucket: o.Check.Bucket, CreateBucket: o.Check.CreateBucket, NeedNoKeys: o.Check.Node,
		Workload: workload,
	}
	var sections []check.Section
	for _, b := range backends {
		services.Checksums = sendsChecksums(cmp.Or(b.DefaultClient, o.Node.DefaultClient), options)
		sections = append(sections, services.Check(ctx, b))
	}
	if o.Check.Node {
		node, err := nodeToCheck(o, version, config.Clients(), backends)
		if err != nil {
			return check.Report{}, err
		}
		sections = append(sections, node.Check(ctx))
	}
	return check.NewReport(sections...), nil
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

func nodeToCheck(o driver.Options, version string, clients client.Set, backends []backend.Backend) (check.Node, error) {
	executable, err := os.Executable()
	if err != nil {
		return check.Node{}, err
	}
	n := check.Node{
		Program: helperProgram(executable), ClientDir: o.Node.ClientDir, DefaultClient: o.Node.DefaultClient, StateDir: o.Node.StateDir,
		CacheDir: o.Node.CacheDir, HostDir: o.Node.HostDir, AllowIsolated: o.Node.AllowIsolated,
		Launcher: o.Node.Launcher, PodDNS: o.Node.DNS == driver.DNSPod, UIDs: launcher.UIDRange(o.Node.UIDs), Version: version, Backends: backends, Clients: clients,
	}
	if n.ClientDir == "" {
		n.ClientDir = filepath.Dir(executable)
	}
	return n, nil
}
