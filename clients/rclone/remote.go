package main

import (
	"context"
	"fmt"
	"strconv"
	"time"

	_ "github.com/rclone/rclone/backend/local" // the cache is a local file system to rclone
	"github.com/rclone/rclone/backend/s3"
	"github.com/rclone/rclone/fs"
	rcloneconfig "github.com/rclone/rclone/fs/config"
	"github.com/rclone/rclone/fs/config/configmap"
	"github.com/rclone/rclone/lib/atexit"
	"github.com/rclone/rclone/vfs"
	"github.com/rclone/rclone/vfs/vfscommon"
)

const (
	// A request without progress for this long is tried again. rclone's own five minutes are longer than what waits for
	// a mount has patience for.
	connectTimeout = 15 * time.Second
	idleTimeout    = 60 * time.Second
	// Attempts of one request. Uploads are tried again beyond that, for ever.
	attempts = 5
	// attrTime is how long the kernel may keep what it was told of a file, as in rclone's own mount command.
	attrTime = time.Second
	// cachePoll is how often the cache is brought down to its size.
	cachePoll = 30 * time.Second
	// cacheAge is how long clean data that nobody reads stays in the cache.
	cacheAge = time.Hour
)

// configureRclone sets rclone's process-wide configuration. Nothing is read from or written to a configuration file.
func configureRclone(c config) error {
	if err := rcloneconfig.SetConfigPath(""); err != nil { // memory only
		return fmt.Errorf("rclone: %w", err)
	}
	if c.cacheDir != "" {
		if err := rcloneconfig.SetCacheDir(c.cacheDir); err != nil {
			return fmt.Errorf("--cache-dir: %w", err)
		}
	}
	// On a signal rclone would end the process, and abort the uploads under way.
	atexit.IgnoreSignals()

	ci := fs.GetConfig(context.Background())
	ci.LogLevel = fs.LogLevelNotice
	if c.debug {
		ci.LogLevel = fs.LogLevelDebug
	}
	ci.UserAgent = "s3-csi-rclone/" + version
	ci.ConnectTimeout = fs.Duration(connectTimeout)
	ci.Timeout = fs.Duration(idleTimeout)
	ci.LowLevelRetries = attempts
	ci.Transfers = int(c.transfers)
	ci.BufferSize = fs.SizeSuffix(c.readAhead)
	ci.UseServerModTime = c.serverMtime
	ci.AskPassword = false
	// After an upload rclone would compare size and hash of the object that is there. If another writer has stored the same
	// file meanwhile, it would call that corruption, delete the other writer's object and upload its own, older version again.
	// The transfer is guarded without that: each request that carries data has Content-MD5 of what was read from the cache, so
	// the service refuses what arrives differently. (See guard.go for what else depends on it.)
	ci.IgnoreSize, ci.IgnoreChecksum = true, true
	if c.caFile != "" {
		ci.CaCert = []string{c.caFile}
	}
	if err := fs.LogReload(ci); err != nil { // or the level is the one of the start
		return fmt.Errorf("rclone's log: %w", err)
	}
	return nil
}

// newRemote makes the S3 file system. It makes no request: whether the bucket is there shows when it is read.
func newRemote(ctx context.Context, c config) (fs.Fs, error) {
	options := s3Options(c)
	info, err := fs.Find("s3")
	if err != nil {
		return nil, err
	}
	all := configmap.Simple{}
	for i := range info.Options {
		all[info.Options[i].Name] = info.Options[i].String()
	}
	for name, value := range options {
		if _, ok := all[name]; !ok {
			return nil, fmt.Errorf("rclone's S3 backend has no option %q", name)
		}
		all[name] = value
	}
	// The slash at the end says that it is a directory. Without it rclone asks S3 whether it is an object, which a
	// session for the prefix alone may not do.
	remote, err := s3.NewFs(ctx, "s3", c.bucket+"/"+c.prefix, all)
	if err != nil {
		return nil, fmt.Errorf("s3://%s/%s: %w", c.bucket, c.prefix, err)
	}
	return remote, nil
}

func s3Options(c config) map[string]string {
	o := map[string]string{
		"provider":         "AWS",
		"env_auth":         "true",
		"region":           c.region,
		"force_path_style": strconv.FormatBool(c.pathStyle),
		"no_check_bucket":  "true", // or every upload would try to create it
		// What is known of an object after its upload comes from the answer to that upload: a HEAD can find another writer's
		// object, and the file in the cache would be taken for its content.
		"no_head":           "true",
		"chunk_size":        strconv.FormatInt(c.partSize, 10) + "B",
		"directory_markers": strconv.FormatBool(c.directoryMarkers),
		"storage_class":     c.storageClass,
	}
	o["server_side_encryption"] = c.sse
	o["sse_kms_key_id"] = c.sseKMSKeyID
	if c.endpoint != "" {
		// "Other" is the careful profile. Listing is what every current service does in the second version and encoded,
		// without which a key with a control character makes a directory unreadable.
		o["provider"] = "Other"
		o["endpoint"] = c.endpoint
		o["list_version"] = "2"
		o["list_url_encode"] = "true"
	}
	return o
}

// newVFS puts rclone's VFS on the remote, and so the cache at work.
func newVFS(ctx context.Context, c config, remote fs.Fs) (*vfs.VFS, error) {
	opt := vfscommon.Opt // the defaults
	opt.ReadOnly = c.readOnly
	opt.UID, opt.GID, opt.Umask = c.uid, c.gid, 0
	opt.DirPerms, opt.FilePerms = vfscommon.FileMode(c.dirMode), vfscommon.FileMode(c.fileMode)
	opt.DirCacheTime = fs.Duration(c.dirCacheTime)
	opt.PollInterval = 0 // S3 cannot be asked for changes
	opt.WriteBack = fs.Duration(c.writeBack)
	opt.CacheMaxSize = fs.SizeSuffix(c.cacheSize)
	opt.CacheMaxAge = fs.Duration(cacheAge)
	opt.CachePollInterval = fs.Duration(cachePoll)
	// Or a file that is opened again right after it changed in S3 is taken for empty.
	opt.HandleCaching = 0
	opt.CacheMode = cacheMode(c)
	want := opt.CacheMode
	v := vfs.New(ctx, remote, &opt)
	// rclone goes on without a cache when it cannot make one, and then without random writes or retries.
	if v.Opt.CacheMode != want {
		v.Shutdown()
		return nil, fmt.Errorf("the cache in %s cannot be used, see above", c.cacheDir)
	}
	return v, nil
}

func cacheMode(c config) vfscommon.CacheMode {
	switch {
	case c.readCache:
		return vfscommon.CacheModeFull
	case c.needsCache():
		return vfscommon.CacheModeWrites
	default:
		return vfscommon.CacheModeOff
	}
}
