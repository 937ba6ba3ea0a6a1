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
	// A request without progress for this long is retried. rclone's default of five minutes exceeds the timeouts of a mount.
	connectTimeout = 15 * time.Second
	idleTimeout    = 60 * time.Second
	// attrTime is how long the kernel may cache attributes and names, as in rclone's own mount command.
	attrTime = time.Second
	// cacheAge is how long unused clean data stays in the cache.
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
	// On a signal, rclone would exit and abort uploads.
	atexit.IgnoreSignals()

	ci := fs.GetConfig(context.Background())
	ci.LogLevel = fs.LogLevelNotice
	if c.debug {
		ci.LogLevel = fs.LogLevelDebug
	}
	ci.UserAgent = "s3-csi-rclone/" + version
	ci.ConnectTimeout = fs.Duration(connectTimeout)
	ci.Timeout = fs.Duration(idleTimeout)
	ci.LowLevelRetries = c.attempts
	ci.Transfers = c.transfers
	ci.BufferSize = c.readAhead
	ci.UseServerModTime = c.serverMtime
	ci.AskPassword = false
	// After an upload, rclone would compare the size and hash of the current object. If another writer has replaced it meanwhile,
	// rclone would treat that as corruption, delete the object and upload its own, older version again. The transfer is protected
	// without that: each request with data has the Content-MD5 of the cached file, so the service rejects corrupted data.
	ci.IgnoreSize, ci.IgnoreChecksum = true, true
	if c.caFile != "" {
		ci.CaCert = []string{c.caFile}
	}
	if err := fs.LogReload(ci); err != nil { // applies the level
		return fmt.Errorf("rclone's log: %w", err)
	}
	return nil
}

// newRemote returns the S3 file system. It makes no request, so it does not notice a missing bucket. encodedKeys is whether it asks
// services other than AWS for encoded keys in listings, and decodes them.
func newRemote(ctx context.Context, c config, encodedKeys bool) (fs.Fs, error) {
	options := s3Options(c, encodedKeys)
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
	// The backend then shows the time of the upload and never asks for metadata. object.ModTime asks for it if needed.
	ctx, ci := fs.AddConfig(ctx)
	ci.UseServerModTime = true
	// The slash at the end marks a directory. Without it, rclone checks whether it is an object, which a session that is limited
	// to the prefix may not do.
	remote, err := s3.NewFs(ctx, "s3", c.bucket+"/"+c.prefix, all)
	if err != nil {
		return nil, fmt.Errorf("s3://%s/%s: %w", c.bucket, c.prefix, err)
	}
	return remote, nil
}

func s3Options(c config, encodedKeys bool) map[string]string {
	o := map[string]string{
		"provider":         "AWS",
		"env_auth":         "true",
		"region":           c.region,
		"force_path_style": strconv.FormatBool(c.pathStyle),
		"no_check_bucket":  "true", // otherwise every upload tries to create it
		// After an upload, rclone uses the response instead of a HEAD request: that can find another writer's object, and rclone
		// would take the cached file for its content.
		"no_head":           "true",
		"chunk_size":        inBytes(c.partSize),
		"upload_cutoff":     inBytes(c.uploadCutoff),
		"directory_markers": strconv.FormatBool(c.directoryMarkers),
		"storage_class":     c.storageClass,
	}
	o["server_side_encryption"] = c.sse
	o["sse_kms_key_id"] = c.sseKMSKeyID
	if c.endpoint != "" {
		// "Other" is the most compatible profile. All current services support version 2 of listing.
		o["provider"] = "Other"
		o["endpoint"] = c.endpoint
		o["list_version"] = "2"
		o["list_url_encode"] = strconv.FormatBool(encodedKeys)
	}
	return o
}

// inBytes is a size as rclone reads it back without loss.
func inBytes(s fs.SizeSuffix) string { return strconv.FormatInt(int64(s), 10) + "B" }

// newVFS returns rclone's VFS on the remote, and starts its cache.
func newVFS(ctx context.Context, c config, remote fs.Fs) (*vfs.VFS, error) {
	opt := vfscommon.Opt // the defaults
	opt.ReadOnly = c.readOnly
	opt.UID, opt.GID, opt.Umask = uint32(c.uid), uint32(c.gid), 0
	opt.DirPerms, opt.FilePerms = c.dirMode, c.fileMode
	opt.DirCacheTime = fs.Duration(vfsDirCacheTime)
	opt.PollInterval = 0 // S3 does not report changes
	opt.WriteBack = fs.Duration(c.writeBack)
	opt.CacheMaxSize = c.cacheSize
	opt.CacheMaxAge = fs.Duration(cacheAge)
	opt.CachePollInterval = fs.Duration(c.cachePoll)
	// Otherwise a file that is opened again right after it changed in S3 is shown as empty.
	opt.HandleCaching = 0
	opt.CacheMode = cacheMode(c)
	want := opt.CacheMode
	v := vfs.New(ctx, remote, &opt)
	// rclone continues without a cache if it cannot create one, and then without random writes and retries.
	if v.Opt.CacheMode != want {
		v.Shutdown()
		return nil, fmt.Errorf("cannot use the cache in %s; see the log for the reason", c.cacheDir)
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
