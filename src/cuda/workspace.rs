//! Where the blocks of a launch meet: device memory that is zero before and after each launch.
//!
//! Launches on one stream follow each other, so they share one place; each stream has its own. A launch that
//! is captured in a graph gets a place that nobody else ever gets, because its replays may run beside
//! anything.

use std::collections::HashMap;
use std::sync::Mutex;

use super::driver::{self, MAX_DEVICES};
use crate::error::Error;
use crate::ops::Stream;

/// The bytes of one meeting (`struct Meeting` in `kernels/elements.cuh`).
const MEETING: usize = 8;
/// Meetings that a stream has: as many as one launch can ask for.
pub(super) const PER_STREAM: usize = 1024;
/// Meetings of a device.
const PER_DEVICE: usize = 1 << 20;

struct Slab {
    start: usize,
    used: usize,
    streams: HashMap<usize, usize>,
}

static SLABS: [Mutex<Option<Slab>>; MAX_DEVICES] = [const { Mutex::new(None) }; MAX_DEVICES];

/// `count` meetings (at most [`PER_STREAM`]) for a launch on this stream.
pub(super) fn meetings(ordinal: i32, stream: Stream, count: usize) -> Result<*mut u8, Error> {
    debug_assert!(count <= PER_STREAM);
    driver::device(ordinal)?;
    let captured = driver::capturing(ordinal, stream)?;
    let mut guard = SLABS[ordinal as usize].lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let slab = match &mut *guard {
        Some(slab) => slab,
        None if captured => {
            return Err(Error::Cuda {
                call: "graph capture".into(),
                message: "the first use of an operation loads its kernels, which a capture does not allow: \
                          run it once before capturing"
                    .into(),
            });
        }
        none => none.insert(Slab {
            start: driver::workspace(ordinal, PER_DEVICE * MEETING)? as usize,
            used: 0,
            streams: HashMap::new(),
        }),
    };
    if !captured && let Some(known) = slab.streams.get(&(stream.0 as usize)) {
        return Ok(*known as *mut u8);
    }
    let wanted = if captured { count } else { PER_STREAM };
    if slab.used + wanted > PER_DEVICE {
        return Err(Error::Cuda {
            call: "workspace".into(),
            message: format!(
                "{PER_DEVICE} meeting places are in use by captured graphs and streams on cuda:{ordinal}"
            ),
        });
    }
    let at = slab.start + slab.used * MEETING;
    slab.used += wanted;
    if !captured {
        slab.streams.insert(stream.0 as usize, at);
    }
    Ok(at as *mut u8)
}
