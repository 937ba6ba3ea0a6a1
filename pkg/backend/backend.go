// Package backend is the driver's knowledge of S3 services: which ones the operator configured, how to talk to them, what
// their errors mean, and whether a bucket is one that a volume can live in.
//
// It knows nothing of volumes' lives (pkg/provision) and nothing of CSI. Every error that leaves it has a pkg/fault kind.
package backend

import (
	"crypto/sha256"
	"crypto/x509"
	"encoding/hex"
	"fmt"

	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
)

// fallbackRegion is where requests are signed for while nobody said otherwise. AWS answers there with a bucket's real
// region, and services without regions accept it.
const fallbackRegion = "us-east-1"

// Backend is one S3 service, as the operator configured it. Values come from a Config; a zero field was not given.
type Backend struct {
	// Name is what volumes call it.
	Name string
	// Endpoint is a URL of scheme and host; "" is AWS.
	Endpoint string
	// Region is where requests go or are signed for until a bucket's own is known; "" is not known.
	Region string
	// PathStyle puts the bucket into the path instead of the host name.
	PathStyle bool
	// CAFile is an absolute path of PEM certificates that are trusted for Endpoint instead of the system's; "" is the
	// system's.
	CAFile string
	// STS is where the service's security token service is; nil: not declared. AWS has one anyway.
	STS *STS
	// SingleController promises that one controller at a time works on this backend, for services without conditional
	// writes.
	SingleController bool
	// AdoptUntaggedBuckets lets CreateVolume take over an empty bucket without tags, for services that drop tags.
	AdoptUntaggedBuckets bool
	// ControllerCredentials is the controller's source: credentials.SourceDriver or credentials.SourceSecret.
	ControllerCredentials string
	// ExpectedBucketOwner is the account id that must own every bucket; "" is the caller's own where STS tells it.
	ExpectedBucketOwner string
	// Scope is what a mount's session must be: one of volume.Scope…; "" was not given, see ScopeOf.
	Scope string
	// Allow are the operator's rules; nil: everything is allowed.
	Allow *Allow
	// WorkloadRoleARN is the role of workload volumes that name none, a volume.Role; "": they have to.
	WorkloadRoleARN string
	// ControllerRoleARN is the role that the controller takes on for its own work; "": none.
	ControllerRoleARN string
	// PodIdentityAgent is where EKS Pod Identity's agent answers on the nodes; "" is its usual place, see AgentURI.
	PodIdentityAgent string

	// What is in CAFile, once it was read: as it is, the trust that follows from it, and its hash.
	ca    string
	roots *x509.CertPool
	caSum string
}

// STS is a backend's security token service.
type STS struct {
	Endpoint string // URL; "" is AWS's of Region, or the backend's own endpoint where it has one
	Region   string // "" is the backend's
	// Kinds are how it makes sessions; none: the usual ones, see Backend.Makes.
	Kinds []credentials.Kind
	// Audience is that of service accounts' tokens for it; "" is AWS's own on AWS, and elsewhere there is none.
	Audience string
	// RoleOptional says that AssumeRole and AssumeRoleWithWebIdentity need no role here.
	RoleOptional bool
}

// AWS tells whether the backend is Amazon S3 itself.
func (b Backend) AWS() bool { return b.Endpoint == "" }

// StartRegion is the region to begin with when a bucket's is not known; never empty.
func (b Backend) StartRegion() string {
	if b.Region != "" {
		return b.Region
	}
	return fallbackRegion
}

// CA is the content of CAFile as it was when the config was read, "" where the operator gave none. It is read now where that
// did not happen; the error is a Precondition.
func (b Backend) CA() (string, error) {
	if b.ca != "" || b.CAFile == "" {
		return b.ca, nil
	}
	pem, err := readBounded(b.CAFile, maxCAFileSize)
	if err != nil {
		return "", fault.Errorf(fault.Precondition, "%s: reading its caFile: %w", b, err)
	}
	return string(pem), nil
}

// MountDigest is a hash of what decides how the client of a mount reaches the service, and of nothing else: endpoint, region,
// addressing and the certificates to trust. It stays the same over upgrades of the driver, so a mount that was made with
// another digest runs against what the config no longer says. The error is CA's.
func (b Backend) MountDigest() (string, error) {
	ca, err := b.CA()
	if err != nil {
		return "", err
	}
	h := sha256.New()
	for _, f := range []struct{ key, value string }{{"endpoint", b.Endpoint}, {"region", b.Region}, {"ca", ca}} {
		if f.value != "" {
			fmt.Fprintf(h, "%s %d %s\n", f.key, len(f.value), f.value)
		}
	}
	if b.PathStyle {
		fmt.Fprintln(h, "pathStyle")
	}
	return "v1:" + hex.EncodeToString(h.Sum(nil)), nil
}

// Revision names all that the operator says about the backend: values with one revision are one service with one set of
// settings. What is remembered of a service is remembered under it, so that nothing learnt at an old endpoint is believed
// of a new one. It means nothing outside of this process.
func (b Backend) Revision() string {
	var sts STS
	if b.STS != nil {
		sts = *b.STS
	}
	var allow Allow
	if b.Allow != nil {
		allow = *b.Allow
	}
	sum := sha256.Sum256(fmt.Appendf(nil, "%q %q %q %t %q %q %t %q %q %q %q %t %t %t %q %q %q %t %q %q %q %q", b.Name, b.Endpoint, b.Region, b.PathStyle, b.CAFile, b.caSum,
		b.STS != nil, sts.Endpoint, sts.Region, sts.Kinds, sts.Audience, sts.RoleOptional, b.SingleController, b.AdoptUntaggedBuckets, b.ControllerCredentials, b.ExpectedBucketOwner,
		b.Scope, b.Allow != nil, allow, b.WorkloadRoleARN, b.ControllerRoleARN, b.PodIdentityAgent))
	return hex.EncodeToString(sum[:16])
}

// String names the backend in messages.
func (b Backend) String() string {
	if b.AWS() {
		return "backend " + b.Name + " (AWS)"
	}
	return "backend " + b.Name + " (" + b.Endpoint + ")"
}

// ControllerKeys chooses the keys for a controller's work: the zero value (the driver's own chain) or those of the
// request's secret, as ControllerCredentials says and never by what happens to be there. Where the two disagree the error
// is a Precondition that says what to change.
func (b Backend) ControllerKeys(secret credentials.Keys) (credentials.Keys, error) {
	if b.ControllerCredentials == credentials.SourceSecret {
		if secret.IsZero() {
			return credentials.Keys{}, fault.Errorf(fault.Precondition, "%s takes the controller's credentials from the request's secret, and there is none: "+
				"check that the StorageClass names a provisioner secret and that the secret still exists with %s and %s",
				b, credentials.SecretAccessKeyID, credentials.SecretSecretAccessKey)
		}
		return secret, nil
	}
	if !secret.IsZero() {
		return credentials.Keys{}, fault.Errorf(fault.Precondition, "the request brings S3 keys in a secret, but %s uses the driver's own credentials: "+
			"set controllerCredentials: secret for it in the driver's config file, or remove the provisioner secret from the StorageClass", b)
	}
	return credentials.Keys{}, nil
}
