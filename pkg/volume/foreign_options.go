package volume

import (
	"errors"
	"strings"
)

// rcloneOptions are those of rclone's mount (its cmd/mountlib, vfs/vfscommon and backend/s3) that volumes of k8s-csi-s3 are likely
// to have.
func rcloneOptions() []ForeignDoc {
	var rows []ForeignDoc
	add := func(outcome Outcome, here string, names ...string) {
		for _, name := range names {
			rows = append(rows, ForeignDoc{Origin: OriginRclone, Name: name, Outcome: outcome, Here: here})
		}
	}
	attribute := func(name, key, here string, read func(t *translation, w word)) {
		rows = append(rows, ForeignDoc{Origin: OriginRclone, Name: name, Outcome: Mapped, Here: here, key: key, read: read})
	}
	option := func(name, ours string) {
		attribute(name, "", "mount option "+ours, func(t *translation, w word) { t.option(ours, w) })
	}
	size := func(name, ours string) {
		attribute(name, "", "mount option "+ours, func(t *translation, w word) { t.optionOfSize(ours, w) })
	}
	flag := func(name, ours string) {
		attribute(name, "", "mount option "+ours, func(t *translation, w word) {
			if !w.hasValue {
				w.value, w.hasValue = "true", true
			}
			t.option(ours, w)
		})
	}
	attribute("uid", keyUID, keyUID, nil)
	attribute("gid", keyGID, keyGID, nil)
	attribute("dir-perms", keyDirMode, keyDirMode, nil)
	attribute("file-perms", keyFileMode, keyFileMode, nil)
	attribute("read-only", keyReadOnly, `readOnly: "true"`, func(t *translation, w word) { t.putFlag(keyReadOnly, w) })
	attribute("vfs-cache-mode", "", "full is the mount option read-cache; writes is so with every mount; of minimal and off the node's log says that they mean nothing", func(t *translation, w word) {
		switch w.value {
		case "full":
			t.option("read-cache", word{field: w.field, name: w.name, value: "true", hasValue: true})
		case "writes":
		default:
			t.ignore(w, "what is written always goes through a cache on the node's disk")
		}
	})
	option("dir-cache-time", "dir-cache-time")
	option("vfs-write-back", "write-back")
	option("transfers", "transfers")
	option("s3-storage-class", "storage-class")
	option("s3-server-side-encryption", "sse")
	option("s3-sse-kms-key-id", "sse-kms-key-id")
	size("vfs-cache-max-size", "cache-size")
	size("vfs-read-ahead", "read-ahead")
	size("s3-chunk-size", "part-size")
	flag("use-server-modtime", "server-mtime")
	flag("s3-directory-markers", "directory-markers")
	rows = append(rows, ForeignDoc{Origin: OriginRclone, Name: "s3-force-path-style", Outcome: Checked, claim: ClaimPathStyle,
		Here: "addressing of the volume's backend has to be path; with AWS it means nothing"})
	add(Same, "so with every mount", "allow-other", "allow-non-empty", "daemon", "default-permissions", "s3-no-check-bucket", "s3-env-auth")
	add(Ignored, "the client has a value of its own", "vfs-cache-max-age", "vfs-cache-poll-interval", "vfs-cache-min-free-space", "buffer-size", "attr-timeout", "poll-interval",
		"checkers", "fast-list", "max-read-ahead", "s3-upload-concurrency", "s3-upload-cutoff", "s3-provider", "no-modtime", "no-checksum", "timeout", "contimeout", "retries", "low-level-retries")
	add(Ignored, "the client's output is in the log of the mount's helper; the mount option debug says more", "log-level", "log-file", "v", "vv", "verbose", "quiet", "stats")
	add(Ignored, "caches lie below the driver's --cache-dir", "cache-dir")
	add(Refused, "write dirMode and fileMode", "umask")
	add(Refused, "a volume names a backend, and that has the endpoint and the region: write backend", "s3-endpoint", "s3-region")
	add(Refused, "certificates are always checked: give the backend a caFile", "no-check-certificate")
	add(Refused, "objects get the access that the bucket gives them: leave it out", "s3-acl")
	add(Refused, "there is nothing like it here: leave it out, or write mountOptions of the client", others)
	return rows
}

// option adds an option for the client.
func (t *translation) option(name string, w word) {
	if !w.hasValue {
		t.refuse(w, "%s needs a value", w.name)
		return
	}
	o, err := parseOption(name + "=" + w.value)
	if err == nil && strings.Contains(o.Value, ",") {
		err = errors.New("holds a comma in its value")
	}
	if err != nil {
		t.refuse(w, "%s %w", w.name, err)
		return
	}
	for _, other := range t.options {
		if other.Name == name {
			t.refuse(w, "%s is given twice", w.name)
			return
		}
	}
	t.options = append(t.options, o)
}

const rcloneSize Pattern = `^([1-9][0-9]{0,11})([KMGT]?)(i?B?)$`

// optionOfSize is option for amounts as rclone writes them: with powers of 1024, and KiB where no unit is named.
func (t *translation) optionOfSize(name string, w word) {
	m := rcloneSize.FindStringSubmatch(w.value)
	if m == nil || m[2] == "" && m[3] != "" {
		t.refuse(w, "%s needs an amount, as 512Mi and 10Gi are", w.name)
		return
	}
	unit := m[2]
	if unit == "" {
		unit = "K"
	}
	w.value = m[1] + unit + "i"
	t.option(name, w)
}

// geesefsOptions are those of geesefs (its core/cfg/flags.go). It is no client here, so each says what to write for another.
func geesefsOptions() []ForeignDoc {
	rows := instead(OriginGeeseFS, []advice{
		{"write dirMode", []string{"dir-mode"}},
		{"write fileMode", []string{"file-mode"}},
		{"write uid and gid", []string{"uid", "gid"}},
		{"it bounded a cache in memory; write memoryLimit for all that the client may take, if the node's --memory-limit is not right: rclone needs 128Mi, mountpoint-s3 needs 640Mi", []string{"memory-limit"}},
		{"write cache: \"true\" and cacheSize", []string{"cache", "max-disk-cache-fd", "cache-file-mode"}},
		{"write the mount option dir-cache-time of rclone or metadata-ttl of mountpoint-s3", []string{"stat-cache-ttl"}},
		{"write the mount option storage-class", []string{"storage-class", "cold-min-size"}},
		{"write the mount option sse: AES256 for --sse, aws:kms and sse-kms-key-id for --sse-kms; customer keys are not supported", []string{"sse", "sse-kms", "sse-c"}},
		{"write the mount option requester-pays of mountpoint-s3", []string{"requester-pays"}},
		{"write the mount option infer-content-type of mountpoint-s3; rclone does so by itself", []string{"use-content-type"}},
		{"write the mount option transfers of rclone or max-threads of mountpoint-s3", []string{"max-flushers", "max-parallel-parts", "max-parallel-copy"}},
		{"write the mount option part-size", []string{"part-sizes", "single-part"}},
		{"write the mount option read-ahead of rclone; mountpoint-s3 needs none", []string{"read-ahead", "read-ahead-small", "read-ahead-large", "read-ahead-parallel"}},
		{"write client: mountpoint-s3, which stores a file before close returns; rclone stores it shortly after", []string{"fsync-on-close"}},
		{"files show uid, gid, dirMode and fileMode of the volume: leave it out", []string{"enable-perms", "enable-specials", "no-specials"}},
		{"rclone keeps modification times by itself, mountpoint-s3 none: leave it out", []string{"enable-mtime"}},
		{"write the mount option debug", []string{"debug", "debug_fuse", "debug_s3", "debug_grpc"}},
		{"a volume names a backend, and that has the endpoint, the region and the addressing: write backend", []string{"endpoint", "region", "subdomain", "project-id", "no-detect", "list-type"}},
		{"certificates are always checked: give the backend a caFile", []string{"no-verify-ssl"}},
		{"write credentials, and name a secret or roleARN", []string{"profile", "shared-config", "iam", "iam-header", "iam-flavor", "iam-url"}},
		{"the driver's --launcher decides: leave it out", []string{"no-systemd"}},
		{"so with every mount: leave it out", []string{"allow_other", "f", "setuid", "setgid"}},
	})
	return append(rows, ForeignDoc{Origin: OriginGeeseFS, Name: others, Outcome: Refused, Here: "there is nothing like it here: leave it out, or write mountOptions of the client"})
}

// s3fsOptions are those of s3fs (its doc/man/s3fs.1.in) likewise.
func s3fsOptions() []ForeignDoc {
	rows := instead(OriginS3FS, []advice{
		{"write uid and gid", []string{"uid", "gid"}},
		{"write dirMode and fileMode", []string{"umask", "mp_umask"}},
		{"write readOnly: \"true\"", []string{"ro"}},
		{"write cache: \"true\" and cacheSize", []string{"use_cache", "ensure_diskfree", "free_space_ratio", "del_cache", "tmpdir"}},
		{"write the mount option dir-cache-time of rclone or metadata-ttl of mountpoint-s3", []string{"stat_cache_expire", "stat_cache_interval_expire", "max_stat_cache_size", "enable_negative_cache", "disable_negative_cache"}},
		{"write the mount option storage-class", []string{"storage_class", "use_rrs"}},
		{"write the mount option sse: AES256, or aws:kms and sse-kms-key-id; customer keys are not supported", []string{"use_sse", "load_sse_c"}},
		{"write the mount option part-size", []string{"multipart_size", "multipart_threshold", "multipart_copy_size"}},
		{"write the mount option transfers of rclone or max-threads of mountpoint-s3", []string{"parallel_count", "max_thread_count", "multireq_max"}},
		{"write the mount option requester-pays of mountpoint-s3", []string{"requester_pays"}},
		{"write the mount option debug", []string{"dbglevel", "curldbg", "d", "logfile"}},
		{"a volume names a backend, and that has the endpoint, the region and the addressing: write backend", []string{"url", "host", "endpoint", "region", "use_path_request_style", "servicepath"}},
		{"certificates are always checked: give the backend a caFile", []string{"no_check_certificate", "ssl_verify_hostname"}},
		{"write credentials, and name a secret or roleARN", []string{"passwd_file", "iam_role", "profile", "use_session_token", "public_bucket", "ecs", "ibm_iam_auth"}},
		{"objects get the access that the bucket gives them: leave it out", []string{"default_acl"}},
		{"a volume may not choose where its data goes, and clients use no proxy: leave it out", []string{"proxy", "proxy_cred_file"}},
		{"so with every mount: leave it out", []string{"allow_other", "nonempty", "f"}},
	})
	return append(rows, ForeignDoc{Origin: OriginS3FS, Name: others, Outcome: Refused, Here: "there is nothing like it here: leave it out, or write mountOptions of the client"})
}

// advice is what to write instead of some options.
type advice struct {
	here  string
	names []string
}

func instead(origin Origin, list []advice) []ForeignDoc {
	var rows []ForeignDoc
	for _, a := range list {
		for _, name := range a.names {
			rows = append(rows, ForeignDoc{Origin: origin, Name: name, Outcome: Refused, Here: a.here})
		}
	}
	return rows
}
