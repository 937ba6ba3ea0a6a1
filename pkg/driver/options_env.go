package driver

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/pflag"
)

// FlagVariables returns the environment variables of a flag, in order of precedence. Those after the first are what other CSI drivers,
// sidecars and csc use.
func FlagVariables(flag string) []string {
	names := []string{"S3_CSI_" + strings.ToUpper(strings.ReplaceAll(flag, "-", "_"))}
	switch flag {
	case "endpoint":
		names = append(names, "CSI_ENDPOINT")
	case "node-id":
		names = append(names, "CSI_NODE_NAME")
	}
	return names
}

// The AWS SDK's variables for region and endpoint, in order of precedence. They configure the backend "default".
func regionVariables() []string   { return []string{"AWS_REGION", "AWS_DEFAULT_REGION"} }
func endpointVariables() []string { return []string{"AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"} }

// applyEnvironment sets the flags that are not on the command line. Empty variables are ignored, so that manifests can have optional
// values. So are variables for flags of other modes, because several modes may share an environment.
func (o *Options) applyEnvironment(fs *pflag.FlagSet, env Environment, c *checker) error {
	var errs []error
	fs.VisitAll(func(f *pflag.Flag) {
		if f.Changed || f.Name == "version" {
			return
		}
		name, value := firstSet(env, FlagVariables(f.Name))
		if name == "" {
			return
		}
		c.origin[f.Name] = name
		if err := f.Value.Set(value); err != nil {
			errs = append(errs, usagef("%s: invalid value %q for --%s: %w", name, value, f.Name, err))
		}
	})
	for variable, key := range map[string]string{"AWS_USE_FIPS_ENDPOINT": "fips", "AWS_USE_DUALSTACK_ENDPOINT": "dualStack"} {
		if value, _ := env.Lookup(variable); strings.EqualFold(value, "true") {
			errs = append(errs, usagef("%s does not reach clients: remove it, and set %s: true for backends of AWS in the config file", variable, key))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return usagef("%w", err)
	}
	_, o.DefaultRegion = firstSet(env, regionVariables())
	_, o.DefaultEndpoint = firstSet(env, endpointVariables())
	return nil
}

func firstSet(env Environment, names []string) (name, value string) {
	for _, name := range names {
		if value, ok := env.Lookup(name); ok && value != "" {
			return name, value
		}
	}
	return "", ""
}

// checker collects the errors of all option values, so that an operator sees them at once.
type checker struct {
	origin map[string]string // flag → the variable that set it
	errs   []error
}

func (c *checker) check(flag string, err error) {
	if err == nil {
		return
	}
	source := "--" + flag
	if name := c.origin[flag]; name != "" {
		source = name + " (--" + flag + ")"
	}
	c.errs = append(c.errs, fmt.Errorf("%s: %w", source, err))
}

func (c *checker) err() error {
	if len(c.errs) == 0 {
		return nil
	}
	return usagef("%w", errors.Join(c.errs...))
}
