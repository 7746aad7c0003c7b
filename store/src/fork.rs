//! Processes that are forked, and not replaced by another program (exec): Python's DataLoader has
//! such workers.
//!
//! The child has copies of all objects of its parent, and maps the same arena, but is no rank. It
//! has none of its parent's threads: a lock that one of them held stays locked for ever, and nobody
//! can be waited for. So what belongs to the parent, the child neither uses nor drops. It may read
//! the memory that it has inherited, and join as a rank of its own.

use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};

use libc::pthread_atfork;

/// The number of forks between this process and the first that used this library.
static GENERATION: AtomicU32 = AtomicU32::new(0);

/// A process, as distinct from its forked children.
#[derive(Clone, Copy, Debug)]
pub struct Process(u32);

impl Process {
    /// Returns the calling process.
    pub fn current() -> Self {
        static WATCHES: AtomicBool = AtomicBool::new(false);
        extern "C" fn in_child() {
            GENERATION.fetch_add(1, Ordering::Relaxed);
        }
        // No `Once`: a fork might leave that half done.
        if !WATCHES.swap(true, Ordering::Relaxed) {
            // SAFETY: the handler may run in a child of many threads: it touches nothing but an
            // atomic.
            if unsafe { pthread_atfork(None, None, Some(in_child)) } != 0 {
                log::warn!(
                    "no memory to watch for forks: a forked child of this process may disturb it"
                );
            }
        }
        Self(GENERATION.load(Ordering::Relaxed))
    }

    /// Returns the number of forks between it and the first that used this library.
    pub fn forks(self) -> u32 {
        self.0
    }

    /// Whether this is the calling process, and not a parent of it.
    pub fn is_current(self) -> bool {
        self.0 == GENERATION.load(Ordering::Relaxed)
    }
}

/// A static value that is made when it is first used, without a lock: a fork may come while another
/// thread makes it. Of two that are made at the same time, one is dropped.
pub struct Once<T>(AtomicPtr<T>);

impl<T: Send + Sync> Once<T> {
    /// Returns an empty cell.
    pub const fn empty() -> Self {
        Self(AtomicPtr::new(ptr::null_mut()))
    }

    /// Returns the value, if there is one.
    #[inline]
    pub fn get(&'static self) -> Option<&'static T> {
        let value = self.0.load(Ordering::Acquire);
        // SAFETY: what is in there came from a box, and is neither changed nor dropped any more.
        unsafe { value.as_ref() }
    }

    /// Returns the value, and makes it if there is none.
    #[inline]
    pub fn get_or_make(&'static self, make: impl FnOnce() -> T) -> &'static T {
        self.get().unwrap_or_else(|| self.set(make()))
    }

    #[cold]
    fn set(&'static self, value: T) -> &'static T {
        put(&self.0, ptr::null_mut(), value)
    }
}

/// Puts a value into a cell in place of `present`, and returns it; or what another thread has put there
/// meanwhile. What a cell has had is never dropped.
fn put<T>(cell: &'static AtomicPtr<T>, present: *mut T, value: T) -> &'static T {
    let own = Box::into_raw(Box::new(value));
    let swapped = cell.compare_exchange(present, own, Ordering::AcqRel, Ordering::Acquire);
    // SAFETY: both came from a box, and what is in the cell is neither changed nor dropped any more. The
    // own one was not given to anyone if another thread was sooner.
    unsafe {
        match swapped {
            Ok(_) => &*own,
            Err(other) => {
                drop(Box::from_raw(own));
                &*other
            }
        }
    }
}

/// A static value that each process makes for itself when it first uses it. A forked child neither uses nor
/// drops what it inherits: another thread of its parent may have held a lock there.
pub struct PerProcess<T>(AtomicPtr<ForkSafe<T>>);

impl<T: Default + Send + Sync> PerProcess<T> {
    /// Returns an empty cell.
    pub const fn empty() -> Self {
        Self(AtomicPtr::new(ptr::null_mut()))
    }

    /// Returns this process's value, and makes it if there is none.
    pub fn get(&'static self) -> &'static T {
        let present = self.0.load(Ordering::Acquire);
        // SAFETY: what is in there came from a box, and is neither changed nor dropped any more.
        match unsafe { present.as_ref() } {
            Some(value) if value.is_ours() => value,
            _ => self.replace(present),
        }
    }

    #[cold]
    fn replace(&'static self, inherited: *mut ForkSafe<T>) -> &'static T {
        let value: &'static ForkSafe<T> = put(&self.0, inherited, ForkSafe::new(T::default()));
        value
    }
}

/// An object that belongs to the process that made it: in a forked child it is not even dropped.
pub struct ForkSafe<T> {
    process: Process,
    value: ManuallyDrop<T>,
}

impl<T> ForkSafe<T> {
    /// Makes a value that belongs to this process.
    pub fn new(value: T) -> Self {
        Self { process: Process::current(), value: ManuallyDrop::new(value) }
    }

    /// Whether it is this process'. False in a process that was forked from the one that made it:
    /// there the value is not to be used.
    pub fn is_ours(&self) -> bool {
        self.process.is_current()
    }
}

impl<T> Deref for ForkSafe<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for ForkSafe<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

impl<T> Drop for ForkSafe<T> {
    fn drop(&mut self) {
        if self.is_ours() {
            // SAFETY: nobody uses the value after this.
            unsafe { ManuallyDrop::drop(&mut self.value) };
        }
    }
}

impl<T: fmt::Debug> fmt::Debug for ForkSafe<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.value.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[test]
    fn a_child_has_its_own_value_where_its_parents_is_locked() {
        static COUNT: PerProcess<Mutex<u32>> = PerProcess::empty();
        *COUNT.get().lock().unwrap() = 1;
        let held = COUNT.get().lock().unwrap();
        // SAFETY: the child calls nothing but the allocator, which a child of many threads may.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: as above.
            unsafe {
                libc::alarm(60);
                libc::_exit((*COUNT.get().lock().unwrap()).cast_signed());
            }
        }
        let mut status = -1;
        // SAFETY: it is this process's child, and the status is written to what lives.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!(status, 0);
        assert_eq!(*held, 1);
    }
}
