package client

import (
	"fmt"
	"strings"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// Default is the client of volumes that name none.
const Default = "mountpoint-s3"

// All are the clients that this driver knows, the default first.
func All() []Client {
	return []Client{
		mountpointS3(),
		rclone(),
	}
}

// Get finds a client by name; "" is the default. An unknown name is fault.Invalid.
func Get(name string) (Client, error) {
	if name == "" {
		name = Default
	}
	var known []string
	for _, c := range All() {
		if c.Name == name {
			return c, nil
		}
		known = append(known, c.Name)
	}
	return Client{}, fault.Errorf(fault.Invalid, "there is no client %s; this driver knows %s", quote(name), strings.Join(known, ", "))
}

// argument is one "--name=value": in this form no value can be taken for a flag.
func argument(name, value string) string { return "--" + name + "=" + value }

// withValue is the argument in a slice, or nothing where there is no value.
func withValue(name, value string) []string {
	if value == "" {
		return nil
	}
	return []string{argument(name, value)}
}

// owner is the argument for a uid or gid, or nothing below the smallest that the client can show.
func owner(name string, id, least uint32) []string {
	if id < least {
		return nil
	}
	return []string{argument(name, fmt.Sprint(id))}
}

func mode(bits uint32) string { return fmt.Sprintf("%04o", bits&0o777) }

// authored are the arguments of an author's options: "--name" for a flag that is on, "--name=value" for the rest.
func authored(types map[string]OptionType, options []volume.Option) []string {
	var args []string
	for _, o := range options {
		switch {
		case types[o.Name].Kind != Flag:
			args = append(args, argument(o.Name, o.Value))
		case on(o):
			args = append(args, "--"+o.Name)
		}
	}
	return args
}

// find returns an option by name.
func find(options []volume.Option, name string) (volume.Option, bool) {
	for _, o := range options {
		if o.Name == name {
			return o, true
		}
	}
	return volume.Option{}, false
}

// environment returns the whole environment of a client. It has no path to programs or configuration, and no credentials: the
// helper adds them.
func environment(in Invocation, more ...string) []string {
	return append([]string{
		"PATH=/nonexistent",
		"HOME=" + in.StateDir,
		"TMPDIR=" + in.StateDir,
		"LANG=C.UTF-8",
		"AWS_CONFIG_FILE=/dev/null",
		"AWS_SHARED_CREDENTIALS_FILE=/dev/null",
		"AWS_EC2_METADATA_DISABLED=true",
	}, more...)
}

// Registry finds clients by the names that volumes give.
type Registry struct {
	Get     func(name string) (Client, error) // the function Get
	Default string                            // the client of volumes that name none
}

// Of returns the client of that name; "" is the default one.
func (r Registry) Of(name string) (Client, error) {
	if name == "" {
		name = r.Default
	}
	return r.Get(name)
}
