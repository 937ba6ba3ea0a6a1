// Package backend is about S3 services: which ones the operator configured, how to talk to them, what their errors mean, and
// whether a bucket can be used for volumes.
//
// It does not depend on provisioning or CSI. All its errors have a pkg/fault kind.
package backend

import (
	"cmp"
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"fmt"
	"strings"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// fallbackRegion is the region for signing requests if none is configured. AWS returns a bucket's real region there, and
// services without regions accept it.
const fallbackRegion = "us-east-1"

// Backend is the configuration of one S3 service. Values come from a Config; zero fields were not set. The tags are keys of the config file.
type Backend struct {
	// Name is the name that volumes use.
	Name string `json:"-"`
	// Endpoint is a URL of scheme and host; "" is AWS.
	Endpoint string `json:"endpoint"`
	// Region is used until a bucket's own region is known; "" is unknown.
	Region string `json:"region"`
	// PathStyle puts the bucket into the path instead of the host name.
	PathStyle bool `json:"-"`
	// RelaxedBucketNames allows names of buckets that Amazon S3 does not.
	RelaxedBucketNames bool `json:"-"`
	// DualStack and FIPS choose these endpoints of AWS, for the driver and for clients.
	DualStack bool `json:"dualStack"`
	FIPS      bool `json:"fips"`
	// Requests are the settings of all requests, which a volume's mount options override.
	Requests Requests `json:"-"`
	// CAFile is an absolute path of PEM certificates that are trusted for Endpoint instead of the system's; "" is the
	// system's.
	CAFile string `json:"caFile"`
	// Proxy is the HTTP proxy for Endpoint and the token service.
	Proxy Proxy `json:"-"`
	// DefaultClient is the client of volumes that name none; "" is the driver's default.
	DefaultClient string `json:"defaultClient"`
	// STS is the security token service; nil: not declared. AWS always has one.
	STS *STS `json:"sts"`
	// SingleController asserts that only one controller at a time uses this backend, for services without conditional writes.
	SingleController bool `json:"singleController"`
	// AdoptUntaggedBuckets allows CreateVolume to use an existing empty bucket without tags, for services that drop tags.
	AdoptUntaggedBuckets bool `json:"adoptUntaggedBuckets"`
	// ControllerCredentials is the controller's source: credentials.SourceDriver or credentials.SourceSecret.
	ControllerCredentials string `json:"controllerCredentials"`
	// ExpectedBucketOwner is the account id that must own every bucket; "" is the caller's own, if STS reports it.
	ExpectedBucketOwner string `json:"expectedBucketOwner"`
	// VolumeBuckets are names and patterns (with *) of the buckets whose volumes are listed; none: all buckets of the controller's account.
	VolumeBuckets []string `json:"volumeBuckets"`
	// Scope is one of volume.Scope…; "" was not set, see ScopeOf.
	Scope string `json:"-"`
	// Allow are the operator's rules; nil: everything is allowed.
	Allow *Allow `json:"-"`
	// WorkloadRoleARN is the default role of workload volumes, a volume.Role; "": there is none.
	WorkloadRoleARN string `json:"workloadRoleARN"`
	// ControllerRoleARN is the role that the controller assumes for its own work; "": none.
	ControllerRoleARN string `json:"controllerRoleARN"`
	// PodIdentityAgent is the URL of EKS Pod Identity's agent on the nodes; "" is the default, see AgentURI.
	PodIdentityAgent string `json:"podIdentityAgent"`

	// The content of CAFile once it was read, its certificates, and its hash.
	ca    string
	roots *x509.CertPool
	caSum string
}

// STS is a backend's security token service.
type STS struct {
	Endpoint string `json:"endpoint"` // URL; "" is the backend's own endpoint, or AWS's of Region
	Region   string `json:"region"`   // "" is the backend's
	// Kinds are the kinds of sessions that it makes; none: the usual ones, see Backend.Makes.
	Kinds []credentials.Kind `json:"kinds"`
	// Audience is that of service accounts' tokens for it; "" is the default on AWS and none elsewhere.
	Audience string `json:"audience"`
	// RoleOptional means that AssumeRole and AssumeRoleWithWebIdentity need no role.
	RoleOptional bool `json:"roleOptional"`
}

// AWS reports whether the backend is Amazon S3 itself.
func (b Backend) AWS() bool { return b.Endpoint == "" }

// CheckBucketName checks a bucket's name against the backend's rules. The error is Invalid.
func (b Backend) CheckBucketName(name string) error {
	if !b.RelaxedBucketNames {
		_, err := volume.ValidateBucketName(name)
		if err != nil && !b.AWS() && volume.CheckBucketName(name) == nil {
			err = fault.Errorf(fault.Invalid, "%w; if %s has such buckets, set bucketNames: relaxed for it in the driver's config file", err, b)
		}
		return err
	}
	if err := volume.CheckBucketName(name); err != nil {
		return fault.Errorf(fault.Invalid, "bucket name %q %w", name, err)
	}
	return nil
}

// StartRegion returns the region to use while a bucket's is unknown; never "".
func (b Backend) StartRegion() string {
	return cmp.Or(b.Region, fallbackRegion)
}

// CA returns the content of CAFile as of when the config was read, or "".
func (b Backend) CA() string { return b.ca }

// MountDigest returns a hash of the settings with which the client of a mount reaches the service: endpoint, region, addressing,
// trusted certificates, proxy and settings of requests. It is stable over upgrades of the driver, so a mount with another digest uses
// settings that are no longer configured.
func (b Backend) MountDigest() string {
	h := sha256.New()
	for _, f := range []struct{ key, value string }{
		{"endpoint", b.Endpoint}, {"region", b.Region}, {"ca", b.ca}, {"proxy", b.ProxyFor(b.Endpoint)}, {"proxyCredentials", b.Proxy.sum},
	} {
		if f.value != "" {
			fmt.Fprintf(h, "%s %d %s\n", f.key, len(f.value), f.value)
		}
	}
	for _, set := range []struct {
		is   bool
		name string
	}{{b.PathStyle, "pathStyle"}, {b.DualStack, "dualStack"}, {b.FIPS, "fips"}} {
		if set.is {
			fmt.Fprintln(h, set.name)
		}
	}
	for _, o := range b.Requests.options() {
		fmt.Fprintln(h, o)
	}
	return "v1:" + hex.EncodeToString(h.Sum(nil))
}

// ListedBuckets returns VolumeBuckets: names, and patterns that are matched with the buckets of the account.
func (b Backend) ListedBuckets() (names, patterns []string) {
	if len(b.VolumeBuckets) == 0 {
		return nil, []string{"*"}
	}
	for _, bucket := range b.VolumeBuckets {
		if strings.Contains(bucket, "*") {
			patterns = append(patterns, bucket)
		} else {
			names = append(names, bucket)
		}
	}
	return names, patterns
}

// Revision identifies the backend's complete configuration. Caches use it in their keys, so that responses of an old endpoint are
// not used for a new one. It is valid in this process only.
func (b Backend) Revision() string {
	sts, allow := b.STS, b.Allow
	b.STS, b.Allow, b.roots, b.ca, b.Proxy.credentials = nil, nil, nil, "", "" // caSum and Proxy.sum identify the content of files
	text := fmt.Appendf(nil, "%#v %t %t", b, sts != nil, allow != nil)
	if sts != nil {
		text = fmt.Appendf(text, " %#v", *sts)
	}
	if allow != nil {
		text = fmt.Appendf(text, " %#v", *allow)
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:16])
}

// String names the backend in messages.
func (b Backend) String() string {
	if b.AWS() {
		return "backend " + b.Name + " (AWS)"
	}
	return "backend " + b.Name + " (" + b.Endpoint + ")"
}

// ControllerKeys returns the keys for a controller's work, according to ControllerCredentials: the zero value (the driver's own chain)
// or those of the request's secret. A Precondition means that the request does not match ControllerCredentials.
func (b Backend) ControllerKeys(secret credentials.Keys) (credentials.Keys, error) {
	if b.ControllerCredentials == credentials.SourceSecret {
		if secret.IsZero() {
			return credentials.Keys{}, fault.Errorf(fault.Precondition, "%[1]s takes the controller's credentials from the request's secret, but the request has none; "+
				"give the volume a secret with %[2]s and %[3]s (in Kubernetes: check that the StorageClass names a provisioner secret and that it exists)",
				b, credentials.SecretAccessKeyID, credentials.SecretSecretAccessKey)
		}
		return secret, nil
	}
	if !secret.IsZero() {
		return credentials.Keys{}, fault.Errorf(fault.Precondition, "the request has S3 keys in a secret, but %s uses the driver's own credentials; "+
			"set controllerCredentials: secret for it in the driver's config file, or remove the secret from the volume (in Kubernetes: the provisioner secret of "+
			"the StorageClass)", b)
	}
	return credentials.Keys{}, nil
}
