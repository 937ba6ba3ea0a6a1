package driver

import (
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// defaultStepTimeout is the default of --step-timeout.
const defaultStepTimeout = 30 * time.Second

// CheckOptions are the options of mode check.
type CheckOptions struct {
	Backend            string // "": all
	Bucket             string // "": no bucket that exists
	CreateBucket       bool   // a bucket is created for each backend, and then deleted
	RoleARN, TokenFile string // a workload's role and its service account's token; "": no role is checked
	Prefix             string // where the role is to list objects in Bucket, or where the client is to write
	Output             string
	Node               bool
	MountOptions       string // the mount options of the volumes, as in the volume parameter mountOptions
	Client             string // the client to check, instead of anything else; "": none. StepTimeout bounds each step of its check.
	StepTimeout        time.Duration
	// SessionDuration is how long the sessions of the client's volume last, whose renewal is awaited; 0: the service's default, which is not.
	SessionDuration time.Duration
}

func (o *CheckOptions) addFlags(fs *pflag.FlagSet) {
	fs.StringVar(&o.Backend, "backend", "", "backend to check; default: all that the config file declares")
	fs.StringVar(&o.Bucket, "bucket", "", "existing bucket in which objects below .s3-csi/check/ are created and then deleted; default: nothing is created")
	fs.BoolVar(&o.CreateBucket, "create-bucket", false, "create a bucket for each backend, check with it, and delete it")
	fs.StringVar(&o.RoleARN, "role", "", "ARN of a workload's role to check, with --token-file and, where several backends are declared, --backend; with "+
		"--bucket, it must be able to list --prefix there")
	fs.StringVar(&o.TokenFile, "token-file", "", "file with a token of the workload's service account, for --role")
	fs.StringVar(&o.Prefix, "prefix", "", "prefix in --bucket that --role must be able to list, as a volume's prefix, or below which --client writes; "+
		"default: the whole bucket")
	outputFlag(fs, &o.Output)
	fs.BoolVar(&o.Node, "node", false, "also check the host as the node service uses it; requires root, on the host or in the node's container")
	fs.StringVar(&o.MountOptions, "mount-options", "", "mount options of the volumes, as in the parameter mountOptions; --client mounts with them")
	fs.StringVar(&o.Client, "client", "", "check the operations that volumes need, then this client, built in or declared, in a mount of its own, "+
		"both below new prefixes of --bucket; requires root, on the host or in the node's container")
	fs.DurationVar(&o.StepTimeout, "step-timeout", defaultStepTimeout, "time limit of each step of --client")
	fs.DurationVar(&o.SessionDuration, "session-duration", 0, "validity of the sessions of --client, as the volume parameter sessionDuration; the check then "+
		"waits until one has expired and was renewed; default: the service's, and renewal is not checked")
}

func (o *CheckOptions) validate(c *checker) {
	c.check("backend", optional(volume.ValidateBackendName, o.Backend))
	c.check("bucket", optional(volume.CheckBucketName, o.Bucket))
	c.check("create-bucket", wrongIf(o.CreateBucket && o.Bucket != "", "cannot be combined with --bucket"))
	c.check("role", wrongIf((o.RoleARN == "") != (o.TokenFile == ""), "and --token-file need each other"))
	c.check("prefix", wrongIf(o.Prefix != "" && (o.RoleARN == "" && o.Client == "" || o.Bucket == ""), "needs --role or --client, and --bucket"))
	_, err := o.ParseMountOptions()
	c.check("mount-options", err)
	o.validateClient(c)
	checkOutput(c, o.Output)
}

// ParseMountOptions returns the mount options of the volumes.
func (o *CheckOptions) ParseMountOptions() ([]volume.Option, error) {
	if o.MountOptions == "" {
		return nil, nil
	}
	return volume.ParseMountOptions(strings.Split(o.MountOptions, ","), "mountOptions")
}

func (o *CheckOptions) validateClient(c *checker) {
	c.check("step-timeout", wrongIf(o.StepTimeout < time.Second || o.StepTimeout > time.Hour, "must be between 1s and 1h"))
	if o.Client == "" {
		c.check("step-timeout", wrongIf(o.StepTimeout != defaultStepTimeout, "needs --client"))
		c.check("session-duration", wrongIf(o.SessionDuration != 0, "needs --client"))
		return
	}
	c.check("session-duration", wrongIf(o.SessionDuration != 0 && (o.SessionDuration < volume.MinSessionDuration ||
		o.SessionDuration > volume.MaxSessionDuration || o.SessionDuration%time.Second != 0),
		"must be whole seconds, from 1s to 36h"))
	c.check("client", client.CheckName(o.Client))
	c.check("client", wrongIf(o.Bucket == "", "needs --bucket"))
	c.check("client", wrongIf(o.CreateBucket, "cannot be combined with --create-bucket"))
	c.check("client", wrongIf(o.RoleARN != "", "cannot be combined with --role"))
	c.check("client", wrongIf(o.Node, "cannot be combined with --node: run the checks one after the other"))
}
