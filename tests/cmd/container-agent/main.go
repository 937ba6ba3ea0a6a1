// Command container-agent is the process of the containers that tests run.
package main

import (
	"fmt"
	"os"

	"github.com/s3-csi/s3-csi-driver/tests/internal/containers/agent"
)

func main() {
	if err := agent.Run(os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "container-agent:", err)
		os.Exit(1)
	}
}
