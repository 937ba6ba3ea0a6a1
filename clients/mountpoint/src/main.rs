//! Command s3-csi-mountpoint serves an S3 bucket on a FUSE descriptor. It is built on the libraries of Mountpoint for Amazon S3, and
//! takes the part of mount-s3's command line that s3-csi-driver uses.
//!
//! It ends when the file system is unmounted and the last upload has ended; signals do not end it. What it writes to standard
//! output are the lines of module report; standard error has the log.

mod args;
mod client;
mod fuse;
mod host;
mod listing;
mod rename;
mod report;
mod tree;
mod upload;
mod words;

use std::num::NonZeroUsize;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use clap::Parser;
use futures::executor::block_on;
use futures::future::{Either, select};
use mountpoint_s3_client::config::{
    AddressingStyle, Allocator, EndpointConfig, RustLogAdapter, S3ClientAuthConfig, S3ClientConfig, TlsConfig, Uri,
};
use mountpoint_s3_client::error::ObjectClientError;
use mountpoint_s3_client::user_agent::UserAgent;
use mountpoint_s3_client::{ObjectClient, S3CrtClient, S3RequestError};
use mountpoint_s3_fs::content_type::ContentTypeDetection;
use mountpoint_s3_fs::data_cache::{CacheLimit, DiskDataCache, DiskDataCacheConfig, ManagedCacheDir};
use mountpoint_s3_fs::fs::{CacheConfig, ServerSideEncryption, TimeToLive, UploadChecksumAlgorithm};
use mountpoint_s3_fs::fuse::S3FuseFilesystem;
use mountpoint_s3_fs::fuse::config::{FuseOptions, FuseSessionConfig, MountPoint};
use mountpoint_s3_fs::fuse::session::FuseSession;
use mountpoint_s3_fs::memory::{CandidateSize, PagedPool};
use mountpoint_s3_fs::prefetch::Prefetcher;
use mountpoint_s3_fs::s3::config::{MemoryLimitSetting, PartConfig};
use mountpoint_s3_fs::s3::{Bucket, Prefix, S3Path, S3Personality};
use mountpoint_s3_fs::metrics;
use mountpoint_s3_fs::{Runtime, S3Filesystem, S3FilesystemConfig, Superblock, SuperblockConfig};
use tracing_subscriber::EnvFilter;

use args::{Args, BucketType, Checksums};
use client::{Client, Rename};
use fuse::Fuse;
use report::Report;
use tree::Tree;

/// Attempts of a request, if AWS_MAX_ATTEMPTS does not say it; mount-s3's.
const ATTEMPTS: usize = 10;
const DEFAULT_REGION: &str = "us-east-1";
const MIB: usize = 1 << 20;
/// Block size of the cache.
const BLOCK: u64 = MIB as u64;
/// How long metadata is kept where there is a cache.
const CACHED_TTL: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    host::use_no_libraries();
    abort_on_panic();
    let args = Args::parse();
    match run(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("Error: {e:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: Args) -> anyhow::Result<()> {
    if args.debug {
        log(&args)?;
    }
    let _metrics = if args.log_metrics { Some(metrics::install(None)?) } else { None };
    ignore_signals();
    if args.sse_kms_key_id.is_some() && !args.sse.as_deref().is_some_and(|sse| sse.starts_with("aws:kms")) {
        bail!("sse-kms-key-id: needs sse aws:kms or aws:kms:dsse");
    }
    let mount_point = mount_point(&args)?;
    let report = Arc::new(Report::default());
    let path = S3Path::new(Bucket::new(args.bucket.as_str())?, Prefix::new(&args.prefix)?);
    let parts = PartConfig::with_read_write_sizes(
        args.read_part_size.unwrap_or(args.part_size),
        args.write_part_size.unwrap_or(args.part_size),
    )
    .validate(MemoryLimitSetting::User(args.memory_target as usize * MIB))?;
    let pool = PagedPool::config()
        .with_candidate_sizes([CandidateSize::new(parts.read_size_bytes), CandidateSize::new(parts.write_size_bytes)])
        .with_memory_limit(args.memory_target as usize * MIB)
        .build();

    let (s3, endpoint) = connect(&args, &path, &parts, &pool, &report)?;
    let personality = match args.bucket_type {
        Some(BucketType::GeneralPurpose) => S3Personality::Standard,
        Some(BucketType::Directory) => S3Personality::ExpressOneZone,
        None => S3Personality::infer_from_bucket(&args.bucket, &endpoint),
    };
    let runtime = Runtime::new(s3.event_loop_group());
    let rename = match personality {
        S3Personality::ExpressOneZone => Rename::Native,
        _ => Rename::Copy,
    };
    let client = Client::new(s3, path.bucket.as_str(), report.clone(), rename);

    let (_cache, cache) = cache_directory(&args)?.unzip(); // the directory is removed when the guard is dropped
    let prefetcher = match cache {
        Some(config) => Prefetcher::caching_builder(DiskDataCache::new(config, pool.clone()), client.clone()),
        None => Prefetcher::default_builder(client.clone()),
    };
    let cache_config = metadata(&args);
    let superblock = SuperblockConfig { cache_config: cache_config.clone(), s3_personality: personality };
    let tree = Tree::new(
        Superblock::new(client.clone(), path, superblock),
        client.clone(),
        report.clone(),
        tree::Options { allow_delete: args.allow_delete && !args.read_only, incremental: args.incremental_upload },
    );
    // A copy is encrypted as the bucket's default says, not as --sse does.
    let can_rename = !args.no_rename && args.allow_delete && (rename == Rename::Native || args.sse.is_none());
    let fs = S3Filesystem::new(
        client,
        prefetcher,
        pool,
        runtime,
        tree.clone(),
        S3FilesystemConfig { cache_config, s3_personality: personality, ..filesystem(&args) },
    );
    // Until here, the returned error says everything.
    if !args.debug {
        log(&args)?;
    }
    let fuse = Fuse { fs: S3FuseFilesystem::new(fs, None), tree: tree.clone(), rename: can_rename };
    let session = FuseSessionConfig::new(
        mount_point,
        FuseOptions {
            read_only: args.read_only,
            allow_other: args.allow_other,
            auto_unmount: args.auto_unmount,
            ..Default::default()
        },
        args.max_threads as usize,
    )?;
    let session = FuseSession::new(fuse, session)?;

    let reporter = report.clone();
    std::thread::Builder::new().name("report".into()).spawn(move || reporter.run(std::io::stdout())).context("report")?;
    session.join()?;
    block_on(tree.store_closed());
    drop(tree);
    report.wait_for_uploads();
    report.finish(std::io::stdout());
    Ok(())
}

/// Takes the FUSE descriptor, before anything is asked of the service. With --auto-unmount, fusermount passes it when the session starts.
fn mount_point(args: &Args) -> anyhow::Result<MountPoint> {
    match MountPoint::new(&args.mount_point)? {
        MountPoint::Directory(path) if !args.auto_unmount => {
            bail!("mount point {}: must be a FUSE descriptor, as /dev/fd/N; a directory needs --auto-unmount and the program fusermount", path.display())
        }
        mount_point => Ok(mount_point),
    }
}

/// Logs warnings to standard error, and what --debug asks for. The runtime's own messages may hold session tokens: they are never
/// logged.
fn log(args: &Args) -> anyhow::Result<()> {
    let level = if args.debug { "debug" } else { "warn" };
    let measurements = if args.log_metrics { "info" } else { "off" };
    RustLogAdapter::try_init().context("log of the AWS runtime")?;
    tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::new(format!("{level},awscrt=off,{}={measurements}", metrics::TARGET_NAME)))
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .try_init()
        .map_err(|e| anyhow::anyhow!("log: {e}"))
}

/// A panic would end one thread, and leave the request that it had without an answer. A client that is gone is started again.
fn abort_on_panic() {
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        print(panic);
        std::process::abort();
    }));
}

/// A client that ends at a signal would take files with it that are open. Only unmounting ends it, or SIGKILL.
fn ignore_signals() {
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGUSR1, libc::SIGUSR2] {
        // SAFETY: SIG_IGN is a valid disposition of these signals.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
}

/// Makes the client and proves with a listing that it reaches the bucket, in the region where that is.
fn connect(
    args: &Args,
    path: &S3Path,
    parts: &PartConfig,
    pool: &PagedPool,
    report: &Arc<Report>,
) -> anyhow::Result<(S3CrtClient, EndpointConfig)> {
    let mut region = args.region.clone().unwrap_or_else(|| DEFAULT_REGION.into());
    loop {
        let endpoint = endpoint(args, &region)?;
        let s3 = S3CrtClient::new(client_config(args, parts, pool, report)?.endpoint_config(endpoint.clone()))
            .map_err(|e| anyhow!("cannot make a client for {}: {}", target(args, path, &region), words::client(&e)))?;
        let handshake = report.failed_handshake();
        let listing = s3.list_objects(path.bucket.as_str(), None, "", 0, path.prefix.as_str());
        let listed = match block_on(select(listing, handshake)) {
            Either::Left((listed, _)) => listed,
            Either::Right((Ok(error), _)) => {
                bail!("cannot list {}: {}", target(args, path, &region), words::connection(&error.to_string()))
            }
            Either::Right((Err(_), listing)) => block_on(listing),
        };
        match listed {
            Ok(_) => return Ok((s3, endpoint)),
            Err(ObjectClientError::ClientError(S3RequestError::IncorrectRegion(other, _)))
                if args.region.is_none() && other != region =>
            {
                region = other;
            }
            Err(e) => bail!("cannot list {}: {}", target(args, path, &region), words::listing(&e)),
        }
    }
}

/// Names the bucket, the prefix and the service in errors.
fn target(args: &Args, path: &S3Path, region: &str) -> String {
    let prefix = match path.prefix.as_str() {
        "" => String::new(),
        prefix => format!("prefix {prefix:?} of "),
    };
    let endpoint = args.endpoint_url.as_deref().map(|url| format!(" at {url}")).unwrap_or_default();
    format!("{prefix}bucket {:?} in region {region}{endpoint}", path.bucket.as_str())
}

fn endpoint(args: &Args, region: &str) -> anyhow::Result<EndpointConfig> {
    let style = if args.force_path_style { AddressingStyle::Path } else { AddressingStyle::Automatic };
    let mut endpoint = EndpointConfig::new(region)
        .addressing_style(style)
        .use_accelerate(args.transfer_acceleration)
        .use_dual_stack(args.dual_stack);
    if let Some(url) = &args.endpoint_url {
        endpoint = endpoint.endpoint(Uri::new_from_str(&Allocator::default(), url).map_err(|_| anyhow!("endpoint-url {url:?}: not a URL"))?);
    }
    Ok(endpoint)
}

fn client_config(args: &Args, parts: &PartConfig, pool: &PagedPool, report: &Arc<Report>) -> anyhow::Result<S3ClientConfig> {
    let attempts = std::env::var("AWS_MAX_ATTEMPTS").ok().and_then(|n| n.parse().ok()).unwrap_or(ATTEMPTS);
    let mut config = S3ClientConfig::new()
        .auth_config(S3ClientAuthConfig::Default)
        .throughput_target_gbps(args.maximum_throughput_gbps as f64)
        .event_loop_threads(event_loops(args.maximum_throughput_gbps))
        .read_part_size(parts.read_size_bytes)
        .write_part_size(parts.write_size_bytes)
        .read_backpressure(true)
        .initial_read_window(parts.read_size_bytes)
        .user_agent(UserAgent::new(args.user_agent_prefix.clone()))
        .memory_pool(pool.clone())
        .max_attempts(NonZeroUsize::new(attempts).context("AWS_MAX_ATTEMPTS is 0")?)
        .telemetry_callback(report.clone());
    if args.requester_pays {
        config = config.request_payer("requester");
    }
    if let Some(owner) = &args.expected_bucket_owner {
        config = config.bucket_owner(owner);
    }
    if let Some(file) = &args.ca_bundle {
        let tls = TlsConfig::new().with_trust_store_path(file);
        tls.validate().map_err(|e| anyhow!("ca-bundle: {e}"))?;
        config = config.tls_config(tls);
    }
    Ok(config)
}

/// Returns how many threads there are for requests, and as many for their data: one for each Gbit/s, up to half of the processors. The
/// runtime's default is half of the processors, which are many threads on a large node.
fn event_loops(gbps: u64) -> u16 {
    let processors = std::thread::available_parallelism().map_or(1, |n| n.get() as u64);
    gbps.min(processors / 2).clamp(1, u16::MAX.into()) as u16
}

fn cache_directory(args: &Args) -> anyhow::Result<Option<(ManagedCacheDir, DiskDataCacheConfig)>> {
    let Some(parent) = &args.cache else { return Ok(None) };
    let managed = ManagedCacheDir::new_from_parent_with_cache_key(parent, None, true)
        .map_err(|e| anyhow!("cannot make the cache in {}: {e}", parent.display()))?;
    let config = DiskDataCacheConfig {
        cache_directory: managed.as_path_buf(),
        block_size: BLOCK,
        limit: match args.max_cache_size {
            Some(mib) => CacheLimit::TotalSize { max_size: mib as usize * MIB },
            None => CacheLimit::default(),
        },
    };
    Ok(Some((managed, config)))
}

fn metadata(args: &Args) -> CacheConfig {
    let ttl = args.metadata_ttl.unwrap_or(match args.cache {
        Some(_) => TimeToLive::Duration(CACHED_TTL),
        None => TimeToLive::Minimal,
    });
    let config = CacheConfig::new(ttl);
    match args.negative_metadata_ttl {
        Some(negative) => config.with_negative_metadata_ttl(negative),
        None => config,
    }
}

fn filesystem(args: &Args) -> S3FilesystemConfig {
    let defaults = S3FilesystemConfig::default();
    S3FilesystemConfig {
        uid: args.uid.unwrap_or(defaults.uid),
        gid: args.gid.unwrap_or(defaults.gid),
        dir_mode: args.dir_mode,
        file_mode: args.file_mode,
        allow_delete: args.allow_delete,
        allow_overwrite: args.allow_overwrite,
        incremental_upload: args.incremental_upload,
        storage_class: args.storage_class.clone(),
        server_side_encryption: ServerSideEncryption::new(args.sse.clone(), args.sse_kms_key_id.clone()),
        upload_checksum_algorithm: match args.upload_checksums {
            Checksums::Crc32c => Some(UploadChecksumAlgorithm::Crc32c),
            Checksums::Crc64nvme => Some(UploadChecksumAlgorithm::Crc64nvme),
            Checksums::Off => None,
        },
        content_type_detection: if args.infer_content_type { ContentTypeDetection::Auto } else { ContentTypeDetection::Disabled },
        read_only: args.read_only,
        ..defaults
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn takes_a_directory_only_if_fusermount_has_its_descriptor() {
        let at = |more: &[&str]| mount_point(&Args::try_parse_from([&["s3-csi-mountpoint", "bucket", "/etc"][..], more].concat()).unwrap());
        let error = at(&[]).unwrap_err().to_string();
        assert!(error.contains("--auto-unmount"), "{error}");
        assert!(matches!(at(&["--auto-unmount"]), Ok(MountPoint::Directory(_))));
    }
}
