package driver

import (
	"fmt"

	logsapi "k8s.io/component-base/logs/api/v1"
	_ "k8s.io/component-base/logs/json/register"
)

func logFormats() []string { return []string{"text", "json"} }

// SetupLogging configures klog to write to stderr with the format and verbosity of o. It must be called at most once, before the first
// log message, because it replaces klog's global logger.
func SetupLogging(o CommonOptions) error {
	c := logsapi.NewLoggingConfiguration()
	c.Format = o.LoggingFormat
	c.Verbosity = logsapi.VerbosityLevel(o.Verbosity)
	if err := logsapi.ValidateAndApply(c, nil); err != nil {
		return fmt.Errorf("set up logging: %w", err)
	}
	return nil
}
