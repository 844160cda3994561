//! The workspace of launches whose thread blocks reduce over the whole grid, or wait for each other: slots of device
//! memory that are zero before and after each launch.
//!
//! Launches on one stream follow each other, so they share slots; each stream has its own. A launch that is captured in
//! a graph gets slots that nobody else has while the graph lives, because its replays may run beside anything; the
//! graph's end gives them back.
//!
//! Two launches that share slots at once would wait for each other's blocks. So a graph must not run twice at once, and
//! streams are known by the driver's numbers: a handle is used again while work of the stream before may still run.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::{MAX_DEVICES, driver};
use crate::error::Error;
use crate::spec::Stream;

/// The bytes of a slot (`struct GridMax` in `kernels/elements.cuh`).
const SLOT: usize = 8;
/// Slots of a chunk, which a stream or a graph takes whole: as many as one launch can ask for.
pub(super) const PER_CHUNK: usize = 1024;
/// Chunks that are allocated at once.
const PER_SLAB: usize = 128;

/// One device's chunks.
#[derive(Default)]
struct Pool {
    free: Vec<usize>,
    streams: HashMap<u64, usize>,
    /// By the capture's number: the chunk that its launches take from now, and how many of it are taken.
    captures: HashMap<u64, (usize, usize)>,
}

/// A chunk that a graph had.
struct Returned {
    capture: u64,
    chunk: usize,
}

static POOLS: [Mutex<Option<Pool>>; MAX_DEVICES] = [const { Mutex::new(None) }; MAX_DEVICES];
/// What destroyed graphs left. A lock of its own, under which nobody calls the driver: a thread of the driver's
/// takes it.
static RETURNED: [Mutex<Vec<Returned>>; MAX_DEVICES] = [const { Mutex::new(Vec::new()) }; MAX_DEVICES];

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Pool {
    /// Makes the chunks of destroyed graphs free.
    fn recover(&mut self, returned: Vec<Returned>) {
        for Returned { capture, chunk } in returned {
            if self.captures.get(&capture).is_some_and(|(at, _)| *at == chunk) {
                self.captures.remove(&capture);
            }
            self.free.push(chunk);
        }
    }

    /// A chunk, from a new slab that starts where `grow` says if there is no free one.
    fn chunk(&mut self, grow: impl FnOnce(usize) -> Result<usize, Error>) -> Result<usize, Error> {
        if self.free.is_empty() {
            let start = grow(PER_SLAB * PER_CHUNK * SLOT)?;
            self.free.extend((0..PER_SLAB).rev().map(|i| start + i * PER_CHUNK * SLOT));
        }
        Ok(self.free.pop().unwrap_or_default())
    }

    /// The slots of a stream.
    fn of_stream(
        &mut self,
        stream: u64,
        grow: impl FnOnce(usize) -> Result<usize, Error>,
    ) -> Result<usize, Error> {
        if let Some(known) = self.streams.get(&stream) {
            return Ok(*known);
        }
        let chunk = self.chunk(grow)?;
        self.streams.insert(stream, chunk);
        Ok(chunk)
    }

    /// Slots for one launch of a capture. `own` ties a chunk to the graph's life, before it is used.
    fn of_capture(
        &mut self,
        capture: u64,
        count: usize,
        grow: impl FnOnce(usize) -> Result<usize, Error>,
        own: impl FnOnce(usize) -> Result<(), Error>,
    ) -> Result<usize, Error> {
        if let Some((chunk, used)) = self.captures.get_mut(&capture)
            && *used + count <= PER_CHUNK
        {
            let at = *chunk + *used * SLOT;
            *used += count;
            return Ok(at);
        }
        let chunk = self.chunk(grow)?;
        own(chunk)?;
        self.captures.insert(capture, (chunk, count));
        Ok(chunk)
    }
}

/// `count` slots (at most [`PER_CHUNK`]) for a launch on this stream.
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

/// Called with what [`slots`] boxed, once, when a graph is gone.
unsafe extern "C" fn give_back(data: *mut c_void) {
    // SAFETY: `data` is that box, and nobody else has it.
    let (ordinal, returned) = *unsafe { Box::from_raw(data.cast::<(i32, Returned)>()) };
    lock(&RETURNED[ordinal as usize]).push(returned);
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHUNK: usize = PER_CHUNK * SLOT;

    /// A pool over slabs at made-up addresses, and how many it took.
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
    fn a_stream_keeps_its_place_and_shares_it_with_none() {
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
    fn launches_of_a_capture_share_no_slot() {
        let (mut pool, mut owned) = (Pool::default(), Vec::new());
        let counts = [1, 1, 1000, 30, 1, 1024, 1];
        let mut spans: Vec<_> =
            counts.iter().map(|count| (capture(&mut pool, 7, *count, &mut owned), count * SLOT)).collect();
        spans.push((capture(&mut pool, 8, 5, &mut owned), 5 * SLOT));
        spans.sort_unstable();
        assert!(spans.windows(2).all(|w| w[0].0 + w[0].1 <= w[1].0));
        // Every chunk is some graph's.
        assert!(spans.iter().all(|(at, _)| owned.iter().any(|o| (o.chunk..o.chunk + CHUNK).contains(at))));
    }

    /// As many captures as there are, of graphs that die, take the memory of one.
    #[test]
    fn destroyed_graphs_give_their_places_back() {
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
    fn a_chunk_that_no_graph_owns_is_not_used() {
        let mut pool = Pool::default();
        let refused = || Error::Cuda { call: "test".into(), message: String::new() };
        assert!(pool.of_capture(1, 1, |_| Ok(1 << 32), |_| Err(refused())).is_err());
        assert!(pool.captures.is_empty());
    }
}
