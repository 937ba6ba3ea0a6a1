package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"
)

// config is the command line.
type config struct {
	// What to serve, and how to reach it. These are the supervisor's to give.
	bucket    string
	prefix    string // "" or ends in "/"
	endpoint  string // "" is the AWS endpoint of the region
	region    string
	pathStyle bool
	caFile    string
	readOnly  bool
	uid, gid  uint32
	dirMode   uint32 // permission bits
	fileMode  uint32
	cacheDir  string
	fuseFD    int
	debug     bool
	// conditionalWrites: the service honours If-Match and If-None-Match.
	conditionalWrites bool

	// Tuning: these may come from the author of a volume.
	cacheSize        int64 // bytes of clean data kept in the cache
	readCache        bool
	dirCacheTime     time.Duration
	writeBack        time.Duration
	readAhead        int64 // bytes per open file
	transfers        uint32
	partSize         int64
	serverMtime      bool
	directoryMarkers bool
	storageClass     string
	sse              string
	sseKMSKeyID      string
}

// Limits of the tuning options. S3 wants parts between 5 MiB and 5 GiB; the rest keeps one mount's memory and the time
// that data exists in the cache only within reason.
const (
	minPartSize, maxPartSize   = 5 << 20, 5 << 30
	minWriteBack, maxWriteBack = 100 * time.Millisecond, time.Hour
	maxDirCacheTime            = 24 * time.Hour
	maxTransfers               = 64
	maxReadAhead               = 1 << 30
	minCacheSize               = 1 << 20
)

var (
	errVersion   = errors.New("version asked for")
	storageClass = regexp.MustCompile(`^[A-Z][A-Z0-9_]{0,63}$`)
	kmsKeyID     = regexp.MustCompile(`^[A-Za-z0-9:/_-]+$`)
)

func flags(c *config, showVersion *bool) *flag.FlagSet {
	fs := flag.NewFlagSet("s3-csi-rclone", flag.ContinueOnError)
	fs.SetOutput(io.Discard) // the caller reports errors, once
	fs.Usage = func() {}
	add := func(name, usage string, v flag.Value) { fs.Var(&once{Value: v}, name, usage) }

	add("bucket", "bucket (required)", (*stringValue)(&c.bucket))
	add("prefix", "prefix to serve, ends in /; empty is the whole bucket", (*stringValue)(&c.prefix))
	add("endpoint", "URL of the S3 service; empty is AWS", (*stringValue)(&c.endpoint))
	add("region", "region of the bucket", (*stringValue)(&c.region))
	add("path-style", "address buckets by path, not by host name", (*boolValue)(&c.pathStyle))
	add("ca-file", "PEM file with the certificate authorities to trust instead of the system's", (*stringValue)(&c.caFile))
	add("read-only", "refuse every write", (*boolValue)(&c.readOnly))
	add("uid", "owner that files are shown with", (*idValue)(&c.uid))
	add("gid", "group that files are shown with", (*idValue)(&c.gid))
	add("dir-mode", "permission bits of directories, octal", (*modeValue)(&c.dirMode))
	add("file-mode", "permission bits of files, octal", (*modeValue)(&c.fileMode))
	add("cache-dir", "directory for data on its way to S3, used by this process alone (required)", (*stringValue)(&c.cacheDir))
	add("fuse-fd", "number of the open and mounted /dev/fuse descriptor", (*intValue)(&c.fuseFD))
	add("debug", "log everything", (*boolValue)(&c.debug))
	add("conditional-writes", "the service honours If-Match and If-None-Match: a late upload uses them", (*boolValue)(&c.conditionalWrites))

	add("cache-size", "how much uploaded or read data to keep in the cache; unsent data has no limit but the disk", (*sizeValue)(&c.cacheSize))
	add("read-cache", "keep what is read in the cache too", (*boolValue)(&c.readCache))
	add("dir-cache-time", "how long a listing is trusted", (*durationValue)(&c.dirCacheTime))
	add("write-back", "how long after closing a file its upload starts", (*durationValue)(&c.writeBack))
	add("read-ahead", "how far to read ahead of a sequential reader, in memory, per open file", (*sizeValue)(&c.readAhead))
	add("transfers", "how many files to upload at the same time", (*idValue)(&c.transfers))
	add("part-size", "size of the parts of large uploads, in memory, four at a time per transfer", (*sizeValue)(&c.partSize))
	add("server-mtime", "show the time of the upload as modification time: one request less per file", (*boolValue)(&c.serverMtime))
	add("directory-markers", "store directories as empty objects, so that empty ones last", (*boolValue)(&c.directoryMarkers))
	add("storage-class", "storage class of new objects", (*stringValue)(&c.storageClass))
	add("sse", "server-side encryption of new objects: AES256 or aws:kms", (*stringValue)(&c.sse))
	add("sse-kms-key-id", "key for aws:kms", (*stringValue)(&c.sseKMSKeyID))
	fs.BoolVar(showVersion, "version", false, "print the version")
	return fs
}

func defaults() config {
	return config{
		dirMode: 0o755, fileMode: 0o644, fuseFD: 3,
		cacheSize: 1 << 30, dirCacheTime: 10 * time.Second, writeBack: time.Second,
		readAhead: 16 << 20, transfers: 4, partSize: minPartSize,
	}
}

// parseArgs reads a command line. Every error names the flag.
func parseArgs(args []string) (config, error) {
	c := defaults()
	var showVersion bool
	fs := flags(&c, &showVersion)
	if err := fs.Parse(args); err != nil {
		return c, err
	}
	if showVersion {
		return c, errVersion
	}
	if fs.NArg() > 0 {
		return c, fmt.Errorf("unexpected argument %q", fs.Arg(0))
	}
	return c, errors.Join(c.checkPlace(), c.checkTuning())
}

func (c *config) checkPlace() error {
	switch {
	case c.bucket == "":
		return errors.New("--bucket is required")
	case strings.ContainsAny(c.bucket, "/\x00") || hasControl(c.bucket):
		return fmt.Errorf("--bucket %q: not a bucket's name", c.bucket)
	case c.prefix != "" && (!strings.HasSuffix(c.prefix, "/") || strings.HasPrefix(c.prefix, "/")):
		return fmt.Errorf("--prefix %q: must end in / and not begin with it", c.prefix)
	case hasControl(c.prefix) || badSegments(c.prefix):
		return fmt.Errorf("--prefix %q: has an empty, . or .. part or a control character", c.prefix)
	case c.fuseFD < 3:
		return fmt.Errorf("--fuse-fd %d: must be a descriptor of its own, 3 or more", c.fuseFD)
	case c.cacheDir == "" && c.needsCache():
		return errors.New("--cache-dir is required")
	case c.cacheDir != "" && !filepath.IsAbs(c.cacheDir):
		return fmt.Errorf("--cache-dir %q: must be absolute", c.cacheDir)
	}
	if c.endpoint != "" {
		u, err := url.Parse(c.endpoint)
		if err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Host == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "" {
			return fmt.Errorf("--endpoint %q: must be http://host or https://host", c.endpoint)
		}
	}
	if c.caFile != "" {
		// rclone would end the process on it, with words of its own.
		if _, err := os.Stat(c.caFile); err != nil {
			return fmt.Errorf("--ca-file: %w", err)
		}
	}
	return nil
}

func (c *config) checkTuning() error {
	switch {
	case c.cacheSize < minCacheSize:
		return fmt.Errorf("--cache-size: must be at least 1Mi")
	case c.dirCacheTime < 0 || c.dirCacheTime > maxDirCacheTime:
		return fmt.Errorf("--dir-cache-time: must be between 0s and %v", maxDirCacheTime)
	case c.writeBack < minWriteBack || c.writeBack > maxWriteBack:
		// With none at all rclone uploads while it closes, and drops the data from its queue when that fails.
		return fmt.Errorf("--write-back: must be between %v and %v", minWriteBack, maxWriteBack)
	case c.readAhead < 0 || c.readAhead > maxReadAhead:
		return fmt.Errorf("--read-ahead: must be between 0 and 1Gi")
	case c.transfers < 1 || c.transfers > maxTransfers:
		return fmt.Errorf("--transfers: must be between 1 and %d", maxTransfers)
	case c.partSize < minPartSize || c.partSize > maxPartSize:
		return fmt.Errorf("--part-size: must be between 5Mi and 5Gi")
	case c.storageClass != "" && !storageClass.MatchString(c.storageClass):
		return fmt.Errorf("--storage-class %q: not a storage class", c.storageClass)
	case c.sse != "" && c.sse != "AES256" && c.sse != "aws:kms":
		return fmt.Errorf("--sse %q: must be AES256 or aws:kms", c.sse)
	case c.sseKMSKeyID != "" && c.sse != "aws:kms":
		return errors.New("--sse-kms-key-id: only with --sse=aws:kms")
	case c.sseKMSKeyID != "" && !kmsKeyID.MatchString(c.sseKMSKeyID):
		return fmt.Errorf("--sse-kms-key-id %q: not a key id", c.sseKMSKeyID)
	}
	return nil
}

// needsCache tells whether files go through the cache directory.
func (c *config) needsCache() bool { return !c.readOnly || c.readCache }

func hasControl(s string) bool {
	return strings.ContainsFunc(s, func(r rune) bool { return r < 0x20 || r == 0x7f })
}

// badSegments finds what rclone would clean away, and so serve another prefix than the one asked for.
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
	fmt.Fprintln(w, "Usage: s3-csi-rclone --bucket=NAME --cache-dir=DIR [flags]")
	var showVersion bool
	c := defaults()
	fs := flags(&c, &showVersion)
	fs.VisitAll(func(f *flag.Flag) { fmt.Fprintf(w, "  --%-18s %s (default %q)\n", f.Name, f.Usage, f.DefValue) })
}
