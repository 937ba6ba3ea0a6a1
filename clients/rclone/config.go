package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/rclone/rclone/fs"
	"github.com/rclone/rclone/vfs/vfscommon"
)

// config is the command line.
type config struct {
	// What to serve, and how to reach it. The supervisor sets these.
	bucket    string
	prefix    string // "" or ends in "/"
	endpoint  string // "" is the AWS endpoint of the region
	region    string
	pathStyle bool
	caFile    string
	readOnly  bool
	uid, gid  id
	dirMode   vfscommon.FileMode // permission bits
	fileMode  vfscommon.FileMode
	cacheDir  string
	fuseFD    int
	debug     bool
	// conditionalWrites: the service honours If-Match and If-None-Match.
	conditionalWrites bool

	// Tuning: these may come from the author of a volume.
	cacheSize        fs.SizeSuffix // clean data kept in the cache
	readCache        bool
	dirCacheTime     time.Duration
	writeBack        time.Duration
	readAhead        fs.SizeSuffix // per open file
	transfers        int
	partSize         fs.SizeSuffix
	serverMtime      bool
	directoryMarkers bool
	storageClass     string
	sse              string
	sseKMSKeyID      string

	// Only tests set these, to be quick.
	cachePoll    time.Duration
	uploadCutoff fs.SizeSuffix
	attempts     int // of one request; uploads are tried again beyond that, forever
}

// Limits of the tuning options. S3 accepts parts from 5 MiB to 5 GiB. The other limits bound a mount's memory, and the time
// that data exists only in the cache.
const (
	minPartSize, maxPartSize   = 5 * fs.Mebi, 5 * fs.Gibi
	minWriteBack, maxWriteBack = 100 * time.Millisecond, time.Hour
	maxDirCacheTime            = 24 * time.Hour
	maxTransfers               = 64
	maxReadAhead               = fs.Gibi
	minCacheSize, maxCacheSize = fs.Mebi, 16 * fs.Tebi
)

var (
	errVersion   = errors.New("version requested")
	storageClass = regexp.MustCompile(`^[A-Z][A-Z0-9_]{0,63}$`)
	kmsKeyID     = regexp.MustCompile(`^[A-Za-z0-9:/_-]+$`)
)

func flags(c *config, showVersion *bool) *flag.FlagSet {
	set := flag.NewFlagSet("s3-csi-rclone", flag.ContinueOnError)
	set.SetOutput(io.Discard) // the caller reports errors, once
	set.Usage = func() {}
	add := func(name, usage string, value any) {
		switch v := value.(type) {
		case *string:
			set.StringVar(v, name, *v, usage)
		case *bool:
			set.BoolVar(v, name, *v, usage)
		case *int:
			set.IntVar(v, name, *v, usage)
		case *time.Duration:
			set.DurationVar(v, name, *v, usage)
		case *fs.SizeSuffix:
			set.Var((*size)(v), name, usage)
		case flag.Value:
			set.Var(v, name, usage)
		}
		f := set.Lookup(name)
		f.Value = &once{Value: f.Value}
	}

	add("bucket", "bucket (required)", &c.bucket)
	add("prefix", "prefix to serve, ends in /; empty serves the whole bucket", &c.prefix)
	add("endpoint", "URL of the S3 service; empty is AWS", &c.endpoint)
	add("region", "region of the bucket", &c.region)
	add("path-style", "address buckets by path instead of by host name", &c.pathStyle)
	add("ca-file", "PEM file of the certificate authorities to trust instead of the system's", &c.caFile)
	add("read-only", "reject all writes", &c.readOnly)
	add("uid", "user that owns all files and directories", &c.uid)
	add("gid", "group that owns all files and directories", &c.gid)
	add("dir-mode", "permission bits of directories, octal", &c.dirMode)
	add("file-mode", "permission bits of files, octal", &c.fileMode)
	add("cache-dir", "directory for data that is not uploaded yet; only one process can use it (required)", &c.cacheDir)
	add("fuse-fd", "number of the open and mounted /dev/fuse descriptor", &c.fuseFD)
	add("debug", "log at debug level", &c.debug)
	add("conditional-writes", "the service honours If-Match and If-None-Match; late uploads use them", &c.conditionalWrites)

	add("cache-size", "amount of uploaded or read data to keep in the cache; data that is not uploaded yet is always kept", &c.cacheSize)
	add("read-cache", "also keep data in the cache that was only read", &c.readCache)
	add("dir-cache-time", "how long directory listings are cached", &c.dirCacheTime)
	add("write-back", "delay between closing a file and uploading it", &c.writeBack)
	add("read-ahead", "read-ahead for sequential reads, in memory for each open file", &c.readAhead)
	add("transfers", "number of files to upload at the same time", &c.transfers)
	add("part-size", "size of the parts of a large file; four parts of each transfer are in memory", &c.partSize)
	add("server-mtime", "show the upload time as the modification time, which saves a request per file", &c.serverMtime)
	add("directory-markers", "store directories as empty objects, so that empty directories are kept", &c.directoryMarkers)
	add("storage-class", "storage class of new objects", &c.storageClass)
	add("sse", "server-side encryption of new objects: AES256 or aws:kms", &c.sse)
	add("sse-kms-key-id", "key for aws:kms", &c.sseKMSKeyID)

	set.DurationVar(&c.cachePoll, "cache-poll-interval", c.cachePoll, "how often the cache is reduced to its size, and listings of unused directories are forgotten (for tests)")
	set.IntVar(&c.attempts, "low-level-retries", c.attempts, "how often a request is tried (for tests)")
	set.Var((*size)(&c.uploadCutoff), "upload-cutoff", "size from which files are uploaded in parts (for tests)")
	set.BoolVar(showVersion, "version", false, "print the version")
	return set
}

func defaults() config {
	return config{
		dirMode: 0o755, fileMode: 0o644, fuseFD: 3,
		cacheSize: fs.Gibi, dirCacheTime: 10 * time.Second, writeBack: time.Second,
		readAhead: 16 * fs.Mebi, transfers: 4, partSize: minPartSize,
		cachePoll: 30 * time.Second, uploadCutoff: 200 * fs.Mebi, attempts: 5,
	}
}

// parseArgs reads a command line. Every error names the flag.
func parseArgs(args []string) (config, error) {
	c := defaults()
	var showVersion bool
	set := flags(&c, &showVersion)
	if err := set.Parse(args); err != nil {
		return c, err
	}
	if showVersion {
		return c, errVersion
	}
	if set.NArg() > 0 {
		return c, fmt.Errorf("unexpected argument %q", set.Arg(0))
	}
	return c, errors.Join(c.checkLocation(), c.checkTuning())
}

func (c *config) checkLocation() error {
	switch {
	case c.bucket == "":
		return errors.New("--bucket is required")
	case strings.ContainsAny(c.bucket, "/\x00") || hasControl(c.bucket):
		return fmt.Errorf("--bucket %q: not a valid bucket name", c.bucket)
	case c.prefix != "" && (!strings.HasSuffix(c.prefix, "/") || strings.HasPrefix(c.prefix, "/")):
		return fmt.Errorf("--prefix %q: must end in / and must not start with /", c.prefix)
	case hasControl(c.prefix) || badSegments(c.prefix):
		return fmt.Errorf("--prefix %q: must not contain empty, . or .. segments or control characters", c.prefix)
	case c.fuseFD < 3:
		return fmt.Errorf("--fuse-fd %d: must be 3 or more", c.fuseFD)
	case c.cacheDir == "" && c.needsCache():
		return errors.New("--cache-dir is required")
	case c.cacheDir != "" && !filepath.IsAbs(c.cacheDir):
		return fmt.Errorf("--cache-dir %q: must be an absolute path", c.cacheDir)
	}
	if c.endpoint != "" {
		u, err := url.Parse(c.endpoint)
		if err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Host == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "" {
			return fmt.Errorf("--endpoint %q: must be http://host or https://host", c.endpoint)
		}
	}
	if c.caFile != "" {
		// Otherwise rclone exits with an error that does not name the flag.
		if _, err := os.Stat(c.caFile); err != nil {
			return fmt.Errorf("--ca-file: %w", err)
		}
	}
	return nil
}

func (c *config) checkTuning() error {
	switch {
	case c.dirMode > 0o777:
		return errors.New("--dir-mode: must be between 0000 and 0777")
	case c.fileMode > 0o777:
		return errors.New("--file-mode: must be between 0000 and 0777")
	case c.cacheSize < minCacheSize || c.cacheSize > maxCacheSize:
		return fmt.Errorf("--cache-size: must be between %v and %v", minCacheSize, maxCacheSize)
	case c.dirCacheTime < 0 || c.dirCacheTime > maxDirCacheTime:
		return fmt.Errorf("--dir-cache-time: must be between 0s and %v", maxDirCacheTime)
	case c.writeBack < minWriteBack || c.writeBack > maxWriteBack:
		// With 0, rclone uploads a file while closing it and gives up after an error.
		return fmt.Errorf("--write-back: must be between %v and %v", minWriteBack, maxWriteBack)
	case c.readAhead < 0 || c.readAhead > maxReadAhead:
		return fmt.Errorf("--read-ahead: must be between 0 and %v", maxReadAhead)
	case c.transfers < 1 || c.transfers > maxTransfers:
		return fmt.Errorf("--transfers: must be between 1 and %d", maxTransfers)
	case c.partSize < minPartSize || c.partSize > maxPartSize:
		return fmt.Errorf("--part-size: must be between %v and %v", minPartSize, maxPartSize)
	case c.storageClass != "" && !storageClass.MatchString(c.storageClass):
		return fmt.Errorf("--storage-class %q: not a valid storage class", c.storageClass)
	case c.sse != "" && c.sse != "AES256" && c.sse != "aws:kms":
		return fmt.Errorf("--sse %q: must be AES256 or aws:kms", c.sse)
	case c.sseKMSKeyID != "" && c.sse != "aws:kms":
		return errors.New("--sse-kms-key-id: requires --sse=aws:kms")
	case c.sseKMSKeyID != "" && !kmsKeyID.MatchString(c.sseKMSKeyID):
		return fmt.Errorf("--sse-kms-key-id %q: not a valid key ID", c.sseKMSKeyID)
	}
	return nil
}

// needsCache reports whether files go through the cache directory.
func (c *config) needsCache() bool { return !c.readOnly || c.readCache }

// listsAttributes reports whether a listing has all attributes of files. The kernel then gets them with the names (READDIRPLUS), and
// a stat that follows takes no request. Otherwise each file would take a HEAD request, or a listing of its own, even if only names
// are read.
func (c *config) listsAttributes() bool { return c.serverMtime && c.dirCacheTime >= attrTime }

func hasControl(s string) bool {
	return strings.ContainsFunc(s, func(r rune) bool { return r < 0x20 || r == 0x7f })
}

// badSegments reports whether rclone would clean the prefix, and so serve a different one.
func badSegments(prefix string) bool {
	if prefix == "" {
		return false
	}
	for s := range strings.SplitSeq(strings.TrimSuffix(prefix, "/"), "/") {
		if s == "" || s == "." || s == ".." {
			return true
		}
	}
	return false
}

func printUsage(w io.Writer) {
	fmt.Fprint(w, "Usage: s3-csi-rclone --bucket=NAME --cache-dir=DIR [flags]\n\n"+
		"Sizes are in bytes, or have a unit of 1024: 512Ki, 16Mi, 1Gi, 2Ti. Durations have units: 100ms, 10s, 5m, 1h.\n\n")
	var showVersion bool
	c := defaults()
	set := flags(&c, &showVersion)
	set.VisitAll(func(f *flag.Flag) { fmt.Fprintf(w, "  --%-18s %s (default %q)\n", f.Name, f.Usage, f.DefValue) })
}

// once refuses a flag that is given twice. Otherwise the last one would win silently if a command line is assembled from
// several sources.
type once struct {
	flag.Value
	set bool
}

func (o *once) String() string {
	if o.Value == nil {
		return "" // the flag package calls String on a zero value
	}
	return o.Value.String()
}

func (o *once) Set(s string) error {
	if o.set {
		return errors.New("set more than once")
	}
	o.set = true
	return o.Value.Set(s)
}

// IsBoolFlag reports whether the flag can be given without a value.
func (o *once) IsBoolFlag() bool {
	b, ok := o.Value.(interface{ IsBoolFlag() bool })
	return ok && b.IsBoolFlag()
}

// size is a number of bytes in rclone's notation, except that a number without a unit is in bytes, not KiB.
type size fs.SizeSuffix

// String returns the size with the largest unit that fits.
func (v *size) String() string { return fs.SizeSuffix(*v).String() }

func (v *size) Set(s string) error {
	if _, err := strconv.ParseUint(s, 10, 63); err == nil {
		s += "B"
	}
	return (*fs.SizeSuffix)(v).Set(s)
}

// id is a user or group ID. The largest one is not valid: for the kernel it is -1, no ID.
type id uint32

func (v *id) String() string { return strconv.FormatUint(uint64(*v), 10) }

func (v *id) Set(s string) error {
	n, err := strconv.ParseUint(s, 10, 32)
	if err != nil || n == math.MaxUint32 {
		return fmt.Errorf("must be a number from 0 to %d", uint32(math.MaxUint32-1))
	}
	*v = id(n)
	return nil
}
