//! Threads. The pool is keyed by process: a forked child (a `DataLoader` worker) has none of its parent's
//! threads, so it makes its own at first use.
//!
//! As many threads as `RAYON_NUM_THREADS` says, else `OMP_NUM_THREADS` (which torchrun sets), else as the
//! process may use; read when the pool is made. With one thread there is no pool: work runs where it is asked
//! for.

use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};

use super::float_env::DefaultFloatEnv;

struct Entry {
    process: u32,
    /// None where one thread is enough, or where threads could not be started.
    pool: Option<ThreadPool>,
}

/// The pool of the process that made it. Never dropped: dropping a parent's pool in a forked child would wait for
/// threads that are not there. No lock either, which a fork could leave taken.
static POOL: AtomicPtr<Entry> = AtomicPtr::new(ptr::null_mut());

/// Calls `f` with 0..count, in any order, on the pool if `parallel`.
pub(super) fn for_each(count: usize, parallel: bool, f: impl Fn(usize) + Sync) {
    match pool() {
        Some(pool) if parallel && count > 1 => {
            pool.install(|| (0..count).into_par_iter().with_max_len(1).for_each(&f));
        }
        _ => (0..count).for_each(f),
    }
}

fn pool() -> Option<&'static ThreadPool> {
    let process = std::process::id();
    let current = POOL.load(Ordering::Acquire);
    // SAFETY: null or an entry that was leaked below.
    if let Some(entry) = unsafe { current.as_ref() }
        && entry.process == process
    {
        return entry.pool.as_ref();
    }
    let made = Box::into_raw(Box::new(Entry { process, pool: build() }));
    match POOL.compare_exchange(current, made, Ordering::AcqRel, Ordering::Acquire) {
        // SAFETY: it was just leaked.
        Ok(_) => unsafe { &*made }.pool.as_ref(),
        Err(other) => {
            // Another thread of this process was faster.
            // SAFETY: `made` was never shared; `other` is a leaked entry.
            unsafe {
                drop(Box::from_raw(made));
                (*other).pool.as_ref()
            }
        }
    }
}

fn build() -> Option<ThreadPool> {
    let count = |name| std::env::var(name).ok()?.parse::<usize>().ok().filter(|n| *n > 0);
    let threads = count("RAYON_NUM_THREADS")
        .or_else(|| count("OMP_NUM_THREADS"))
        .or_else(|| std::thread::available_parallelism().ok().map(usize::from))
        .unwrap_or(1);
    if threads == 1 {
        return None;
    }
    ThreadPoolBuilder::new()
        .num_threads(threads)
        .thread_name(|i| format!("fp8rs-{i}"))
        .start_handler(|_| DefaultFloatEnv::enter_for_good())
        .build()
        .ok()
}
