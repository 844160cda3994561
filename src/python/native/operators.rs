//! The operators: each takes its arguments in the order of its schema (`python/fp8rs/ops`), makes room for its
//! results as the schema's fake kernel does, and calls the operation of its name.

use std::ffi::CStr;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::call::{Tensor, Values, stream, views};
use super::raise::{Failure, throw};
use super::shim::{Kernel, Value};
use crate::format::Fp8Format;
use crate::layout::{Block, DType, ViewMut, packed};
use crate::ops::{self, Axis, BlockPlane, BlockScale, BlockSpec, Given, ScaleRule};
use crate::python::parse;

type Results = Result<Vec<Tensor>, Failure>;

macro_rules! operators {
    ($($name:ident $symbol:literal)*) => {
        /// Every operator that has a kernel here. Not those that declare a write: to count a tensor's version is
        /// nothing that torch's C interface can do.
        pub(super) const ALL: &[(&CStr, Kernel)] = &[$(($symbol, {
            unsafe extern "C-unwind" fn kernel(stack: *mut Value, inputs: u64, outputs: u64) {
                // SAFETY: torch's values, as many as it says.
                unsafe { run($name, stack, inputs, outputs) }
            }
            kernel
        })),*];
    };
}

operators! {
    amax c"amax"
    multi_amax c"multi_amax"
    scale_from_amax c"scale_from_amax"
    quantize c"quantize"
    quantize_delayed c"_quantize_delayed"
    quantize_current c"quantize_current"
    transpose c"transpose"
    dequantize c"dequantize"
    block_amax c"block_amax"
    quantize_blocks c"quantize_blocks"
    pack_scales c"pack_scales"
    unpack_scales c"unpack_scales"
    rebase c"rebase"
}

/// # Safety
/// `stack` has room for `inputs` and `outputs` values; the inputs are those of the operator's schema.
unsafe fn run(operator: fn(Values<'_>) -> Results, stack: *mut Value, inputs: u64, outputs: u64) {
    let called = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: the caller's promise.
        let results = operator(Values::new(unsafe { std::slice::from_raw_parts(stack, inputs as usize) }))?;
        assert_eq!(results.len() as u64, outputs, "the kernel gives what the schema says");
        for (i, result) in results.into_iter().enumerate() {
            // SAFETY: below `outputs`.
            unsafe { stack.add(i).write(result.into_value()) };
        }
        Ok(())
    }));
    let failure = match called {
        Ok(Ok(())) => return,
        Ok(Err(failure)) => failure,
        Err(panic) => {
            let words = panic.downcast_ref::<&str>().map(ToString::to_string);
            Failure::Panic(words.or_else(|| panic.downcast_ref().cloned()).unwrap_or_default())
        }
    };
    throw(failure)
}

/// Room for the codes of one quantization.
struct Codes {
    row: Option<Tensor>,
    col: Option<Tensor>,
    format: Fp8Format,
}

impl Codes {
    fn new(x: &Tensor, format: Fp8Format, rowwise: bool, columnwise: bool) -> Result<Self, Failure> {
        let dtype = format.into();
        let row = if rowwise { Some(x.room(dtype, x.sizes()?)?) } else { None };
        let (rows, cols) = x.matrix_shape()?;
        let col = if columnwise { Some(x.room_strided(dtype, &[cols, rows], &[rows, 1])?) } else { None };
        Ok(Self { row, col, format })
    }

    fn views(&self) -> Result<[Option<ViewMut<'_>>; 2], Failure> {
        Ok([optional_mut(self.row.as_ref(), "rowwise")?, optional_mut(self.col.as_ref(), "columnwise")?])
    }

    /// The codes, those that were not asked for with the shape (0,).
    fn or_empty(self, x: &Tensor) -> Result<[Tensor; 2], Failure> {
        let dtype = self.format.into();
        Ok([or_empty(self.row, x, dtype)?, or_empty(self.col, x, dtype)?])
    }
}

fn optional_mut<'a>(tensor: Option<&'a Tensor>, name: &'static str) -> Result<Option<ViewMut<'a>>, Failure> {
    tensor.map(|tensor| tensor.view_mut(name)).transpose()
}

fn or_empty(tensor: Option<Tensor>, like: &Tensor, dtype: DType) -> Result<Tensor, Failure> {
    tensor.map_or_else(|| like.empty(dtype), Ok)
}

fn amax(mut values: Values) -> Results {
    let x = values.tensor();
    let out = x.room(DType::F32, &[])?;
    let x = x.matrix()?;
    ops::amax(x.view("x")?, out.view_mut("out")?, stream([&x])?)?;
    Ok(vec![out])
}

fn multi_amax(mut values: Values) -> Results {
    let xs = values.tensors();
    let Some(first) = xs.first() else { return Err(Failure::Value("multi_amax: xs is empty".into())) };
    let out = first.room(DType::F32, &[xs.len() as i64])?;
    let xs = xs.into_iter().map(Tensor::matrix).collect::<Result<Vec<_>, _>>()?;
    ops::multi_amax(&views(&xs, "xs")?, out.view_mut("out")?, stream(&xs)?)?;
    Ok(vec![out])
}

fn scale_from_amax(mut values: Values) -> Results {
    let (amax, dtype) = (values.tensor(), values.dtype());
    let (power_of_2, amax_epsilon, margin) = (values.flag(), values.float(), values.integer());
    let rule = ScaleRule { power_of_2, amax_epsilon, margin: parse::margin(margin) };
    let format = dtype.format()?;
    let amax = amax.matrix()?;
    let out = amax.room(DType::F32, amax.sizes()?)?;
    let stream = stream([&amax])?;
    ops::scale_from_amax(amax.view("amax")?, format, rule, out.view_mut("scale_out")?, stream)?;
    Ok(vec![out])
}

fn quantize(mut values: Values) -> Results {
    let (x, scale, dtype) = (values.tensor(), values.tensor(), values.dtype());
    let (rowwise, columnwise) = (values.flag(), values.flag());
    let _after = values.optional_tensor();
    let codes = Codes::new(&x, dtype.format()?, rowwise, columnwise)?;
    let x = x.matrix()?;
    let [row, col] = codes.views()?;
    ops::quantize(x.view("x")?, scale.view("scale")?, row, col, stream([&x, &scale])?)?;
    Ok(codes.or_empty(&x)?.into())
}

fn quantize_delayed(mut values: Values) -> Results {
    let (x, scale, amax, dtype) = (values.tensor(), values.tensor(), values.tensor(), values.dtype());
    let (rowwise, columnwise) = (values.flag(), values.flag());
    let codes = Codes::new(&x, dtype.format()?, rowwise, columnwise)?;
    let used = x.room(DType::F32, &[])?;
    let x = x.matrix()?;
    let [row, col] = codes.views()?;
    let stream = stream([&x, &scale, &amax])?;
    let (scale, amax) = (scale.view("scale")?, amax.view_mut("amax")?);
    ops::quantize_delayed(x.view("x")?, scale, amax, used.view_mut("scale_used")?, row, col, stream)?;
    let [row, col] = codes.or_empty(&x)?;
    Ok(vec![row, col, used])
}

fn quantize_current(mut values: Values) -> Results {
    let (x, dtype) = (values.tensor(), values.dtype());
    let (rowwise, columnwise) = (values.flag(), values.flag());
    let rule = ScaleRule { power_of_2: values.flag(), amax_epsilon: values.float(), margin: 0 };
    let codes = Codes::new(&x, dtype.format()?, rowwise, columnwise)?;
    let scale = x.room(DType::F32, &[])?;
    let x = x.matrix()?;
    let [row, col] = codes.views()?;
    ops::quantize_current(x.view("x")?, rule, scale.view_mut("scale_out")?, row, col, stream([&x])?)?;
    let [row, col] = codes.or_empty(&x)?;
    Ok(vec![row, col, scale])
}

fn transpose(mut values: Values) -> Results {
    let codes = values.tensor();
    let _after = values.optional_tensor();
    let (rows, cols) = codes.matrix_shape()?;
    let codes = codes.matrix()?;
    let view = codes.view("codes")?;
    let out = codes.room(view.dtype(), &[cols, rows])?;
    ops::transpose(view, out.view_mut("out")?, stream([&codes])?)?;
    Ok(vec![out])
}

fn dequantize(mut values: Values) -> Results {
    let (codes, scale, block, dtype) = (values.tensor(), values.tensor(), values.integers(), values.dtype());
    let &[block_rows, block_cols] = &block[..] else {
        let message = format!("block is {block:?}; it must be two sizes, -1 for the whole extent");
        return Err(Failure::Value(message));
    };
    let Some(wide) = dtype.known().filter(|dtype| dtype.is_wide()) else {
        let message = format!("dtype is {}; it must be float32, bfloat16 or float16", dtype.name());
        return Err(Failure::Type(message));
    };
    let block = parse::block(block_rows, block_cols)?;
    let out = codes.room(wide, codes.sizes()?)?;
    let codes = codes.matrix()?;
    let stream = stream([&codes, &scale])?;
    ops::dequantize(codes.view("codes")?, scale.view("scale")?, block, out.view_mut("out")?, stream)?;
    Ok(vec![out])
}

fn block_amax(mut values: Values) -> Results {
    let (x, block, row_offset) = (values.tensor(), values.integers(), values.integer());
    let block = pair(&block)?;
    let row_offset = parse::count("row_offset", row_offset)?;
    let (rows, cols) = x.matrix_shape()?;
    let (down, across) = block.grid_from(row_offset, rows as usize, cols as usize);
    let out = x.room(DType::F32, &[down as i64, across as i64])?;
    let x = x.matrix()?;
    ops::block_amax(x.view("x")?, block, row_offset, out.view_mut("out")?, stream([&x])?)?;
    Ok(vec![out])
}

fn quantize_blocks(mut values: Values) -> Results {
    let (x, fp8_dtype, block) = (values.tensor(), values.dtype(), values.integers());
    let (scale_dtype, rowwise, columnwise) = (values.dtype(), values.flag(), values.flag());
    let (rounding, power_of_2, amax_epsilon) = (values.string(), values.flag(), values.float());
    let (packed, row_offset) = (values.flag(), values.integer());
    let given = [values.optional_tensor(), values.optional_tensor(), values.optional_tensor()];
    let _after = values.optional_tensor();

    let block = pair(&block)?;
    let scales = scale_dtype.known();
    let scale = match scales {
        Some(DType::E8m0) => BlockScale::E8m0(parse::rounding(&rounding)?),
        Some(DType::F32) => {
            parse::rounding(&rounding)?;
            BlockScale::F32(ScaleRule { power_of_2, amax_epsilon, margin: 0 })
        }
        _ => {
            let got = scale_dtype.name();
            let message = format!("scale_dtype is {got}; it must be torch.float32 or torch.float8_e8m0fnu");
            return Err(Failure::Type(message));
        }
    };
    let codes = Codes::new(&x, fp8_dtype.format()?, rowwise, columnwise)?;
    let row_offset = parse::count("row_offset", row_offset)?;
    let spec = BlockSpec { block, scale, row_offset, packed };
    let (rows, cols) = x.matrix_shape()?;
    let lines = [(codes.row.is_some(), rows as usize), (codes.col.is_some(), cols as usize)];
    let mut scales = [None, None];
    for (i, ((wanted, lines), grid)) in
        lines.into_iter().zip(spec.grids(rows as usize, cols as usize)).enumerate()
    {
        if wanted {
            scales[i] = Some(room_for_scales(&x, &spec, lines, grid)?);
        }
    }
    let x = x.matrix()?;
    {
        let [row, col] = codes.views()?;
        let plane =
            |codes, scales| Option::zip(codes, scales).map(|(codes, scales)| BlockPlane { codes, scales });
        let rowwise = plane(row, optional_mut(scales[0].as_ref(), "rowwise_scale")?);
        let columnwise = plane(col, optional_mut(scales[1].as_ref(), "columnwise_scale")?);
        let view = |i: usize, name| given[i].as_ref().map(|tensor| tensor.view(name)).transpose();
        let known = Given {
            amax: view(0, "amax")?,
            amax_columnwise: view(1, "amax_columnwise")?,
            fold: view(2, "fold")?,
        };
        let stream = stream(given.iter().flatten().chain([&x]))?;
        ops::quantize_blocks(x.view("x")?, spec, known, rowwise, columnwise, stream)?;
    }
    let [row_scale, col_scale] = scales;
    let dtype = scale.dtype();
    let [row, col] = codes.or_empty(&x)?;
    Ok(vec![row, or_empty(row_scale, &x, dtype)?, col, or_empty(col_scale, &x, dtype)?])
}

/// Scales of a plane with `lines` rows: contiguous; those of (1, 128) with the rows next to each other.
fn room_for_scales(
    x: &Tensor,
    spec: &BlockSpec,
    lines: usize,
    (down, across): (usize, usize),
) -> Result<Tensor, Failure> {
    let (dtype, shape) = (spec.scale.dtype(), [down as i64, across as i64]);
    if spec.packed {
        return x.room(dtype, &[packed::bytes(lines, across) as i64]);
    }
    if spec.block == (Block { rows: 1, cols: 128 }) {
        return x.room_strided(dtype, &shape, &[1, shape[0].max(1)]);
    }
    x.room(dtype, &shape)
}

fn pack_scales(mut values: Values) -> Results {
    let (scale, rows, block_rows) = (values.tensor(), values.integer(), values.integer());
    let &[_, blocks] = scale.sizes()? else {
        let message = format!("scale has {} dimensions; it must have 2", scale.sizes()?.len());
        return Err(Failure::Value(message));
    };
    let (rows, block_rows) = (parse::count("rows", rows)?, parse::count("block_rows", block_rows)?);
    let view = scale.view("scale")?;
    let out = scale.room(view.dtype(), &[packed::bytes(rows, blocks as usize) as i64])?;
    ops::pack_scales(view, rows, block_rows, out.view_mut("out")?, stream([&scale])?)?;
    Ok(vec![out])
}

fn unpack_scales(mut values: Values) -> Results {
    let (packed, rows) = (values.tensor(), values.integer());
    let (blocks, block_rows) = (values.integer(), values.integer());
    if block_rows != 1 && block_rows != 32 {
        return Err(Failure::Value(format!("block_rows is {block_rows}; it must be 1 or 32")));
    }
    let (rows, blocks) = (parse::count("rows", rows)?, parse::count("blocks", blocks)?);
    let block_rows = block_rows as usize;
    let view = packed.view("packed")?;
    let out = packed.room(view.dtype(), &[rows.div_ceil(block_rows) as i64, blocks as i64])?;
    ops::unpack_scales(view, rows, block_rows, out.view_mut("out")?, stream([&packed])?)?;
    Ok(vec![out])
}

fn rebase(mut values: Values) -> Results {
    let (codes, scale, block, axis) = (values.tensor(), values.tensor(), values.integers(), values.integer());
    let _after = values.optional_tensor();
    let block = pair(&block)?;
    let axis = parse::axis(axis)?;
    let (rows, cols) = codes.matrix_shape()?;
    let codes = codes.matrix()?;
    let view = codes.view("codes")?;
    let (out, lines) = match axis {
        Axis::Rows => (codes.room(view.dtype(), codes.sizes()?)?, rows),
        Axis::Columns => (codes.room(view.dtype(), &[cols, rows])?, cols),
    };
    let scale_out = codes.room(DType::F32, &[lines, 1])?;
    let stream = stream([&codes, &scale])?;
    let (to, to_scale) = (out.view_mut("out")?, scale_out.view_mut("scale_out")?);
    ops::rebase(view, scale.view("scale")?, block, axis, to, to_scale, stream)?;
    Ok(vec![out, scale_out])
}

/// The sizes of a block, as the Python kernels check them.
fn pair(block: &[i64]) -> Result<Block, Failure> {
    let &[rows, cols] = block else {
        return Err(Failure::Value(format!(
            "block is {block:?}; it must be two sizes, -1 for the whole extent"
        )));
    };
    if [rows, cols].iter().any(|size| *size != -1 && *size < 1) {
        return Err(Failure::Value(format!(
            "block is {block:?}; each size must be at least 1, or -1 for the whole extent"
        )));
    }
    Ok(parse::block(rows, cols)?)
}
