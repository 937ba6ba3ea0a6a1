package driver

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/pflag"
)

// FlagVariables are the environment variables of a flag, the strongest first. Those after the first are names that
// other CSI drivers, their sidecars and csc use for the same thing.
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

// The variables that describe the default backend, as the AWS SDK reads them, the strongest first.
func regionVariables() []string   { return []string{"AWS_REGION", "AWS_DEFAULT_REGION"} }
func endpointVariables() []string { return []string{"AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"} }

// applyEnvironment sets every flag that the command line did not. An empty variable is an unset one, which is what
// manifests with optional values need. Variables of another mode's flags are left alone: one environment may serve
// several modes.
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
			errs = append(errs, usagef("%s: %q is not a value for --%s: %w", name, value, f.Name, err))
		}
	})
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

// checker collects what is wrong with option values, so that an operator sees all of it at once.
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
