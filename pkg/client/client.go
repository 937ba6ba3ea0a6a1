// Package client declares the FUSE clients that can serve a mount.
//
// A client is one declaration in a file of its own: how its command line is built, which options are allowed, how it gets the
// FUSE descriptor and how it reports its upload queue. Command lines are argument vectors; there is no shell.
package client

import (
	"cmp"
	"fmt"
	"strings"
	"syscall"

	"github.com/s3-csi/s3-csi-driver/pkg/fault"
	"github.com/s3-csi/s3-csi-driver/pkg/policy"
	"github.com/s3-csi/s3-csi-driver/pkg/sandbox"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// FlushSignal asks a client with Flushed for a flush. Clients that do not know it in that meaning ignore it.
const FlushSignal = syscall.SIGTERM

// FuseFD is the number of the FUSE descriptor in every client process.
const FuseFD = 3

// Invocation is the input of a command line: a mount spec with everything resolved.
type Invocation struct {
	Binary    string // absolute path of the client's program
	Bucket    string
	Prefix    string // "" or a prefix that ends in "/"
	Region    string
	Endpoint  string // URL; "" is the AWS endpoint of the region
	PathStyle bool
	CAFile    string // PEM bundle that the client's uid can read; "" is the system's
	Proxy     string // URL of an HTTP proxy for the endpoint, without credentials; "" is none
	ReadOnly  bool
	UID, GID  uint32 // owner that files are shown with
	DirMode   uint32 // permission bits
	FileMode  uint32
	Options   []volume.Option // in the author's order, already checked by Check
	// ExpectedBucketOwner is the AWS account that must own the bucket; "" is not checked. Not all clients can send it.
	ExpectedBucketOwner string
	// UserAgent is a product token such as "s3-csi-driver/1.2.3" in front of the client's own; "" adds nothing.
	UserAgent string
	StateDir  string // writable for the client's uid; removed when the mount ends
	CacheDir  string // likewise, on disk
	// ConditionalWrites means that, according to the config, the service supports If-Match and If-None-Match.
	ConditionalWrites bool
	// MemoryLimit is the memory limit of the client and its helper in bytes, which has passed CheckLimits; 0 is none.
	MemoryLimit uint64
	// Cache enables a read cache in CacheDir; CacheSize bounds it in bytes, 0 is volume.DefaultCacheSize.
	Cache     bool
	CacheSize uint64
	// Consistency is one of volume.Consistency…, or "": the default of the client.
	Consistency string
}

// cacheSize returns the bound of the cache in bytes.
func (in Invocation) cacheSize() uint64 {
	return cmp.Or(in.CacheSize, volume.DefaultCacheSize)
}

// Command is a process to start. It contains no secrets.
type Command struct {
	Argv []string `json:"argv"` // Argv[0] is the absolute path of the program
	Env  []string `json:"env"`  // the whole environment, "K=V"; the helper adds credentials
	// Ports are the TCP ports of the service, and Files the files outside of its directories that the client must read. A helper
	// with a sandbox lets it reach no others. Without Ports, connections are not restricted.
	Ports []uint16 `json:"ports,omitempty"`
	Files []string `json:"files,omitempty"`
	// Fusermount is the path of s3-csi-fusermount for a client that gets the FUSE descriptor by executing fusermount3 or fusermount;
	// "": the client takes the descriptor FuseFD itself.
	Fusermount string `json:"fusermount,omitempty"`
	// StaticKeys means that the client gets its keys in its environment, instead of the address of the credential endpoint. The helper
	// adds them, and refuses keys that expire.
	StaticKeys bool `json:"staticKeys,omitempty"`
}

// Mountpoint is the directory in StateDir that such a client gets as its mount point. Nothing is mounted there.
const Mountpoint = "mountpoint"

// command returns a command with what it needs to reach the service.
func (in Invocation) command(argv, env []string) Command {
	c := Command{Argv: argv, Env: env, Ports: []uint16{sandbox.Port(in.Endpoint)}}
	if in.Proxy != "" {
		c.Env, c.Ports = append(c.Env, in.proxyEnv()...), []uint16{sandbox.Port(in.Proxy)}
	}
	if in.CAFile != "" {
		c.Files = []string{in.CAFile}
	}
	return c
}

// ProxyVariables are the variables with the URL of a proxy, for endpoints with https and with http. They are in lower case because
// libcurl does not read HTTP_PROXY; all others read both.
func ProxyVariables() (https, http string) { return "https_proxy", "http_proxy" }

// proxyEnv returns the environment that makes a client use the proxy for the endpoint, and not for the credential endpoint.
func (in Invocation) proxyEnv() []string {
	name, plain := ProxyVariables()
	if strings.HasPrefix(in.Endpoint, "http://") {
		name = plain
	}
	return []string{name + "=" + in.Proxy, "no_proxy=127.0.0.1,::1,localhost"}
}

// Client is the declaration of one FUSE client.
type Client struct {
	// Name is the name that volumes use, for example "mountpoint-s3".
	Name string
	// Programs are the file names of its program. The first one that is installed is used; all take the same command line.
	Programs []string
	// Declared means that it is from the operator's config file.
	Declared bool
	// SHA256 is the digest that the program must have, in hexadecimal; "": any.
	SHA256 string
	// Options are the allowed mount options, by name without dashes.
	Options map[string]OptionType
	// Refused has reasons and alternatives for some options that are not allowed. Any other unknown name is refused as well.
	Refused map[string]string
	// MinOwner is the lowest uid and gid that the client supports as owner of files.
	MinOwner uint32
	// MinMemory (bytes) and MinTasks (processes and threads) are the lowest limits for the client and its helper.
	MinMemory, MinTasks uint64
	// CallerPIDs means that the client must see the pids of its callers, so the driver must mount in the host's PID namespace.
	// Mountpoint completes an upload when the process that wrote the file flushes it.
	CallerPIDs bool
	// WriteBack means that a closed file may be in CacheDir alone until it is uploaded.
	WriteBack bool
	// ExitsEarly means that the client may end before everything is stored.
	ExitsEarly bool
	// Fusermount means that the client executes fusermount3 or fusermount, see FusermountProgram.
	Fusermount bool
	// StaticKeys means that the client reads its keys when it starts, and cannot get others while it runs.
	StaticKeys bool
	// NoInline means that inline volumes must not use the client.
	NoInline bool
	// Command builds the process from an invocation that was checked before.
	Command func(Invocation) Command
	// Queue parses the upload queue from a line of the client's output; ok is false for other lines. nil: the client does not
	// report it.
	Queue func(line string) (q Queue, ok bool)
	// Flushed parses from a line of output how many changed files the client still has after a flush, which it begins when it
	// gets FlushSignal: it uploads its queue at once and reports when that is empty. nil: every file is stored when the kernel has
	// no request left for the client, and Queue reports no upload.
	Flushed func(line string) (unsent int, ok bool)
	// Requests parses the client's request counts from a line of its output. nil: the client does not report them.
	Requests func(line string) (r Requests, ok bool)
	// Conflicts parses from a line of output how many files the client has quarantined since its start, because another writer
	// had changed their objects. nil: the client does not do that.
	Conflicts func(line string) (files int, ok bool)
	// Unstored parses from a line of output the files that the client could not store after they were closed. nil: the client does not
	// report them.
	Unstored func(line string) (u Unstored, ok bool)

	// Quarantine is the quarantine: a directory in CacheDir for files that the client could not upload; "": there is none.
	Quarantine string

	// rules checks options against each other, after each was checked alone. It returns the wrong option and the problem, or "".
	rules func(given map[string]string) (name, problem string)
	// memory checks a memory limit of at least MinMemory against the values of options and returns the problem, or "".
	memory func(limit uint64, given map[string]string) (problem string)
	// least returns the lowest memory limit for the values of options; nil: MinMemory.
	least func(given map[string]string) uint64
	// access returns the permissions that the client needs with these options on a writable volume.
	access func(options []volume.Option) policy.Needs
	// contradiction returns the option that contradicts a volume's consistency, or "".
	contradiction func(consistency string, given map[string]string) (name string)
	// caching are the client's own options for the volume's cache and cacheSize.
	caching []string
	// ignores are the attributes for which a declared client has no argument. Volumes that set one are refused.
	ignores []string
	// logging are the options for verbose logs, which only readers of the node's log can use.
	logging []string
}

// Needs returns the permissions that the client needs in addition to reading and writing objects, with options that have passed
// Check. Sessions of mounts get no more.
func (c Client) Needs(options []volume.Option, readOnly bool) policy.Needs {
	if readOnly {
		return policy.Needs{}
	}
	return c.access(options)
}

// Default is the client of volumes that name none.
const Default = "mountpoint-s3"

// All are the clients that this driver knows, the default first.
func All() []Client {
	return []Client{
		mountpointS3(),
		rclone(),
	}
}

// CheckName checks that a text can be the name of a client, declared or not. The error is Invalid.
func CheckName(name string) error {
	if !volume.IsName(name, 32) {
		return fault.Errorf(fault.Invalid, "%s is not a client's name: at most 32 of a-z, 0-9 and -, not - at the start or end", quote(name))
	}
	return nil
}

// Set are the clients of a configuration: those that the driver knows, and declared ones. The zero Set has those that the driver knows.
type Set struct{ clients []Client }

// NewSet returns the driver's own clients together with declared ones, whose names differ.
func NewSet(declared []Client) Set { return Set{append(All(), declared...)} }

// All returns all clients, the driver's own first. They belong to the Set.
func (s Set) All() []Client {
	if s.clients == nil {
		return All()
	}
	return s.clients
}

// Get finds a client by name; "" is the default. An unknown name is fault.Invalid.
func (s Set) Get(name string) (Client, error) {
	name = cmp.Or(name, Default)
	var known []string
	for _, c := range s.All() {
		if c.Name == name {
			return c, nil
		}
		known = append(known, c.Name)
	}
	return Client{}, fault.Errorf(fault.Invalid, "there is no client %s; this driver knows %s", quote(name), strings.Join(known, ", "))
}

// Get finds one of the driver's own clients by name; "" is the default. An unknown name is fault.Invalid.
func Get(name string) (Client, error) { return Set{}.Get(name) }

// argument is one "--name=value": in this form no value can be taken for a flag.
func argument(name, value string) string { return "--" + name + "=" + value }

// unlessGiven is the argument for an option that the author has not set.
func (in Invocation) unlessGiven(name, value string) []string {
	if _, given := volume.FindOption(in.Options, name); given {
		return nil
	}
	return []string{argument(name, value)}
}

func mode(bits uint32) string { return fmt.Sprintf("%04o", bits&0o777) }

// authored are the arguments of an author's options: "--name" for a flag that is on, "--name=value" for the rest.
func authored(types map[string]OptionType, options []volume.Option) []string {
	var args []string
	for _, o := range options {
		switch {
		case types[o.Name].Kind != Flag:
			args = append(args, argument(o.Name, o.Value))
		case o.On():
			args = append(args, "--"+o.Name)
		}
	}
	return args
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

// Source has the clients that can be used now.
type Source interface{ Clients() Set }

// Clients implements Source.
func (s Set) Clients() Set { return s }

// Registry finds clients by the names in volume attributes.
type Registry struct {
	Source  Source
	Default string // the client of volumes that name none
}

// Of returns the client of that name; "" is the default one.
func (r Registry) Of(name string) (Client, error) {
	return r.Source.Clients().Get(cmp.Or(name, r.Default))
}
