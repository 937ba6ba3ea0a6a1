package driver

import (
	"slices"

	"github.com/spf13/pflag"

	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// Values of --output of the modes that show something.
const (
	OutputText = "text"
	OutputJSON = "json"
	OutputName = "name"
)

// StatusOptions are the options of mode status.
type StatusOptions struct {
	Output       string
	Pod          string // "": all
	ClientOutput bool
}

func (o *StatusOptions) addFlags(fs *pflag.FlagSet) {
	fs.StringVarP(&o.Output, "output", "o", OutputText, "output format: text, json, or name (the names of mounts)")
	fs.StringVar(&o.Pod, "pod", "", "pod whose mounts are shown, as namespace/name; default: all")
	fs.BoolVar(&o.ClientOutput, "client-output", false, "with the output text, also show the end of each client's output")
}

func (o *StatusOptions) validate(c *checker) {
	c.check("output", checkOneOf(o.Output, []string{OutputText, OutputJSON, OutputName}))
}

// VolumesOptions are the options of mode volumes.
type VolumesOptions struct {
	Output  string
	Backend string // "": all
	All     bool
}

func (o *VolumesOptions) addFlags(fs *pflag.FlagSet) {
	outputFlag(fs, &o.Output)
	fs.StringVar(&o.Backend, "backend", "", "backend whose volumes are shown; default: all that the config file declares")
	fs.BoolVar(&o.All, "all", false, "also show ready snapshots, the records of deleted volumes and snapshots, and reserved names")
}

func (o *VolumesOptions) validate(c *checker) {
	checkOutput(c, o.Output)
	c.check("backend", optional(volume.ValidateBackendName, o.Backend))
}

func outputFlag(fs *pflag.FlagSet, to *string) {
	fs.StringVarP(to, "output", "o", OutputText, "output format: text or json")
}

func checkOutput(c *checker, output string) {
	c.check("output", checkOneOf(output, []string{OutputText, OutputJSON}))
}

// commandFlags adds the flags of a mode that serves nothing: its own, and those of other modes that affect it. Other options have their
// defaults.
func (o *Options) commandFlags(mode Mode, fs *pflag.FlagSet) {
	shared := []string{"logging-format", "v", "version"}
	switch mode {
	case ModeCheck:
		o.Check.addFlags(fs)
		shared = append(shared, "config", "state-dir", "cache-dir", "client-dir", "default-client", "launcher", "node-dns", "host-dir", "uid-range", "allow-isolated")
	case ModeStatus:
		o.Status.addFlags(fs)
		shared = append(shared, "state-dir")
	case ModeVolumes:
		o.Volumes.addFlags(fs)
		shared = append(shared, "config", "driver-name", "cluster-id")
	}
	others := pflag.NewFlagSet("", pflag.ContinueOnError)
	o.Common.addFlags(others)
	o.Controller.addFlags(others)
	o.Node.addFlags(others)
	_ = others.Set("v", "0") // only the result is printed
	others.Lookup("v").DefValue = "0"
	others.VisitAll(func(f *pflag.Flag) {
		f.Changed = false
		if slices.Contains(shared, f.Name) {
			fs.AddFlag(f)
		}
	})
}
