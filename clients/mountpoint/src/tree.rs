//! The tree of files and directories: Mountpoint's, in which a directory does not vanish with the last file in it.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet, VecDeque};
use std::ffi::{OsStr, OsString};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use futures::FutureExt;
use futures::future::{BoxFuture, join_all};
use mountpoint_s3_client::types::ETag;
use mountpoint_s3_fs::fs::OpenFlags;
use mountpoint_s3_fs::memory::WriteHandleLimiter;
use mountpoint_s3_fs::metablock::{
    AddDirEntry, AddDirEntryResult, InodeError, InodeErrorInfo, InodeInformation, InodeKind, InodeNo, InodeStat, Lookup, Metablock,
    NewHandle, PendingUploadHook, ReadWriteMode, S3Location, WriteMode,
};
use time::OffsetDateTime;

use crate::report::Report;
use crate::upload::Version;
use crate::words;

/// How long the kernel may believe that a directory exists which has vanished from S3.
const VANISHED_TTL: Duration = Duration::from_secs(1);

/// How long a rename or a removal waits until the kernel releases a file that the program has closed.
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
///
/// Mountpoint makes another inode of a directory that was gone. The kernel keeps the one that it has, as long as it refers to it: Tree
/// translates.
#[derive(Clone)]
pub struct Tree(Arc<Inner>);

struct Inner {
    tree: Box<dyn Metablock>,
    objects: Box<dyn Objects>,
    report: Arc<Report>,
    options: Options,
    known: Mutex<Known>,
    began: OffsetDateTime,
}

#[derive(Clone, Copy)]
pub struct Options {
    /// Objects can be deleted.
    pub allow_delete: bool,
    /// Uploads append to objects, and do not replace them.
    pub incremental: bool,
}

/// What the tree asks of the service besides what Mountpoint's tree does.
#[async_trait]
pub trait Objects: Send + Sync {
    /// Notes the version of an object that an upload replaces.
    fn replaces(&self, key: &str, version: Option<Version>);
    /// Stores the empty object of an upload that has no data yet.
    async fn store_empty(&self, key: &str) -> Result<(), InodeError>;
    /// Deletes the empty object of a directory's name. Returns false if there are other keys below it.
    async fn remove_marker(&self, key: &str) -> Result<bool, InodeError>;
}

/// How many directories that this mount has emptied are there by their names: the latest.
const EMPTIED: usize = 10_000;

/// A directory's parent and name.
type Place = (InodeNo, OsString);

#[derive(Default)]
struct Known {
    /// The directories that the kernel refers to, by its inodes and by their places.
    directories: HashMap<InodeNo, Directory>,
    places: HashMap<Place, InodeNo>,
    /// Those in which this mount has removed something, the oldest first.
    emptied: HashSet<Place>,
    order: VecDeque<Place>,
    /// The files that this mount has created, until they are stored.
    created: HashMap<InodeNo, Place>,
    /// The processes that open files for writing or close them, by inode and by handle.
    opening: HashMap<InodeNo, u32>,
    closing: HashMap<u64, u32>,
    /// The handles that have replaced those of directories that Mountpoint had recreated.
    handles: HashMap<u64, u64>,
    /// The files that are open for writing, by handle.
    writers: HashMap<u64, Writer>,
    stored: Recent,
}

struct Writer {
    ino: InodeNo,
    key: String,
    opener: u32,
    size: usize,
    /// The program has closed it, and has no error of the upload.
    closed: Option<PendingUploadHook>,
    /// The kernel has released it.
    released: bool,
    upload: Option<Upload>,
}

/// The end of an upload.
#[derive(Clone, Copy, PartialEq)]
enum Upload {
    Stored,
    Failed,
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
    /// Mountpoint's inode of it, and the references to those that were.
    now: InodeNo,
    counted: HashMap<InodeNo, u64>,
}

impl Known {
    /// Returns Mountpoint's inode for one that the kernel has.
    fn real(&self, ino: InodeNo) -> InodeNo {
        self.directories.get(&ino).map_or(ino, |directory| directory.now)
    }

    /// Reports whether a program has closed a file that the kernel has not released, or whose upload has not ended.
    fn is_closing(&self, ino: InodeNo) -> bool {
        self.writers.values().any(|w| w.ino == ino && w.upload.is_none() && (w.released || w.closed.is_some()))
    }

    fn is_released(&self, ino: InodeNo) -> bool {
        self.writers.values().any(|w| w.ino == ino && w.upload.is_none() && w.released)
    }

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
    pub fn new(tree: impl Metablock + 'static, objects: impl Objects + 'static, report: Arc<Report>, options: Options) -> Self {
        let (tree, objects, began) = (Box::new(tree), Box::new(objects), OffsetDateTime::now_utc());
        Self(Arc::new(Inner { tree, objects, report, options, known: Mutex::default(), began }))
    }

    /// Notes the process of a request to open a file for writing.
    pub fn opening(&self, ino: InodeNo, pid: u32) {
        self.known().opening.insert(ino, pid);
    }

    /// Calls close, which closes a handle for a process.
    pub fn closing(&self, fh: u64, pid: u32, close: impl FnOnce()) {
        self.known().closing.insert(fh, pid);
        close();
        self.known().closing.remove(&fh);
    }

    /// Returns the key of a file that is stored and still open for writing.
    pub fn complete(&self, fh: u64) -> Option<String> {
        self.known().writers.get(&fh).filter(|w| w.upload == Some(Upload::Stored)).map(|w| w.key.clone())
    }

    /// Returns the size of a file, if it is known.
    pub async fn size(&self, ino: InodeNo) -> Option<u64> {
        self.getattr(ino, false).await.ok().map(|found| found.stat().size as u64)
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
        let writers: Vec<_> = self.known().writers.drain().filter_map(|(_, w)| Some((w.key, w.closed?))).collect();
        join_all(writers.into_iter().map(|(key, hook)| async move {
            if let Err(e) = hook.wait_for_completion().await {
                self.0.report.unstored(&key, words::unstored(&e));
            }
        }))
        .await;
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.0.known.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn real(&self, ino: InodeNo) -> InodeNo {
        self.known().real(ino)
    }

    /// Counts a reference that the kernel gets, and returns its inode.
    fn referenced(&self, kind: InodeKind, ino: InodeNo, parent: InodeNo, name: &OsStr) -> InodeNo {
        if kind == InodeKind::File {
            return ino;
        }
        let mut known = self.known();
        let place = (parent, name.to_owned());
        let kernels = *known.places.entry(place.clone()).or_insert(ino);
        let new = Directory { references: 0, place, now: ino, counted: HashMap::new() };
        let directory = known.directories.entry(kernels).or_insert(new);
        directory.references += 1;
        directory.now = ino;
        *directory.counted.entry(ino).or_default() += 1;
        kernels
    }

    /// Looks a directory up again whose inode Mountpoint does not have any more. Its parents come first.
    fn renew(&self, ino: InodeNo) -> BoxFuture<'_, Option<Lookup>> {
        async move {
            let (parent, name) = self.known().directories.get(&ino)?.place.clone();
            let found = match self.0.tree.lookup(self.real(parent), &name).await {
                Err(_) if self.renew(parent).await.is_some() => self.0.tree.lookup(self.real(parent), &name).await,
                found => found,
            };
            let found = found.ok()?;
            let is_directory = found.kind() == InodeKind::Directory;
            let kept = match self.known().directories.get_mut(&ino).filter(|_| is_directory) {
                Some(directory) => {
                    directory.now = found.ino();
                    *directory.counted.entry(found.ino()).or_default() += 1;
                    true
                }
                None => false,
            };
            if kept {
                return Some(with_ino(found, ino));
            }
            self.0.tree.forget(found.ino(), 1).await;
            None
        }
        .boxed()
    }

    /// Reports whether a rename or a removal can be tried again, because the file that it needs is being released.
    fn waits(&self, error: &InodeError, until: Instant) -> bool {
        let (InodeError::RenameNotPermittedWhileWriting(file) | InodeError::UnlinkNotPermittedWhileWriting(file)) = error else {
            return false;
        };
        let known = self.known();
        let waits = known.is_released(file.ino) || known.is_closing(file.ino) && Instant::now() < until;
        drop(known);
        if waits {
            std::thread::sleep(RELEASE / 100);
        }
        waits
    }

    /// Removes the object that consoles make for a directory, if there is nothing else in it.
    async fn remove_marker(&self, info: InodeErrorInfo) -> Result<(), InodeError> {
        if !self.0.options.allow_delete {
            return Err(InodeError::CannotRemoveRemoteDirectory(info));
        }
        let dir = info.ino;
        let key = self.0.tree.getattr(dir, false).await?.s3_location()?.full_key();
        if self.has_entries(dir).await? || !self.0.objects.remove_marker(&key).await? {
            return Err(InodeError::DirectoryNotEmpty(info));
        }
        // Mountpoint finds out that it is gone.
        let _ = self.0.tree.getattr(dir, true).await;
        Ok(())
    }

    async fn has_entries(&self, dir: InodeNo) -> Result<bool, InodeError> {
        let fh = self.0.tree.new_readdir_handle(dir).await?;
        let mut found = false;
        let add = |_, name: OsString, _, _| {
            found |= name != "." && name != "..";
            if found { AddDirEntryResult::ReplyBufferFull } else { AddDirEntryResult::EntryAdded }
        };
        let read = self.0.tree.readdir(dir, fh, 0, false, Box::new(add)).await;
        self.0.tree.releasedir(fh).await?;
        read.map(|()| found)
    }

    /// Notes that something was removed from a directory.
    fn removed_from(&self, ino: InodeNo) {
        self.known().emptied(ino);
    }

    fn stored_lately(&self, parent: InodeNo, name: &OsStr) -> bool {
        self.known().stored.has(&(parent, name.to_owned()), Instant::now())
    }
}

fn with_ino(found: Lookup, ino: InodeNo) -> Lookup {
    let location = found.s3_location().ok().cloned();
    Lookup::new(ino, found.stat().clone(), found.kind(), location)
}

/// Reports whether two threads are known to be of different processes. The threads must be there.
fn are_of_different_processes(one: u32, other: u32) -> bool {
    let process = |pid: u32| {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        status.lines().find_map(|line| line.strip_prefix("Tgid:")?.trim().parse::<u32>().ok())
    };
    one != other && process(one).zip(process(other)).is_some_and(|(one, other)| one != other)
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
        let mut found = self.0.tree.lookup(self.real(parent), name).await;
        if matches!(found, Err(InodeError::FileDoesNotExist(..))) && self.stored_lately(parent, name) {
            found = self.0.tree.lookup(self.real(parent), name).await;
        }
        let found = match found {
            Err(InodeError::FileDoesNotExist(..)) if self.known().emptied.contains(&(parent, name.to_owned())) => {
                self.0.tree.create(self.real(parent), name, InodeKind::Directory).await?
            }
            other => other?,
        };
        let ino = self.referenced(found.kind(), found.ino(), parent, name);
        Ok(with_ino(found, ino))
    }

    async fn getattr(&self, ino: InodeNo, revalidate: bool) -> Result<Lookup, InodeError> {
        let error = match self.0.tree.getattr(self.real(ino), revalidate).await {
            Err(e @ (InodeError::FileDoesNotExist(..) | InodeError::InodeDoesNotExist(_) | InodeError::StaleInode { .. })) => e,
            other => return other.map(|found| with_ino(found, ino)),
        };
        if !self.known().directories.contains_key(&ino) {
            return Err(stale(ino, error));
        }
        if let Some(found) = self.renew(ino).await {
            return Ok(found);
        }
        Ok(Lookup::new(ino, InodeStat::for_directory(self.0.began, VANISHED_TTL), InodeKind::Directory, None))
    }

    async fn setattr(
        &self,
        ino: InodeNo,
        atime: Option<OffsetDateTime>,
        mtime: Option<OffsetDateTime>,
    ) -> Result<Lookup, InodeError> {
        match self.0.tree.setattr(self.real(ino), atime, mtime).await {
            // Nothing of a directory is stored, so nothing can be changed. Programs that copy directories take that for a failure.
            Err(InodeError::SetAttrNotPermittedOnRemoteInode(..)) if self.known().directories.contains_key(&ino) => {
                self.getattr(ino, false).await
            }
            other => other.map(|found| with_ino(found, ino)),
        }
    }

    async fn create(&self, dir: InodeNo, name: &OsStr, kind: InodeKind) -> Result<Lookup, InodeError> {
        let made = self.0.tree.create(self.real(dir), name, kind).await?;
        if made.kind() == InodeKind::File {
            self.known().created.insert(made.ino(), (dir, name.to_owned()));
        }
        let ino = self.referenced(made.kind(), made.ino(), dir, name);
        Ok(with_ino(made, ino))
    }

    async fn forget(&self, ino: InodeNo, n: u64) {
        let counted = {
            let mut known = self.known();
            match known.directories.entry(ino) {
                Entry::Vacant(_) => HashMap::from([(ino, n)]),
                Entry::Occupied(mut directory) if directory.get().references > n => {
                    directory.get_mut().references -= n;
                    HashMap::new()
                }
                Entry::Occupied(directory) => {
                    let directory = directory.remove();
                    if known.places.get(&directory.place) == Some(&ino) {
                        known.places.remove(&directory.place);
                    }
                    directory.counted
                }
            }
        };
        for (ino, n) in counted {
            self.0.tree.forget(ino, n).await;
        }
    }

    async fn open_handle(
        &self,
        ino: InodeNo,
        fh: u64,
        mode: &WriteMode,
        flags: OpenFlags,
        limiter: Option<&WriteHandleLimiter>,
    ) -> Result<NewHandle, InodeError> {
        let opener = self.known().opening.remove(&ino).unwrap_or_default();
        let opened = self.0.tree.open_handle(ino, fh, mode, flags, limiter).await.map_err(|e| stale(ino, e))?;
        if matches!(opened.mode, ReadWriteMode::Write) {
            let (stat, key) = (opened.lookup.stat(), opened.lookup.s3_location()?.full_key().to_string());
            self.0.objects.replaces(&key, stat.etag.as_ref().map(|etag| (etag.to_string(), stat.mtime)));
            let writer = Writer { ino, key, opener, size: 0, closed: None, released: false, upload: None };
            self.known().writers.insert(fh, writer);
        }
        Ok(opened)
    }

    async fn inc_file_size(&self, ino: InodeNo, len: usize) -> Result<usize, InodeError> {
        if let Some(writer) = self.known().writers.values_mut().find(|w| w.ino == ino && w.closed.is_none() && !w.released) {
            writer.size += len;
        }
        self.0.tree.inc_file_size(ino, len).await
    }

    async fn finish_writing(&self, ino: InodeNo, etag: Option<ETag>, fh: u64) -> Result<Lookup, InodeError> {
        let upload = if etag.is_some() { Upload::Stored } else { Upload::Failed };
        let finished = self.0.tree.finish_writing(ino, etag, fh).await;
        let mut known = self.known();
        if let Some(writer) = known.writers.get_mut(&fh) {
            writer.upload = Some(upload);
            if upload == Upload::Stored {
                self.0.report.stored(&writer.key);
            }
        }
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
        let empty = {
            let known = self.known();
            let caller = known.closing.get(&fh).copied();
            known.writers.get(&fh).filter(|w| w.size == 0 && !self.0.options.incremental).map(|w| (w.key.clone(), w.opener, caller))
        };
        // This may be the last close, which no later request tells. A process that inherited the file is not the last to close it.
        if let Some((key, opener, caller)) = empty
            && !caller.is_some_and(|caller| are_of_different_processes(opener, caller))
        {
            self.0.objects.store_empty(&key).await?;
        }
        let pending = self.0.tree.flush_writer(ino, fh, hook).await?;
        if let Some(hook) = &pending
            && let Some(writer) = self.known().writers.get_mut(&fh)
        {
            writer.closed = Some(hook.clone());
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
        if let Some(writer) = self.known().writers.get_mut(&fh) {
            writer.released = true;
        }
        let mut released = self.0.tree.release_writer(ino, fh, hook, location).await;
        let writer = self.known().writers.remove(&fh);
        // Another open had the error of the upload, but not the program that closed the file.
        if let Some(Writer { closed: Some(hook), upload: Some(Upload::Failed), .. }) = writer
            && released.is_ok()
        {
            released = hook.wait_for_completion().await.map(drop);
        }
        if let Err(e) = &released {
            self.0.report.unstored(&location.full_key(), words::unstored(e));
        }
        released
    }

    async fn try_reactivate_handle(&self, ino: InodeNo, fh: u64, mode: ReadWriteMode) -> Result<bool, InodeError> {
        let active = self.0.tree.try_reactivate_handle(ino, fh, mode).await?;
        if let Some(writer) = self.known().writers.get_mut(&fh).filter(|_| active) {
            writer.closed = None;
        }
        Ok(active)
    }

    async fn new_readdir_handle(&self, ino: InodeNo) -> Result<u64, InodeError> {
        self.0.tree.new_readdir_handle(self.real(ino)).await
    }

    async fn readdir<'a>(
        &self,
        parent: InodeNo,
        fh: u64,
        offset: i64,
        plus: bool,
        mut add: AddDirEntry<'a>,
    ) -> Result<(), InodeError> {
        let mut counted = move |found: InodeInformation, name: OsString, offset: i64, generation: u64| {
            let (kind, ino, own) = (found.kind(), found.ino(), name == "." || name == "..");
            let kernels = if own { None } else { self.known().places.get(&(parent, name.clone())).copied() };
            let shown = match kernels {
                Some(kernels) if kind == InodeKind::Directory => InodeInformation::new(kernels, found.stat().clone(), kind),
                _ => found,
            };
            let result = add(shown, name.clone(), offset, generation);
            if plus && !own && result == AddDirEntryResult::EntryAdded {
                self.referenced(kind, ino, parent, &name);
            }
            result
        };
        let handle = self.known().handles.get(&fh).copied().unwrap_or(fh);
        let error = match self.0.tree.readdir(self.real(parent), handle, offset, plus, Box::new(&mut counted)).await {
            Err(e @ (InodeError::FileDoesNotExist(..) | InodeError::InodeDoesNotExist(_) | InodeError::StaleInode { .. })) => e,
            other => return other,
        };
        if offset != 0 || !self.known().directories.contains_key(&parent) {
            return Err(error);
        }
        if self.renew(parent).await.is_none() {
            return Ok(()); // it has vanished: an empty directory
        }
        let handle = self.0.tree.new_readdir_handle(self.real(parent)).await?;
        let older = self.known().handles.insert(fh, handle);
        if let Some(older) = older {
            self.0.tree.releasedir(older).await?;
        }
        self.0.tree.readdir(self.real(parent), handle, offset, plus, Box::new(counted)).await
    }

    async fn releasedir(&self, fh: u64) -> Result<(), InodeError> {
        let newer = self.known().handles.remove(&fh);
        if let Some(newer) = newer {
            self.0.tree.releasedir(newer).await?;
        }
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
            match self.0.tree.rename(self.real(from), name, self.real(to), new_name, overwrite).await {
                Err(e) if self.waits(&e, until) => {}
                Err(InodeError::FileDoesNotExist(..)) if again && self.stored_lately(from, name) => again = false,
                other => break other?,
            }
        }
        self.known().stored.add((to, new_name.to_owned()), Instant::now());
        self.removed_from(from);
        Ok(())
    }

    async fn rmdir(&self, parent: InodeNo, name: &OsStr) -> Result<(), InodeError> {
        let place = (parent, name.to_owned());
        let emptied = self.known().removed(&place);
        match self.0.tree.rmdir(self.real(parent), name).await {
            Err(InodeError::FileDoesNotExist(..)) if emptied => {}
            Err(InodeError::CannotRemoveRemoteDirectory(info)) => self.remove_marker(info).await?,
            other => other?,
        }
        // The kernel does not use the inode of a removed directory again.
        self.known().places.remove(&place);
        self.removed_from(parent);
        Ok(())
    }

    async fn unlink(&self, parent: InodeNo, name: &OsStr) -> Result<(), InodeError> {
        let until = Instant::now() + RELEASE;
        loop {
            match self.0.tree.unlink(self.real(parent), name).await {
                Err(e) if self.waits(&e, until) => {}
                other => break other?,
            }
        }
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
