//! The S3 client that the file system has: that of Mountpoint, with its uploads counted and proven, listings that end, and renames where
//! the service has none.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use futures::FutureExt;
use futures::future::BoxFuture;
use mountpoint_s3_client::error::{
    CopyObjectError, DeleteObjectError, GetObjectAttributesError, GetObjectError, HeadObjectError, ListObjectsError,
    ObjectClientError, PutObjectError, RenameObjectError,
};
use mountpoint_s3_client::types::{
    CopyObjectParams, CopyObjectResult, DeleteObjectResult, GetObjectAttributesResult, GetObjectParams,
    HeadObjectParams, HeadObjectResult, ListObjectsResult, ObjectAttribute, ObjectClientResult, PutObjectParams,
    PutObjectResult, PutObjectSingleParams, RenameObjectParams, RenameObjectResult,
};
use mountpoint_s3_client::{ObjectClient, S3CrtClient, S3GetObjectResponse, S3RequestError};
use mountpoint_s3_crt::io::event_loop::EventLoopTimer;
use mountpoint_s3_crt::s3::client::BufferPoolUsageStats;
use mountpoint_s3_fs::metablock::InodeError;

use crate::listing::Position;
use crate::rename;
use crate::report::Report;
use crate::tree::Objects;
use crate::upload::{Upload, Uploads, Version, put_empty};

/// How files are renamed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Rename {
    /// By the service's RenameObject, which only directory buckets have. Other services may take it for an upload of nothing.
    Native,
    /// By a copy of the object, and the deletion of the source when the copy is proven.
    Copy,
}

/// Wraps the client of Mountpoint.
#[derive(Clone)]
pub struct Client {
    pub s3: S3CrtClient,
    pub uploads: Arc<Uploads>,
    bucket: Arc<str>,
    report: Arc<Report>,
    rename: Rename,
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("bucket", &self.bucket).field("rename", &self.rename).finish_non_exhaustive()
    }
}

impl Client {
    pub fn new(s3: S3CrtClient, bucket: &str, report: Arc<Report>, rename: Rename) -> Self {
        Self { s3, uploads: Default::default(), bucket: bucket.into(), report, rename }
    }

    /// Waits.
    pub fn after(&self, duration: Duration) -> BoxFuture<'static, ()> {
        match self.s3.event_loop_group().get_next_loop() {
            Ok(event_loop) => EventLoopTimer::new(&event_loop, duration).map(|_| ()).boxed(),
            Err(_) => futures::future::pending().boxed(),
        }
    }
}

type Answer<T, E> = ObjectClientResult<T, E, S3RequestError>;

#[async_trait]
impl ObjectClient for Client {
    type GetObjectResponse = S3GetObjectResponse;
    type PutObjectRequest = Upload;
    type ClientError = S3RequestError;

    fn read_part_size(&self) -> usize {
        self.s3.read_part_size()
    }

    fn write_part_size(&self) -> usize {
        self.s3.write_part_size()
    }

    fn initial_read_window_size(&self) -> Option<usize> {
        self.s3.initial_read_window_size()
    }

    fn mem_usage_stats(&self) -> Option<BufferPoolUsageStats> {
        self.s3.mem_usage_stats()
    }

    async fn delete_object(&self, bucket: &str, key: &str) -> Answer<DeleteObjectResult, DeleteObjectError> {
        self.s3.delete_object(bucket, key).await
    }

    async fn copy_object(
        &self,
        source_bucket: &str,
        source_key: &str,
        bucket: &str,
        key: &str,
        params: &CopyObjectParams,
    ) -> Answer<CopyObjectResult, CopyObjectError> {
        self.s3.copy_object(source_bucket, source_key, bucket, key, params).await
    }

    async fn get_object(&self, bucket: &str, key: &str, params: &GetObjectParams) -> Answer<S3GetObjectResponse, GetObjectError> {
        self.s3.get_object(bucket, key, params).await
    }

    async fn list_objects(
        &self,
        bucket: &str,
        continuation_token: Option<&str>,
        delimiter: &str,
        max_keys: usize,
        prefix: &str,
    ) -> Answer<ListObjectsResult, ListObjectsError> {
        let position = Position::parse(continuation_token);
        let token = position.as_ref().map(Position::token);
        let mut page = self.s3.list_objects(bucket, token, delimiter, max_keys, prefix).await?;
        match Position::follow(position, &mut page) {
            Ok(()) => Ok(page),
            Err(e) => Err(ObjectClientError::ClientError(S3RequestError::InternalError(e.into()))),
        }
    }

    async fn head_object(&self, bucket: &str, key: &str, params: &HeadObjectParams) -> Answer<HeadObjectResult, HeadObjectError> {
        self.s3.head_object(bucket, key, params).await
    }

    async fn put_object(&self, bucket: &str, key: &str, params: &PutObjectParams) -> Answer<Upload, PutObjectError> {
        Ok(Upload::new(self.clone(), self.uploads.begin(bucket, key, params), self.report.upload()))
    }

    async fn put_object_single(
        &self,
        bucket: &str,
        key: &str,
        params: &PutObjectSingleParams,
        contents: impl AsRef<[u8]> + Send + 'static,
    ) -> Answer<PutObjectResult, PutObjectError> {
        let mut upload = self.report.upload();
        upload.wrote(contents.as_ref().len());
        self.s3.put_object_single(bucket, key, params, contents).await
    }

    async fn get_object_attributes(
        &self,
        bucket: &str,
        key: &str,
        max_parts: Option<usize>,
        part_number_marker: Option<usize>,
        attributes: &[ObjectAttribute],
    ) -> Answer<GetObjectAttributesResult, GetObjectAttributesError> {
        self.s3.get_object_attributes(bucket, key, max_parts, part_number_marker, attributes).await
    }

    async fn rename_object(
        &self,
        bucket: &str,
        source: &str,
        destination: &str,
        params: &RenameObjectParams,
    ) -> Answer<RenameObjectResult, RenameObjectError> {
        match self.rename {
            Rename::Native => self.s3.rename_object(bucket, source, destination, params).await,
            Rename::Copy => rename::by_copy(&self.s3, bucket, source, destination, params).await,
        }
    }
}

#[async_trait]
impl Objects for Client {
    fn replaces(&self, key: &str, version: Option<Version>) {
        self.uploads.replaces(key, version);
    }

    async fn store_empty(&self, key: &str) -> Result<(), InodeError> {
        // Without one, the upload has data or has ended.
        let Some(upload) = self.uploads.empty(key) else { return Ok(()) };
        match put_empty(&self.s3, &upload).await {
            Ok(_) => Ok(()),
            Err(e) => Err(InodeError::client_error(e, "PutObject of an empty file failed", &self.bucket, key)),
        }
    }

    async fn remove_marker(&self, key: &str) -> Result<bool, InodeError> {
        let failed = |e| InodeError::client_error(e, "ListObjectsV2 failed", &self.bucket, key);
        let listed = self.s3.list_objects(&self.bucket, None, "", 2, key).await.map_err(failed)?;
        match &listed.objects[..] {
            [] => Ok(true),
            [marker] if marker.key == key && marker.size == 0 && listed.next_continuation_token.is_none() => {
                let failed = |e| InodeError::client_error(e, "DeleteObject failed", &self.bucket, key);
                self.s3.delete_object(&self.bucket, key).await.map(|_| true).map_err(failed)
            }
            _ => Ok(false),
        }
    }
}
