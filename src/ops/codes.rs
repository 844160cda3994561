//! Operations on existing FP8 codes.

use super::validate::{Call, Kind, check_number, contiguous, one_each, one_matrix, shape};
use crate::error::{Arg, Error};
use crate::layout::{Block, Device, View, ViewMut};
use crate::spec::Stream;
use crate::{cpu, cuda};

/// Transposes FP8 codes: `out` has the shape (cols, rows) and the dtype of `codes`.
pub fn transpose(codes: View, out: ViewMut, stream: Stream) -> Result<(), Error> {
    let mut call = Call::default();
    call.input("codes", &codes, Kind::Fp8)?;
    call.output("out", &out, Kind::Is(codes.dtype()))?;
    shape("out", out.shape(), (codes.cols(), codes.rows()), "the transposed shape of codes")?;
    let device = call.finish()?;
    match device {
        Device::Cpu => {
            (0..codes.batch()).for_each(|i| cpu::transpose(codes.at(i), out.at(i)));
            Ok(())
        }
        Device::Cuda(_) => cuda::transpose(codes, out, stream),
    }
}

/// Computes code * scale in fp32 and casts it once to the dtype of `out` (fp32, bf16 or fp16; the shape of
/// `codes`). A NaN becomes the positive quiet NaN without payload.
///
/// `scale` is fp32 or E8M0, with one element per block ([`Block::grid`] of the shape of `codes`).
pub fn dequantize(codes: View, scale: View, block: Block, out: ViewMut, stream: Stream) -> Result<(), Error> {
    if block.rows == 0 || block.cols == 0 {
        return Err(Error::Value {
            arg: "block".into(),
            got: format!("({}, {})", block.rows, block.cols),
            expected: "at least 1 in each dimension".into(),
        });
    }
    let mut call = Call::default();
    call.input("codes", &codes, Kind::Fp8)?;
    call.input("scale", &scale, Kind::Scale)?;
    let grid = block.grid(codes.rows(), codes.cols());
    shape("scale", scale.shape(), grid, "one element for each block")?;
    call.output("out", &out, Kind::Wide)?;
    shape("out", out.shape(), codes.shape(), "the shape of codes")?;
    // With one scale per matrix, each matrix of a batch is one block of the flattened rows.
    let rows = if block.rows == Block::ALL { codes.rows().max(1) } else { block.rows };
    let block = if codes.batch() > 1 { Block { rows, ..block } } else { block };
    let device = call.finish()?;
    let dequantize = |codes, scale, out| match device {
        Device::Cpu => {
            cpu::dequantize(codes, scale, block, out);
            Ok(())
        }
        Device::Cuda(_) => cuda::dequantize(codes, scale, block, out, stream),
    };
    if block.divides_rows(codes.rows()) && codes.is_flat() && scale.is_flat() && out.is_flat() {
        return dequantize(codes.flat(), scale.flat(), out.flat());
    }
    (0..codes.batch()).try_for_each(|i| dequantize(codes.at(i), scale.at(i), out.at(i)))
}

/// Rounds codes to new scales, in place: encode(code * scale * (1 / new scale)). Each scale of a matrix
/// belongs to `width` columns. The last scale of a matrix may belong to fewer. `scales` and `new_scales` are
/// fp32, 1xN, with the scales of all matrices in order. Codes whose scale has the same bits in both are not
/// read. On CUDA, a batch takes as many launches as one matrix.
pub fn multi_rescale(
    codes: &[ViewMut],
    scales: View,
    new_scales: View,
    width: usize,
    stream: Stream,
) -> Result<(), Error> {
    check_number("width", width, width > 0, "at least 1")?;
    let mut call = Call::default();
    for (i, out) in codes.iter().enumerate() {
        call.output(Arg::Item("codes", i), out, Kind::Fp8)?;
    }
    let count = codes.iter().map(|out| out.batch() * out.cols().div_ceil(width)).sum();
    for (arg, list) in [("scales", &scales), ("new_scales", &new_scales)] {
        call.input(arg, list, Kind::F32)?;
        one_matrix(arg, list.batch())?;
        one_each(arg, list.shape(), count, "codes")?;
        contiguous(arg, list.is_contiguous())?;
    }
    match call.finish()? {
        Device::Cpu => {
            cpu::multi_rescale(codes, scales, new_scales, width);
            Ok(())
        }
        Device::Cuda(_) => cuda::multi_rescale(codes, scales, new_scales, width, stream),
    }
}
