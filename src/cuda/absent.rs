//! What stands in for the backend in a build without CUDA: the same functions, which say so.

use crate::error::Error;
use crate::format::Fp8Format;
use crate::layout::{Block, View, ViewMut};
use crate::spec::{Axis, BlockCall, ScaleRule, Stream};

fn unsupported(what: &'static str) -> Result<(), Error> {
    Err(Error::Unsupported {
        what: what.into(),
        reason: "this build has no CUDA backend".into(),
        instead: "use a CPU tensor, or build with the feature \"cuda\"".into(),
    })
}

macro_rules! dummy {
    ($($name:ident($($arg:ty),*);)*) => {
        $(pub(crate) fn $name($(_: $arg),*) -> Result<(), Error> {
            unsupported(stringify!($name))
        })*
    };
}

dummy! {
    amax(View, ViewMut, Stream);
    multi_amax(&[View], ViewMut, Stream);
    scale_from_amax(View, Fp8Format, ScaleRule, ViewMut, Stream);
    quantize(View, View, Option<ViewMut>, Option<ViewMut>, Stream);
    quantize_delayed(View, View, ViewMut, ViewMut, Option<ViewMut>, Option<ViewMut>, Stream);
    quantize_current(View, Fp8Format, ScaleRule, ViewMut, Option<ViewMut>, Option<ViewMut>, Stream);
    multi_quantize(&[View], View, &[ViewMut], Stream);
    multi_quantize_delayed(&[View], View, ViewMut, ViewMut, &[ViewMut], Stream);
    transpose(View, ViewMut, Stream);
    dequantize(View, View, Block, ViewMut, Stream);
    block_amax(View, Block, usize, ViewMut, Stream);
    quantize_blocks(BlockCall, Stream);
    pack_scales(View, usize, usize, ViewMut, Stream);
    unpack_scales(View, usize, usize, ViewMut, Stream);
    rebase(View, View, Block, Axis, ViewMut, ViewMut, Stream);
}
