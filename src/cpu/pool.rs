//! The thread pool. There is one pool per process, because a forked child (a `DataLoader` worker) has none of
//! its parent's threads. The child creates its own pool at first use.
//!
//! The number of threads is `RAYON_NUM_THREADS`, otherwise `OMP_NUM_THREADS` (which torchrun sets), otherwise
//! the number of CPUs available to the process. It is read when the pool is created. With one thread, no pool
//! is created and work runs on the calling thread.

use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};

use super::float_env::DefaultFloatEnv;

struct Entry {
    process: u32,
    /// None if one thread is enough, or if the threads could not be started.
    pool: Option<ThreadPool>,
}

/// The pool of the process that created it. It is never dropped, because dropping a parent's pool in a forked child
/// would wait for threads that do not exist. A lock would not be safe either: a fork can copy it in the locked state.
static POOL: AtomicPtr<Entry> = AtomicPtr::new(ptr::null_mut());

/// Calls `f` with each of 0..count in any order, on the pool if `parallel` is set.
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
    // SAFETY: the pointer is null or points to an entry that was leaked below.
    if let Some(entry) = unsafe { current.as_ref() }
        && entry.process == process
    {
        return entry.pool.as_ref();
    }
    let created = Box::into_raw(Box::new(Entry { process, pool: build() }));
    match POOL.compare_exchange(current, created, Ordering::AcqRel, Ordering::Acquire) {
        // SAFETY: `created` was leaked by `Box::into_raw` above.
        Ok(_) => unsafe { &*created }.pool.as_ref(),
        Err(other) => {
            // Another thread of this process created a pool first.
            // SAFETY: `created` was never shared, and `other` points to a leaked entry.
            unsafe {
                drop(Box::from_raw(created));
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
        .start_handler(|_| DefaultFloatEnv::enter_for_thread())
        .build()
        .ok()
}
