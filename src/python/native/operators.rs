//! The operators. Each reads its arguments in the order of its schema (`python/fp8rs/ops`), allocates its
//! results as the schema's fake kernel does, and calls the operation of the same name.

use std::ffi::CStr;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::call::{Tensor, Values, stream, views};
use super::raise::{Failure, throw};
use super::shim::{Kernel, Value};
use crate::format::Fp8Format;
use crate::layout::{Block, BlockFormat, DType, View, ViewMut, packed};
use crate::ops::{
    self, Axis, BlockInputs, BlockPlane, BlockScale, BlockSpec, Combine, CombineBackward, Gated, Glu, Groups,
    Norm, Rotation, Routes, ScaleRule, TensorPlanes,
};
use crate::python::parse;
use crate::spec::{PlaneShape, gated_shape, indexed_shape};

type Results = Result<Vec<Tensor>, Failure>;

macro_rules! operators {
    ($($name:ident $symbol:literal)*) => {
        /// All operators that have a kernel here. Operators that declare a write are not among them, because
        /// torch's C interface cannot increase a tensor's version.
        pub(super) const ALL: &[(&CStr, Kernel)] = &[$(($symbol, {
            /// # Safety
            /// The requirements of [`run`] apply.
            unsafe extern "C-unwind" fn kernel(stack: *mut Value, inputs: u64, outputs: u64) {
                // SAFETY: torch passes `inputs` arguments and provides space for `outputs` results.
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
    rebase c"rebase"
    group_bounds c"group_bounds"
    route_rows c"route_rows"
    quantize_groups c"quantize_groups"
    quantize_gated c"quantize_gated"
    quantize_norm c"_quantize_norm"
    quantize_glu c"_quantize_glu"
    quantize_glu_backward c"_quantize_glu_backward"
    rotate c"_rotate"
    combine_rows c"combine_rows"
    combine_rows_backward c"combine_rows_backward"
}

/// # Safety
/// `stack` must have space for `inputs` and `outputs` values. The inputs must match the operator's schema.
unsafe fn run(operator: fn(Values<'_>) -> Results, stack: *mut Value, inputs: u64, outputs: u64) {
    let called = catch_unwind(AssertUnwindSafe(|| {
        // SAFETY: the caller guarantees `inputs` values at `stack`.
        let results = operator(Values::new(unsafe { std::slice::from_raw_parts(stack, inputs as usize) }))?;
        assert_eq!(results.len() as u64, outputs, "the kernel returns as many results as the schema has");
        for (i, result) in results.into_iter().enumerate() {
            // SAFETY: `i` is below `outputs`, and the caller guarantees space for `outputs` values.
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

/// The code outputs of one quantization.
struct Codes {
    row: Option<Tensor>,
    col: Option<Tensor>,
    format: Fp8Format,
}

impl Codes {
    fn new(
        x: &Tensor,
        batch: bool,
        format: Fp8Format,
        rowwise: bool,
        columnwise: bool,
    ) -> Result<Self, Failure> {
        let dtype = format.into();
        let row = if rowwise { Some(x.allocate(dtype, x.sizes()?)?) } else { None };
        let (rows, cols) = x.matrix_shape(batch)?;
        let col = if columnwise { Some(allocate_transposed(x, batch, dtype, (rows, cols))?) } else { None };
        Ok(Self { row, col, format })
    }

    fn views(&self, batch: bool) -> Result<[Option<ViewMut<'_>>; 2], Failure> {
        let row = optional_mut(self.row.as_ref(), "rowwise", batch)?;
        Ok([row, optional_mut(self.col.as_ref(), "columnwise", batch)?])
    }

    /// Returns the codes. A plane that was not requested has the shape (0,).
    fn or_empty(self, x: &Tensor) -> Result<[Tensor; 2], Failure> {
        let dtype = self.format.into();
        Ok([or_empty(self.row, x, dtype)?, or_empty(self.col, x, dtype)?])
    }

    /// Returns the codes as `or_empty` does, with an allocation of its own for each that was not requested.
    fn or_new_empty(self, x: &Tensor) -> Result<[Tensor; 2], Failure> {
        let dtype = self.format.into();
        let or_new = |codes: Option<Tensor>| codes.map_or_else(|| x.allocate(dtype, &[0]), Ok);
        Ok([or_new(self.row)?, or_new(self.col)?])
    }
}

/// Allocates a contiguous output for the transpose of each matrix.
fn allocate_transposed(
    x: &Tensor,
    batch: bool,
    dtype: DType,
    (rows, cols): (i64, i64),
) -> Result<Tensor, Failure> {
    if batch {
        return x.allocate(dtype, &x.each(batch, &[cols, rows])?);
    }
    x.allocate_strided(dtype, &[cols, rows], &[rows, 1])
}

fn optional_mut<'a>(
    tensor: Option<&'a Tensor>,
    name: &'static str,
    batch: bool,
) -> Result<Option<ViewMut<'a>>, Failure> {
    tensor.map(|tensor| tensor.batch_view_mut(name, batch)).transpose()
}

fn or_empty(tensor: Option<Tensor>, like: &Tensor, dtype: DType) -> Result<Tensor, Failure> {
    tensor.map_or_else(|| like.empty(dtype), Ok)
}

fn amax(mut values: Values) -> Results {
    let x = values.tensor();
    let batch = x.is_batch(values.flag())?;
    let out = x.allocate(DType::F32, &x.each(batch, &[])?)?;
    let x = x.matrix(batch)?;
    ops::amax(x.batch_view("x", batch)?, out.batch_view_mut("out", batch)?, stream([&x])?)?;
    Ok(vec![out])
}

fn multi_amax(mut values: Values) -> Results {
    let (xs, batched) = (values.tensors(), values.flag());
    if xs.is_empty() {
        return Err(Failure::Value("xs is empty; it must have at least one tensor".into()));
    }
    let matrix = |x: Tensor| {
        let batch = x.is_batch(batched)?;
        x.matrix(batch)
    };
    let xs = xs.into_iter().map(matrix).collect::<Result<Vec<_>, _>>()?;
    let views = views(&xs, "xs", batched)?;
    let count = views.iter().map(View::batch).sum::<usize>();
    let out = xs[0].allocate(DType::F32, &[count as i64])?;
    ops::multi_amax(&views, out.view_mut("out")?, stream(&xs)?)?;
    Ok(vec![out])
}

fn scale_from_amax(mut values: Values) -> Results {
    let (amax, dtype) = (values.tensor(), values.dtype());
    let (power_of_2, amax_epsilon, margin) = (values.flag(), values.float(), values.integer());
    let rule = ScaleRule { power_of_2, amax_epsilon, margin: parse::margin(margin) };
    let format = dtype.format()?;
    let amax = amax.matrix(false)?;
    let out = amax.allocate(DType::F32, amax.sizes()?)?;
    let stream = stream([&amax])?;
    ops::scale_from_amax(amax.view("amax")?, format, rule, out.view_mut("scale_out")?, stream)?;
    Ok(vec![out])
}

fn quantize(mut values: Values) -> Results {
    let (x, scale, dtype) = (values.tensor(), values.tensor(), values.dtype());
    let (rowwise, columnwise) = (values.flag(), values.flag());
    let _after = values.optional_tensor();
    let batch = x.is_batch(values.flag())?;
    let codes = Codes::new(&x, batch, dtype.format()?, rowwise, columnwise)?;
    let x = x.matrix(batch)?;
    let [row, col] = codes.views(batch)?;
    let stream = stream([&x, &scale])?;
    ops::quantize(x.batch_view("x", batch)?, scale.batch_view("scale", batch)?, row, col, stream)?;
    Ok(codes.or_empty(&x)?.into())
}

fn quantize_delayed(mut values: Values) -> Results {
    let (x, scale, amax, dtype) = (values.tensor(), values.tensor(), values.tensor(), values.dtype());
    let (rowwise, columnwise) = (values.flag(), values.flag());
    let batch = x.is_batch(values.flag())?;
    let codes = Codes::new(&x, batch, dtype.format()?, rowwise, columnwise)?;
    let used = x.allocate(DType::F32, &x.each(batch, &[])?)?;
    let x = x.matrix(batch)?;
    let [row, col] = codes.views(batch)?;
    let stream = stream([&x, &scale, &amax])?;
    let (scale, amax) = (scale.batch_view("scale", batch)?, amax.batch_view_mut("amax", batch)?);
    let scale_used = used.batch_view_mut("scale_used", batch)?;
    ops::quantize_delayed(x.batch_view("x", batch)?, scale, amax, scale_used, row, col, stream)?;
    let [row, col] = codes.or_empty(&x)?;
    Ok(vec![row, col, used])
}

fn quantize_current(mut values: Values) -> Results {
    let (x, dtype) = (values.tensor(), values.dtype());
    let (rowwise, columnwise) = (values.flag(), values.flag());
    let rule = ScaleRule { power_of_2: values.flag(), amax_epsilon: values.float(), margin: 0 };
    let batch = x.is_batch(values.flag())?;
    let codes = Codes::new(&x, batch, dtype.format()?, rowwise, columnwise)?;
    let scale = x.allocate(DType::F32, &x.each(batch, &[])?)?;
    let x = x.matrix(batch)?;
    let [row, col] = codes.views(batch)?;
    let scale_out = scale.batch_view_mut("scale_out", batch)?;
    ops::quantize_current(x.batch_view("x", batch)?, rule, scale_out, row, col, stream([&x])?)?;
    let [row, col] = codes.or_empty(&x)?;
    Ok(vec![row, col, scale])
}

fn transpose(mut values: Values) -> Results {
    let codes = values.tensor();
    let _after = values.optional_tensor();
    let batch = codes.is_batch(values.flag())?;
    let (rows, cols) = codes.matrix_shape(batch)?;
    let codes = codes.matrix(batch)?;
    let view = codes.batch_view("codes", batch)?;
    let out = codes.allocate(view.dtype(), &codes.each(batch, &[cols, rows])?)?;
    ops::transpose(view, out.batch_view_mut("out", batch)?, stream([&codes])?)?;
    Ok(vec![out])
}

fn dequantize(mut values: Values) -> Results {
    let (codes, scale, block, dtype) = (values.tensor(), values.tensor(), values.integers(), values.dtype());
    let batch = codes.is_batch(values.flag())?;
    let &[block_rows, block_cols] = &block[..] else {
        let message = format!("block is {block:?}; it must be two sizes, where -1 is the whole extent");
        return Err(Failure::Value(message));
    };
    let Some(wide) = dtype.supported().filter(|dtype| dtype.is_wide()) else {
        let message = format!("dtype is {}; it must be float32, bfloat16 or float16", dtype.name());
        return Err(Failure::Type(message));
    };
    let block = parse::block(block_rows, block_cols)?;
    let out = codes.allocate(wide, codes.sizes()?)?;
    let codes = codes.matrix(batch)?;
    let stream = stream([&codes, &scale])?;
    let (view, scale) = (codes.batch_view("codes", batch)?, scale.batch_view("scale", batch)?);
    ops::dequantize(view, scale, block, out.batch_view_mut("out", batch)?, stream)?;
    Ok(vec![out])
}

fn block_amax(mut values: Values) -> Results {
    let (x, block, row_offset) = (values.tensor(), values.integers(), values.integer());
    let block = pair(&block)?;
    let row_offset = parse::count("row_offset", row_offset)?;
    let batch = x.is_batch(values.flag())?;
    let (rows, cols) = x.matrix_shape(batch)?;
    let (down, across) = block.grid_from(row_offset, rows as usize, cols as usize);
    let out = x.allocate(DType::F32, &x.each(batch, &[down as i64, across as i64])?)?;
    let x = x.matrix(batch)?;
    let out_view = out.batch_view_mut("out", batch)?;
    ops::block_amax(x.batch_view("x", batch)?, block, row_offset, out_view, stream([&x])?)?;
    Ok(vec![out])
}

fn quantize_blocks(mut values: Values) -> Results {
    let (x, fp8_dtype, block) = (values.tensor(), values.dtype(), values.integers());
    let (scale_dtype, rowwise, columnwise) = (values.dtype(), values.flag(), values.flag());
    let (rounding, power_of_2, amax_epsilon) = (values.string(), values.flag(), values.float());
    let (divide, packed, row_offset) = (values.flag(), values.flag(), values.integer());
    let given = [values.optional_tensor(), values.optional_tensor(), values.optional_tensor()];
    let _after = values.optional_tensor();
    let batch = x.is_batch(values.flag())?;

    let block = pair(&block)?;
    let scales = scale_dtype.supported();
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
    if batch && packed {
        return Err(Failure::Value("packed is True; it must be False for a batch of matrices".into()));
    }
    let codes = Codes::new(&x, batch, fp8_dtype.format()?, rowwise, columnwise)?;
    let row_offset = parse::count("row_offset", row_offset)?;
    let spec = BlockSpec { block, scale, row_offset, packed, divide };
    let (rows, cols) = x.matrix_shape(batch)?;
    let [row_shape, col_shape] = spec.plane_shapes(rows as usize, cols as usize);
    let allocate = |shape: PlaneShape| allocate_scales(&x, batch, &spec, shape.scales);
    let row_scale = if rowwise { Some(allocate(row_shape)?) } else { None };
    let col_scale = if columnwise { Some(allocate(col_shape)?) } else { None };
    let x = x.matrix(batch)?;
    {
        let [row, col] = codes.views(batch)?;
        let plane =
            |codes, scales| Option::zip(codes, scales).map(|(codes, scales)| BlockPlane { codes, scales });
        let rowwise = plane(row, optional_mut(row_scale.as_ref(), "rowwise_scale", batch)?);
        let columnwise = plane(col, optional_mut(col_scale.as_ref(), "columnwise_scale", batch)?);
        let view =
            |i: usize, name| given[i].as_ref().map(|tensor| tensor.batch_view(name, batch)).transpose();
        let inputs = BlockInputs {
            amax: view(0, "amax")?,
            amax_columnwise: view(1, "amax_columnwise")?,
            column_scale: view(2, "column_scale")?,
        };
        let stream = stream(given.iter().flatten().chain([&x]))?;
        ops::quantize_blocks(x.batch_view("x", batch)?, spec, inputs, rowwise, columnwise, stream)?;
    }
    let dtype = scale.dtype();
    let [row, col] = codes.or_empty(&x)?;
    Ok(vec![row, or_empty(row_scale, &x, dtype)?, col, or_empty(col_scale, &x, dtype)?])
}

/// Allocates the scales of a plane: a vector if they are packed, and otherwise a matrix for each matrix of `x`.
/// The layout is contiguous, or column-major if the format requires it ([`BlockFormat::scales_by_columns`]).
fn allocate_scales(
    x: &Tensor,
    batch: bool,
    spec: &BlockSpec,
    (rows, cols): (usize, usize),
) -> Result<Tensor, Failure> {
    let (dtype, shape) = (spec.scale.dtype(), [rows as i64, cols as i64]);
    if spec.packed {
        return x.allocate(dtype, &[cols as i64]);
    }
    let sizes = x.each(batch, &shape)?;
    if BlockFormat::find(spec.block, dtype).is_some_and(|format| format.scales_by_columns) {
        let [rows, cols] = shape.map(|extent| extent.max(1));
        let strides = [rows * cols, 1, rows];
        return x.allocate_strided(dtype, &sizes, if batch { &strides } else { &strides[1..] });
    }
    x.allocate(dtype, &sizes)
}

fn pack_scales(mut values: Values) -> Results {
    let (scale, rows, block_rows) = (values.tensor(), values.integer(), values.integer());
    let &[_, blocks] = scale.sizes()? else {
        let message = format!("scale has {} dimensions; it must have 2", scale.sizes()?.len());
        return Err(Failure::Value(message));
    };
    let (rows, block_rows) = (parse::count("rows", rows)?, parse::count("block_rows", block_rows)?);
    let view = scale.view("scale")?;
    let out = scale.allocate(view.dtype(), &[packed::bytes(rows, blocks as usize) as i64])?;
    ops::pack_scales(view, rows, block_rows, out.view_mut("out")?, stream([&scale])?)?;
    Ok(vec![out])
}

fn rebase(mut values: Values) -> Results {
    let (codes, scale, block, axis) = (values.tensor(), values.tensor(), values.integers(), values.integer());
    let _after = values.optional_tensor();
    let batch = codes.is_batch(values.flag())?;
    let block = pair(&block)?;
    let axis = parse::axis(axis)?;
    let (rows, cols) = codes.matrix_shape(batch)?;
    let codes = codes.matrix(batch)?;
    let view = codes.batch_view("codes", batch)?;
    let out = match axis {
        Axis::Rows => codes.allocate(view.dtype(), codes.sizes()?)?,
        Axis::Columns => allocate_transposed(&codes, batch, view.dtype(), (rows, cols))?,
    };
    let (lines, _) = axis.rebased_shape(view.shape());
    let scale_out = codes.allocate(DType::F32, &codes.each(batch, &[lines as i64, 1])?)?;
    let stream = stream([&codes, &scale])?;
    let scale = scale.batch_view("scale", batch)?;
    let (to, to_scale) = (out.batch_view_mut("out", batch)?, scale_out.batch_view_mut("scale_out", batch)?);
    ops::rebase(view, scale, block, axis, to, to_scale, stream)?;
    Ok(vec![out, scale_out])
}

fn group_bounds(mut values: Values) -> Results {
    let (offs, x) = (values.tensor(), values.tensor());
    let rows = x.sizes()?.first().map_or(1, |rows| *rows as usize);
    let vector = || offs.allocate(DType::I32, offs.sizes()?);
    let (ends, padded_ends) = (vector()?, vector()?);
    let stream = stream([&offs, &x])?;
    let (to, to_padded) = (ends.view_mut("ends")?, padded_ends.view_mut("padded_ends")?);
    ops::group_bounds(offs.view("offs")?, rows, to, to_padded, stream)?;
    Ok(vec![ends, padded_ends])
}

fn route_rows(mut values: Values) -> Results {
    let (row_experts, row_pairs) = (values.tensor(), values.tensor());
    let (experts, k) = (values.integer(), values.integer());
    let (experts, k) = (parse::count("experts", experts)?, parse::count("k", k)?);
    let vector = |dtype, count: usize| row_experts.allocate(dtype, &[count as i64]);
    let rows = row_experts.sizes()?.iter().product::<i64>() as usize;
    let (ends, padded_ends) = (vector(DType::I32, experts)?, vector(DType::I32, experts)?);
    let (row_tokens, token_rows) = (vector(DType::I64, rows)?, vector(DType::I64, rows)?);
    let stream = stream([&row_experts, &row_pairs])?;
    let routes = Routes {
        row_experts: row_experts.view("row_experts")?,
        row_pairs: row_pairs.view("row_pairs")?,
        k,
        ends: ends.view_mut("ends")?,
        padded_ends: padded_ends.view_mut("padded_ends")?,
        row_tokens: row_tokens.view_mut("row_tokens")?,
        token_rows: token_rows.view_mut("token_rows")?,
    };
    ops::route_rows(routes, stream)?;
    Ok(vec![ends, padded_ends, row_tokens, token_rows])
}

fn quantize_groups(mut values: Values) -> Results {
    let (x, ends, padded_ends) = (values.tensor(), values.tensor(), values.tensor());
    let (dtype, rowwise, columnwise) = (values.dtype(), values.flag(), values.flag());
    let index = values.optional_tensor();
    let rule = ScaleRule { power_of_2: values.flag(), amax_epsilon: values.float(), margin: 0 };
    let x = x.matrix(false)?;
    let (view, index_view) = (x.view("x")?, index.as_ref().map(|index| index.view("index")).transpose()?);
    let groups = Groups { ends: ends.view("ends")?, padded_ends: padded_ends.view("padded_ends")? };
    let shapes = groups.plane_shapes(indexed_shape(&view, index_view.as_ref()));
    let planes = GroupPlanes::new(&x, shapes, dtype.format()?, [rowwise, columnwise])?;
    let stream = stream(index.iter().chain([&x, &ends, &padded_ends]))?;
    let [row, col] = planes.views()?;
    ops::quantize_groups(view, index_view, groups, rule, row, col, stream)?;
    Ok(planes.results)
}

fn quantize_gated(mut values: Values) -> Results {
    let (h, ends, padded_ends) = (values.tensor(), values.tensor(), values.tensor());
    let (activation, dtype) = (values.string(), values.dtype());
    let (rowwise, columnwise, dy) = (values.flag(), values.flag(), values.optional_tensor());
    let rule = ScaleRule { power_of_2: values.flag(), amax_epsilon: values.float(), margin: 0 };
    let activation = parse::activation(&activation)?;
    let h = h.matrix(false)?;
    let (view, dy_view) = (h.view("h")?, dy.as_ref().map(|dy| dy.view("dy")).transpose()?);
    let groups = Groups { ends: ends.view("ends")?, padded_ends: padded_ends.view("padded_ends")? };
    let shape = gated_shape(view.shape(), dy.is_some());
    let shapes = groups.plane_shapes(shape);
    let planes = GroupPlanes::new(&h, shapes, dtype.format()?, [rowwise, columnwise])?;
    let scratch = h.allocate(view.dtype(), &[shape.0 as i64, shape.1 as i64])?;
    let stream = stream(dy.iter().chain([&h, &ends, &padded_ends]))?;
    let gated = Gated { h: view, dy: dy_view, activation, values: scratch.view_mut("values")? };
    let [row, col] = planes.views()?;
    ops::quantize_gated(gated, groups, rule, row, col, stream)?;
    Ok(planes.results)
}

/// The outputs of a quantization with one scale per tensor whose values are computed by the operator.
struct FusedPlanes {
    codes: Codes,
    scale: Tensor,
}

impl FusedPlanes {
    fn new(x: &Tensor, format: Fp8Format, wanted: [bool; 2]) -> Result<Self, Failure> {
        let codes = Codes::new(x, false, format, wanted[0], wanted[1])?;
        Ok(Self { codes, scale: x.allocate(DType::F32, &[])? })
    }

    /// Returns the outputs as an argument. `delayed` has the scale and the amax of delayed scaling.
    fn planes<'a>(
        &'a self,
        rule: ScaleRule,
        delayed: [Option<&'a Tensor>; 2],
    ) -> Result<TensorPlanes<'a>, Failure> {
        let delayed = match delayed {
            [Some(scale), Some(amax)] => Some((scale.view("scale")?, amax.view_mut("amax")?)),
            [None, None] => None,
            _ => {
                let message = "scale and amax must be given together, for delayed scaling, or be None";
                return Err(Failure::Value(message.into()));
            }
        };
        let [rowwise, columnwise] = self.codes.views(false)?;
        Ok(TensorPlanes { rule, delayed, scale: self.scale.view_mut("scale_out")?, rowwise, columnwise })
    }

    /// Returns rowwise codes, columnwise codes and the scale.
    fn results(self, x: &Tensor) -> Results {
        let [row, col] = self.codes.or_empty(x)?;
        Ok(vec![row, col, self.scale])
    }
}

fn quantize_norm(mut values: Values) -> Results {
    let (x, weight, bias) = (values.tensor(), values.optional_tensor(), values.optional_tensor());
    let (centered, eps, dtype) = (values.flag(), values.float(), values.dtype());
    let wanted = [values.flag(), values.flag()];
    let rule = ScaleRule { power_of_2: values.flag(), amax_epsilon: values.float(), margin: 0 };
    let (scale, amax) = (values.optional_tensor(), values.optional_tensor());

    let planes = FusedPlanes::new(&x, dtype.format()?, wanted)?;
    let Some((_, leading)) = x.sizes()?.split_last() else {
        return Err(Failure::Value("x has no dimension; it must have rows".into()));
    };
    let per_row = [leading, &[1]].concat();
    let rstd = x.allocate(DType::F32, &per_row)?;
    let mean = if centered { x.allocate(DType::F32, &per_row)? } else { x.empty(DType::F32)? };
    let x = x.matrix(false)?;
    {
        let norm = Norm {
            x: x.view("x")?,
            weight: weight.as_ref().map(|weight| weight.view("weight")).transpose()?,
            bias: bias.as_ref().map(|bias| bias.view("bias")).transpose()?,
            centered,
            eps,
            mean: if centered { Some(mean.view_mut("mean")?) } else { None },
            rstd: rstd.view_mut("rstd")?,
        };
        let given = [&weight, &bias, &scale, &amax].into_iter().flatten();
        let stream = stream(given.chain([&x]))?;
        ops::quantize_norm(norm, planes.planes(rule, [scale.as_ref(), amax.as_ref()])?, stream)?;
    }
    let mut results = planes.results(&x)?;
    results.extend([mean, rstd]);
    Ok(results)
}

fn quantize_glu(mut values: Values) -> Results {
    let (gate, up, activation, dtype) = (values.tensor(), values.tensor(), values.string(), values.dtype());
    let wanted = [values.flag(), values.flag()];
    let rule = ScaleRule { power_of_2: values.flag(), amax_epsilon: values.float(), margin: 0 };
    let (scale, amax) = (values.optional_tensor(), values.optional_tensor());

    let activation = parse::activation(&activation)?;
    let planes = FusedPlanes::new(&gate, dtype.format()?, wanted)?;
    let (gate, up) = (gate.matrix(false)?, up.matrix(false)?);
    let glu = Glu { gate: gate.view("gate")?, up: up.view("up")?, activation };
    let product = gate.allocate(glu.gate.dtype(), gate.sizes()?)?;
    let stream = stream([&scale, &amax].into_iter().flatten().chain([&gate, &up]))?;
    let outputs = planes.planes(rule, [scale.as_ref(), amax.as_ref()])?;
    ops::quantize_glu(glu, product.view_mut("values")?, outputs, stream)?;
    planes.results(&gate)
}

fn quantize_glu_backward(mut values: Values) -> Results {
    let (gate, up, dy) = (values.tensor(), values.tensor(), values.tensor());
    let (activation, dtype) = (values.string(), values.dtype());
    let wanted = [values.flag(), values.flag()];
    let rule = ScaleRule { power_of_2: values.flag(), amax_epsilon: values.float(), margin: 0 };
    let delayed = [(); 4].map(|()| values.optional_tensor());

    let activation = parse::activation(&activation)?;
    let gate_planes = FusedPlanes::new(&gate, dtype.format()?, wanted)?;
    let up_planes = FusedPlanes::new(&gate, dtype.format()?, wanted)?;
    let (gate, up, dy) = (gate.matrix(false)?, up.matrix(false)?, dy.matrix(false)?);
    let glu = Glu { gate: gate.view("gate")?, up: up.view("up")?, activation };
    let new_gradient = || gate.allocate(glu.gate.dtype(), gate.sizes()?);
    let gate_gradient = new_gradient()?;
    let up_gradient = new_gradient()?;
    let stream = stream(delayed.iter().flatten().chain([&gate, &up, &dy]))?;
    let [gate_scale, gate_amax, up_scale, up_amax] = delayed.each_ref().map(Option::as_ref);
    let to_gate = gate_planes.planes(rule, [gate_scale, gate_amax])?;
    let to_up = up_planes.planes(rule, [up_scale, up_amax])?;
    let gradients = [gate_gradient.view_mut("values")?, up_gradient.view_mut("up_values")?];
    ops::quantize_glu_backward(glu, dy.view("dy")?, gradients, to_gate, to_up, stream)?;
    let mut results = gate_planes.results(&gate)?;
    // Results must not share memory, not even that of empty ones.
    let [row, col] = up_planes.codes.or_new_empty(&gate)?;
    results.extend([row, col, up_planes.scale]);
    Ok(results)
}

fn rotate(mut values: Values) -> Results {
    let (x, cos, sin, back) = (values.tensor(), values.tensor(), values.tensor(), values.flag());
    let (x, cos, sin) = (x.matrix(false)?, cos.matrix(false)?, sin.matrix(false)?);
    let rotation = Rotation { x: x.view("x")?, cos: cos.view("cos")?, sin: sin.view("sin")?, back };
    let out = x.allocate(rotation.x.dtype(), x.sizes()?)?;
    ops::rotate(rotation, out.view_mut("out")?, stream([&x, &cos, &sin])?)?;
    Ok(vec![out])
}

/// Returns a view of a tensor that must have two dimensions.
fn two_dimensional<'a>(tensor: &'a Tensor, name: &'static str) -> Result<View<'a>, Failure> {
    let dimensions = tensor.sizes()?.len();
    if dimensions == 2 {
        return tensor.view(name);
    }
    Err(Failure::Value(format!("{name} has {dimensions} dimensions; it must have 2")))
}

fn combine_rows(mut values: Values) -> Results {
    let (rows, token_rows, weights) = (values.tensor(), values.tensor(), values.optional_tensor());
    let combine = Combine {
        rows: two_dimensional(&rows, "rows")?,
        token_rows: two_dimensional(&token_rows, "token_rows")?,
        weights: weights.as_ref().map(|weights| two_dimensional(weights, "weights")).transpose()?,
    };
    let sizes = [combine.token_rows.rows() as i64, combine.rows.cols() as i64];
    let out = rows.allocate(combine.rows.dtype(), &sizes)?;
    ops::combine_rows(combine, out.view_mut("out")?, stream(weights.iter().chain([&rows, &token_rows]))?)?;
    Ok(vec![out])
}

fn combine_rows_backward(mut values: Values) -> Results {
    let (grad, rows) = (values.tensor(), values.optional_tensor());
    let (token_rows, weights) = (values.tensor(), values.tensor());
    let wanted = [values.flag(), values.flag()];
    if wanted == [false, false] {
        let message = "needs_rows is False, and so is needs_weights; at least one must be True";
        return Err(Failure::Value(message.into()));
    }
    let grad_view = two_dimensional(&grad, "grad")?;
    let rows_view = rows.as_ref().map(|rows| two_dimensional(rows, "rows")).transpose()?;
    let token_rows_view = two_dimensional(&token_rows, "token_rows")?;
    let dtype = grad_view.dtype();
    let (tokens, k) = (token_rows_view.rows() as i64, token_rows_view.cols() as i64);
    let allocate = |wanted, dtype, sizes: [i64; 2]| {
        if wanted { grad.allocate(dtype, &sizes) } else { grad.empty(dtype) }
    };
    let d_rows = allocate(wanted[0], dtype, [tokens * k, grad_view.cols() as i64])?;
    let d_weights = allocate(wanted[1], DType::F32, [tokens, k])?;
    let output = |wanted: bool, tensor, name| {
        if wanted { optional_mut(Some(tensor), name, false) } else { Ok(None) }
    };
    let backward = CombineBackward {
        grad: grad_view,
        rows: rows_view,
        token_rows: token_rows_view,
        weights: two_dimensional(&weights, "weights")?,
        d_rows: output(wanted[0], &d_rows, "d_rows")?,
        d_weights: output(wanted[1], &d_weights, "d_weights")?,
    };
    ops::combine_rows_backward(backward, stream(rows.iter().chain([&grad, &token_rows, &weights]))?)?;
    Ok(vec![d_rows, d_weights])
}

/// The outputs of a quantization of groups: rowwise codes and scales, columnwise codes and scales.
struct GroupPlanes {
    wanted: [bool; 2],
    results: Vec<Tensor>,
}

impl GroupPlanes {
    fn new(
        like: &Tensor,
        shapes: [PlaneShape; 2],
        format: Fp8Format,
        wanted: [bool; 2],
    ) -> Result<Self, Failure> {
        let mut results = Vec::with_capacity(4);
        for (shape, wanted) in shapes.into_iter().zip(wanted) {
            for (dtype, (rows, cols)) in [(format.into(), shape.codes), (DType::F32, shape.scales)] {
                results.push(if wanted {
                    like.allocate(dtype, &[rows as i64, cols as i64])?
                } else {
                    like.empty(dtype)?
                });
            }
        }
        Ok(Self { wanted, results })
    }

    fn views(&self) -> Result<[Option<BlockPlane<'_>>; 2], Failure> {
        let plane = |i: usize, names: [&'static str; 2]| -> Result<_, Failure> {
            if !self.wanted[i] {
                return Ok(None);
            }
            let codes = self.results[2 * i].view_mut(names[0])?;
            Ok(Some(BlockPlane { codes, scales: self.results[2 * i + 1].view_mut(names[1])? }))
        };
        Ok([plane(0, ["rowwise", "rowwise_scale"])?, plane(1, ["columnwise", "columnwise_scale"])?])
    }
}

/// Parses the sizes of a block with the checks and messages of the Python kernels.
fn pair(block: &[i64]) -> Result<Block, Failure> {
    let &[rows, cols] = block else {
        return Err(Failure::Value(format!(
            "block is {block:?}; it must be two sizes, where -1 is the whole extent"
        )));
    };
    if [rows, cols].iter().any(|size| *size != -1 && *size < 1) {
        return Err(Failure::Value(format!(
            "block is {block:?}; each size must be at least 1, or -1 for the whole extent"
        )));
    }
    Ok(parse::block(rows, cols)?)
}
