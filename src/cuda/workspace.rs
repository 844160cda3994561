//! The workspace of launches whose thread blocks reduce over the whole grid or synchronize: slots of device
//! memory that are zero before and after each launch.
//!
//! Launches on one stream run one after the other, so they share slots. Each stream has its own slots. A
//! launch that is captured in a graph gets slots that nothing else uses while the graph lives, because its
//! replays may run concurrently with any other work. Destroying the graph releases them.
//!
//! If two launches used the same slots at the same time, they would wait for each other's blocks. Therefore a
//! graph must not run concurrently with itself. Streams are identified by the driver's IDs, because a handle
//! can be reused while work of the previous stream is still running.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::{MAX_DEVICES, driver};
use crate::error::Error;
use crate::spec::Stream;

/// Size of a slot in bytes (`struct GridMax` in `kernels/elements.cuh`).
pub(super) const SLOT: usize = 8;
/// Slots of a chunk, which is also the most that one launch can use. Chunks are assigned to streams and
/// graphs as a whole.
pub(super) const PER_CHUNK: usize = 1024;
/// Number of chunks that are allocated together.
const PER_SLAB: usize = 128;

/// The chunks of one device.
#[derive(Default)]
struct Pool {
    free: Vec<usize>,
    streams: HashMap<u64, usize>,
    /// For each capture ID: the chunk that its next launches use, and how many of its slots are used.
    captures: HashMap<u64, (usize, usize)>,
}

/// A chunk that belonged to a destroyed graph.
struct Returned {
    capture: u64,
    chunk: usize,
}

static POOLS: [Mutex<Option<Pool>>; MAX_DEVICES] = [const { Mutex::new(None) }; MAX_DEVICES];
/// Chunks of destroyed graphs. They have a separate lock because a thread of the driver acquires it. No code calls the
/// driver while holding it.
static RETURNED: [Mutex<Vec<Returned>>; MAX_DEVICES] = [const { Mutex::new(Vec::new()) }; MAX_DEVICES];

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Pool {
    /// Adds the chunks of destroyed graphs to the free chunks.
    fn recover(&mut self, returned: Vec<Returned>) {
        for Returned { capture, chunk } in returned {
            if self.captures.get(&capture).is_some_and(|(at, _)| *at == chunk) {
                self.captures.remove(&capture);
            }
            self.free.push(chunk);
        }
    }

    /// Returns a free chunk. If there is none, `grow` allocates a new slab and returns its address.
    fn chunk(&mut self, grow: impl FnOnce(usize) -> Result<usize, Error>) -> Result<usize, Error> {
        if self.free.is_empty() {
            let start = grow(PER_SLAB * PER_CHUNK * SLOT)?;
            self.free.extend((0..PER_SLAB).rev().map(|i| start + i * PER_CHUNK * SLOT));
        }
        Ok(self.free.pop().unwrap_or_default())
    }

    /// Returns the slots of a stream.
    fn of_stream(
        &mut self,
        stream: u64,
        grow: impl FnOnce(usize) -> Result<usize, Error>,
    ) -> Result<usize, Error> {
        if let Some(chunk) = self.streams.get(&stream) {
            return Ok(*chunk);
        }
        let chunk = self.chunk(grow)?;
        self.streams.insert(stream, chunk);
        Ok(chunk)
    }

    /// Returns slots for one launch of a capture. `tie_to_graph` ties a new chunk to the graph's lifetime before
    /// the chunk is used.
    fn of_capture(
        &mut self,
        capture: u64,
        count: usize,
        grow: impl FnOnce(usize) -> Result<usize, Error>,
        tie_to_graph: impl FnOnce(usize) -> Result<(), Error>,
    ) -> Result<usize, Error> {
        if let Some((chunk, used)) = self.captures.get_mut(&capture)
            && *used + count <= PER_CHUNK
        {
            let at = *chunk + *used * SLOT;
            *used += count;
            return Ok(at);
        }
        let chunk = self.chunk(grow)?;
        tie_to_graph(chunk)?;
        self.captures.insert(capture, (chunk, count));
        Ok(chunk)
    }
}

/// Returns `count` slots (at most [`PER_CHUNK`]) for a launch on this stream.
pub(super) fn slots(ordinal: i32, stream: Stream, count: usize) -> Result<*mut u8, Error> {
    debug_assert!(count <= PER_CHUNK);
    driver::device(ordinal)?;
    let capture = driver::capture(ordinal, stream)?;
    let id = if capture.is_none() { driver::stream_id(ordinal, stream)? } else { 0 };
    let mut guard = lock(&POOLS[ordinal as usize]);
    let pool = guard.get_or_insert_default();
    let grow = |bytes| driver::workspace(ordinal, bytes).map(|at| at as usize);
    let at = if let Some(capture) = capture {
        pool.recover(std::mem::take(&mut *lock(&RETURNED[ordinal as usize])));
        pool.of_capture(capture.id, count, grow, |chunk| {
            let owned = Box::new((ordinal, Returned { capture: capture.id, chunk }));
            driver::when_destroyed(ordinal, capture, give_back, Box::into_raw(owned).cast())
        })?
    } else {
        pool.of_stream(id, grow)?
    };
    Ok(at as *mut u8)
}

/// Returns a chunk of a destroyed graph. The driver calls this.
///
/// # Safety
/// `data` must be a box of [`slots`], as a raw pointer, and must not be used afterwards.
unsafe extern "C" fn give_back(data: *mut c_void) {
    // SAFETY: `data` came from `Box::into_raw` in `slots`, and the driver calls this once.
    let (ordinal, returned) = *unsafe { Box::from_raw(data.cast::<(i32, Returned)>()) };
    lock(&RETURNED[ordinal as usize]).push(returned);
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHUNK: usize = PER_CHUNK * SLOT;

    /// Generates slab addresses and counts the slabs.
    struct Slabs(usize);

    impl Slabs {
        fn grow(&mut self) -> impl FnOnce(usize) -> Result<usize, Error> {
            self.0 += 1;
            let start = self.0 << 32;
            move |_| Ok(start)
        }
    }

    fn capture(pool: &mut Pool, id: u64, count: usize, owned: &mut Vec<Returned>) -> usize {
        let grow = |_| Ok(1 << 32);
        pool.of_capture(id, count, grow, |chunk| {
            owned.push(Returned { capture: id, chunk });
            Ok(())
        })
        .expect("a place")
    }

    #[test]
    fn streams_have_distinct_chunks_and_keep_them() {
        let (mut pool, mut slabs) = (Pool::default(), Slabs(0));
        let places: Vec<_> = (0..300).map(|s| pool.of_stream(s, slabs.grow()).expect("a place")).collect();
        for (stream, place) in (0..).zip(&places) {
            assert_eq!(pool.of_stream(stream, |_| unreachable!()).expect("known"), *place);
        }
        let mut sorted = places.clone();
        sorted.sort_unstable();
        assert!(sorted.windows(2).all(|w| w[1] - w[0] >= CHUNK));
    }

    #[test]
    fn launches_of_a_capture_have_distinct_slots() {
        let (mut pool, mut owned) = (Pool::default(), Vec::new());
        let counts = [1, 1, 1000, 30, 1, 1024, 1];
        let mut spans: Vec<_> =
            counts.iter().map(|count| (capture(&mut pool, 7, *count, &mut owned), count * SLOT)).collect();
        spans.push((capture(&mut pool, 8, 5, &mut owned), 5 * SLOT));
        spans.sort_unstable();
        assert!(spans.windows(2).all(|w| w[0].0 + w[0].1 <= w[1].0));
        // Every chunk is owned by a graph.
        assert!(spans.iter().all(|(at, _)| owned.iter().any(|o| (o.chunk..o.chunk + CHUNK).contains(at))));
    }

    /// However many graphs are captured and destroyed, one slab is enough.
    #[test]
    fn destroyed_graphs_release_their_chunks() {
        let (mut pool, mut owned) = (Pool::default(), Vec::new());
        for id in 0..10_000 {
            for _ in 0..3 {
                let place = capture(&mut pool, id, 1000, &mut owned);
                assert!(place >> 32 == 1 && (place & 0xffff_ffff) < PER_SLAB * CHUNK);
            }
            pool.recover(std::mem::take(&mut owned));
            assert_eq!(pool.free.len(), PER_SLAB);
            assert!(pool.captures.is_empty());
        }
    }

    #[test]
    fn chunk_is_not_used_if_tying_it_to_the_graph_fails() {
        let mut pool = Pool::default();
        let refused = || Error::Cuda { call: "test".into(), message: String::new() };
        assert!(pool.of_capture(1, 1, |_| Ok(1 << 32), |_| Err(refused())).is_err());
        assert!(pool.captures.is_empty());
    }
}
