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
	// systemdBound is the time within which a running systemd must answer when the driver starts.
	systemdBound = time.Minute
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
	hostLauncher
	systemd        *launcher.Systemd // nil with launcher process
	why            string            // reason for the choice of the launcher
	limits         launcher.Limits   // default limits of a mount
	slice          launcher.Limits   // of all mounts together
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

// launchOn chooses the launcher and prepares the host for it:
//
//  1. compute the limits of one mount and of all mounts
//  2. copy the driver's resolv.conf, with --node-dns=pod
//  3. look for the host's systemd
//  4. install the programs on the host, if they must run from there
func launchOn(ctx context.Context, ns *host.Namespace, p programPaths, o driver.Options, version string) (l launch, err error) {
	limits, slice, err := limitsOf(o.Node)
	if err != nil {
		return l, err
	}
	l = launch{limits: limits, slice: slice, programs: programs.NewClients(ns, p.clients.All(), p.clientDir, p.clientDir)}
	if l.dns, err = ownDNS(ns, o.Node); err != nil {
		return l, err
	}
	options := launcher.Options{UIDs: launcher.UIDRange(o.Node.UIDs), DefaultLimits: limits, SliceLimits: slice}
	if l.dns != nil {
		options.Resolver = l.dns
	}
	if l.systemd, l.why, err = findSystemd(ctx, ns, p.helper, o.Node, options); err != nil {
		return l, err
	}
	program := p.helper
	if l.systemd != nil || ns.Foreign() {
		installed, err := install(ctx, ns, p, o, version, l.systemd != nil && l.systemd.Sandbox().Landlock == 0)
		if err != nil {
			return l, err
		}
		program = installed.Path(filepath.Base(p.helper))
		l.programs = programs.NewClients(ns, p.clients.All(), p.clientDir, installed.Dir)
		l.clean = func(ctx context.Context, used []string) error {
			return installed.Clean(ctx, ns, func(dir string) bool { return slices.Contains(used, dir) })
		}
	}
	if l.systemd != nil {
		l.hostLauncher = l.systemd
		return l, l.systemd.SetProgram(program)
	}
	if !ns.Foreign() {
		l.sessionProblem = p.sessionProblem()
	}
	l.hostLauncher = launcher.NewProcess(ns, program, options)
	return l, nil
}

// ownDNS returns the copy of the driver's resolv.conf for helpers, or nil if helpers use the host's. Outside a container both are the same.
func ownDNS(ns *host.Namespace, o driver.NodeOptions) (*resolvconf.Copy, error) {
	if o.DNS != driver.DNSPod || !ns.Foreign() {
		return nil, nil
	}
	dns, err := resolvconf.New(ns, o.StateDir)
	if err != nil {
		return nil, fmt.Errorf("--node-dns=pod: %w", err)
	}
	return dns, nil
}

// limitsOf returns the limits of one mount and of all mounts together on this node.
func limitsOf(o driver.NodeOptions) (one, all launcher.Limits, err error) {
	total, err := nodeMemory()
	if err != nil {
		return one, all, err
	}
	one = launcher.Limits{MemoryMax: o.MemoryLimit.Of(total), CPUWeight: o.CPUWeight, TasksMax: o.TasksMax}
	all = launcher.Limits{MemoryMax: o.SliceMemoryLimit.Of(total)}
	return one, all, nil
}

// enforced returns the memory limits that the launcher enforces, of one mount and of all together, in bytes; 0: none.
func (l launch) enforced() (one, all uint64) {
	if l.systemd == nil {
		return 0, 0
	}
	return l.limits.MemoryMax, l.slice.MemoryMax
}

// lingerLimits returns the limits of lingering mounts on this node.
func lingerLimits(o driver.NodeOptions) (linger.Limits, error) {
	total, err := nodeMemory()
	return linger.Limits{Mounts: o.LingerMaxMounts, Memory: o.LingerMaxMemory.Of(total)}, err
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

// findSystemd returns the host's systemd, or nil and the reason for launcher process. A systemd that does not answer is an error,
// because its running mounts could not be distinguished from exited ones.
func findSystemd(
	ctx context.Context, ns *host.Namespace, program string, o driver.NodeOptions, options launcher.Options,
) (s *launcher.Systemd, why string, err error) {
	if o.Launcher == driver.LauncherProcess {
		return nil, "set with --launcher", nil
	}
	options.Nameservers = nameservers(ctx, ns)
	s, err = launcher.NewSystemd(ns, program, options)
	if err != nil {
		return nil, "", err
	}
	err = awaitSystemd(ctx, s)
	switch {
	case err == nil && o.Launcher == driver.LauncherAuto:
		why = "the host runs systemd"
	case err == nil:
		why = "set with --launcher"
	case errors.Is(err, launcher.ErrNoSystemd) && o.Launcher == driver.LauncherAuto:
		return nil, err.Error(), nil
	case errors.Is(err, launcher.ErrNoSystemd):
		return nil, "", fmt.Errorf("--launcher=systemd: %w; run the driver in the host's PID namespace (hostPID: true), or set --launcher=process", err)
	default:
		return nil, "", fmt.Errorf("the host runs systemd, but the driver cannot use it: %w; check systemd and D-Bus on the host (systemctl is-system-running), "+
			"or set --launcher=process", err)
	}
	for flag, dir := range map[string]string{"--state-dir": o.StateDir, "--cache-dir": o.CacheDir} {
		if below, hidden := programs.Hidden(dir); hidden && s.Sandbox().Landlock == 0 {
			return nil, "", fmt.Errorf("%s: %s is below %s, which units of launcher systemd cannot access; choose another directory, or set --launcher=process", flag, dir, below)
		}
	}
	return s, why, nil
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
func install(ctx context.Context, ns *host.Namespace, p programPaths, o driver.Options, version string, hides bool) (programs.Installed, error) {
	ctx, cancel := context.WithTimeout(ctx, installBound)
	defer cancel()
	installed, err := programs.Install(ctx, ns, programs.Options{
		Dir: o.Node.HostDir, DriverName: o.Common.DriverName, Version: version, Files: p.files(), Closed: []string{p.sessions()}, Sandboxed: hides,
	})
	if err != nil {
		return installed, err
	}
	if err := ns.Passable(ctx, installed.Dir, o.Node.UIDs.First); err != nil {
		return installed, fmt.Errorf("--host-dir: %w", err)
	}
	_, err = programs.Try(ctx, ns, installed.Path(filepath.Base(p.helper)))
	return installed, err
}

// report writes the launcher, the reason for its choice and its missing features to the log, /readyz and the metrics.
func (l launch) report(ctx context.Context, cfg *driver.Config, o driver.NodeOptions) error {
	logger := klog.FromContext(ctx)
	box := l.Sandbox()
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
	if ok, why := l.SurvivesDriver(); !ok {
		logger.Info("Mounts do not survive driver restarts", "reason", why)
		cfg.Health.Note("mounts do not survive driver restarts: " + why)
	}
	return cfg.Metrics.ShowLauncher(l.info)
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
	if ok, why := l.ResolvesBy(); !ok {
		logger.Info("Mounts use the host's resolv.conf", "reason", why)
		cfg.Health.Note("--node-dns=pod has no effect, so mounts cannot resolve names of the cluster's services: " + why)
		return
	}
	logger.Info("New mounts use the driver's resolv.conf")
}

// info returns the labels of the launcher's metrics.
func (l launch) info() driver.LauncherInfo {
	box := l.Sandbox()
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
