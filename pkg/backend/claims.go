package backend

import (
	"errors"
	"fmt"
	"net"
	"net/url"
	"regexp"
	"strings"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// CheckClaims holds what a volume's author says of the service against what the config says of the backend of that name. It
// decides nothing: requests and keys go where the backend says, and a volume or secret that expects them elsewhere is not used
// at all. The error is a Precondition that says what to write, because the config may be what is wrong.
func (c *Config) CheckClaims(name string, claims []volume.Claim) error {
	if len(claims) == 0 {
		return nil
	}
	b, err := c.Backend(name)
	if err != nil {
		return err
	}
	for _, claim := range claims {
		if problem := c.problem(b, claim); problem != "" {
			return fault.Errorf(fault.Precondition, "%s: %s", claim.Field, problem)
		}
	}
	return nil
}

// CheckClaims is Config.CheckClaims with the config as it is now.
func (l *Live) CheckClaims(name string, claims []volume.Claim) error {
	return l.Config().CheckClaims(name, claims)
}

// problem says what is wrong with a claim; "" is nothing.
func (c *Config) problem(b Backend, claim volume.Claim) string {
	switch claim.Kind {
	case volume.ClaimEndpoint:
		return c.endpointProblem(b, claim.Value)
	case volume.ClaimRegion:
		if b.AWS() || claim.Value == b.StartRegion() {
			return ""
		}
		return fmt.Sprintf("%q is not the region of %s, %s: give the backend that region in the driver's config file, or take it out here", Clip(claim.Value, 64), b, b.StartRegion())
	case volume.ClaimPathStyle:
		if b.AWS() || b.PathStyle || claim.Value == "false" {
			return ""
		}
		return fmt.Sprintf("%s puts the bucket into the host's name: give it addressing: path in the driver's config file, or take this out", b)
	case volume.ClaimInsecure:
		return insecureProblem(b, claim.Value)
	}
	return fmt.Sprintf("nobody can tell whether %s is what it says", b)
}

func (c *Config) endpointProblem(b Backend, endpoint string) string {
	wanted, err := canonical(endpoint)
	if err != nil {
		return "is no endpoint that a backend can have: it has to be http:// or https://, a host, and perhaps a port. Requests go where the volume's backend says, " + b.String() + ": take it out"
	}
	if b.isAt(wanted) {
		return ""
	}
	advice := fmt.Sprintf("declare a backend with endpoint: %s in the driver's config file, and write backend: with its name into the volume or its StorageClass "+
		"(into a PersistentVolume that exists, mountOptions: [backend=<name>]), or give backend %s this endpoint for all volumes that name none", wanted, volume.DefaultBackend)
	for _, other := range c.Backends() {
		if other.isAt(wanted) {
			advice = "write backend: " + other.Name + ", which is there, into the volume or its StorageClass (into a PersistentVolume that exists, mountOptions: [backend=" + other.Name + "])"
			break
		}
	}
	return fmt.Sprintf("names the service at %s, and the volume is of %s. Requests and keys go where a backend says, never where a volume or a secret does: %s, or take it out if %s is meant",
		wanted, b, advice, b)
}

// isAt tells whether a canonical endpoint is the backend's, or for AWS, one of Amazon S3's in the backend's partition: keys are
// good for all of them, and requests go to that of the bucket's region anyway.
func (b Backend) isAt(endpoint string) bool {
	if !b.AWS() {
		own, err := canonical(b.Endpoint)
		return err == nil && own == endpoint
	}
	m := awsEndpoint.FindStringSubmatch(endpoint)
	if m == nil {
		return false
	}
	partition := partitionOf(m[1])
	return partition == b.Partition() && m[2] == map[string]string{
		"aws": "amazonaws.com", "aws-us-gov": "amazonaws.com", "aws-cn": "amazonaws.com.cn", "aws-eusc": "amazonaws.eu",
	}[partition]
}

// awsEndpoint matches the endpoints of Amazon S3 that are not for one bucket or one network (AWS General Reference, "Amazon S3
// endpoints and quotas").
var awsEndpoint = regexp.MustCompile(`^https://s3(?:[.-]([a-z]{2,5}(?:-[a-z]+)+-[0-9]{1,2}))?\.(amazonaws\.com|amazonaws\.com\.cn|amazonaws\.eu)$`)

// canonical is an endpoint in the form in which two are compared.
func canonical(endpoint string) (string, error) {
	endpoint, err := checkEndpoint("endpoint", strings.TrimSpace(endpoint))
	if err != nil {
		return "", err
	}
	if endpoint == "" {
		return "", errors.New("no endpoint")
	}
	u, err := url.Parse(strings.ToLower(endpoint))
	if err != nil {
		return "", err
	}
	host := u.Host
	if port := u.Port(); port == map[string]string{"http": "80", "https": "443"}[u.Scheme] {
		host = strings.TrimSuffix(host, ":"+port)
	} else if port != "" {
		host = net.JoinHostPort(u.Hostname(), port)
	}
	return u.Scheme + "://" + strings.TrimSuffix(host, "."), nil
}

func insecureProblem(b Backend, value string) string {
	switch strings.ToLower(value) {
	case "1", "t", "true":
	default:
		return "" // k8s-csi-s3 takes what is no boolean for false
	}
	if b.AWS() {
		return "certificates are always checked, and Amazon S3's can be: take it out"
	}
	if b.CAFile == "" && strings.HasPrefix(b.Endpoint, "https://") {
		return fmt.Sprintf("certificates are always checked: give %s a caFile in the driver's config file, or take this out if the system's certificates are enough", b)
	}
	return ""
}
