package driver

import (
	"github.com/spf13/pflag"

	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// Values of --output.
const (
	OutputTable = "table"
	OutputJSON  = "json"
)

// CheckOptions are the options of mode check.
type CheckOptions struct {
	Backend string // "": all
	Bucket  string // "": one is created for each backend
	Output  string
	Node    bool
}

// AddFlags registers the options on fs with their defaults.
func (o *CheckOptions) AddFlags(fs *pflag.FlagSet) {
	fs.StringVar(&o.Backend, "backend", "", "backend to check; default: all that the config file declares")
	fs.StringVar(&o.Bucket, "bucket", "", "existing bucket in which objects below .s3-csi/check/ are created and then deleted; default: a bucket is created for each backend and then deleted")
	fs.StringVar(&o.Output, "output", OutputTable, "output format: table or json")
	fs.BoolVar(&o.Node, "node", false, "also check the host as the node service uses it; requires root, on the host or in the node's container")
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
