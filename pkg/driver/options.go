package driver

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"
)

// Mode is what a process of the driver serves.
type Mode string

const (
	// ModeAll serves identity, controller and node on one socket.
	ModeAll Mode = "all"
	// ModeController serves identity and controller.
	ModeController Mode = "controller"
	// ModeNode serves identity and node.
	ModeNode Mode = "node"
	// ModeCheck serves nothing: it tells an operator what backends and hosts can do.
	ModeCheck Mode = "check"
)

// Modes are those that an operator starts to serve something.
func Modes() []Mode { return []Mode{ModeAll, ModeController, ModeNode} }

// Controller tells whether the mode serves the CSI Controller service.
func (m Mode) Controller() bool { return m == ModeAll || m == ModeController }

// Node tells whether the mode serves the CSI Node service.
func (m Mode) Node() bool { return m == ModeAll || m == ModeNode }

// UsageError is a mistake on the command line or in the environment: the process exits with code 2.
type UsageError struct{ err error }

// Error implements error.
func (e *UsageError) Error() string { return e.err.Error() }

// Unwrap gives the cause.
func (e *UsageError) Unwrap() error { return e.err }

func usagef(format string, args ...any) error { return &UsageError{err: fmt.Errorf(format, args...)} }

// Options is everything that an operator tells a process at its start.
type Options struct {
	Mode       Mode
	Common     CommonOptions
	Controller ControllerOptions // meaningful where Mode.Controller()
	Node       NodeOptions       // meaningful where Mode.Node(), and some of them with ModeCheck
	Check      CheckOptions      // meaningful with ModeCheck
	// DefaultRegion and DefaultEndpoint are those of the backend that needs no configuration, from AWS_REGION and
	// AWS_ENDPOINT_URL.
	DefaultRegion, DefaultEndpoint string
}

// CommonOptions are those of every mode.
type CommonOptions struct {
	Endpoint        string
	DriverName      string
	Config          string
	HTTPEndpoint    string
	LoggingFormat   string
	Verbosity       int
	ShutdownTimeout time.Duration
	Version         bool
}

// AddFlags registers the options on fs with their defaults.
func (o *CommonOptions) AddFlags(fs *pflag.FlagSet) {
	fs.StringVar(&o.Endpoint, "endpoint", "unix:///csi/csi.sock", "where the CSI services are served: unix:///path, or tcp://127.0.0.1:port (loopback only, because the protocol has no authentication)")
	fs.StringVar(&o.DriverName, "driver-name", "s3.csi.driver", "the CSI plugin name, as in StorageClasses and PersistentVolumes; at most 63 letters, digits, dots and dashes")
	fs.StringVar(&o.Config, "config", "", "the YAML file that declares backends; none: one backend named \"default\", which is AWS or what AWS_ENDPOINT_URL says")
	fs.StringVar(&o.HTTPEndpoint, "http-endpoint", "", "address, host:port or :port, that serves /metrics, /healthz and /readyz; none: not served")
	fs.StringVar(&o.LoggingFormat, "logging-format", "text", "log format: text or json")
	fs.IntVarP(&o.Verbosity, "v", "v", 2, "log verbosity, 0 to 10: 2 shows changes, 4 requests, 5 answers, 6 polling")
	fs.DurationVar(&o.ShutdownTimeout, "shutdown-timeout", 20*time.Second, "how long a stopping driver lets running requests finish before it cancels them")
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
	c.check("shutdown-timeout", checkDuration(o.ShutdownTimeout, 0, time.Hour))
}

// ControllerOptions are those of the modes that serve the CSI Controller service.
type ControllerOptions struct {
	ClusterID       string
	DeletionWorkers int
}

// AddFlags registers the options on fs with their defaults.
func (o *ControllerOptions) AddFlags(fs *pflag.FlagSet) {
	fs.StringVar(&o.ClusterID, "cluster-id", "", "tells this cluster's volumes from another cluster's in the same bucket; never change it while volumes exist; at most 63 letters, digits, dots, dashes and underscores")
	fs.IntVar(&o.DeletionWorkers, "deletion-workers", 4, "how many volumes are emptied at the same time, 1 to 64")
}

func (o *ControllerOptions) validate(c *checker) {
	c.check("cluster-id", optional(checkClusterID, o.ClusterID))
	c.check("deletion-workers", checkRange(o.DeletionWorkers, 1, 64))
}

// Flags is the flag set of a mode, bound to o.
func (o *Options) Flags(mode Mode) *pflag.FlagSet {
	fs := pflag.NewFlagSet(string(mode), pflag.ContinueOnError)
	fs.SortFlags = false
	fs.Usage = func() {} // the caller prints; pflag would write to stderr by itself
	if mode == ModeCheck {
		o.checkFlags(fs)
		return fs
	}
	o.Common.AddFlags(fs)
	if mode.Controller() {
		o.Controller.AddFlags(fs)
	}
	if mode.Node() {
		o.Node.AddFlags(fs)
	}
	return fs
}

// Environment is what a process inherits, passed in so that tests need not change their own.
type Environment struct {
	Lookup   func(key string) (string, bool)
	Hostname func() (string, error)
}

// Parse reads a command line without its program name. Every mistake is a *UsageError; --help is pflag.ErrHelp. With
// Common.Version set nothing else is valid or checked.
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
		return o, usagef("unexpected argument %q: options are --name=value, and the mode comes first", fs.Arg(0))
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
			return o, usagef("--node-id is not given and the host name cannot be read: %w", err)
		}
	}
	o.Common.validate(c)
	if mode.Controller() {
		o.Controller.validate(c)
	}
	if mode.Node() || mode == ModeCheck {
		o.Node.validate(c)
	}
	if mode == ModeCheck {
		o.Check.validate(c)
	}
	return o, c.err()
}

// Usage is the help text of a mode.
func Usage(mode Mode) string {
	var o Options
	var b strings.Builder
	fmt.Fprintf(&b, "s3-csi-driver [all|controller|node|check] [--flag=value ...]\n\n")
	fmt.Fprintf(&b, "Without a mode it is \"all\". These are the flags of mode %q; each can be set by its variable\nS3_CSI_<FLAG> (--http-endpoint: S3_CSI_HTTP_ENDPOINT); the command line wins.\n\n", mode)
	b.WriteString(o.Flags(mode).FlagUsagesWrapped(100))
	return b.String()
}

func splitMode(args []string) (Mode, []string, error) {
	if len(args) == 0 || strings.HasPrefix(args[0], "-") {
		return ModeAll, args, nil
	}
	mode := Mode(args[0])
	if mode != ModeCheck && !slices.Contains(Modes(), mode) {
		return ModeAll, nil, usagef("unknown mode %q: the modes are all (the default), controller, node and check", args[0])
	}
	return mode, args[1:], nil
}

// explainParse tells a flag of another mode from one that exists nowhere.
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
	for _, m := range append(Modes(), ModeCheck) {
		if m != mode && new(Options).Flags(m).Lookup(name) != nil {
			owners = append(owners, string(m))
		}
	}
	if len(owners) > 0 {
		return usagef("--%s is a flag of modes %s and means nothing to mode %s: remove it, or start the other mode", name, strings.Join(owners, " and "), mode)
	}
	return usagef("%w; s3-csi-driver %s --help lists the flags", err, mode)
}
