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

// CheckClaims checks claims of a volume or secret about the service against the config of the backend. Requests and keys always
// go to the backend's endpoint; a volume or secret that expects another service is refused with a Precondition.
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

// CheckClaims is Config.CheckClaims with the current config.
func (l *Live) CheckClaims(name string, claims []volume.Claim) error {
	return l.Config().CheckClaims(name, claims)
}

// problem returns the error in a claim, or "".
func (c *Config) problem(b Backend, claim volume.Claim) string {
	switch claim.Kind {
	case volume.ClaimEndpoint:
		return c.endpointProblem(b, claim.Value)
	case volume.ClaimRegion:
		if b.AWS() || claim.Value == b.StartRegion() {
			return ""
		}
		return fmt.Sprintf("%q is not the region of %s, %s; set that region for the backend in the driver's config file, or remove it here",
			Clip(claim.Value, 64), b, b.StartRegion())
	case volume.ClaimPathStyle:
		if b.AWS() || b.PathStyle || claim.Value == "false" {
			return ""
		}
		return fmt.Sprintf("%s uses virtual-hosted addressing; set addressing: path in the driver's config file, or remove this", b)
	case volume.ClaimInsecure:
		return insecureProblem(b, claim.Value)
	}
	return fmt.Sprintf("unknown kind of claim about %s", b)
}

func (c *Config) endpointProblem(b Backend, endpoint string) string {
	wanted, err := canonical(endpoint)
	if err != nil {
		return "must be http:// or https://, a host, and optionally a port; requests go to " + b.String() + ", so remove it"
	}
	if b.isAt(wanted) {
		return ""
	}
	advice := fmt.Sprintf("declare a backend with endpoint: %s in the driver's config file and set backend in the volume or its StorageClass to its name "+
		"(in an existing PersistentVolume, mountOptions: [backend=<name>]), or set this endpoint for backend %s, which volumes use by default",
		wanted, volume.DefaultBackend)
	for _, other := range c.Backends() {
		if other.isAt(wanted) {
			advice = "set backend: " + other.Name + " in the volume or its StorageClass (in an existing PersistentVolume, mountOptions: [backend=" + other.Name + "])"
			break
		}
	}
	return fmt.Sprintf("names the service at %s, but the volume uses %s, and only a backend decides where requests and keys go; %s, or remove it if %s is right",
		wanted, b, advice, b)
}

// isAt reports whether a canonical endpoint is the backend's or, for AWS, one of Amazon S3 in the backend's partition, where the
// same keys are valid and requests go to the bucket's region.
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

// canonical returns an endpoint in a form for comparison.
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
		return "" // k8s-csi-s3 treats other values as false
	}
	if b.AWS() {
		return "certificates are always verified; remove it"
	}
	if b.CAFile == "" && strings.HasPrefix(b.Endpoint, "https://") {
		return fmt.Sprintf("certificates are always verified; set caFile for %s in the driver's config file, or remove this if the system's certificates suffice", b)
	}
	return ""
}
