//! Block formats: see the functions of the same names in [`crate::ops`].

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use super::parse;
use super::tensors::Arguments;
use crate::layout::{DType, ViewMut};
use crate::ops::{self, BlockPlane, BlockScale, BlockSpec, Given};

functions!(block_amax, quantize_blocks, pack_scales, unpack_scales, rebase);

type Tensor<'a, 'py> = &'a Bound<'py, PyAny>;
type Optional<'a, 'py> = Option<&'a Bound<'py, PyAny>>;

/// The largest magnitude of each block, into `out` (float32, one element for each block that `x` touches).
#[pyfunction]
#[pyo3(signature = (x, block_rows, block_cols, out, row_offset=0))]
fn block_amax<'py>(
    py: Python<'py>,
    x: Tensor<'_, 'py>,
    block_rows: i64,
    block_cols: i64,
    out: Tensor<'_, 'py>,
    row_offset: i64,
) -> PyResult<()> {
    let block = parse::block(block_rows, block_cols)?;
    let row_offset = parse::count("row_offset", row_offset)?;
    let args = Arguments::new(py);
    let x = args.input("x", x)?;
    let out = args.output("out", out)?;
    args.run(|stream| ops::block_amax(x, block, row_offset, out, stream))
}

/// Quantizes with a scale for each block; the dtype of the scales (float32 or `float8_e8m0fnu`) says of which
/// kind they are.
#[pyfunction]
#[pyo3(signature = (
    x, block_rows, block_cols, rowwise, rowwise_scale, columnwise, columnwise_scale, *, rounding="ceil",
    power_2_scale=false, amax_epsilon=0.0, packed=false, row_offset=0, amax=None, amax_columnwise=None,
    fold=None
))]
fn quantize_blocks<'py>(
    py: Python<'py>,
    x: Tensor<'_, 'py>,
    block_rows: i64,
    block_cols: i64,
    rowwise: Optional<'_, 'py>,
    rowwise_scale: Optional<'_, 'py>,
    columnwise: Optional<'_, 'py>,
    columnwise_scale: Optional<'_, 'py>,
    rounding: &str,
    power_2_scale: bool,
    amax_epsilon: f64,
    packed: bool,
    row_offset: i64,
    amax: Optional<'_, 'py>,
    amax_columnwise: Optional<'_, 'py>,
    fold: Optional<'_, 'py>,
) -> PyResult<()> {
    let block = parse::block(block_rows, block_cols)?;
    let row_offset = parse::count("row_offset", row_offset)?;
    let rounding = parse::rounding(rounding)?;
    let args = Arguments::new(py);
    let x = args.input("x", x)?;
    let given = Given {
        amax: args.optional_input("amax", amax)?,
        amax_columnwise: args.optional_input("amax_columnwise", amax_columnwise)?,
        fold: args.optional_input("fold", fold)?,
    };
    let rowwise = plane(
        args.optional_output("rowwise", rowwise)?,
        args.optional_output("rowwise_scale", rowwise_scale)?,
        "rowwise",
    )?;
    let columnwise = plane(
        args.optional_output("columnwise", columnwise)?,
        args.optional_output("columnwise_scale", columnwise_scale)?,
        "columnwise",
    )?;
    let scales = [&rowwise, &columnwise].into_iter().flatten().next().map(|plane| plane.scales.dtype());
    let scale = match scales {
        Some(DType::E8m0) => BlockScale::E8m0(rounding),
        _ => BlockScale::F32(parse::scale_rule(power_2_scale, amax_epsilon, 0)),
    };
    let spec = BlockSpec { block, scale, row_offset, packed };
    args.run(|stream| ops::quantize_blocks(x, spec, given, rowwise, columnwise, stream))
}

/// Packs E8M0 scales of a plane with `rows` rows into the 128x4 layout.
#[pyfunction]
fn pack_scales<'py>(
    py: Python<'py>,
    scale: Tensor<'_, 'py>,
    rows: i64,
    block_rows: i64,
    out: Tensor<'_, 'py>,
) -> PyResult<()> {
    let (rows, block_rows) = (parse::count("rows", rows)?, parse::count("block_rows", block_rows)?);
    let args = Arguments::new(py);
    let scale = args.input("scale", scale)?;
    let out = args.output("out", out)?;
    args.run(|stream| ops::pack_scales(scale, rows, block_rows, out, stream))
}

/// Undoes [`pack_scales`]; `out` has one element for each block.
#[pyfunction]
fn unpack_scales<'py>(
    py: Python<'py>,
    packed: Tensor<'_, 'py>,
    rows: i64,
    block_rows: i64,
    out: Tensor<'_, 'py>,
) -> PyResult<()> {
    let (rows, block_rows) = (parse::count("rows", rows)?, parse::count("block_rows", block_rows)?);
    let args = Arguments::new(py);
    let packed = args.input("packed", packed)?;
    let out = args.output("out", out)?;
    args.run(|stream| ops::unpack_scales(packed, rows, block_rows, out, stream))
}

/// Rewrites MXFP8 codes for one power-of-two scale a row (axis 0), or a column (axis 1; transposed).
#[pyfunction]
fn rebase<'py>(
    py: Python<'py>,
    codes: Tensor<'_, 'py>,
    scale: Tensor<'_, 'py>,
    block_rows: i64,
    block_cols: i64,
    axis: i64,
    out: Tensor<'_, 'py>,
    scale_out: Tensor<'_, 'py>,
) -> PyResult<()> {
    let block = parse::block(block_rows, block_cols)?;
    let axis = parse::axis(axis)?;
    let args = Arguments::new(py);
    let codes = args.input("codes", codes)?;
    let scale = args.input("scale", scale)?;
    let out = args.output("out", out)?;
    let scale_out = args.output("scale_out", scale_out)?;
    args.run(|stream| ops::rebase(codes, scale, block, axis, out, scale_out, stream))
}

fn plane<'a>(
    codes: Option<ViewMut<'a>>,
    scales: Option<ViewMut<'a>>,
    name: &str,
) -> PyResult<Option<BlockPlane<'a>>> {
    match (codes, scales) {
        (Some(codes), Some(scales)) => Ok(Some(BlockPlane { codes, scales })),
        (None, None) => Ok(None),
        _ => Err(PyTypeError::new_err(format!("{name} and {name}_scale go together; one of them is None"))),
    }
}
