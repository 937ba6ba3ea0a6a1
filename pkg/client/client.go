// Package client declares the FUSE clients that can serve a mount.
//
// A client is one small declaration in a file of its own: how its command line is built, which options an author may
// pass, how it takes the FUSE descriptor and how it tells what it still has to write. Command lines are argument
// vectors; no shell is ever involved.
package client

import (
	"github.com/s3-csi/s3-csi-driver/pkg/policy"
	"github.com/s3-csi/s3-csi-driver/pkg/volume"
)

// FuseFD is the number of the FUSE descriptor in every client process.
const FuseFD = 3

// Invocation is what a command line is built from: a mount spec with everything resolved.
type Invocation struct {
	Binary    string // absolute path of the client's program
	Bucket    string
	Prefix    string // "" or a prefix that ends in "/"
	Region    string
	Endpoint  string // URL; "" is the AWS endpoint of the region
	PathStyle bool
	CAFile    string // PEM bundle that the client's uid can read; "" is the system's
	ReadOnly  bool
	UID, GID  uint32 // owner that files are shown with
	DirMode   uint32 // permission bits
	FileMode  uint32
	Options   []volume.Option // in the author's order, already checked by Check
	// ExpectedBucketOwner is the AWS account that must own the bucket; "" is not checked. Only clients that can send it
	// with every request use it.
	ExpectedBucketOwner string
	// UserAgent is a product token such as "s3-csi-driver/1.2.3" that goes before the client's own; "" adds nothing.
	UserAgent string
	StateDir  string // a directory that the client's uid can write; gone when the mount ends
	CacheDir  string // likewise, for what must not be in memory
	// ConditionalWrites tells that the service honours If-Match and If-None-Match, as far as the operator knows.
	ConditionalWrites bool
	// MemoryLimit is what the kernel lets the client and its helper have, in bytes, as CheckLimits has passed it; 0 is no
	// limit.
	MemoryLimit uint64
	// Cache asks for a cache of what is read, in CacheDir; CacheSize bounds it, in bytes, and 0 is volume.DefaultCacheSize.
	Cache     bool
	CacheSize uint64
}

// cacheSize is the bound of the cache in bytes.
func (in Invocation) cacheSize() uint64 {
	if in.CacheSize == 0 {
		return volume.DefaultCacheSize
	}
	return in.CacheSize
}

// Command is a process to start: nothing in it is secret.
type Command struct {
	Argv []string // Argv[0] is the absolute path of the program
	Env  []string // the whole environment, "K=V"; credentials are added by the helper
}

// Client is the declaration of one FUSE client.
type Client struct {
	// Name is what volumes call it, for example "mountpoint-s3".
	Name string
	// Binary is the file name of its program in the directory of client programs.
	Binary string
	// Options are the mount options that an author may pass, by name without dashes.
	Options map[string]OptionType
	// Refused are options that an author might well try and may not pass, with the reason and what to use instead. Every
	// other unknown name is refused too.
	Refused map[string]string
	// MinOwner is the smallest uid and gid that the client can show files with.
	MinOwner uint32
	// MinMemory and MinTasks are the smallest limits that the client works within, its helper's needs included: bytes, and
	// processes and threads.
	MinMemory, MinTasks uint64
	// CallerPIDs tells that the client must see the pids of the processes that call it, so the driver has to mount in the
	// host's PID namespace: Mountpoint takes a flush by another process for the end of a file's upload.
	CallerPIDs bool
	// Command builds the process from an invocation. It must not fail: everything was checked before.
	Command func(Invocation) Command
	// Queue reads what the client still has to upload from a line of its output; ok is false for any other line.
	// nil: the client does not say.
	Queue func(line string) (q Queue, ok bool)
	// Conflicts reads from a line of its output how many files the client has put aside since it was started, because another
	// writer had changed their objects. nil: the client has no such files.
	Conflicts func(line string) (files int, ok bool)

	// Aside is a directory in CacheDir where the client puts what it cannot store and a human may want; "": there is none.
	Aside string

	// rules checks options against each other, after each was checked alone: given holds the values as they were
	// written. It names the option to blame; problem "" is no objection.
	rules func(given map[string]string) (name, problem string)
	// memory checks a memory limit of at least MinMemory against the values of options; "" is no objection.
	memory func(limit uint64, given map[string]string) (problem string)
	// least is the least memory limit that the values of options fit; nil: MinMemory.
	least func(given map[string]string) uint64
	// access is what the client does to objects with these options, on a volume that can be written.
	access func(options []volume.Option) policy.Needs
	// caching are the options that say in the client's own words what the volume's cache and cacheSize say.
	caching []string
	// logging are the options that make the client say so much that it is of use to nobody but whoever reads the node's log.
	logging []string
}

// Needs is what the client does to a volume's objects beside reading and storing them, with options that have passed Check: no
// session of a mount is given more.
func (c Client) Needs(options []volume.Option, readOnly bool) policy.Needs {
	if readOnly {
		return policy.Needs{}
	}
	return c.access(options)
}

// Queue is what a client has accepted and not yet stored.
type Queue struct {
	Uploads int   `json:"uploads"` // files
	Bytes   int64 `json:"bytes"`
}
