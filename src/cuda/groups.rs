//! Bounds and quantization of groups of rows.

use crate::error::Error;
use crate::layout::{View, ViewMut};
use crate::spec::{Gated, GroupCall, Stream};

pub(crate) fn group_bounds(
    _offsets: View,
    _rows: usize,
    _ends: ViewMut,
    _padded_ends: ViewMut,
    _error: ViewMut,
    _stream: Stream,
) -> Result<(), Error> {
    Err(missing())
}

pub(crate) fn quantize_gated(_gated: &Gated, _call: GroupCall, _stream: Stream) -> Result<(), Error> {
    Err(missing())
}

pub(crate) fn quantize_groups(_call: GroupCall, _stream: Stream) -> Result<(), Error> {
    Err(missing())
}

fn missing() -> Error {
    Error::Unsupported {
        what: "groups on CUDA".into(),
        reason: "their kernels are not written yet".into(),
        instead: "use CPU tensors".into(),
    }
}
