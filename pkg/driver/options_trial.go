package driver

import (
	"slices"

	"github.com/spf13/pflag"

	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// The forms in which a check says what it found.
const (
	OutputTable = "table"
	OutputJSON  = "json"
)

// CheckOptions are those of the mode check.
type CheckOptions struct {
	Backend string // "": all
	Bucket  string // "": one is made for each backend
	Output  string
	Node    bool
}

// AddFlags registers the options on fs with their defaults.
func (o *CheckOptions) AddFlags(fs *pflag.FlagSet) {
	fs.StringVar(&o.Backend, "backend", "", "the backend to check; none: all that the config file declares")
	fs.StringVar(&o.Bucket, "bucket", "", "a bucket that is there, in which objects below .s3-csi/check/ are written and removed again; none: a bucket is made for each backend, and removed again")
	fs.StringVar(&o.Output, "output", OutputTable, "how the result is written: table or json")
	fs.BoolVar(&o.Node, "node", false, "check the host too, as the node service would use it: as root, on the host or in the node's container")
}

func (o *CheckOptions) validate(c *checker) {
	if o.Backend != "" {
		c.check("backend", volume.ValidateBackendName(o.Backend))
	}
	if o.Bucket != "" {
		_, err := volume.ValidateBucketName(o.Bucket)
		c.check("bucket", err)
	}
	c.check("output", checkOneOf(o.Output, []string{OutputTable, OutputJSON}))
}

// checkFlags are the flags of the mode check: its own, and those of the others that say what is to be checked. The others have
// their defaults.
func (o *Options) checkFlags(fs *pflag.FlagSet) {
	o.Check.AddFlags(fs)
	others := pflag.NewFlagSet("", pflag.ContinueOnError)
	o.Common.AddFlags(others)
	o.Node.AddFlags(others)
	_ = others.Set("v", "0") // the result is what is to be read
	others.Lookup("v").DefValue = "0"
	others.VisitAll(func(f *pflag.Flag) {
		f.Changed = false
		if slices.Contains([]string{"config", "logging-format", "v", "version", "state-dir", "cache-dir", "client-dir", "default-client", "launcher", "node-dns", "host-dir", "uid-range", "allow-isolated"}, f.Name) {
			fs.AddFlag(f)
		}
	})
}
