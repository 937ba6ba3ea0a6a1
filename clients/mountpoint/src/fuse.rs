//! The FUSE file system: that of Mountpoint, but for the answers that programs need to fall back on a copy.

use std::ffi::OsStr;
use std::time::SystemTime;

use fuser::{
    Filesystem, KernelConfig, ReplyAttr, ReplyData, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyOpen,
    ReplyStatfs, ReplyWrite, ReplyXattr, Request, TimeOrNow,
};
use futures::executor::block_on;
use libc::c_int;
use tracing::warn;

use crate::tree::Tree;

/// Wraps the file system over a tree.
pub struct Fuse<F> {
    pub fs: F,
    pub tree: Tree,
    /// Files can be renamed.
    pub rename: bool,
}

macro_rules! delegate {
    ($($name:ident($($arg:ident: $type:ty),*);)*) => {
        $(
            #[allow(clippy::too_many_arguments)]
            fn $name(&self, req: &Request<'_>, $($arg: $type),*) {
                self.fs.$name(req, $($arg),*)
            }
        )*
    };
}

impl<F: Filesystem> Filesystem for Fuse<F> {
    fn init(&self, req: &Request<'_>, config: &mut KernelConfig) -> Result<(), c_int> {
        self.fs.init(req, config)
    }

    /// rename(2) has EXDEV for what only a copy can do. With it, mv and the libraries of most languages copy by themselves.
    fn rename(
        &self,
        req: &Request<'_>,
        parent: u64,
        name: &OsStr,
        new_parent: u64,
        new_name: &OsStr,
        flags: u32,
        reply: ReplyEmpty,
    ) {
        if !self.rename || block_on(self.tree.is_directory(parent, name)) {
            return reply.error(libc::EXDEV);
        }
        self.fs.rename(req, parent, name, new_parent, new_name, flags, reply)
    }

    /// Only what was not written yet can be cut off or added: the size that a file has.
    fn setattr(
        &self,
        req: &Request<'_>,
        ino: u64,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        ctime: Option<SystemTime>,
        fh: Option<u64>,
        crtime: Option<SystemTime>,
        chgtime: Option<SystemTime>,
        bkuptime: Option<SystemTime>,
        flags: Option<u32>,
        reply: ReplyAttr,
    ) {
        if let Some(wanted) = size
            && let Some(size) = block_on(self.tree.size(ino))
            && size != wanted
        {
            warn!(ino, "cannot set the size of a file of {size} bytes to {wanted}: files are written from start to end");
            return reply.error(libc::EPERM);
        }
        self.fs.setattr(req, ino, mode, uid, gid, size, atime, mtime, ctime, fh, crtime, chgtime, bkuptime, flags, reply)
    }

    fn open(&self, req: &Request<'_>, ino: u64, flags: i32, reply: ReplyOpen) {
        if flags & (libc::O_WRONLY | libc::O_RDWR) != 0 {
            self.tree.opening(ino, req.pid());
        }
        self.fs.open(req, ino, flags, reply)
    }

    fn write(
        &self,
        req: &Request<'_>,
        ino: u64,
        fh: u64,
        offset: i64,
        data: &[u8],
        write_flags: u32,
        flags: i32,
        lock_owner: Option<u64>,
        reply: ReplyWrite,
    ) {
        if let Some(key) = self.tree.complete(fh) {
            warn!("cannot write to {key:?}: fsync or close has completed the object; write a file as a whole before");
            return reply.error(libc::EOPNOTSUPP);
        }
        self.fs.write(req, ino, fh, offset, data, write_flags, flags, lock_owner, reply)
    }

    fn flush(&self, req: &Request<'_>, ino: u64, fh: u64, lock_owner: u64, reply: ReplyEmpty) {
        self.tree.closing(fh, req.pid(), || self.fs.flush(req, ino, fh, lock_owner, reply))
    }

    delegate! {
        lookup(parent: u64, name: &OsStr, reply: ReplyEntry);
        forget(ino: u64, lookups: u64);
        getattr(ino: u64, fh: Option<u64>, reply: ReplyAttr);
        mknod(parent: u64, name: &OsStr, mode: u32, umask: u32, rdev: u32, reply: ReplyEntry);
        mkdir(parent: u64, name: &OsStr, mode: u32, umask: u32, reply: ReplyEntry);
        unlink(parent: u64, name: &OsStr, reply: ReplyEmpty);
        rmdir(parent: u64, name: &OsStr, reply: ReplyEmpty);
        read(ino: u64, fh: u64, offset: i64, size: u32, flags: i32, lock_owner: Option<u64>, reply: ReplyData);
        release(ino: u64, fh: u64, flags: i32, lock_owner: Option<u64>, flush: bool, reply: ReplyEmpty);
        fsync(ino: u64, fh: u64, datasync: bool, reply: ReplyEmpty);
        opendir(ino: u64, flags: i32, reply: ReplyOpen);
        readdir(ino: u64, fh: u64, offset: i64, reply: ReplyDirectory);
        readdirplus(ino: u64, fh: u64, offset: i64, reply: ReplyDirectoryPlus);
        releasedir(ino: u64, fh: u64, flags: i32, reply: ReplyEmpty);
        fsyncdir(ino: u64, fh: u64, datasync: bool, reply: ReplyEmpty);
        statfs(ino: u64, reply: ReplyStatfs);
        getxattr(ino: u64, name: &OsStr, size: u32, reply: ReplyXattr);
        listxattr(ino: u64, size: u32, reply: ReplyXattr);
        setxattr(ino: u64, name: &OsStr, value: &[u8], flags: i32, position: u32, reply: ReplyEmpty);
        removexattr(ino: u64, name: &OsStr, reply: ReplyEmpty);
        access(ino: u64, mask: i32, reply: ReplyEmpty);
        symlink(parent: u64, name: &OsStr, target: &std::path::Path, reply: ReplyEntry);
        link(ino: u64, new_parent: u64, new_name: &OsStr, reply: ReplyEntry);
    }
}
