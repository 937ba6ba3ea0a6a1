package main

import (
	"context"
	"errors"
	"fmt"
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
	"github.com/s3-csi/s3-csi-driver/pkg/hostdir"
	"github.com/s3-csi/s3-csi-driver/pkg/launcher"
	"github.com/s3-csi/s3-csi-driver/pkg/mount/runner"
	"github.com/s3-csi/s3-csi-driver/pkg/programs"
	"github.com/s3-csi/s3-csi-driver/pkg/resolvconf"
)

const (
	// systemdBound is how long a systemd that is there may take to answer at the start.
	systemdBound = time.Minute
	systemdPause = time.Second
	// installBound is how long programs may take to be copied: some 100 MB, to a disk that a node's start keeps busy.
	installBound = 3 * time.Minute
)

// built is what runs for mounts, in the driver's own view.
type built struct{ helper, clientDir string }

// sessions is the program that helpers make sessions with: the driver's, beside theirs. "": there is none of that name.
func (p built) sessions() string {
	path := filepath.Join(filepath.Dir(p.helper), helper.ExchangeProgram)
	if fi, err := os.Stat(path); err != nil || !fi.Mode().IsRegular() {
		return ""
	}
	return path
}

// exposed says what is wrong with the program that makes sessions where it was not installed on the host; "": nothing.
func (p built) exposed() string {
	path := p.sessions()
	if path == "" {
		return "sessions cannot be renewed: there is no " + helper.ExchangeProgram + " beside " + p.helper
	}
	if fi, err := os.Stat(path); err == nil && fi.Mode().Perm()&0o004 != 0 {
		return "a client could look into the process that renews its session, because everybody may read " + path + ": take that permission away (chmod 0711)"
	}
	return ""
}

// files are those that exist. A client that is missing is one that no volume may ask for.
func (p built) files() []string {
	files := []string{p.helper}
	if path := p.sessions(); path != "" {
		files = append(files, path)
	}
	for _, c := range client.All() {
		if name, ok := programs.Find(c, p.clientDir); ok {
			files = append(files, filepath.Join(p.clientDir, name))
		}
	}
	return files
}

// hostLauncher is what both launchers are.
type hostLauncher interface {
	runner.Launcher
	SurvivesDriver() (bool, string)
	ResolvesBy() (bool, string)
}

// launch is how helpers come to life on this node: decided once, at the start.
type launch struct {
	hostLauncher
	systemd  *launcher.Systemd // nil: they are plain children
	why      string
	limits   launcher.Limits // of mounts whose volumes give none
	programs *programs.Clients
	dns      *resolvconf.Copy // nil: helpers resolve names as the host does
	exposed  string           // what is wrong with the program that makes sessions
	clean    func(ctx context.Context, used []string) error
}

// launchOn decides how helpers come to life, and installs the programs on the host where they run from there.
func launchOn(ctx context.Context, ns *host.Namespace, p built, o driver.Options, version string) (l launch, err error) {
	limits, slice, err := limitsOf(o.Node)
	if err != nil {
		return l, err
	}
	l = launch{limits: limits, programs: programs.NewClients(ns, p.clientDir, p.clientDir)}
	if l.dns, err = ownDNS(ns, o.Node); err != nil {
		return l, err
	}
	if l.systemd, l.why, err = findSystemd(ctx, ns, p.helper, o.Node, limits, slice, l.dns); err != nil {
		return l, err
	}
	program, options := p.helper, []launcher.Option{launcher.WithUIDs(launcher.UIDRange(o.Node.UIDs))}
	if l.dns != nil {
		options = append(options, launcher.WithResolver(l.dns))
	}
	if l.systemd != nil || ns.Foreign() {
		installed, err := install(ctx, ns, p, o, version, l.systemd != nil)
		if err != nil {
			return l, err
		}
		program, options = installed.Path(filepath.Base(p.helper)), append(options, launcher.WithHostProgram())
		l.programs = programs.NewClients(ns, p.clientDir, installed.Dir)
		l.clean = func(ctx context.Context, used []string) error {
			return installed.Clean(ctx, ns, func(dir string) bool { return slices.Contains(used, dir) })
		}
	}
	if l.systemd != nil {
		l.systemd, err = l.systemd.With(program)
		l.hostLauncher = l.systemd
		return l, err
	}
	if !ns.Foreign() {
		l.exposed = p.exposed()
	}
	l.hostLauncher = launcher.NewProcess(ns, program, options...)
	return l, nil
}

// ownDNS is the driver's resolv.conf for helpers, or nil: the host's. They are the same where the driver is in no container.
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

// limitsOf are the limits of one mount and of all together, on this node.
func limitsOf(o driver.NodeOptions) (one, all launcher.Limits, err error) {
	var node unix.Sysinfo_t
	if err := unix.Sysinfo(&node); err != nil {
		return one, all, fmt.Errorf("ask for the node's memory: %w", err)
	}
	total := node.Totalram * uint64(node.Unit)
	one = launcher.Limits{MemoryMax: o.MemoryLimit.Of(total), CPUWeight: o.CPUWeight, TasksMax: o.TasksMax}
	all = launcher.Limits{MemoryMax: o.SliceMemoryLimit.Of(total)}
	return one, all, nil
}

// findSystemd is the host's systemd, or nil and why helpers are not launched by one. A systemd that is there and does not
// answer is an error: mounts that it runs could not be told from ones that are gone.
func findSystemd(ctx context.Context, ns *host.Namespace, program string, o driver.NodeOptions, one, all launcher.Limits, dns *resolvconf.Copy) (s *launcher.Systemd, why string, err error) {
	if o.Launcher == driver.LauncherProcess {
		return nil, "it was chosen with --launcher", nil
	}
	options := []launcher.SystemdOption{launcher.WithSystemdUIDs(launcher.UIDRange(o.UIDs)), launcher.WithDefaultLimits(one), launcher.WithSliceLimits(all)}
	if dns != nil {
		options = append(options, launcher.WithSystemdResolver(dns))
	}
	s, err = launcher.NewSystemd(ns, program, options...)
	if err != nil {
		return nil, "", err
	}
	err = awaitSystemd(ctx, s)
	switch {
	case err == nil && o.Launcher == driver.LauncherAuto:
		why = "the host has it"
	case err == nil:
		why = "it was chosen with --launcher"
	case errors.Is(err, launcher.ErrNoSystemd) && o.Launcher == driver.LauncherAuto:
		return nil, err.Error(), nil
	case errors.Is(err, launcher.ErrNoSystemd):
		return nil, "", fmt.Errorf("--launcher=systemd: %w; start the driver where it sees the host's PID 1 (hostPID: true), or choose --launcher=process", err)
	default:
		return nil, "", fmt.Errorf("the host has systemd, and it cannot be used: %w; look at the state of systemd and D-Bus on the host (systemctl is-system-running), "+
			"or choose --launcher=process", err)
	}
	for flag, dir := range map[string]string{"--state-dir": o.StateDir, "--cache-dir": o.CacheDir} {
		if below, hidden := hostdir.Hidden(dir); hidden {
			return nil, "", fmt.Errorf("%s: %s is below %s, which is hidden from the units of launcher systemd: choose another directory, or --launcher=process", flag, dir, below)
		}
	}
	return s, why, nil
}

// awaitSystemd asks systemd what it can do, and again for a while if it is busy.
func awaitSystemd(ctx context.Context, s *launcher.Systemd) error {
	for end := time.Now().Add(systemdBound); ; {
		_, err := s.Check(ctx)
		if err == nil || ctx.Err() != nil || fault.Is(err, fault.Precondition) || time.Now().After(end) {
			return err
		}
		klog.FromContext(ctx).Error(err, "systemd does not answer; it is asked again")
		select {
		case <-time.After(systemdPause):
		case <-ctx.Done():
			return err
		}
	}
}

// install puts the programs on the host and sees that the host runs them.
func install(ctx context.Context, ns *host.Namespace, p built, o driver.Options, version string, sandboxed bool) (hostdir.Installed, error) {
	ctx, cancel := context.WithTimeout(ctx, installBound)
	defer cancel()
	installed, err := hostdir.Install(ctx, ns, hostdir.Options{
		Dir: o.Node.HostDir, DriverName: o.Common.DriverName, Version: version, Files: p.files(), Closed: []string{p.sessions()}, Sandboxed: sandboxed,
	})
	if err != nil {
		return installed, err
	}
	if err := ns.Passable(ctx, installed.Dir, o.Node.UIDs.First); err != nil {
		return installed, fmt.Errorf("--host-dir: %w", err)
	}
	_, err = hostdir.Try(ctx, ns, installed.Path(filepath.Base(p.helper)))
	return installed, err
}

// report says in the log, in /readyz and in the metrics how helpers come to life, why so, and what is missing.
func (l launch) report(ctx context.Context, cfg *driver.Config, o driver.NodeOptions) error {
	logger := klog.FromContext(ctx)
	if l.systemd == nil {
		logger.Info("Helpers are launched as plain processes", "reason", l.why)
		cfg.Health.Note("the launcher is process: " + l.why)
		if chosen := o.ChosenLimits(); len(chosen) > 0 {
			note := "the launcher process cannot enforce limits, so these flags do nothing: " + strings.Join(chosen, ", ")
			logger.Info("Limits are not enforced", "reason", note)
			cfg.Health.Note(note)
		}
	} else {
		box := l.systemd.Sandbox()
		logger.Info("Helpers are launched by systemd", "reason", l.why, "version", box.Version, "program", l.systemd.Program(),
			"sandbox", box.Present, "missing", box.Missing, "memoryLimit", l.limits.MemoryMax, "tasksMax", l.limits.TasksMax)
		cfg.Health.Note("the launcher is systemd " + box.Version + ": " + l.why)
		if len(box.Missing) > 0 {
			cfg.Health.Note("the host's systemd does not put up these parts of the sandbox: " + strings.Join(box.Missing, ", "))
		}
	}
	l.reportDNS(ctx, cfg, o)
	if l.exposed != "" {
		logger.Info("Sessions are less safe than they could be", "reason", l.exposed)
		cfg.Health.Note(l.exposed)
	}
	if ok, why := l.SurvivesDriver(); !ok {
		logger.Info("Restarts of the driver break mounts", "reason", why)
		cfg.Health.Note("restarts of the driver break mounts: " + why)
	}
	return cfg.Metrics.ShowLauncher(l.info)
}

// reportDNS says how helpers resolve names, where that was chosen.
func (l launch) reportDNS(ctx context.Context, cfg *driver.Config, o driver.NodeOptions) {
	if o.DNS != driver.DNSPod {
		return
	}
	logger := klog.FromContext(ctx)
	if l.dns == nil {
		logger.Info("Mounts resolve names as the host does: the driver is in no container, and its resolv.conf is the host's")
		return
	}
	if ok, why := l.ResolvesBy(); !ok {
		logger.Info("Mounts resolve names as the host does, against --node-dns=pod", "reason", why)
		cfg.Health.Note("--node-dns=pod is not in force, and names of the cluster's services are unknown to mounts: " + why)
		return
	}
	logger.Info("Mounts that start from now on resolve names as the driver's container does")
}

// info is the launcher for metrics.
func (l launch) info() driver.LauncherInfo {
	if l.systemd == nil {
		return driver.LauncherInfo{Launcher: driver.LauncherProcess}
	}
	box := l.systemd.Sandbox()
	i := driver.LauncherInfo{Launcher: driver.LauncherSystemd, SystemdVersion: box.Version}
	for _, property := range box.Missing {
		name, _, _ := strings.Cut(property, " ")
		i.Missing = append(i.Missing, name)
	}
	return i
}
