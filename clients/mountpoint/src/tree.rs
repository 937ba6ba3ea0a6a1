//! The tree of files and directories: Mountpoint's, in which a directory exists as long as the kernel refers to it.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::{OsStr, OsString};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use mountpoint_s3_client::types::ETag;
use mountpoint_s3_fs::fs::OpenFlags;
use mountpoint_s3_fs::memory::WriteHandleLimiter;
use mountpoint_s3_fs::metablock::{
    AddDirEntry, AddDirEntryResult, InodeError, InodeInformation, InodeKind, InodeNo, InodeStat, Lookup, Metablock,
    NewHandle, PendingUploadHook, ReadWriteMode, S3Location, WriteMode,
};
use time::OffsetDateTime;

/// How long the kernel may believe that a directory exists which has vanished from S3.
const VANISHED_TTL: Duration = Duration::from_secs(1);

/// A directory exists in S3 only while there is an object in it. Mountpoint denies one that has vanished, even to those who have it: a
/// pod's mount of a subPath, or a process's working directory. On other file systems such a directory is an empty one. Kubernetes
/// needs that: kubelet never unmounts a subPath that it cannot stat.
#[derive(Clone)]
pub struct Tree(Arc<Inner>);

struct Inner {
    tree: Box<dyn Metablock>,
    /// The kernel's references to directories, as FUSE counts them (lookup, mkdir, readdirplus; forget).
    directories: Mutex<HashMap<InodeNo, u64>>,
    began: OffsetDateTime,
}

impl Tree {
    pub fn new(tree: impl Metablock + 'static) -> Self {
        let began = OffsetDateTime::now_utc();
        Self(Arc::new(Inner { tree: Box::new(tree), directories: Mutex::default(), began }))
    }

    /// Reports whether a name belongs to a directory.
    pub async fn is_directory(&self, parent: InodeNo, name: &OsStr) -> bool {
        match self.lookup(parent, name).await {
            Ok(found) => {
                self.forget(found.ino(), 1).await;
                found.kind() == InodeKind::Directory
            }
            Err(_) => false,
        }
    }

    fn directories(&self) -> MutexGuard<'_, HashMap<InodeNo, u64>> {
        self.0.directories.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn referenced(&self, kind: InodeKind, ino: InodeNo) {
        if kind == InodeKind::Directory {
            *self.directories().entry(ino).or_default() += 1;
        }
    }
}

#[async_trait]
impl Metablock for Tree {
    async fn lookup(&self, parent: InodeNo, name: &OsStr) -> Result<Lookup, InodeError> {
        let found = self.0.tree.lookup(parent, name).await?;
        self.referenced(found.kind(), found.ino());
        Ok(found)
    }

    async fn getattr(&self, ino: InodeNo, revalidate: bool) -> Result<Lookup, InodeError> {
        let error = match self.0.tree.getattr(ino, revalidate).await {
            Err(e @ (InodeError::FileDoesNotExist(..) | InodeError::InodeDoesNotExist(_) | InodeError::StaleInode { .. })) => e,
            other => return other,
        };
        if !self.directories().contains_key(&ino) {
            return Err(error);
        }
        Ok(Lookup::new(ino, InodeStat::for_directory(self.0.began, VANISHED_TTL), InodeKind::Directory, None))
    }

    async fn setattr(
        &self,
        ino: InodeNo,
        atime: Option<OffsetDateTime>,
        mtime: Option<OffsetDateTime>,
    ) -> Result<Lookup, InodeError> {
        self.0.tree.setattr(ino, atime, mtime).await
    }

    async fn create(&self, dir: InodeNo, name: &OsStr, kind: InodeKind) -> Result<Lookup, InodeError> {
        let made = self.0.tree.create(dir, name, kind).await?;
        self.referenced(made.kind(), made.ino());
        Ok(made)
    }

    async fn forget(&self, ino: InodeNo, n: u64) {
        if let Entry::Occupied(mut references) = self.directories().entry(ino) {
            *references.get_mut() = references.get().saturating_sub(n);
            if *references.get() == 0 {
                references.remove();
            }
        }
        self.0.tree.forget(ino, n).await
    }

    async fn open_handle(
        &self,
        ino: InodeNo,
        fh: u64,
        mode: &WriteMode,
        flags: OpenFlags,
        limiter: Option<&WriteHandleLimiter>,
    ) -> Result<NewHandle, InodeError> {
        self.0.tree.open_handle(ino, fh, mode, flags, limiter).await
    }

    async fn inc_file_size(&self, ino: InodeNo, len: usize) -> Result<usize, InodeError> {
        self.0.tree.inc_file_size(ino, len).await
    }

    async fn finish_writing(&self, ino: InodeNo, etag: Option<ETag>, fh: u64) -> Result<Lookup, InodeError> {
        self.0.tree.finish_writing(ino, etag, fh).await
    }

    async fn finish_reading(&self, ino: InodeNo, fh: u64) -> Result<(), InodeError> {
        self.0.tree.finish_reading(ino, fh).await
    }

    async fn flush_reader(&self, ino: InodeNo, fh: u64) -> Result<(), InodeError> {
        self.0.tree.flush_reader(ino, fh).await
    }

    async fn flush_writer(
        &self,
        ino: InodeNo,
        fh: u64,
        hook: PendingUploadHook,
    ) -> Result<Option<PendingUploadHook>, InodeError> {
        self.0.tree.flush_writer(ino, fh, hook).await
    }

    async fn release_writer(
        &self,
        ino: InodeNo,
        fh: u64,
        hook: PendingUploadHook,
        location: &S3Location,
    ) -> Result<(), InodeError> {
        self.0.tree.release_writer(ino, fh, hook, location).await
    }

    async fn try_reactivate_handle(&self, ino: InodeNo, fh: u64, mode: ReadWriteMode) -> Result<bool, InodeError> {
        self.0.tree.try_reactivate_handle(ino, fh, mode).await
    }

    async fn new_readdir_handle(&self, ino: InodeNo) -> Result<u64, InodeError> {
        self.0.tree.new_readdir_handle(ino).await
    }

    async fn readdir<'a>(
        &self,
        parent: InodeNo,
        fh: u64,
        offset: i64,
        plus: bool,
        mut add: AddDirEntry<'a>,
    ) -> Result<(), InodeError> {
        let counted = move |found: InodeInformation, name: OsString, offset: i64, generation: u64| {
            let (kind, ino, own) = (found.kind(), found.ino(), name == "." || name == "..");
            let result = add(found, name, offset, generation);
            if plus && !own && result == AddDirEntryResult::EntryAdded {
                self.referenced(kind, ino);
            }
            result
        };
        self.0.tree.readdir(parent, fh, offset, plus, Box::new(counted)).await
    }

    async fn releasedir(&self, fh: u64) -> Result<(), InodeError> {
        self.0.tree.releasedir(fh).await
    }

    async fn rename(
        &self,
        from: InodeNo,
        name: &OsStr,
        to: InodeNo,
        new_name: &OsStr,
        overwrite: bool,
    ) -> Result<(), InodeError> {
        self.0.tree.rename(from, name, to, new_name, overwrite).await
    }

    async fn rmdir(&self, parent: InodeNo, name: &OsStr) -> Result<(), InodeError> {
        self.0.tree.rmdir(parent, name).await
    }

    async fn unlink(&self, parent: InodeNo, name: &OsStr) -> Result<(), InodeError> {
        self.0.tree.unlink(parent, name).await
    }
}
