//! The command line: the part of mount-s3's that the driver uses, with the same meaning.

use std::path::PathBuf;

use clap::{Parser, ValueEnum};
use mountpoint_s3_fs::fs::TimeToLive;
use mountpoint_s3_fs::s3::{Bucket, Prefix};

/// Serves a bucket, or a prefix of one, as a file system on an open and mounted FUSE descriptor.
#[derive(Parser, Debug)]
#[command(name = "s3-csi-mountpoint", version)]
pub struct Args {
    /// Bucket
    #[arg(value_parser = bucket)]
    pub bucket: String,
    /// FUSE descriptor, as /dev/fd/N, or a directory with --auto-unmount
    pub mount_point: String,
    /// Gets the FUSE descriptor from the program fusermount
    #[arg(long)]
    pub auto_unmount: bool,

    /// Runs in the foreground, as always
    #[arg(long, short)]
    pub foreground: bool,
    /// Lets all users in, as the mount's own options say
    #[arg(long)]
    pub allow_other: bool,

    /// Prefix, ending in "/"
    #[arg(long, default_value = "", value_parser = prefix)]
    pub prefix: String,
    /// Region of the bucket [default: found out]
    #[arg(long)]
    pub region: Option<String>,
    /// URL of the S3 service [default: that of AWS]
    #[arg(long)]
    pub endpoint_url: Option<String>,
    /// The bucket's name is in the path of URLs
    #[arg(long)]
    pub force_path_style: bool,
    /// File of CA certificates to trust, instead of the system's
    #[arg(long)]
    pub ca_bundle: Option<PathBuf>,
    /// Account that must own the bucket
    #[arg(long)]
    pub expected_bucket_owner: Option<String>,
    /// Text in front of the user agent
    #[arg(long)]
    pub user_agent_prefix: Option<String>,
    /// Type of the bucket [default: by its name]
    #[arg(long, value_enum)]
    pub bucket_type: Option<BucketType>,
    #[arg(long)]
    pub requester_pays: bool,
    #[arg(long)]
    pub transfer_acceleration: bool,
    #[arg(long)]
    pub dual_stack: bool,

    /// Owner of all files, not root [default: the process's]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub uid: Option<u32>,
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub gid: Option<u32>,
    /// Permissions in octal digits
    #[arg(long, default_value = "0755", value_parser = permissions)]
    pub dir_mode: u16,
    #[arg(long, default_value = "0644", value_parser = permissions)]
    pub file_mode: u16,

    #[arg(long)]
    pub read_only: bool,
    #[arg(long)]
    pub allow_delete: bool,
    #[arg(long)]
    pub allow_overwrite: bool,
    #[arg(long)]
    pub incremental_upload: bool,
    /// Refuses to rename files (not an option of mount-s3)
    #[arg(long)]
    pub no_rename: bool,
    #[arg(long)]
    pub infer_content_type: bool,
    #[arg(long)]
    pub storage_class: Option<String>,
    #[arg(long, value_parser = ["aws:kms", "aws:kms:dsse", "AES256"])]
    pub sse: Option<String>,
    #[arg(long, requires = "sse", value_parser = kms_key)]
    pub sse_kms_key_id: Option<String>,
    #[arg(long, value_enum, default_value = "crc32c")]
    pub upload_checksums: Checksums,

    /// Directory in which objects' content is cached
    #[arg(long)]
    pub cache: Option<PathBuf>,
    /// Size of the cache in MiB
    #[arg(long, requires = "cache")]
    pub max_cache_size: Option<u64>,
    /// Seconds, "minimal" or "indefinite" [default: minimal; 60 with a cache]
    #[arg(long, value_parser = TimeToLive::new_from_str)]
    pub metadata_ttl: Option<TimeToLive>,
    #[arg(long, value_parser = TimeToLive::new_from_str)]
    pub negative_metadata_ttl: Option<TimeToLive>,

    #[arg(long, default_value = "10", value_parser = clap::value_parser!(u64).range(1..))]
    pub maximum_throughput_gbps: u64,
    /// Memory to stay within, in MiB
    #[arg(long, default_value = "1024", value_parser = clap::value_parser!(u64).range(512..))]
    pub memory_target: u64,
    #[arg(long, default_value = "16", value_parser = clap::value_parser!(u64).range(1..))]
    pub max_threads: u64,
    /// Bytes
    #[arg(long, default_value = "8388608")]
    pub part_size: usize,
    #[arg(long, conflicts_with = "part_size")]
    pub read_part_size: Option<usize>,
    #[arg(long, conflicts_with = "part_size")]
    pub write_part_size: Option<usize>,

    #[arg(long, short)]
    pub debug: bool,
    /// Logs the file system's own measurements every five seconds
    #[arg(long)]
    pub log_metrics: bool,
}

#[derive(ValueEnum, Debug, Clone, Copy)]
pub enum BucketType {
    GeneralPurpose,
    Directory,
}

#[derive(ValueEnum, Debug, Clone, Copy)]
pub enum Checksums {
    Crc32c,
    Crc64nvme,
    Off,
}

fn bucket(text: &str) -> Result<String, String> {
    Bucket::new(text).map(Into::into).map_err(|e| e.to_string())
}

fn prefix(text: &str) -> Result<String, String> {
    Prefix::new(text).map(|_| text.to_owned()).map_err(|e| e.to_string())
}

fn kms_key(text: &str) -> Result<String, String> {
    match text.starts_with("arn:") && text.contains(":key/") {
        true => Ok(text.to_owned()),
        false => Err("must be the ARN of a KMS key".into()),
    }
}

fn permissions(text: &str) -> Result<u16, String> {
    match u16::from_str_radix(text, 8) {
        Ok(mode) if mode <= 0o777 => Ok(mode),
        _ => Err(format!("{text:?} is not a mode of up to three octal digits, such as 0755")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn takes_the_drivers_command_line() {
        let args = Args::try_parse_from([
            "s3-csi-mountpoint", "--foreground", "--allow-other", "--prefix=p/", "--region=us-east-1",
            "--endpoint-url=http://127.0.0.1:9000", "--force-path-style", "--dir-mode=0750", "--file-mode=0640",
            "--allow-delete", "--allow-overwrite", "--maximum-throughput-gbps=10", "--memory-target=819",
            "--metadata-ttl=indefinite", "--", "-bucket", "/dev/fd/3",
        ])
        .unwrap();
        assert_eq!((args.bucket.as_str(), args.prefix.as_str(), args.dir_mode), ("-bucket", "p/", 0o750));
        assert!(args.allow_delete && args.allow_overwrite && !args.no_rename && !args.read_only);
    }

    #[test]
    fn takes_a_command_line_for_mount_s3_in_a_pod() {
        let args = Args::try_parse_from([
            "mount-s3", "test-bucket", "/tmp", "--endpoint-url", "http://localhost:9000", "-d", "--allow-other", "--auto-unmount", "--foreground",
            "--force-path-style",
        ])
        .unwrap();
        assert_eq!((args.bucket.as_str(), args.mount_point.as_str()), ("test-bucket", "/tmp"));
        assert!(args.auto_unmount && args.debug && args.allow_other);
    }

    #[test]
    fn refuses_wrong_values() {
        for bad in ["--prefix=p", "--uid=0", "--gid=4294967296", "--dir-mode=1777", "--file-mode=rw", "--metadata-ttl=never", "--memory-target=100", "--sse=none", "--max-cache-size=5"] {
            assert!(Args::try_parse_from(["s3-csi-mountpoint", bad, "--", "bucket", "/dev/fd/3"]).is_err(), "{bad}");
        }
    }
}
