//! Rows of the per-tensor operations, with E4M3 outputs.

use fp8rs::{Block, DType, Fp8Format, ScaleRule, ops};

use crate::machine::{Case, Plan};
use crate::row::{Operands, Row};

const E4M3: DType = DType::E4m3;
const F32: DType = DType::F32;
const ONE: (usize, usize) = (1, 1);

/// Number of matrices that the input of a list operation is split into. It is larger than the short list
/// kernels support.
const LIST: usize = 128;
/// Number of weights of a model, for the operation on their scales.
const WEIGHTS: usize = 256;

type MakeRow = fn(Case) -> Row;

/// Returns all rows, grouped by operation.
pub(crate) fn rows(plan: &Plan) -> Vec<Row> {
    let ops: [(&[Case], MakeRow); 12] = [
        (&plan.basic, amax),
        (&plan.basic, |case| quantize(case, false)),
        (&plan.basic, |case| quantize(case, true)),
        (&plan.tensorwise, |case| quantize_delayed(case, false)),
        (&plan.tensorwise, |case| quantize_delayed(case, true)),
        (&plan.tensorwise, |case| quantize_current(case, false)),
        (&plan.tensorwise, |case| quantize_current(case, true)),
        (&plan.tensorwise[..1], transpose),
        (&plan.tensorwise, dequantize),
        (&plan.lists, multi_amax),
        (&plan.lists, multi_quantize),
        (&plan.lists, multi_quantize_delayed),
    ];
    let each = ops.iter().flat_map(|(cases, row)| cases.iter().map(|case| row(*case)));
    [scale_from_amax()].into_iter().chain(each).collect()
}

fn name(Case { dtype, shape }: Case) -> String {
    format!("{dtype}/{}x{}", shape.0, shape.1)
}

fn transposed((rows, cols): (usize, usize)) -> (usize, usize) {
    (cols, rows)
}

fn scale_from_amax() -> Row {
    let mut o = Operands::default();
    let amaxes = o.value(3.0, (1, WEIGHTS));
    let scales = o.output(F32, (1, WEIGHTS));
    o.row("scale_from_amax", format!("float32/{WEIGHTS}"), move |r| {
        let rule = ScaleRule::default();
        ops::scale_from_amax(r.view(amaxes), Fp8Format::E4m3, rule, r.out(scales), r.stream())
    })
}

fn amax(case: Case) -> Row {
    let mut o = Operands::default();
    let (x, out) = (o.case(case), o.output(F32, ONE));
    o.row("amax", name(case), move |r| ops::amax(r.view(x), r.out(out), r.stream()))
}

fn quantize(case: Case, both: bool) -> Row {
    let mut o = Operands::default();
    let (x, scale) = (o.case(case), o.value(0.01, ONE));
    let rowwise = o.output(E4M3, case.shape);
    let columnwise = both.then(|| o.output(E4M3, transposed(case.shape)));
    o.row(if both { "quantize_both" } else { "quantize" }, name(case), move |r| {
        let columnwise = columnwise.map(|out| r.out(out));
        ops::quantize(r.view(x), r.view(scale), Some(r.out(rowwise)), columnwise, r.stream())
    })
}

fn quantize_delayed(case: Case, both: bool) -> Row {
    let mut o = Operands::default();
    let (x, scale) = (o.case(case), o.value(0.01, ONE));
    let (amax, used) = (o.output(F32, ONE), o.output(F32, ONE));
    let rowwise = o.output(E4M3, case.shape);
    let columnwise = both.then(|| o.output(E4M3, transposed(case.shape)));
    o.row(if both { "quantize_delayed_both" } else { "quantize_delayed" }, name(case), move |r| {
        let (rowwise, columnwise) = (Some(r.out(rowwise)), columnwise.map(|out| r.out(out)));
        let (amax, used) = (r.out(amax), r.out(used));
        ops::quantize_delayed(r.view(x), r.view(scale), amax, used, rowwise, columnwise, r.stream())
    })
}

/// Counts the bytes of the input once, although it is read for the maximum and again for the codes.
fn quantize_current(case: Case, both: bool) -> Row {
    let mut o = Operands::default();
    let (x, scale) = (o.case(case), o.output(F32, ONE));
    let rowwise = o.output(E4M3, case.shape);
    let columnwise = both.then(|| o.output(E4M3, transposed(case.shape)));
    o.row(if both { "quantize_current_both" } else { "quantize_current" }, name(case), move |r| {
        let (rowwise, columnwise) = (Some(r.out(rowwise)), columnwise.map(|out| r.out(out)));
        let rule = ScaleRule::default();
        ops::quantize_current(r.view(x), rule, r.out(scale), rowwise, columnwise, r.stream())
    })
}

fn transpose(case: Case) -> Row {
    let case = Case { dtype: E4M3, ..case };
    let mut o = Operands::default();
    let (codes, out) = (o.case(case), o.output(E4M3, transposed(case.shape)));
    o.row("transpose", name(case), move |r| ops::transpose(r.view(codes), r.out(out), r.stream()))
}

fn dequantize(case: Case) -> Row {
    let mut o = Operands::default();
    let (codes, scale) = (o.input(E4M3, case.shape), o.value(0.01, ONE));
    let out = o.output(case.dtype, case.shape);
    o.row("dequantize", name(case), move |r| {
        ops::dequantize(r.view(codes), r.view(scale), Block::TENSOR, r.out(out), r.stream())
    })
}

fn multi_amax(case: Case) -> Row {
    let mut o = Operands::default();
    let (xs, amaxes) = (o.case(case), o.output(F32, (1, LIST)));
    o.row("multi_amax", name(case), move |r| ops::multi_amax(&r.views(xs, LIST), r.out(amaxes), r.stream()))
}

fn multi_quantize(case: Case) -> Row {
    let mut o = Operands::default();
    let (xs, scales) = (o.case(case), o.value(0.01, (1, LIST)));
    let outs = o.output(E4M3, case.shape);
    o.row("multi_quantize", name(case), move |r| {
        ops::multi_quantize(&r.views(xs, LIST), r.view(scales), &r.outs(outs, LIST), r.stream())
    })
}

fn multi_quantize_delayed(case: Case) -> Row {
    let mut o = Operands::default();
    let (xs, scales) = (o.case(case), o.value(0.01, (1, LIST)));
    let (amaxes, used) = (o.output(F32, (1, LIST)), o.output(F32, (1, LIST)));
    let outs = o.output(E4M3, case.shape);
    o.row("multi_quantize_delayed", name(case), move |r| {
        let (xs, outs) = (r.views(xs, LIST), r.outs(outs, LIST));
        let (amaxes, used) = (r.out(amaxes), r.out(used));
        ops::multi_quantize_delayed(&xs, r.view(scales), amaxes, used, &outs, r.stream())
    })
}
