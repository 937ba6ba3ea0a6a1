//! The S3 client that the file system has: that of Mountpoint, with its uploads counted and renames where the service has none.

use std::sync::Arc;

use async_trait::async_trait;
use mountpoint_s3_client::error::{
    CopyObjectError, DeleteObjectError, GetObjectAttributesError, GetObjectError, HeadObjectError, ListObjectsError,
    ObjectClientError, PutObjectError, RenameObjectError,
};
use mountpoint_s3_client::types::{
    CopyObjectParams, CopyObjectResult, DeleteObjectResult, GetObjectAttributesResult, GetObjectParams,
    HeadObjectParams, HeadObjectResult, ListObjectsResult, ObjectAttribute, ObjectClientResult, PutObjectParams,
    PutObjectResult, PutObjectSingleParams, RenameObjectParams, RenameObjectResult, UploadReview, UploadReviewOutcome,
};
use mountpoint_s3_client::{ObjectClient, PutObjectRequest};
use mountpoint_s3_crt::s3::client::BufferPoolUsageStats;

use crate::rename;
use crate::report::{Report, Upload};

/// How files are renamed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Rename {
    /// By the service's RenameObject, which only directory buckets have. Other services may take it for an upload of nothing.
    Native,
    /// By a copy of the object, and the deletion of the source when the copy is proven.
    Copy,
}

/// Wraps an [ObjectClient].
#[derive(Debug, Clone)]
pub struct Client<C> {
    inner: C,
    report: Arc<Report>,
    rename: Rename,
}

impl<C> Client<C> {
    pub fn new(inner: C, report: Arc<Report>, rename: Rename) -> Self {
        Self { inner, report, rename }
    }
}

type Answer<T, E, C> = ObjectClientResult<T, E, <C as ObjectClient>::ClientError>;

#[async_trait]
impl<C> ObjectClient for Client<C>
where
    C: ObjectClient + Send + Sync,
    C::PutObjectRequest: Send,
{
    type GetObjectResponse = C::GetObjectResponse;
    type PutObjectRequest = CountedUpload<C::PutObjectRequest>;
    type ClientError = C::ClientError;

    fn read_part_size(&self) -> usize {
        self.inner.read_part_size()
    }

    fn write_part_size(&self) -> usize {
        self.inner.write_part_size()
    }

    fn initial_read_window_size(&self) -> Option<usize> {
        self.inner.initial_read_window_size()
    }

    fn mem_usage_stats(&self) -> Option<BufferPoolUsageStats> {
        self.inner.mem_usage_stats()
    }

    async fn delete_object(&self, bucket: &str, key: &str) -> Answer<DeleteObjectResult, DeleteObjectError, C> {
        self.inner.delete_object(bucket, key).await
    }

    async fn copy_object(
        &self,
        source_bucket: &str,
        source_key: &str,
        bucket: &str,
        key: &str,
        params: &CopyObjectParams,
    ) -> Answer<CopyObjectResult, CopyObjectError, C> {
        self.inner.copy_object(source_bucket, source_key, bucket, key, params).await
    }

    async fn get_object(
        &self,
        bucket: &str,
        key: &str,
        params: &GetObjectParams,
    ) -> Answer<Self::GetObjectResponse, GetObjectError, C> {
        self.inner.get_object(bucket, key, params).await
    }

    async fn list_objects(
        &self,
        bucket: &str,
        continuation_token: Option<&str>,
        delimiter: &str,
        max_keys: usize,
        prefix: &str,
    ) -> Answer<ListObjectsResult, ListObjectsError, C> {
        self.inner.list_objects(bucket, continuation_token, delimiter, max_keys, prefix).await
    }

    async fn head_object(
        &self,
        bucket: &str,
        key: &str,
        params: &HeadObjectParams,
    ) -> Answer<HeadObjectResult, HeadObjectError, C> {
        self.inner.head_object(bucket, key, params).await
    }

    async fn put_object(
        &self,
        bucket: &str,
        key: &str,
        params: &PutObjectParams,
    ) -> Answer<Self::PutObjectRequest, PutObjectError, C> {
        let upload = self.report.upload();
        let request = self.inner.put_object(bucket, key, params).await?;
        Ok(CountedUpload { request, upload })
    }

    async fn put_object_single(
        &self,
        bucket: &str,
        key: &str,
        params: &PutObjectSingleParams,
        contents: impl AsRef<[u8]> + Send + 'static,
    ) -> Answer<PutObjectResult, PutObjectError, C> {
        let mut upload = self.report.upload();
        upload.wrote(contents.as_ref().len());
        self.inner.put_object_single(bucket, key, params, contents).await
    }

    async fn get_object_attributes(
        &self,
        bucket: &str,
        key: &str,
        max_parts: Option<usize>,
        part_number_marker: Option<usize>,
        attributes: &[ObjectAttribute],
    ) -> Answer<GetObjectAttributesResult, GetObjectAttributesError, C> {
        self.inner.get_object_attributes(bucket, key, max_parts, part_number_marker, attributes).await
    }

    async fn rename_object(
        &self,
        bucket: &str,
        source: &str,
        destination: &str,
        params: &RenameObjectParams,
    ) -> Answer<RenameObjectResult, RenameObjectError, C> {
        match self.rename {
            Rename::Native => self.inner.rename_object(bucket, source, destination, params).await,
            Rename::Copy => rename::by_copy(&self.inner, bucket, source, destination, params).await,
        }
    }
}

/// An upload that counts as in flight until it is completed or dropped.
#[derive(Debug)]
pub struct CountedUpload<R> {
    request: R,
    upload: Upload,
}

#[async_trait]
impl<R: PutObjectRequest> PutObjectRequest for CountedUpload<R> {
    type ClientError = R::ClientError;

    async fn write(&mut self, slice: &[u8]) -> Result<(), ObjectClientError<PutObjectError, R::ClientError>> {
        self.upload.wrote(slice.len());
        self.request.write(slice).await
    }

    async fn complete(self) -> Result<PutObjectResult, ObjectClientError<PutObjectError, R::ClientError>> {
        let _in_flight = self.upload;
        self.request.complete().await
    }

    async fn review_and_complete(
        self,
        review: impl FnOnce(UploadReview) -> UploadReviewOutcome + Send + 'static,
    ) -> Result<PutObjectResult, ObjectClientError<PutObjectError, R::ClientError>> {
        let _in_flight = self.upload;
        self.request.review_and_complete(review).await
    }
}
