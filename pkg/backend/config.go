package backend

// Config is the driver's config file.
type Config struct{ backends map[string]Backend }

// LoadConfig reads the config file and the CA files that it names.
func LoadConfig(path, region, endpoint string) (*Config, error) { panic("soon") }

// ParseConfig reads a config file's content.
func ParseConfig(data []byte, region, endpoint string) (*Config, error) { panic("soon") }

// DefaultConfig is the config without a file.
func DefaultConfig(region, endpoint string) (*Config, error) {
	return ParseConfig(nil, region, endpoint)
}

// Backend gives the backend of that name.
func (c *Config) Backend(name string) (Backend, error) { panic("soon") }

// Backends gives all of them, sorted by name.
func (c *Config) Backends() []Backend { panic("soon") }
