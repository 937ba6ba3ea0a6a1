package backend

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"sigs.k8s.io/yaml"

	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// maxConfigSize bounds the config file, in bytes. It is enough for several hundred backends.
const maxConfigSize = 256 << 10

// Values of the key addressing.
const (
	addressingPath    = "path"
	addressingVirtual = "virtual"
)

// Values of the key bucketNames.
const (
	bucketNamesAWS     = "aws"
	bucketNamesRelaxed = "relaxed"
)

var (
	// A region becomes part of signatures and, on AWS, of a host name.
	regionName = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9_-]{0,62}[A-Za-z0-9])?$`)
	kmsKeyID   = regexp.MustCompile(`^[\x21-\x7e]{1,1000}$`)
)

// Config is the operator's configuration of S3 services, with the declarations of further clients. It is immutable.
type Config struct {
	backends map[string]Backend
	clients  client.Set
	declared string // identifies the declarations of clients
	// undeclared is set if the file declares backends, but not "default".
	undeclared bool
}

// The keys of the file, which docs/reference/configuration.md describes.
type (
	fileConfig struct {
		Backends map[string]json.RawMessage `json:"backends"`
		Clients  map[string]json.RawMessage `json:"clients"`
	}
	// fileBackend are the keys of a backend: those that become settings as they are, and the others.
	fileBackend struct {
		Settings      Backend   `json:",inline"`
		Addressing    string    `json:"addressing"`
		BucketNames   string    `json:"bucketNames"`
		RequesterPays bool      `json:"requesterPays"`
		SSE           *fileSSE  `json:"sse"`
		Proxy         *Proxy    `json:"proxy"`
		Scope         fileScope `json:"scope"`
		Allow         []rule    `json:"allow"`
	}
	fileSSE struct {
		Algorithm string `json:"algorithm"`
		KMSKeyID  string `json:"kmsKeyID"`
	}
	// fileClient is a declaration of a client.
	fileClient struct {
		Declaration client.Declaration         `json:",inline"`
		Options     map[string]json.RawMessage `json:"options"`
	}
)

// LoadConfig reads the config file and the files that it names. region and endpoint are the environment's (AWS_REGION,
// AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL): defaults for the backend "default", or "". Errors are Invalid and name the key,
// or Precondition for a file that cannot be read.
func LoadConfig(path, region, endpoint string) (*Config, error) {
	data, err := readBounded(path, maxConfigSize)
	if err != nil {
		return nil, fault.Errorf(fault.Precondition, "read the config file: %w", err)
	}
	c, err := ParseConfig(data, region, endpoint)
	if err != nil {
		return nil, fmt.Errorf("config file %s: %w", path, err)
	}
	for name, b := range c.backends {
		if c.backends[name], err = b.withFiles(); err != nil {
			return nil, fmt.Errorf("config file %s: %w", path, err)
		}
	}
	return c, nil
}

// DefaultConfig returns the config without a file: only the backend "default".
func DefaultConfig(region, endpoint string) (*Config, error) {
	return ParseConfig(nil, region, endpoint)
}

// ParseConfig is LoadConfig for a file's content. It does not read the files that it names.
func ParseConfig(data []byte, region, endpoint string) (*Config, error) {
	top, err := parseFile(data)
	if err != nil {
		return nil, err
	}
	files, err := top.fileBackends()
	if err != nil {
		return nil, err
	}
	clients, err := top.declaredClients()
	if err != nil {
		return nil, err
	}
	_, declared := files[volume.DefaultBackend]
	c := &Config{backends: make(map[string]Backend, len(files)), undeclared: !declared && len(files) > 0}
	if !declared {
		files[volume.DefaultBackend] = fileBackend{}
	}
	c.clients = client.NewSet(clients)
	if identity, err := json.Marshal(top.Clients); err == nil { // of what was parsed before
		c.declared = string(identity)
	}
	for name, f := range files {
		place := func(key string) string { return "backends." + name + "." + key }
		if name == volume.DefaultBackend {
			// Errors name the source of a value.
			given := map[string]string{}
			if b := &f.Settings; b.Endpoint == "" && endpoint != "" {
				b.Endpoint, given["endpoint"] = endpoint, "the environment's S3 endpoint (AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL)"
			}
			if b := &f.Settings; b.Region == "" && region != "" {
				b.Region, given["region"] = region, "the environment's region (AWS_REGION)"
			}
			place = func(key string) string {
				if from, ok := given[key]; ok {
					return from
				}
				return "backends." + name + "." + key
			}
		}
		if c.backends[name], err = f.backend(name, place); err != nil {
			return nil, err
		}
		if wanted := f.Settings.DefaultClient; wanted != "" {
			if _, err := c.clients.Get(wanted); err != nil {
				return nil, fault.Field(place("defaultClient"), "%w", err)
			}
		}
	}
	return c, nil
}

// Backend returns the backend of that name. An unknown name is a Precondition, because volumes outlive config files.
func (c *Config) Backend(name string) (Backend, error) {
	if b, ok := c.backends[name]; ok {
		return b, nil
	}
	return Backend{}, fault.Errorf(fault.Precondition, "there is no backend %q in the driver's config (known: %s); add it to the config file of every controller "+
		"and node, which reload it automatically", name, strings.Join(slices.Sorted(maps.Keys(c.backends)), ", "))
}

// Clients returns the driver's own clients and those that the file declares.
func (c *Config) Clients() client.Set { return c.clients }

// Config implements Configured.
func (c *Config) Config() *Config { return c }

// Changed implements Configured: a Config never changes.
func (c *Config) Changed() <-chan struct{} { return nil }

// Backends returns all backends, sorted by name.
func (c *Config) Backends() []Backend {
	return slices.SortedFunc(maps.Values(c.backends), func(a, b Backend) int { return strings.Compare(a.Name, b.Name) })
}

// Declared returns the backends of the config file, sorted by name; without any, the backend "default".
func (c *Config) Declared() []Backend {
	return slices.DeleteFunc(c.Backends(), func(b Backend) bool { return c.undeclared && b.Name == volume.DefaultBackend })
}

// parseFile decodes the YAML and checks the topmost keys.
func parseFile(data []byte) (top fileConfig, err error) {
	if len(data) > maxConfigSize {
		return top, fault.Errorf(fault.Invalid, "the config file has %d bytes, more than the %d allowed", len(data), maxConfigSize)
	}
	// The YAML library ignores all documents but the first.
	if err := oneDocument(string(data)); err != nil {
		return top, err
	}
	raw, err := yaml.YAMLToJSONStrict(data)
	if err != nil {
		return top, fault.Errorf(fault.Invalid, "not valid YAML: %w", err)
	}
	if string(raw) == "null" { // nothing but comments
		return top, nil
	}
	return top, decodeKeys("", raw, &top)
}

// fileBackends checks the keys and types of backends, but not values.
func (f fileConfig) fileBackends() (map[string]fileBackend, error) {
	files := map[string]fileBackend{}
	for name, settings := range f.Backends {
		if !volume.IsName(name, 32) {
			return nil, fault.Field("backends."+Clip(name, 64), "is not a backend name: at most 32 of a-z, 0-9 and -, not - at the start or end")
		}
		var b fileBackend
		if err := decodeKeys("backends."+name, settings, &b); err != nil {
			return nil, err
		}
		files[name] = b
	}
	return files, nil
}

// declaredClients returns the declared clients, sorted by name.
func (f fileConfig) declaredClients() ([]client.Client, error) {
	var declared []client.Client
	for _, name := range slices.Sorted(maps.Keys(f.Clients)) {
		place := "clients." + Clip(name, 64)
		if err := client.CheckName(name); err != nil {
			return nil, fault.Field(place, "%w", err)
		}
		var d fileClient
		if err := decodeKeys(place, f.Clients[name], &d); err != nil {
			return nil, err
		}
		d.Declaration.Options = map[string]client.OptionDeclaration{}
		for option, raw := range d.Options {
			var o client.OptionDeclaration
			if err := decodeKeys(place+".options."+Clip(option, 64), raw, &o); err != nil {
				return nil, err
			}
			d.Declaration.Options[option] = o
		}
		c, err := d.Declaration.Client(name, place)
		if err != nil {
			return nil, err
		}
		declared = append(declared, c)
	}
	return declared, nil
}

func oneDocument(text string) error {
	content := false
	for number, line := range strings.Split(text, "\n") {
		line = strings.TrimRight(line, "\r \t")
		marker := line == "---" || strings.HasPrefix(line, "--- ")
		if (marker && content) || line == "..." {
			return fault.Errorf(fault.Invalid, "line %d: the config file must be one YAML document", number+1)
		}
		if t := strings.TrimLeft(line, " \t"); t != "" && !strings.HasPrefix(t, "#") {
			content = true
		}
	}
	return nil
}

// backend checks the values of one backend and applies defaults. The first error counts.
func (f fileBackend) backend(name string, place func(key string) string) (b Backend, err error) {
	b = f.Settings
	b.Name, b.Scope, b.RelaxedBucketNames = name, string(f.Scope), f.BucketNames == bucketNamesRelaxed
	b.ControllerCredentials = cmp.Or(b.ControllerCredentials, credentials.SourceDriver)
	usual := addressingPath
	if b.AWS() {
		usual = addressingVirtual
	}
	b.PathStyle = cmp.Or(f.Addressing, usual) == addressingPath
	if b.Endpoint, err = checkEndpoint(place("endpoint"), b.Endpoint); err != nil {
		return b, err
	}
	err = cmp.Or(
		checkRegion(place("region"), b.Region),
		oneOf(place("addressing"), cmp.Or(f.Addressing, usual), addressingPath, addressingVirtual),
		oneOf(place("bucketNames"), cmp.Or(f.BucketNames, bucketNamesAWS), bucketNamesAWS, bucketNamesRelaxed),
		b.checkBucketNames(place("bucketNames")),
		checkPath(place("caFile"), b.CAFile),
		f.requests(&b, place),
		f.proxy(&b, place),
		oneOf(place("controllerCredentials"), b.ControllerCredentials, credentials.SourceDriver, credentials.SourceSecret),
		b.checkBuckets(place),
		b.checkSTS(place),
		oneOf(place("scope"), cmp.Or(b.Scope, volume.ScopeAuto), volume.ScopeRequired, volume.ScopeAuto, volume.ScopeOff),
		b.checkRole(place("workloadRoleARN"), b.WorkloadRoleARN, templates),
		b.checkRole(place("controllerRoleARN"), b.ControllerRoleARN, noTemplates),
		b.checkPodIdentityAgent(place("podIdentityAgent")),
	)
	if err == nil {
		b.Allow, err = newAllow(f.Allow, place("allow"))
	}
	return b, err
}

func (b Backend) checkBucketNames(place string) error {
	if b.RelaxedBucketNames && b.AWS() {
		return fault.Field(place, "%s is only for other services; Amazon S3 has the rules %s", bucketNamesRelaxed, bucketNamesAWS)
	}
	return nil
}

func (b Backend) checkBuckets(place func(key string) string) error {
	if b.ExpectedBucketOwner != "" && !credentials.IsAccount(b.ExpectedBucketOwner) {
		return fault.Field(place("expectedBucketOwner"), "must be an account id of 12 digits")
	}
	for i, bucket := range b.VolumeBuckets {
		key := fmt.Sprintf("%s[%d]", place("volumeBuckets"), i)
		if strings.Contains(bucket, "*") {
			if err := checkPattern(bucket, "-._"); err != nil {
				return fault.Field(key, "%q %w", Clip(bucket, 64), err)
			}
		} else if err := b.CheckBucketName(bucket); err != nil {
			return fault.Field(key, "%w", err)
		}
	}
	return nil
}

// oneOf refuses a value that is none of the known ones.
func oneOf[T ~string](place string, value T, known ...T) error {
	if slices.Contains(known, value) {
		return nil
	}
	var list strings.Builder
	for i, k := range known {
		if i > 0 {
			list.WriteString(map[bool]string{true: " or ", false: ", "}[i == len(known)-1])
		}
		list.WriteString(string(k))
	}
	return fault.Field(place, "is %q, must be %s", Clip(string(value), 32), list.String())
}

func checkPath(place, path string) error {
	if path != "" && !strings.HasPrefix(path, "/") {
		return fault.Field(place, "must be an absolute path")
	}
	return nil
}

func checkRegion(place, region string) error {
	if region != "" && !regionName.MatchString(region) {
		return fault.Field(place, "is not a region: letters, digits, - and _, at most 64")
	}
	return nil
}

// checkEndpoint is checkURL for an endpoint.
func checkEndpoint(place, endpoint string) (string, error) {
	return checkURL(place, endpoint, "keys come from a secret or the driver's own environment")
}

// hostName matches host names in ASCII and IPv4 addresses.
var hostName = regexp.MustCompile(`^([a-z0-9_]([a-z0-9_-]*[a-z0-9_])?\.)*[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?\.?$`)

// checkURL returns the URL in its canonical form: scheme and host in lower case, no trailing slash. Errors do not repeat the value, which
// may contain a password; instead is where credentials belong.
func checkURL(place, endpoint, instead string) (string, error) {
	if endpoint == "" {
		return "", nil
	}
	u, err := url.Parse(endpoint)
	if err != nil {
		return "", fault.Field(place, "is not a URL")
	}
	host, port := strings.ToLower(u.Hostname()), u.Port()
	number, portErr := strconv.ParseUint(port, 10, 16)
	_, addressErr := netip.ParseAddr(host)
	switch {
	case u.Scheme != "http" && u.Scheme != "https":
		return "", fault.Field(place, "must start with https:// or http://")
	case u.User != nil:
		return "", fault.Field(place, "must not contain a user or password; %s", instead)
	case !hostName.MatchString(host) && (addressErr != nil || strings.Contains(host, "%")):
		return "", fault.Field(place, "has no valid host; write a name with other letters than a-z in its ASCII form (xn--…)")
	case port != "" && (portErr != nil || number == 0 || strconv.FormatUint(number, 10) != port):
		return "", fault.Field(place, "has no valid port: 1 to 65535")
	case u.Path != "" && u.Path != "/", u.RawQuery != "", u.ForceQuery, strings.Contains(endpoint, "#"):
		return "", fault.Field(place, "must be scheme, host and port only, without a path or query")
	}
	if strings.Contains(host, ":") {
		host = "[" + host + "]"
	}
	if port != "" {
		host += ":" + port
	}
	return u.Scheme + "://" + host, nil
}

// readBounded reads a regular file of at most limit bytes.
func readBounded(path string, limit int64) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0) // do not block on a FIFO, which is refused below
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil {
		return nil, err
	} else if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is not a regular file", path)
	}
	data, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err == nil && int64(len(data)) > limit {
		err = fmt.Errorf("%s is larger than %d bytes", path, limit)
	}
	return data, err
}

// Clip returns at most limit bytes of a foreign text, on one line, for messages.
func Clip(s string, limit int) string {
	s = strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return ' '
		}
		return r
	}, s)
	if len(s) > limit {
		return strings.ToValidUTF8(s[:limit], "") + "…"
	}
	return strings.ToValidUTF8(s, "?")
}
