//! A file in memory that is written to by way of a mapping, past the caches: that takes no longer than a copy in
//! memory. The kernel's `write` takes nearly twice as long.

use std::io;
use std::os::fd::AsFd;
use std::ptr::NonNull;

use rustix::fs::{FallocateFlags, fallocate};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

use super::bytes::copy_streaming;

/// The first bytes of a memfd, mapped to be written to.
pub struct MappedFile {
    base: NonNull<u8>,
    length: usize,
}

// SAFETY: it is a plain mapping, valid in all threads until it is dropped.
unsafe impl Send for MappedFile {}
// SAFETY: as above; only who has it for itself writes.
unsafe impl Sync for MappedFile {}

impl MappedFile {
    /// Maps the first `length` bytes of `file`, which get memory if they have none yet: zeros.
    ///
    /// The file must not become shorter while it is mapped: a write beyond its end kills the process.
    ///
    /// # Errors
    ///
    /// There is too little memory; a limit of the system forbids it.
    pub fn map(file: impl AsFd, length: usize) -> io::Result<Self> {
        // A write to a page for which there is no memory would kill the process.
        fallocate(&file, FallocateFlags::empty(), 0, length as u64)?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice touches no existing memory.
        let base =
            unsafe { mmap(std::ptr::null_mut(), length, access, MapFlags::SHARED, file, 0) }?;
        // A core dump need not have it, and no write has to wait for a page: where the kernel can.
        for advice in [Advice::LinuxDontDump, Advice::LinuxPopulateWrite] {
            // SAFETY: the range was just mapped, and neither changes what is there.
            let _ = unsafe { madvise(base, length, advice) };
        }
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::AddrNotAvailable)?;
        Ok(Self { base, length })
    }

    /// Returns how many bytes are mapped.
    pub fn length(&self) -> usize {
        self.length
    }

    /// Writes bytes to the file, from `start` on.
    ///
    /// # Panics
    ///
    /// Not all of them lie in what is mapped.
    pub fn write(&mut self, start: usize, bytes: &[u8]) {
        let end = start.checked_add(bytes.len());
        assert!(end.is_some_and(|end| end <= self.length), "{start} is too far for a write");
        // SAFETY: the range is inside the mapping, of which no reference exists.
        unsafe { copy_streaming(bytes.as_ptr(), self.base.as_ptr().add(start), bytes.len()) };
    }
}

impl Drop for MappedFile {
    fn drop(&mut self) {
        // SAFETY: the range is this mapping, to which nothing refers.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.length) };
    }
}

#[cfg(all(test, not(miri)))] // Miri knows no memfd
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;

    #[test]
    fn what_is_written_is_in_the_file() {
        let file = File::from(memfd_create("test", MemfdFlags::CLOEXEC).unwrap());
        file.write_all_at(b"12345678", 0).unwrap();
        let mut mapped = MappedFile::map(&file, 10_000).unwrap();
        mapped.write(2, b"abc");
        mapped.write(9_999, b"z");
        mapped.write(10_000, b"");
        drop(mapped);
        let mut read = vec![0; 10_000];
        file.read_exact_at(&mut read, 0).unwrap();
        assert_eq!((&read[..9], read[9_999]), (&b"12abc678\0"[..], b'z'));
    }

    #[test]
    #[should_panic = "9998 is too far"]
    fn nothing_is_written_beyond_the_end() {
        let file = File::from(memfd_create("test", MemfdFlags::CLOEXEC).unwrap());
        MappedFile::map(&file, 10_000).unwrap().write(9_998, b"abc");
    }
}
