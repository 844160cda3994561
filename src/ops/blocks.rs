//! Quantization with one scale per block: rows, 1x128 and 128x128 with fp32 scales; MXFP8's 1x32 and 32x32
//! with E8M0 scales.
//!
//! A block shape applies to the matrix of its plane. Rowwise blocks of (1, n) run along the rows of `x`.
//! Columnwise blocks run along the rows of its transpose, which is the matrix of the columnwise plane. A
//! square block has one scale for both directions, so the columnwise scales are the transposed rowwise
//! scales.

use super::tensorwise::check_rule_without_margin;
use super::validate::{Call, Kind, check_number, one_matrix, shape};
use crate::error::Error;
use crate::layout::{Block, BlockFormat, DType, Device, View, ViewMut, block_extents, list, packed};
use crate::spec::{Axis, BlockCall, BlockInputs, BlockPlane, BlockScale, BlockSpec, Stream};
use crate::{cpu, cuda};

/// Elements of an MX block along a dimension in which it has more than one.
pub(crate) const MX: usize = 32;

/// Computes the absolute maximum of each block by the rule of [`super::amax`], into `out` (fp32). `out` has
/// one row of elements for each row of blocks that `x` touches, where row 0 of `x` is row `row_offset` of the
/// whole matrix. Block rows and columns are those of the [formats](crate::FORMATS).
pub fn block_amax(
    x: View,
    block: Block,
    row_offset: usize,
    out: ViewMut,
    stream: Stream,
) -> Result<(), Error> {
    let extents = block_extents();
    if !(extents.contains(&block.rows) && extents.contains(&block.cols)) {
        let names = extents.into_iter().map(Block::extent_name).collect();
        return Err(block.unsupported(format!("made of {}", list(names))));
    }
    let mut call = Call::default();
    call.input("x", &x, Kind::Wide)?;
    call.output("out", &out, Kind::F32)?;
    let grid = block.grid_from(row_offset, x.rows(), x.cols());
    shape("out", out.shape(), grid, "one element for each block that x touches")?;
    let (device, block_offset) = (call.finish()?, block.block_offset(row_offset));
    let block_amax = |x, out| match device {
        Device::Cpu => {
            cpu::block_amax(x, block, block_offset, out);
            Ok(())
        }
        Device::Cuda(_) => cuda::block_amax(x, block, block_offset, out, stream),
    };
    if block_offset == 0 && block.divides_rows(x.rows()) && x.is_flat() && out.is_flat() {
        return block_amax(x.flat(), out.flat());
    }
    (0..x.batch()).try_for_each(|i| block_amax(x.at(i), out.at(i)))
}

/// Quantizes with a scale for each block, in one or both directions from one read.
///
/// fp32 scales follow [`crate::ScaleRule::scale`]; E8M0 scales follow `format::e8m0::from_amax`. Codes are
/// encode(x * (1 / scale)), or encode(x / scale) with [`BlockSpec::divide`]. If a block holds a NaN or an infinity, its scale is NaN (E8M0: byte 255) and all
/// its codes are 0x7F. Neighbouring blocks are not affected.
pub fn quantize_blocks(
    x: View,
    spec: BlockSpec,
    inputs: BlockInputs,
    rowwise: Option<BlockPlane>,
    columnwise: Option<BlockPlane>,
    stream: Stream,
) -> Result<(), Error> {
    let (rows, cols) = x.shape();
    let block = spec.block;
    let mut call = Call::default();
    call.input("x", &x, Kind::Wide)?;
    let codes = [&rowwise, &columnwise].map(|plane| plane.as_ref().map(|plane| &plane.codes));
    let format = call.planes(x.shape(), codes[0], codes[1])?;
    check_spec(spec)?;

    let [grid, columnwise_grid] = spec.grids(rows, cols);
    let [rowwise_shape, columnwise_shape] = spec.plane_shapes(rows, cols);
    for (arg, plane, expected, blocks) in [
        ("rowwise_scale", &rowwise, rowwise_shape, grid.1),
        ("columnwise_scale", &columnwise, columnwise_shape, columnwise_grid.1),
    ] {
        let Some(plane) = plane else { continue };
        call.output(arg, &plane.scales, Kind::Is(spec.scale.dtype()))?;
        if spec.packed {
            packed_vector(arg, &plane.scales, expected.codes.0, blocks)?;
        } else {
            shape(arg, plane.scales.shape(), expected.scales, "one element for each block")?;
        }
    }
    for (arg, view, expected, used) in [
        ("amax", inputs.amax, grid, rowwise.is_some() || block.is_square()),
        (
            "amax_columnwise",
            inputs.amax_columnwise,
            columnwise_grid,
            columnwise.is_some() && !block.is_square(),
        ),
        ("column_scale", inputs.column_scale, (1, cols), rowwise.is_some() && block == Block::ROW),
    ] {
        let Some(view) = view else { continue };
        if !used {
            return Err(Error::Value {
                arg: arg.into(),
                got: "given".into(),
                expected: match arg {
                    "column_scale" => "absent, unless blocks are (1, all) and there is a rowwise output",
                    "amax" => "absent, unless there is a rowwise output or blocks are square",
                    _ => "absent, unless there is a columnwise output and blocks are not square",
                }
                .into(),
            });
        }
        call.input(arg, &view, Kind::F32)?;
        let of = if arg == "column_scale" { "column of x" } else { "block" };
        shape(arg, view.shape(), expected, &format!("one element for each {of}"))?;
    }
    let device = call.finish()?;
    let call = BlockCall { x, spec, format, inputs, rowwise, columnwise };
    let quantize_blocks = |call| match device {
        Device::Cpu => {
            cpu::quantize_blocks(call);
            Ok(())
        }
        Device::Cuda(_) => cuda::quantize_blocks(call, stream),
    };
    if let Some(call) = call.flat() {
        return quantize_blocks(call);
    }
    (0..x.batch()).try_for_each(|i| quantize_blocks(call.at(i)))
}

/// Packs E8M0 scales into the 128x4 layout. `scale` has one element per block of a plane with `rows` rows.
/// `block_rows` rows (1 or 32) share a scale, which is repeated for each of them. Padding bytes are 0. `out`
/// is a contiguous vector of [`packed::bytes`]`(rows, blocks per row)`.
pub fn pack_scales(
    scale: View,
    rows: usize,
    block_rows: usize,
    out: ViewMut,
    stream: Stream,
) -> Result<(), Error> {
    check_block_rows(block_rows)?;
    let mut call = Call::default();
    call.input("scale", &scale, Kind::Is(DType::E8m0))?;
    call.output("out", &out, Kind::Is(DType::E8m0))?;
    let expected = (rows.div_ceil(block_rows), scale.cols());
    shape("scale", scale.shape(), expected, "one row for each row of blocks")?;
    packed_vector("out", &out, rows, scale.cols())?;
    one_matrix("scale", scale.batch())?;
    match call.finish()? {
        Device::Cpu => {
            cpu::pack_scales(scale, rows, block_rows, out);
            Ok(())
        }
        Device::Cuda(_) => cuda::pack_scales(scale, rows, block_rows, out, stream),
    }
}

/// Rewrites the codes of an MXFP8 plane (blocks of (1, 32) or (32, 32), E8M0 scales) so that each row of
/// `out` has one fp32 scale, a power of two. For a line, e is the largest exponent of its blocks that are not
/// NaN, at least -126, and code' = encode(code * 2^(`e_block` - e)). The blocks with the largest exponent
/// keep their bits. Other codes lose bits only if they become subnormal in the format.
///
/// NaN codes stay NaN, and all codes of a NaN block become NaN (0x7F). A line whose codes are all zero or NaN
/// has scale 1. `scale_out` is fp32, (rows of `out`, 1).
pub fn rebase(
    codes: View,
    scale: View,
    block: Block,
    axis: Axis,
    out: ViewMut,
    scale_out: ViewMut,
    stream: Stream,
) -> Result<(), Error> {
    if BlockFormat::find(block, DType::E8m0).is_none() {
        return Err(block.unsupported(BlockFormat::list_blocks(|format| format.scale_dtype == DType::E8m0)));
    }
    let mut call = Call::default();
    call.input("codes", &codes, Kind::Fp8)?;
    call.input("scale", &scale, Kind::Is(DType::E8m0))?;
    let (rows, cols) = codes.shape();
    shape("scale", scale.shape(), block.grid(rows, cols), "one element for each block")?;
    call.output("out", &out, Kind::Is(codes.dtype()))?;
    let expected = axis.rebased_shape((rows, cols));
    let is = match axis {
        Axis::Rows => "the shape of codes",
        Axis::Columns => "the transposed shape of codes",
    };
    shape("out", out.shape(), expected, is)?;
    call.output("scale_out", &scale_out, Kind::F32)?;
    shape("scale_out", scale_out.shape(), (expected.0, 1), "one element for each row of out")?;
    let device = call.finish()?;
    let rebase = |codes, scale, out, scale_out| match device {
        Device::Cpu => {
            cpu::rebase(codes, scale, block, axis, out, scale_out);
            Ok(())
        }
        Device::Cuda(_) => cuda::rebase(codes, scale, block, axis, out, scale_out, stream),
    };
    let flat = codes.is_flat() && scale.is_flat() && out.is_flat() && scale_out.is_flat();
    if axis == Axis::Rows && block.divides_rows(rows) && flat {
        return rebase(codes.flat(), scale.flat(), out.flat(), scale_out.flat());
    }
    (0..codes.batch()).try_for_each(|i| rebase(codes.at(i), scale.at(i), out.at(i), scale_out.at(i)))
}

fn check_spec(spec: BlockSpec) -> Result<(), Error> {
    let BlockSpec { block, scale, row_offset, packed, divide } = spec;
    if let BlockScale::F32(rule) = scale {
        check_rule_without_margin(rule, "0 for block scales")?;
    }

    let dtype = scale.dtype();
    if BlockFormat::find(block, dtype).is_none() {
        let blocks = BlockFormat::list_blocks(|format| format.scale_dtype == dtype);
        return Err(block.unsupported(format!("{blocks} with {dtype} scales")));
    }

    let is_row = block == Block::ROW;
    check_number("divide", divide, !divide || is_row, "false unless blocks are (1, all)")?;
    match scale {
        BlockScale::F32(_) => check_number("packed", packed, !packed, "false with float32 scales"),
        BlockScale::E8m0(_) => {
            let works = !packed || row_offset % MX == 0;
            check_number("row_offset", row_offset, works, "a multiple of 32 if scales are packed")
        }
    }
}

fn check_block_rows(block_rows: usize) -> Result<(), Error> {
    check_number("block_rows", block_rows, block_rows == 1 || block_rows == MX, "1 or 32")
}

/// Returns an error unless the scales are a contiguous vector of the packed size.
fn packed_vector(arg: &'static str, scales: &ViewMut, rows: usize, blocks: usize) -> Result<(), Error> {
    let bytes = packed::bytes(rows, blocks);
    let is = format!("the packed layout of {rows} rows of {blocks} blocks");
    shape(arg, scales.shape(), (1, bytes), &is)?;
    if scales.is_contiguous() {
        return Ok(());
    }
    Err(Error::Value {
        arg: arg.into(),
        got: "strided".into(),
        expected: "contiguous, because scales are packed".into(),
    })
}
