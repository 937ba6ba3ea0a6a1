package driver

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"
)

// Mode selects the services of a driver process.
type Mode string

// The modes.
const (
	ModeAll        Mode = "all"        // serves identity, controller and node on one socket
	ModeController Mode = "controller" // serves identity and controller
	ModeNode       Mode = "node"       // serves identity and node
	ModeCheck      Mode = "check"      // serves nothing; it checks backends and the host
	ModeStatus     Mode = "status"     // serves nothing; it shows what runs on the node, as the node service reports it
	ModeVolumes    Mode = "volumes"    // serves nothing; it shows the volumes that records and tags have
)

// Modes returns the modes that serve CSI services.
func Modes() []Mode { return []Mode{ModeAll, ModeController, ModeNode} }

// Commands returns the modes that serve nothing.
func Commands() []Mode { return []Mode{ModeCheck, ModeStatus, ModeVolumes} }

// Controller reports whether the mode serves the CSI Controller service.
func (m Mode) Controller() bool { return m == ModeAll || m == ModeController }

// Node reports whether the mode serves the CSI Node service.
func (m Mode) Node() bool { return m == ModeAll || m == ModeNode }

// UsageError is a mistake on the command line or in the environment: the process exits with code 2.
type UsageError struct{ err error }

// Error implements error.
func (e *UsageError) Error() string { return e.err.Error() }

// Unwrap returns the cause.
func (e *UsageError) Unwrap() error { return e.err }

func usagef(format string, args ...any) error { return &UsageError{err: fmt.Errorf(format, args...)} }

// Options holds the flags of a process and the settings from its environment.
type Options struct {
	Mode       Mode
	Common     CommonOptions
	Controller ControllerOptions // used if Mode.Controller(); ModeVolumes uses some of them
	Node       NodeOptions       // used if Mode.Node(); commands use some of them
	Check      CheckOptions      // used with ModeCheck
	Status     StatusOptions     // used with ModeStatus
	Volumes    VolumesOptions    // used with ModeVolumes
	// DefaultRegion and DefaultEndpoint are the settings of the backend "default" if the config file does not declare it, from
	// AWS_REGION and AWS_ENDPOINT_URL.
	DefaultRegion, DefaultEndpoint string
}

// CommonOptions are the options of all modes.
type CommonOptions struct {
	Endpoint        string
	DriverName      string
	Config          string
	HTTPEndpoint    string
	LoggingFormat   string
	Verbosity       int
	ShutdownTimeout time.Duration
	VolumeHealth    bool
	Version         bool
}

func (o *CommonOptions) addFlags(fs *pflag.FlagSet) {
	fs.StringVar(&o.Endpoint, "endpoint", "unix:///csi/csi.sock", "address of the CSI services: unix:///path, or tcp://127.0.0.1:port (loopback only, "+
		"because the protocol has no authentication)")
	fs.StringVar(&o.DriverName, "driver-name", "s3.csi.driver", "name of the CSI driver in StorageClasses and PersistentVolumes; at most 63 letters, digits, "+
		"dots and dashes")
	fs.StringVar(&o.Config, "config", "", "YAML file that declares backends; if empty, there is one backend named \"default\", which is AWS or the service "+
		"at AWS_ENDPOINT_URL")
	fs.StringVar(&o.HTTPEndpoint, "http-endpoint", "", "address (host:port or :port) of /metrics, /healthz and /readyz; if empty, they are not served")
	fs.StringVar(&o.LoggingFormat, "logging-format", "text", "log format: text or json")
	fs.IntVarP(&o.Verbosity, "v", "v", 2, "log verbosity, 0 to 10: 2 logs changes, 4 requests, 5 responses, 6 polling")
	fs.DurationVar(&o.ShutdownTimeout, "shutdown-timeout", 20*time.Second, "how long running requests may take to finish during shutdown before they are "+
		"cancelled")
	fs.BoolVar(&o.VolumeHealth, "volume-health", false, "offer the RPCs of volume health, which are alpha in CSI 1.13 and may change")
	fs.BoolVar(&o.Version, "version", false, "print the version and exit")
}

func (o *CommonOptions) validate(c *checker) {
	_, err := parseEndpoint(o.Endpoint)
	c.check("endpoint", err)
	c.check("driver-name", checkDriverName(o.DriverName))
	c.check("config", optional(checkAbsolute, o.Config))
	c.check("http-endpoint", optional(checkHostPort, o.HTTPEndpoint))
	c.check("logging-format", checkOneOf(o.LoggingFormat, logFormats()))
	c.check("v", checkRange(o.Verbosity, 0, 10))
	c.check("shutdown-timeout", checkRange(o.ShutdownTimeout, 0, time.Hour))
}

// ControllerOptions are the options of the modes that serve the CSI Controller service.
type ControllerOptions struct {
	ClusterID       string
	DeletionWorkers int
	CopyWorkers     int
}

func (o *ControllerOptions) addFlags(fs *pflag.FlagSet) {
	fs.StringVar(&o.ClusterID, "cluster-id", "", "distinguishes this cluster's volumes from those of other clusters in the same bucket; must not change "+
		"while volumes exist; at most 63 letters, digits, dots, dashes and underscores")
	fs.IntVar(&o.DeletionWorkers, "deletion-workers", 4, "number of volumes that are emptied concurrently, 1 to 64")
	fs.IntVar(&o.CopyWorkers, "copy-workers", 16, "number of requests in flight per backend for snapshots, restores and clones, 1 to 256")
}

func (o *ControllerOptions) validate(c *checker) {
	c.check("cluster-id", optional(checkClusterID, o.ClusterID))
	c.check("deletion-workers", checkRange(o.DeletionWorkers, 1, 64))
	c.check("copy-workers", checkRange(o.CopyWorkers, 1, 256))
}

// Flags returns the flag set of a mode, bound to o.
func (o *Options) Flags(mode Mode) *pflag.FlagSet {
	fs := pflag.NewFlagSet(string(mode), pflag.ContinueOnError)
	fs.SortFlags = false
	fs.Usage = func() {} // the caller prints the usage; pflag would write it to stderr
	if slices.Contains(Commands(), mode) {
		o.commandFlags(mode, fs)
		return fs
	}
	o.Common.addFlags(fs)
	if mode.Controller() {
		o.Controller.addFlags(fs)
	}
	if mode.Node() {
		o.Node.addFlags(fs)
	}
	return fs
}

// Environment provides environment variables and the host name, so that tests can replace them.
type Environment struct {
	Lookup   func(key string) (string, bool)
	Hostname func() (string, error)
}

// Parse reads a command line without its program name. It returns a *UsageError for a mistake and pflag.ErrHelp for --help. With --version,
// it neither validates nor completes the other options.
func Parse(args []string, env Environment) (Options, error) {
	mode, args, err := splitMode(args)
	if err != nil {
		return Options{}, err
	}
	o := Options{Mode: mode}
	fs := o.Flags(mode)
	if err := fs.Parse(args); err != nil {
		return o, explainParse(mode, err)
	}
	if fs.NArg() > 0 {
		return o, usagef("unexpected argument %q: options have the form --name=value, and the mode comes first", fs.Arg(0))
	}
	if o.Common.Version {
		return o, nil
	}
	c := &checker{origin: map[string]string{}}
	if err := o.applyEnvironment(fs, env, c); err != nil {
		return o, err
	}
	if mode.Node() && o.Node.NodeID == "" {
		if o.Node.NodeID, err = env.Hostname(); err != nil {
			return o, usagef("--node-id is not set and the host name cannot be read: %w", err)
		}
	}
	o.Common.validate(c)
	if mode.Controller() || mode == ModeVolumes {
		o.Controller.validate(c)
	}
	if mode.Node() || slices.Contains(Commands(), mode) {
		o.Node.validate(c)
	}
	switch mode {
	case ModeCheck:
		o.Check.validate(c)
	case ModeStatus:
		o.Status.validate(c)
	case ModeVolumes:
		o.Volumes.validate(c)
	}
	return o, c.err()
}

// Usage returns the help text of a mode.
func Usage(mode Mode) string {
	var o Options
	var b strings.Builder
	fmt.Fprintf(&b, "s3-csi-driver [all|controller|node|%s] [--flag=value ...]\n\n", join(Commands(), "|"))
	fmt.Fprintf(&b, "The default mode is \"all\". These are the flags of mode %q. Each can also be set with the variable\nS3_CSI_<FLAG> (--http-endpoint: "+
		"S3_CSI_HTTP_ENDPOINT); the command line takes precedence.\n\n", mode)
	b.WriteString(o.Flags(mode).FlagUsagesWrapped(100))
	return b.String()
}

func splitMode(args []string) (Mode, []string, error) {
	if len(args) == 0 || strings.HasPrefix(args[0], "-") {
		return ModeAll, args, nil
	}
	mode := Mode(args[0])
	if !slices.Contains(append(Modes(), Commands()...), mode) {
		return ModeAll, nil, usagef("unknown mode %q: the modes are all (default), controller, node, %s", args[0], join(Commands(), ", "))
	}
	return mode, args[1:], nil
}

func join(modes []Mode, separator string) string {
	var names []string
	for _, m := range modes {
		names = append(names, string(m))
	}
	return strings.Join(names, separator)
}

// explainParse returns a usage error that distinguishes a flag of another mode from an unknown flag.
func explainParse(mode Mode, err error) error {
	if errors.Is(err, pflag.ErrHelp) {
		return err
	}
	unknown := (*pflag.NotExistError)(nil)
	if !errors.As(err, &unknown) {
		return usagef("%w", err)
	}
	name := unknown.GetSpecifiedName()
	var owners []string
	for _, m := range append(Modes(), Commands()...) {
		if m != mode && new(Options).Flags(m).Lookup(name) != nil {
			owners = append(owners, string(m))
		}
	}
	if len(owners) > 0 {
		return usagef("--%s is a flag of modes %s, not of mode %s: remove it, or use another mode", name, strings.Join(owners, " and "), mode)
	}
	return usagef("%w; see s3-csi-driver %s --help", err, mode)
}
