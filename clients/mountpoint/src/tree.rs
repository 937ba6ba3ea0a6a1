//! The tree of files and directories: Mountpoint's, in which a directory does not vanish with the last file in it.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet, VecDeque};
use std::ffi::{OsStr, OsString};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use futures::future::join_all;
use mountpoint_s3_client::types::ETag;
use mountpoint_s3_fs::fs::OpenFlags;
use mountpoint_s3_fs::memory::WriteHandleLimiter;
use mountpoint_s3_fs::metablock::{
    AddDirEntry, AddDirEntryResult, InodeError, InodeErrorInfo, InodeInformation, InodeKind, InodeNo, InodeStat, Lookup, Metablock,
    NewHandle, PendingUploadHook, ReadWriteMode, S3Location, WriteMode,
};
use time::OffsetDateTime;

/// How long the kernel may believe that a directory exists which has vanished from S3.
const VANISHED_TTL: Duration = Duration::from_secs(1);

/// How long a rename waits for the end of an upload: an empty file is stored a moment after the program has closed it, when the kernel
/// releases it.
const RELEASE: Duration = Duration::from_secs(1);

/// How long after the end of its upload or rename a file is looked up again if it seems to be missing. A look-up that was sent before
/// that end can be answered after it.
const SETTLING: Duration = Duration::from_secs(5);

/// A directory exists in S3 only while there is an object in it, and Mountpoint denies one that has vanished. On other file systems such
/// a directory is an empty one, and programs rely on it:
///
/// - Who has the directory keeps it: a pod's mount of a subPath, a process's working directory. kubelet never unmounts a subPath that it
///   cannot stat.
/// - A directory that this mount has emptied is there by its name, as one that was made and not yet written to: `rm -r` removes it.
#[derive(Clone)]
pub struct Tree(Arc<Inner>);

struct Inner {
    tree: Box<dyn Metablock>,
    known: Mutex<Known>,
    began: OffsetDateTime,
}

/// How many directories that this mount has emptied are there by their names: the latest.
const EMPTIED: usize = 10_000;

/// A directory's parent and name.
type Place = (InodeNo, OsString);

#[derive(Default)]
struct Known {
    /// The directories that the kernel refers to.
    directories: HashMap<InodeNo, Directory>,
    /// Those in which this mount has removed something, the oldest first.
    emptied: HashSet<Place>,
    order: VecDeque<Place>,
    /// The files that this mount has created, until they are stored.
    created: HashMap<InodeNo, Place>,
    /// The uploads, by handle, that a program has closed and the kernel has not released.
    closed: HashMap<u64, PendingUploadHook>,
    stored: Recent,
}

/// The files that this mount has stored or renamed lately.
#[derive(Default)]
struct Recent {
    places: HashMap<Place, Instant>,
    order: VecDeque<(Instant, Place)>,
}

impl Recent {
    fn add(&mut self, place: Place, now: Instant) {
        while self.order.front().is_some_and(|(then, _)| now.duration_since(*then) > SETTLING) {
            if let Some((then, old)) = self.order.pop_front()
                && self.places.get(&old) == Some(&then)
            {
                self.places.remove(&old);
            }
        }
        self.places.insert(place.clone(), now);
        self.order.push_back((now, place));
    }

    fn has(&self, place: &Place, now: Instant) -> bool {
        self.places.get(place).is_some_and(|then| now.duration_since(*then) <= SETTLING)
    }
}

struct Directory {
    /// The kernel's references, as FUSE counts them (lookup, mkdir, readdirplus; forget).
    references: u64,
    place: Place,
}

impl Known {
    fn emptied(&mut self, ino: InodeNo) {
        let Some(place) = self.directories.get(&ino).map(|directory| directory.place.clone()) else { return };
        if !self.emptied.insert(place.clone()) {
            return;
        }
        self.order.push_back(place);
        if self.order.len() > EMPTIED
            && let Some(oldest) = self.order.pop_front()
        {
            self.emptied.remove(&oldest);
        }
    }

    fn removed(&mut self, place: &Place) -> bool {
        let had = self.emptied.remove(place);
        if had {
            self.order.retain(|p| p != place);
        }
        had
    }
}

impl Tree {
    pub fn new(tree: impl Metablock + 'static) -> Self {
        let began = OffsetDateTime::now_utc();
        Self(Arc::new(Inner { tree: Box::new(tree), known: Mutex::default(), began }))
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

    /// Stores the files that are closed and not released: an unmount drops what the kernel has not sent yet. Call it when no request
    /// can come any more.
    pub async fn store_closed(&self) {
        let closed: Vec<_> = self.known().closed.drain().collect();
        let stored = closed.iter().map(|(_, hook)| hook.wait_for_completion());
        for result in join_all(stored).await {
            if let Err(e) = result {
                tracing::error!("a closed file is not stored: {e}");
            }
        }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.0.known.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn referenced(&self, kind: InodeKind, ino: InodeNo, parent: InodeNo, name: &OsStr) {
        if kind == InodeKind::Directory {
            let directory = Directory { references: 0, place: (parent, name.to_owned()) };
            self.known().directories.entry(ino).or_insert(directory).references += 1;
        }
    }

    /// Notes that something was removed from a directory.
    fn removed_from(&self, ino: InodeNo) {
        self.known().emptied(ino);
    }

    fn stored_lately(&self, parent: InodeNo, name: &OsStr) -> bool {
        self.known().stored.has(&(parent, name.to_owned()), Instant::now())
    }
}

/// Mountpoint looks for a file by the name that it knows. The kernel can know a newer one: a look-up that missed the end of an upload makes
/// another inode, and a rename then renames that one. ESTALE, unlike ENOENT, has the kernel look the name up again.
fn stale(ino: InodeNo, error: InodeError) -> InodeError {
    match error {
        InodeError::FileDoesNotExist(name, parent) => InodeError::StaleInode {
            remote_key: name,
            old_inode: InodeErrorInfo { ino, ..parent.clone() },
            new_inode: parent,
        },
        other => other,
    }
}

#[async_trait]
impl Metablock for Tree {
    async fn lookup(&self, parent: InodeNo, name: &OsStr) -> Result<Lookup, InodeError> {
        let mut found = self.0.tree.lookup(parent, name).await;
        if matches!(found, Err(InodeError::FileDoesNotExist(..))) && self.stored_lately(parent, name) {
            found = self.0.tree.lookup(parent, name).await;
        }
        let found = match found {
            Err(InodeError::FileDoesNotExist(..)) if self.known().emptied.contains(&(parent, name.to_owned())) => {
                self.0.tree.create(parent, name, InodeKind::Directory).await?
            }
            other => other?,
        };
        self.referenced(found.kind(), found.ino(), parent, name);
        Ok(found)
    }

    async fn getattr(&self, ino: InodeNo, revalidate: bool) -> Result<Lookup, InodeError> {
        let error = match self.0.tree.getattr(ino, revalidate).await {
            Err(e @ (InodeError::FileDoesNotExist(..) | InodeError::InodeDoesNotExist(_) | InodeError::StaleInode { .. })) => e,
            other => return other,
        };
        if !self.known().directories.contains_key(&ino) {
            return Err(stale(ino, error));
        }
        Ok(Lookup::new(ino, InodeStat::for_directory(self.0.began, VANISHED_TTL), InodeKind::Directory, None))
    }

    async fn setattr(
        &self,
        ino: InodeNo,
        atime: Option<OffsetDateTime>,
        mtime: Option<OffsetDateTime>,
    ) -> Result<Lookup, InodeError> {
        match self.0.tree.setattr(ino, atime, mtime).await {
            // Nothing of a directory is stored, so nothing can be changed. Programs that copy directories take that for a failure.
            Err(InodeError::SetAttrNotPermittedOnRemoteInode(..)) if self.known().directories.contains_key(&ino) => {
                self.getattr(ino, false).await
            }
            other => other,
        }
    }

    async fn create(&self, dir: InodeNo, name: &OsStr, kind: InodeKind) -> Result<Lookup, InodeError> {
        let made = self.0.tree.create(dir, name, kind).await?;
        if made.kind() == InodeKind::File {
            self.known().created.insert(made.ino(), (dir, name.to_owned()));
        }
        self.referenced(made.kind(), made.ino(), dir, name);
        Ok(made)
    }

    async fn forget(&self, ino: InodeNo, n: u64) {
        {
            let mut known = self.known();
            if let Entry::Occupied(mut directory) = known.directories.entry(ino) {
                directory.get_mut().references = directory.get().references.saturating_sub(n);
                if directory.get().references == 0 {
                    directory.remove();
                }
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
        self.0.tree.open_handle(ino, fh, mode, flags, limiter).await.map_err(|e| stale(ino, e))
    }

    async fn inc_file_size(&self, ino: InodeNo, len: usize) -> Result<usize, InodeError> {
        self.0.tree.inc_file_size(ino, len).await
    }

    async fn finish_writing(&self, ino: InodeNo, etag: Option<ETag>, fh: u64) -> Result<Lookup, InodeError> {
        let finished = self.0.tree.finish_writing(ino, etag, fh).await;
        let mut known = self.known();
        known.closed.remove(&fh);
        if let Some(place) = known.created.remove(&ino) {
            known.stored.add(place, Instant::now());
        }
        finished
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
        let pending = self.0.tree.flush_writer(ino, fh, hook).await?;
        if let Some(hook) = &pending {
            self.known().closed.insert(fh, hook.clone());
        }
        Ok(pending)
    }

    async fn release_writer(
        &self,
        ino: InodeNo,
        fh: u64,
        hook: PendingUploadHook,
        location: &S3Location,
    ) -> Result<(), InodeError> {
        self.known().closed.remove(&fh);
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
            let result = add(found, name.clone(), offset, generation);
            if plus && !own && result == AddDirEntryResult::EntryAdded {
                self.referenced(kind, ino, parent, &name);
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
        let until = Instant::now() + RELEASE;
        let mut again = true;
        loop {
            match self.0.tree.rename(from, name, to, new_name, overwrite).await {
                Err(InodeError::RenameNotPermittedWhileWriting(_)) if Instant::now() < until => std::thread::sleep(RELEASE / 100),
                Err(InodeError::FileDoesNotExist(..)) if again && self.stored_lately(from, name) => again = false,
                other => break other?,
            }
        }
        self.known().stored.add((to, new_name.to_owned()), Instant::now());
        self.removed_from(from);
        Ok(())
    }

    async fn rmdir(&self, parent: InodeNo, name: &OsStr) -> Result<(), InodeError> {
        let emptied = self.known().removed(&(parent, name.to_owned()));
        match self.0.tree.rmdir(parent, name).await {
            Err(InodeError::FileDoesNotExist(..)) if emptied => {}
            other => other?,
        }
        self.removed_from(parent);
        Ok(())
    }

    async fn unlink(&self, parent: InodeNo, name: &OsStr) -> Result<(), InodeError> {
        self.0.tree.unlink(parent, name).await?;
        self.removed_from(parent);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_recent_for_a_while() {
        let (mut recent, began) = (Recent::default(), Instant::now());
        let place = |name: &str| (1, OsString::from(name));
        recent.add(place("a"), began);
        recent.add(place("b"), began + SETTLING / 2);
        recent.add(place("a"), began + SETTLING / 2);
        assert!(recent.has(&place("a"), began + SETTLING) && !recent.has(&place("c"), began));
        recent.add(place("c"), began + SETTLING * 5 / 4);
        assert!(recent.has(&place("a"), began + SETTLING * 5 / 4) && recent.has(&place("b"), began + SETTLING * 5 / 4));
        recent.add(place("d"), began + SETTLING * 3);
        assert_eq!((recent.places.len(), recent.order.len()), (1, 1));
        assert!(!recent.has(&place("c"), began + SETTLING * 3));
    }
}
