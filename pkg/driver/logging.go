package driver

import (
	"fmt"

	logsapi "k8s.io/component-base/logs/api/v1"
	_ "k8s.io/component-base/logs/json/register"
)

func logFormats() []string { return []string{"text", "json"} }

// SetupLogging makes klog write to stderr in the format and verbosity of o. It may be called once in a process, before
// anything logs: it replaces klog's logger, which is the process's own global.
func SetupLogging(o CommonOptions) error {
	c := logsapi.NewLoggingConfiguration()
	c.Format = o.LoggingFormat
	c.Verbosity = logsapi.VerbosityLevel(o.Verbosity)
	if err := logsapi.ValidateAndApply(c, nil); err != nil {
		return fmt.Errorf("set up logging: %w", err)
	}
	return nil
}
