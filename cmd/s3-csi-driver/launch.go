package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/driver"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/helper"
	"github.com/s3-csi/s3-csi-driver/pkg/host"
	"github.com/s3-csi/s3-csi-driver/pkg/launcher"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/linger"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/runner"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/spares"
	"github.com/s3-csi/s3-csi-driver/pkg/programs"
	"github.com/s3-csi/s3-csi-driver/pkg/resolvconf"
	"github.com/s3-csi/s3-csi-driver/pkg/sandbox"
)

const (
	systemdBound = time.Minute // the time within which a running systemd must answer when the driver starts
	systemdPause = time.Second
	// installBound is the time limit for copying the programs: about 100 MB, to a disk that is busy while the node boots.
	installBound = 3 * time.Minute
)

// programPaths holds the paths of the programs that run for mounts, as the driver sees them.
type programPaths struct {
	helper, clientDir string
	clients           client.Set
}

// sessions returns the path of the program that renews sessions for helpers: the driver, in their directory. It is "" if the file is missing.
func (p programPaths) sessions() string {
	path := filepath.Join(filepath.Dir(p.helper), helper.ExchangeProgram)
	if fi, err := os.Stat(path); err != nil || !fi.Mode().IsRegular() {
		return ""
	}
	return path
}

// sessionProblem returns the problem with a session program that was not installed on the host, or "".
func (p programPaths) sessionProblem() string {
	path := p.sessions()
	if path == "" {
		return "sessions cannot be renewed: " + helper.ExchangeProgram + " is not in the directory of " + p.helper
	}
	if fi, err := os.Stat(path); err == nil && fi.Mode().Perm()&0o004 != 0 {
		return "a client could inspect the process that renews its session, because " + path + " is readable by every user; remove that permission (chmod 0711)"
	}
	return ""
}

// files returns the programs that exist. Volumes cannot use a client whose program is missing.
func (p programPaths) files() []string {
	files := []string{p.helper}
	if path := p.sessions(); path != "" {
		files = append(files, path)
	}
	return append(files, programs.Files(p.clients.All(), p.clientDir)...)
}

// hostLauncher is implemented by both launchers.
type hostLauncher interface {
	runner.Launcher
	spares.Preparer
	SurvivesDriver() (bool, string)
	ResolvesBy() (bool, string)
	Sandbox() launcher.Sandbox
}

// launch is how helpers are started on this node. It is decided once, when the driver starts.
type launch struct {
	hostLauncher   hostLauncher
	systemd        *launcher.Systemd // nil with launcher process
	why            string            // reason for the choice of the launcher
	limits         launcher.Limits   // default limits of a mount
	slice          launcher.Limits   // of all mounts together
	linger         linger.Limits     // of all lingering mounts
	programs       *programs.Clients
	dns            *resolvconf.Copy // nil if helpers use the host's resolv.conf
	sessionProblem string           // problem with the session program; "" if none
	clean          func(ctx context.Context, used []string) error
}

// name returns the name of the launcher, as --launcher has it.
func (l launch) name() string {
	if l.systemd == nil {
		return driver.LauncherProcess
	}
	return driver.LauncherSystemd
}

// launch chooses the launcher and prepares the host for it:
//
//  1. compute the limits of one mount and of all mounts
//  2. copy the driver's resolv.conf, with --node-dns=pod
//  3. look for the host's systemd
//  4. install the programs on the host, if they must run from there
func (p nodeParts) launch(ctx context.Context) (l launch, err error) {
	paths, err := p.programs()
	if err != nil {
		return l, err
	}
	ns, o := p.namespace, p.options.Node
	total, err := nodeMemory()
	if err != nil {
		return l, err
	}
	l.limits = launcher.Limits{MemoryMax: o.MemoryLimit.Of(total), CPUWeight: o.CPUWeight, TasksMax: o.TasksMax}
	l.slice = launcher.Limits{MemoryMax: o.SliceMemoryLimit.Of(total)}
	l.linger = linger.Limits{Mounts: o.LingerMaxMounts, Memory: o.LingerMaxMemory.Of(total)}
	l.programs = programs.NewClients(ns, paths.clients.All(), paths.clientDir, paths.clientDir)
	if o.DNS == driver.DNSPod && ns.Foreign() { // outside a container both files are the same
		if l.dns, err = resolvconf.New(ns, o.StateDir); err != nil {
			return l, fmt.Errorf("--node-dns=pod: %w", err)
		}
	}
	program, options := paths.helper, launcher.Options{UIDs: launcher.UIDRange(o.UIDs), DefaultLimits: l.limits, SliceLimits: l.slice}
	if l.dns != nil {
		options.Resolver = l.dns
	}
	if err := l.findSystemd(ctx, p, program, options); err != nil {
		return l, err
	}
	if l.systemd != nil || ns.Foreign() {
		installed, err := p.install(ctx, paths, l.systemd)
		if err != nil {
			return l, err
		}
		program = installed.Path(filepath.Base(paths.helper))
		l.programs = programs.NewClients(ns, paths.clients.All(), paths.clientDir, installed.Dir)
		l.clean = func(ctx context.Context, used []string) error {
			return installed.Clean(ctx, ns, func(dir string) bool { return slices.Contains(used, dir) })
		}
	}
	if l.systemd != nil {
		l.hostLauncher = l.systemd
		return l, l.systemd.SetProgram(program)
	}
	if !ns.Foreign() {
		l.sessionProblem = paths.sessionProblem()
	}
	l.hostLauncher = launcher.NewProcess(ns, program, options)
	return l, nil
}

// enforced returns the memory limits that the launcher enforces, of one mount and of all together, in bytes; 0: none.
func (l launch) enforced() (one, all uint64) {
	if l.systemd == nil {
		return 0, 0
	}
	return l.limits.MemoryMax, l.slice.MemoryMax
}

// nodeMemory returns the size of the node's memory in bytes.
func nodeMemory() (uint64, error) {
	var node unix.Sysinfo_t
	if err := unix.Sysinfo(&node); err != nil {
		return 0, fmt.Errorf("read the node's memory size: %w", err)
	}
	return node.Totalram * uint64(node.Unit), nil
}

// nameservers returns the addresses of the host's name servers, and of this process's, which mounts use with --node-dns=pod. Without a
// readable file there are none.
func nameservers(ctx context.Context, ns *host.Namespace) []netip.Addr {
	own, _ := resolvconf.Read(resolvconf.File)
	ctx, cancel := context.WithTimeout(ctx, nameserverBound)
	defer cancel()
	hosts, _ := host.Call(ctx, ns, "reading "+resolvconf.File, nil, func() (resolvconf.Config, error) { return resolvconf.Read(resolvconf.File) })
	return append(own.Addresses(), hosts.Addresses()...)
}

// nameserverBound is how long the host may take to read a small file.
const nameserverBound = 10 * time.Second

// findSystemd finds the host's systemd, or the reason for launcher process. A systemd that does not answer is an error, because its running
// mounts could not be distinguished from exited ones.
func (l *launch) findSystemd(ctx context.Context, p nodeParts, program string, options launcher.Options) error {
	o := p.options.Node
	l.why = "set with --launcher"
	if o.Launcher == driver.LauncherProcess {
		return nil
	}
	options.Nameservers = nameservers(ctx, p.namespace)
	s, err := launcher.NewSystemd(p.namespace, program, options)
	if err != nil {
		return err
	}
	switch err := awaitSystemd(ctx, s); {
	case err == nil && o.Launcher == driver.LauncherAuto:
		l.why = "the host runs systemd"
	case err == nil:
	case errors.Is(err, launcher.ErrNoSystemd) && o.Launcher == driver.LauncherAuto:
		l.why = err.Error()
		return nil
	case errors.Is(err, launcher.ErrNoSystemd):
		return fmt.Errorf("--launcher=systemd: %w; run the driver in the host's PID namespace (hostPID: true), or set --launcher=process", err)
	default:
		return fmt.Errorf("the host runs systemd, but the driver cannot use it: %w; check systemd and D-Bus on the host (systemctl is-system-running), "+
			"or set --launcher=process", err)
	}
	for _, own := range ownDirs(o) {
		if below, hidden := programs.Hidden(own.Path); hidden && s.Sandbox().Landlock == 0 {
			return fmt.Errorf("%s: %s is below %s, which units of launcher systemd cannot access; choose another directory, or set --launcher=process",
				own.Flag, own.Path, below)
		}
	}
	l.systemd = s
	return nil
}

// awaitSystemd checks the features of systemd, and retries for systemdBound while systemd is busy.
func awaitSystemd(ctx context.Context, s *launcher.Systemd) error {
	for end := time.Now().Add(systemdBound); ; {
		_, err := s.Check(ctx)
		if err == nil || ctx.Err() != nil || fault.Is(err, fault.Precondition) || time.Now().After(end) {
			return err
		}
		klog.FromContext(ctx).Error(err, "systemd is unresponsive, retrying")
		select {
		case <-time.After(systemdPause):
		case <-ctx.Done():
			return err
		}
	}
}

// install copies the programs to the host and verifies that the host can run them.
func (p nodeParts) install(ctx context.Context, paths programPaths, systemd *launcher.Systemd) (programs.Installed, error) {
	ctx, cancel := context.WithTimeout(ctx, installBound)
	defer cancel()
	installed, err := programs.Install(ctx, p.namespace, programs.Options{
		Dir: p.options.Node.HostDir, DriverName: p.options.Common.DriverName, Version: p.version, Files: paths.files(), Closed: []string{paths.sessions()},
		Sandboxed: systemd != nil && systemd.Sandbox().Landlock == 0,
	})
	if err != nil {
		return installed, err
	}
	if err := p.namespace.Passable(ctx, installed.Dir, p.options.Node.UIDs.First); err != nil {
		return installed, fmt.Errorf("--host-dir: %w", err)
	}
	_, err = programs.Try(ctx, p.namespace, installed.Path(filepath.Base(paths.helper)))
	return installed, err
}

// report writes the launcher, the reason for its choice and its missing features to the log, /readyz and the metrics.
func (l launch) report(ctx context.Context, cfg *driver.Config, o driver.NodeOptions) {
	logger := klog.FromContext(ctx)
	box := l.hostLauncher.Sandbox()
	if l.systemd == nil {
		logger.Info("Using launcher process", "reason", l.why, "missing", box.Missing)
		cfg.Health.Note("the launcher is process: " + l.why)
		if chosen := o.ChosenLimits(); len(chosen) > 0 {
			note := "launcher process does not enforce limits, so these flags have no effect: " + strings.Join(chosen, ", ")
			logger.Info("Limits are not enforced", "launcher", driver.LauncherProcess, "flags", chosen)
			cfg.Health.Note(note)
		}
	} else {
		logger.Info("Using launcher systemd", "reason", l.why, "version", box.Version, "program", l.systemd.Program(),
			"properties", box.Present, "missing", box.Missing, "memoryLimit", l.limits.MemoryMax, "tasksMax", l.limits.TasksMax)
		cfg.Health.Note("the launcher is systemd " + box.Version + ": " + l.why)
	}
	if len(box.Missing) > 0 {
		cfg.Health.Note("the host does not support these parts of the sandbox: " + strings.Join(box.Missing, ", "))
	}
	if box.Landlock > 0 {
		logger.Info("Restricting new mounts with Landlock", "sandbox", box.Kind(), "landlock", box.Landlock, "beyondFiles", sandbox.Restrictions(box.Landlock))
	} else {
		logger.Info("Cannot restrict mounts with Landlock", "sandbox", box.Kind(), "reason", box.NoLandlock)
		cfg.Health.Note("the sandbox of mounts is \"" + box.Kind() + "\": " + box.NoLandlock)
	}
	l.reportDNS(ctx, cfg, o)
	if l.sessionProblem != "" {
		logger.Info("Session program missing or readable by clients", "reason", l.sessionProblem)
		cfg.Health.Note(l.sessionProblem)
	}
	if ok, why := l.hostLauncher.SurvivesDriver(); !ok {
		logger.Info("Mounts do not survive driver restarts", "reason", why)
		cfg.Health.Note("mounts do not survive driver restarts: " + why)
	}
	cfg.Metrics.ShowLauncher(l.info)
}

// reportDNS reports which resolv.conf helpers use, with --node-dns=pod.
func (l launch) reportDNS(ctx context.Context, cfg *driver.Config, o driver.NodeOptions) {
	if o.DNS != driver.DNSPod {
		return
	}
	logger := klog.FromContext(ctx)
	if l.dns == nil {
		logger.Info("Mounts use the host's resolv.conf", "reason", "the driver does not run in a container")
		return
	}
	if ok, why := l.hostLauncher.ResolvesBy(); !ok {
		logger.Info("Mounts use the host's resolv.conf", "reason", why)
		cfg.Health.Note("--node-dns=pod has no effect, so mounts cannot resolve names of the cluster's services: " + why)
		return
	}
	logger.Info("New mounts use the driver's resolv.conf")
}

// info returns the labels of the launcher's metrics.
func (l launch) info() driver.LauncherInfo {
	box := l.hostLauncher.Sandbox()
	i := driver.LauncherInfo{Launcher: driver.LauncherProcess, Sandbox: box.Kind(), Landlock: box.Landlock}
	if l.systemd != nil {
		i.Launcher, i.SystemdVersion = driver.LauncherSystemd, box.Version
	}
	for _, property := range box.Missing {
		name, _, _ := strings.Cut(property, " ")
		i.Missing = append(i.Missing, name)
	}
	return i
}
