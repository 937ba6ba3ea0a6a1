//! Renames of files on services that have no request for it.

use futures::future::try_join;
use mountpoint_s3_client::ObjectClient;
use mountpoint_s3_client::error::{CopyObjectError, HeadObjectError, ObjectClientError, RenameObjectError};
use mountpoint_s3_client::types::{
    Checksum, ChecksumMode, CopyObjectParams, HeadObjectParams, HeadObjectResult, ObjectClientResult,
    RenameObjectParams, RenameObjectResult, RenamePreconditionTypes,
};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use tracing::warn;

/// What is not encoded in x-amz-copy-source (CopyObject in the API reference of S3: "must be URL-encoded").
const UNENCODED: AsciiSet = NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~').remove(b'/');

/// Copies an object, compares the copy, and deletes the source. After an error both names may exist, never none.
///
/// The runtime copies an object of 1 GiB or more in parts, because one CopyObject can have 5 GiB at most. Its copies cannot be made
/// conditional, so the source is looked at again when it is copied: a copy of two versions is not taken for one of the first.
pub async fn by_copy<C: ObjectClient + Sync>(
    client: &C,
    bucket: &str,
    source: &str,
    destination: &str,
    params: &RenameObjectParams,
) -> ObjectClientResult<RenameObjectResult, RenameObjectError, C::ClientError> {
    let (before, replaced) = try_join(head(client, bucket, source), head(client, bucket, destination)).await?;
    let Some(before) = before else {
        return Err(ObjectClientError::ServiceError(RenameObjectError::KeyNotFound));
    };
    if params.if_none_match.is_some() && replaced.is_some() {
        let exists = RenameObjectError::PreConditionFailed(RenamePreconditionTypes::IfNoneMatch);
        return Err(ObjectClientError::ServiceError(exists));
    }
    let encoded = utf8_percent_encode(source, &UNENCODED).to_string();
    client.copy_object(bucket, &encoded, bucket, destination, &CopyObjectParams::new()).await.map_err(|e| match e {
        ObjectClientError::ServiceError(CopyObjectError::NotFound) => {
            ObjectClientError::ServiceError(RenameObjectError::KeyNotFound)
        }
        ObjectClientError::ServiceError(e) => {
            warn!("cannot rename {source:?} to {destination:?}: {e}");
            ObjectClientError::ServiceError(RenameObjectError::AccessDenied)
        }
        ObjectClientError::ClientError(e) => ObjectClientError::ClientError(e),
    })?;
    let (copy, after) = try_join(head(client, bucket, destination), head(client, bucket, source)).await?;
    if let Err(why) = proven(&before, replaced.as_ref(), copy.as_ref(), after.as_ref()) {
        warn!("cannot rename {source:?} to {destination:?}: {why}; the source is kept");
        return Err(ObjectClientError::ServiceError(RenameObjectError::InternalError));
    }
    match client.delete_object(bucket, source).await {
        Ok(_) => Ok(RenameObjectResult::new()),
        Err(ObjectClientError::ClientError(e)) => Err(ObjectClientError::ClientError(e)),
        Err(ObjectClientError::ServiceError(e)) => {
            warn!("cannot delete {source:?}, which was renamed to {destination:?}: {e}; both exist");
            Err(ObjectClientError::ServiceError(RenameObjectError::InternalError))
        }
    }
}

async fn head<C: ObjectClient + Sync>(
    client: &C,
    bucket: &str,
    key: &str,
) -> ObjectClientResult<Option<HeadObjectResult>, RenameObjectError, C::ClientError> {
    let params = HeadObjectParams::new().checksum_mode(Some(ChecksumMode::Enabled));
    match client.head_object(bucket, key, &params).await {
        Ok(result) => Ok(Some(result)),
        Err(ObjectClientError::ServiceError(HeadObjectError::NotFound)) => Ok(None),
        Err(ObjectClientError::ClientError(e)) => Err(ObjectClientError::ClientError(e)),
        Err(ObjectClientError::ServiceError(_)) => Err(ObjectClientError::ServiceError(RenameObjectError::InternalError)),
    }
}

/// Returns an error if deleting the source could lose data.
fn proven(
    before: &HeadObjectResult,
    replaced: Option<&HeadObjectResult>,
    copy: Option<&HeadObjectResult>,
    after: Option<&HeadObjectResult>,
) -> Result<(), &'static str> {
    let copy = copy.ok_or("the copy does not exist")?;
    let after = after.ok_or("another writer deleted the source")?;
    if (&before.etag, before.size, before.last_modified) != (&after.etag, after.size, after.last_modified) {
        return Err("another writer replaced it during the copy");
    }
    if replaced.is_some_and(|old| (&old.etag, old.last_modified) == (&copy.etag, copy.last_modified)) && copy.etag != before.etag {
        return Err("the service reported a copy, but did not change the destination");
    }
    if copy.size != before.size {
        return Err("the copy has another size");
    }
    if differs(&before.checksum, &copy.checksum) {
        return Err("the copy has another checksum");
    }
    Ok(())
}

/// Compares the checksums that both have. One of an object in parts ("…-3") depends on the parts.
fn differs(a: &Checksum, b: &Checksum) -> bool {
    let pairs = [
        (&a.checksum_crc64nvme, &b.checksum_crc64nvme),
        (&a.checksum_crc32, &b.checksum_crc32),
        (&a.checksum_crc32c, &b.checksum_crc32c),
        (&a.checksum_sha1, &b.checksum_sha1),
        (&a.checksum_sha256, &b.checksum_sha256),
    ];
    pairs.iter().any(|(a, b)| match (a, b) {
        (Some(a), Some(b)) => a != b && !a.contains('-') && !b.contains('-'),
        _ => false,
    })
}
