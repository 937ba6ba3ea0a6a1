package helper

import (
	"cmp"
	"slices"

	"github.com/s3-csi/s3-csi-driver/pkg/client"
	"github.com/s3-csi/s3-csi-driver/pkg/credentials"
	"github.com/s3-csi/s3-csi-driver/pkg/fusermount"
	"github.com/s3-csi/s3-csi-driver/pkg/sandbox"
)

// Restrict applies the sandbox of a helper to the calling thread, which is about to execute the program with these arguments, if they
// ask for one. Launchers call it before the helper is executed, because the kernel restricts threads, not processes.
func Restrict(args []string) error {
	if len(args) == 0 || args[0] != "helper" {
		return nil
	}
	a, err := parse(args[1:])
	if err != nil || !a.Landlock {
		return err
	}
	return sandbox.Helper(Assignment{a.Name, a.StateDir, a.CacheDir}.Directories()...).Restrict()
}

// restricted calls start, which starts a process, within the sandbox of that process.
func (o options) restricted(c sandbox.Child, start func() error) error {
	if !o.args.Landlock {
		return start()
	}
	return c.Policy().Run(start)
}

// clientSandbox returns what a client may reach: its service, its directories, and the credential endpoint if it uses that. Call under mu.
func (h *helper) clientSandbox(c client.Command) sandbox.Child {
	s := sandbox.Child{Programs: []string{c.Argv[0]}, Files: c.Files, Writable: h.mount.Directories()}
	if c.Fusermount != "" {
		s.Programs = append(s.Programs, c.Fusermount)
		s.Without = fusermount.Names() // libfuse executes those of the host before it looks into PATH
	}
	if c.Ports != nil {
		s.Ports = slices.Clone(c.Ports)
		if !c.StaticKeys {
			s.Ports = append(s.Ports, addressOf(h.endpoint.listener.Addr()).Port())
		}
	}
	return s
}

// exchangeSandbox returns what the program may reach that makes a session from an order. It writes no files.
func exchangeSandbox(program string, o credentials.Order) sandbox.Child {
	s := sandbox.Child{Programs: []string{program}, Ports: []uint16{sandbox.Port(cmp.Or(o.STS.Proxy, o.STS.Endpoint))}}
	if o.AgentURI != "" {
		s.Ports = append(s.Ports, sandbox.Port(o.AgentURI))
	}
	return s
}
