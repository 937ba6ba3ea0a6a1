//! Uploads. One without data is a single request. An answer that leaves it open whether an upload is stored is settled by a look at the
//! object.

use std::collections::HashMap;
use std::pin::pin;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use futures::future::{Either, select};
use mountpoint_s3_client::checksums::{Crc32c, Crc64nvme, crc32c, crc32c_from_base64, crc32c_to_base64};
use mountpoint_s3_client::error::{ObjectClientError, PutObjectError};
use mountpoint_s3_client::error_metadata::ProvideErrorMetadata;
use mountpoint_s3_client::types::{
    Checksum, ChecksumAlgorithm, ChecksumMode, HeadObjectParams, HeadObjectResult, PutObjectParams, PutObjectResult, PutObjectSingleParams,
    PutObjectTrailingChecksums, UploadChecksum, UploadReview, UploadReviewOutcome, UploadReviewPart,
};
use mountpoint_s3_client::{ObjectClient, PutObjectRequest, S3CrtClient, S3PutObjectRequest, S3RequestError};
use mountpoint_s3_fs::checksums::combine_checksums;
use time::OffsetDateTime;

use crate::client::Client;
use crate::report;

/// How long the completion of an upload may have no answer before the object is looked at. The runtime sends it again after 30 s.
const SLOW: Duration = Duration::from_secs(35);

/// How long an upload takes to begin at most: the file system starts it on another thread.
const BEGIN: Duration = Duration::from_secs(10);

pub type Stored = Result<PutObjectResult, ObjectClientError<PutObjectError, S3RequestError>>;

/// An object's ETag and time.
pub type Version = (String, OffsetDateTime);

/// The uploads that have no data yet.
#[derive(Debug, Default)]
pub struct Uploads {
    known: Mutex<Known>,
    begun: Condvar,
}

#[derive(Debug, Default)]
struct Known {
    /// What the next upload of a key replaces.
    replaced: HashMap<String, Version>,
    empty: HashMap<String, Arc<Begun>>,
}

/// An upload at its start.
#[derive(Debug)]
pub struct Begun {
    bucket: String,
    key: String,
    params: PutObjectParams,
    replaced: Option<Version>,
    /// The empty object that it has stored.
    stored: futures::lock::Mutex<Option<PutObjectResult>>,
}

impl Uploads {
    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Notes the version that the next upload of a key replaces.
    pub fn replaces(&self, key: &str, version: Option<Version>) {
        match version {
            Some(version) => self.known().replaced.insert(key.to_owned(), version),
            None => self.known().replaced.remove(key),
        };
    }

    pub fn begin(&self, bucket: &str, key: &str, params: &PutObjectParams) -> Arc<Begun> {
        let mut known = self.known();
        let replaced = known.replaced.remove(key);
        let (bucket, key, params) = (bucket.to_owned(), key.to_owned(), params.clone());
        let begun = Arc::new(Begun { bucket, key, params, replaced, stored: Default::default() });
        known.empty.insert(begun.key.clone(), begun.clone());
        self.begun.notify_all();
        begun
    }

    /// Returns the upload of a key that has no data yet. The file system has asked for it, but it may not have begun.
    pub fn empty(&self, key: &str) -> Option<Arc<Begun>> {
        let until = Instant::now() + BEGIN;
        let mut known = self.known();
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match known.empty.get(key) {
                Some(begun) => return Some(begun.clone()),
                None if left.is_zero() => return None,
                None => known = self.begun.wait_timeout(known, left).unwrap_or_else(|poisoned| poisoned.into_inner()).0,
            }
        }
    }

    fn ended(&self, upload: &Arc<Begun>) {
        let mut known = self.known();
        if known.empty.get(&upload.key).is_some_and(|begun| Arc::ptr_eq(begun, upload)) {
            known.empty.remove(&upload.key);
        }
    }
}

/// An upload that counts as in flight until it is completed or dropped. The request in parts begins with the first data.
#[derive(Debug)]
pub struct Upload {
    client: Client,
    begun: Arc<Begun>,
    request: Option<S3PutObjectRequest>,
    counted: report::Upload,
}

impl Upload {
    pub fn new(client: Client, begun: Arc<Begun>, counted: report::Upload) -> Self {
        Self { client, begun, request: None, counted }
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        self.client.uploads.ended(&self.begun);
    }
}

#[async_trait]
impl PutObjectRequest for Upload {
    type ClientError = S3RequestError;

    async fn write(&mut self, slice: &[u8]) -> Result<(), ObjectClientError<PutObjectError, S3RequestError>> {
        if slice.is_empty() {
            return Ok(());
        }
        self.counted.wrote(slice.len());
        let request = match &mut self.request {
            Some(request) => request,
            none => {
                self.client.uploads.ended(&self.begun);
                let begun = &self.begun;
                none.insert(self.client.s3.put_object(&begun.bucket, &begun.key, &begun.params).await?)
            }
        };
        request.write(slice).await
    }

    async fn complete(self) -> Stored {
        self.review_and_complete(|_| UploadReviewOutcome::Proceed(None)).await
    }

    async fn review_and_complete(mut self, review: impl FnOnce(UploadReview) -> UploadReviewOutcome + Send + 'static) -> Stored {
        let Some(request) = self.request.take() else {
            return put_empty(&self.client.s3, &self.begun).await;
        };
        let sent = Arc::new(Mutex::new(None));
        let completes = sent.clone();
        let complete = request.review_and_complete(move |reviewed| {
            let object = Object::of(&reviewed.parts);
            let outcome = review(reviewed);
            if let UploadReviewOutcome::Proceed(checksum) = &outcome {
                let crc64nvme = checksum.as_ref().map(UploadChecksum::to_base64);
                *completes.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = Some(Object { crc64nvme, ..object });
            }
            outcome
        });
        let mut complete = pin!(complete);
        loop {
            let answer = match select(complete.as_mut(), self.client.after(SLOW)).await {
                Either::Left((Ok(stored), _)) => return Ok(stored),
                Either::Left((Err(error), _)) => Some(error),
                Either::Right(_) => None,
            };
            let object = sent.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).clone();
            let stored = match object {
                Some(object) if answer.as_ref().is_none_or(is_unclear) => settle(&self.client.s3, &self.begun, &object).await,
                _ => None,
            };
            match (stored, answer) {
                (Some(stored), _) => return Ok(stored),
                (None, Some(error)) => return Err(error),
                (None, None) => {}
            }
        }
    }
}

/// Stores an empty object, if that upload has not stored it before.
pub async fn put_empty(s3: &S3CrtClient, upload: &Begun) -> Stored {
    let mut stored = upload.stored.lock().await;
    if let Some(stored) = &*stored {
        return Ok(stored.clone());
    }
    let mut params = PutObjectSingleParams::new();
    params.checksum = match &upload.params.trailing_checksums {
        PutObjectTrailingChecksums::Composite(ChecksumAlgorithm::Crc32c) => Some(UploadChecksum::Crc32c(Crc32c::new(0))),
        PutObjectTrailingChecksums::FullObject(ChecksumAlgorithm::Crc64nvme) => Some(UploadChecksum::Crc64nvme(Crc64nvme::new(0))),
        _ => None,
    };
    params.storage_class = upload.params.storage_class.clone();
    params.server_side_encryption = upload.params.server_side_encryption.clone();
    params.ssekms_key_id = upload.params.ssekms_key_id.clone();
    params.custom_headers = upload.params.custom_headers.clone();
    params.object_metadata = upload.params.object_metadata.clone();
    let result = match s3.put_object_single(&upload.bucket, &upload.key, &params, []).await {
        // Any empty object is the right one.
        Err(error) if is_unclear(&error) => head(s3, upload).await.filter(|head| head.size == 0).map(result).ok_or(error)?,
        answer => answer?,
    };
    *stored = Some(result.clone());
    Ok(result)
}

/// Reports whether an upload may be stored in spite of an error: there was no answer, or one that says nothing about the upload. 404 is
/// the answer to a second request if the first completed the upload.
fn is_unclear(error: &ObjectClientError<PutObjectError, S3RequestError>) -> bool {
    match error {
        ObjectClientError::ServiceError(_) => false,
        ObjectClientError::ClientError(e) => !matches!(e.meta().http_code, Some(300..=403 | 405..=499)),
    }
}

async fn head(s3: &S3CrtClient, upload: &Begun) -> Option<HeadObjectResult> {
    let params = HeadObjectParams::new().checksum_mode(Some(ChecksumMode::Enabled));
    s3.head_object(&upload.bucket, &upload.key, &params).await.ok()
}

fn result(head: HeadObjectResult) -> PutObjectResult {
    PutObjectResult::new(head.etag, head.sse_type, head.sse_kms_key_id)
}

/// Returns the object of an upload if it is proven that it is stored.
async fn settle(s3: &S3CrtClient, upload: &Begun, object: &Object) -> Option<PutObjectResult> {
    let head = head(s3, upload).await?;
    let version = (head.etag.as_str().to_owned(), head.last_modified);
    object.is(head.size, &head.checksum, &version, upload.replaced.as_ref()).then(|| result(head))
}

/// What an upload in parts has sent.
#[derive(Debug, Clone, PartialEq)]
struct Object {
    size: u64,
    parts: usize,
    /// Checksums of the object, in base64: of its bytes, and of the checksums of its parts.
    crc32c: Option<(String, String)>,
    crc64nvme: Option<String>,
}

impl Object {
    fn of(parts: &[UploadReviewPart]) -> Self {
        let (mut whole, mut composite) = (Some(Crc32c::new(0)), crc32c::Hasher::new());
        for part in parts {
            let checksum = part.checksum.as_deref().and_then(|text| crc32c_from_base64(text).ok());
            whole = whole.zip(checksum).map(|(whole, part_checksum)| {
                composite.update(&part_checksum.value().to_be_bytes());
                combine_checksums(whole, part_checksum, part.size as usize)
            });
        }
        let composite = composite.finalize();
        let crc32c = whole.map(|whole| (crc32c_to_base64(&whole), format!("{}-{}", crc32c_to_base64(&composite), parts.len())));
        Self { size: parts.iter().map(|part| part.size).sum(), parts: parts.len(), crc32c, crc64nvme: None }
    }

    /// Reports whether an object that the service has is this one, and not the one that it replaces.
    fn is(&self, size: u64, checksum: &Checksum, version: &Version, replaced: Option<&Version>) -> bool {
        if size != self.size {
            return false;
        }
        if let (Some(theirs), Some((whole, composite))) = (&checksum.checksum_crc32c, &self.crc32c) {
            return theirs == composite || theirs == whole;
        }
        if let (Some(theirs), Some(ours)) = (&checksum.checksum_crc64nvme, &self.crc64nvme) {
            return theirs == ours;
        }
        let parts = version.0.trim_matches('"').rsplit_once('-').and_then(|(_, parts)| parts.parse().ok());
        parts.is_none_or(|parts: usize| parts == self.parts) && replaced != Some(version)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(content: &[u8]) -> UploadReviewPart {
        UploadReviewPart { size: content.len() as u64, checksum: Some(crc32c_to_base64(&crc32c::checksum(content))) }
    }

    #[test]
    fn an_object_is_recognised_by_its_checksum_or_as_a_new_version() {
        let object = Object::of(&[part(b"hello "), part(b"world")]);
        assert_eq!(object.crc32c.as_ref().unwrap().0, crc32c_to_base64(&crc32c::checksum(b"hello world")));
        let version = |etag: &str| (etag.to_owned(), OffsetDateTime::UNIX_EPOCH);
        let with = |text: &str| Checksum { checksum_crc32c: Some(text.to_owned()), ..Checksum::empty() };
        let none = Checksum::empty();
        let (whole, composite) = object.crc32c.clone().unwrap();
        for (want, size, checksum, etag, replaced) in [
            (true, 11, &none, "\"a-2\"", None),
            (true, 11, &none, "\"a-2\"", Some("\"b-2\"")),
            (true, 11, &none, "a", Some("b")),
            (false, 12, &none, "\"a-2\"", None),
            (false, 11, &none, "\"a-3\"", None),
            (false, 11, &none, "\"a-2\"", Some("\"a-2\"")),
            (true, 11, &with(&composite), "\"a-2\"", Some("\"a-2\"")),
            (true, 11, &with(&whole), "\"a-2\"", Some("\"a-2\"")),
            (false, 11, &with("AAAAAA=="), "\"b-2\"", None),
        ] {
            let replaced = replaced.map(version);
            assert_eq!(object.is(size, checksum, &version(etag), replaced.as_ref()), want, "{size} {checksum:?} {etag} {replaced:?}");
        }
        let later = (String::from("\"a-2\""), OffsetDateTime::UNIX_EPOCH + Duration::from_secs(1));
        assert!(object.is(11, &none, &later, Some(&version("\"a-2\""))));
    }

    #[test]
    fn an_empty_upload_is_found_until_it_has_data() {
        let uploads = Arc::new(Uploads::default());
        let replaced = (String::from("e"), OffsetDateTime::UNIX_EPOCH);
        uploads.replaces("k", Some(replaced.clone()));
        let other = uploads.clone();
        let found = std::thread::spawn(move || other.empty("k"));
        let begun = uploads.begin("b", "k", &PutObjectParams::new());
        assert_eq!(begun.replaced, Some(replaced));
        assert!(Arc::ptr_eq(&found.join().unwrap().unwrap(), &begun));
        let newer = uploads.begin("b", "k", &PutObjectParams::new());
        assert_eq!(newer.replaced, None);
        uploads.ended(&begun);
        assert!(Arc::ptr_eq(&uploads.empty("k").unwrap(), &newer));
        uploads.ended(&newer);
        assert!(uploads.known().empty.is_empty());
    }
}
