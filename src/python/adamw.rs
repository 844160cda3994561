//! Bindings of the optimizer step and of random numbers. They wrap the functions of the same names in
//! [`crate::ops`].

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::parse;
use super::tensors::Arguments;
use crate::error::Error;
use crate::layout::{DType, ViewMut};
use crate::ops::{self, AdamW, AdamWTensor, BlockScale, Hyper, Numbers, Target};

functions!(adamw, random_uniform);

type Tensor<'a, 'py> = &'a Bound<'py, PyAny>;
type Optional<'a, 'py> = Option<&'a Bound<'py, PyAny>>;

/// Performs one optimizer step for each tensor of the lists. `masters`, `scales`, `new_scales`, `amaxes`,
/// `exp_avg_ranges` and `exp_avg_sq_ranges` are as long as `params`, or empty. `block` is empty, or the two block sizes if parameters have one scale
/// per block.
#[pyfunction]
#[pyo3(signature = (
    grads, exp_avgs, exp_avg_sqs, params, masters, steps, scales, new_scales, amaxes, exp_avg_ranges,
    exp_avg_sq_ranges, offsets, streams,
    lr_tensor=None, grad_scale=None, found_inf=None, *, lr, beta1, beta2, eps, weight_decay, maximize, seed, block, rounding="ceil",
    power_2_scale=false, amax_epsilon=0.0, batched=false
))]
fn adamw<'py>(
    py: Python<'py>,
    grads: Tensor<'_, 'py>,
    exp_avgs: Tensor<'_, 'py>,
    exp_avg_sqs: Tensor<'_, 'py>,
    params: Tensor<'_, 'py>,
    masters: Tensor<'_, 'py>,
    steps: Tensor<'_, 'py>,
    scales: Tensor<'_, 'py>,
    new_scales: Tensor<'_, 'py>,
    amaxes: Tensor<'_, 'py>,
    exp_avg_ranges: Tensor<'_, 'py>,
    exp_avg_sq_ranges: Tensor<'_, 'py>,
    offsets: Vec<i64>,
    streams: Vec<i64>,
    lr_tensor: Optional<'_, 'py>,
    grad_scale: Optional<'_, 'py>,
    found_inf: Optional<'_, 'py>,
    lr: f64,
    beta1: f64,
    beta2: f64,
    eps: f64,
    weight_decay: f64,
    maximize: bool,
    seed: Option<i64>,
    block: Vec<i64>,
    rounding: &str,
    power_2_scale: bool,
    amax_epsilon: f64,
    batched: bool,
) -> PyResult<()> {
    let args = Arguments::new(py);
    let batch = |_, ndim| batched && ndim > 2;
    let params = args.outputs("params", params, batch)?;
    let as_param = |i: usize, _| params.get(i).is_some_and(|param| param.batch() != 1);
    let count = params.len();
    let grads = args.inputs("grads", grads, batch)?;
    let exp_avgs = args.outputs("exp_avgs", exp_avgs, batch)?;
    let exp_avg_sqs = args.outputs("exp_avg_sqs", exp_avg_sqs, batch)?;
    let masters = args.outputs("masters", masters, batch)?;
    let steps = args.inputs("steps", steps, |_, _| false)?;
    let scales = args.outputs("scales", scales, as_param)?;
    let new_scales = args.inputs("new_scales", new_scales, as_param)?;
    let amaxes = args.outputs("amaxes", amaxes, as_param)?;
    let exp_avg_ranges = args.outputs("exp_avg_ranges", exp_avg_ranges, batch)?;
    let exp_avg_sq_ranges = args.outputs("exp_avg_sq_ranges", exp_avg_sq_ranges, batch)?;
    for (name, got, optional) in [
        ("grads", grads.len(), false),
        ("exp_avgs", exp_avgs.len(), false),
        ("exp_avg_sqs", exp_avg_sqs.len(), false),
        ("masters", masters.len(), true),
        ("steps", steps.len(), false),
        ("scales", scales.len(), true),
        ("new_scales", new_scales.len(), true),
        ("amaxes", amaxes.len(), true),
        ("exp_avg_ranges", exp_avg_ranges.len(), true),
        ("exp_avg_sq_ranges", exp_avg_sq_ranges.len(), exp_avg_ranges.is_empty()),
        ("offsets", offsets.len(), false),
        ("streams", streams.len(), false),
    ] {
        if got != count && !(optional && got == 0) {
            return Err(Error::Length { arg: name.into(), got, expected: count, with: "params" }.into());
        }
    }

    let scale_dtype = scales.first().map(ViewMut::dtype);
    let target = if block.is_empty() {
        match (scale_dtype, new_scales.is_empty()) {
            (None, _) => Target::Plain,
            (Some(_), true) => Target::Measure,
            (Some(_), false) => Target::Tensor,
        }
    } else {
        let &[rows, cols] = &block[..] else {
            let message =
                format!("block is {block:?}; it must be empty or two sizes, where -1 is the whole extent");
            return Err(PyValueError::new_err(message));
        };
        let scale = match scale_dtype {
            Some(DType::E8m0) => BlockScale::E8m0(parse::rounding(rounding)?),
            _ => BlockScale::F32(parse::scale_rule(power_2_scale, amax_epsilon, 0)),
        };
        Target::Blocks(parse::block(rows, cols)?, scale)
    };
    let shared = AdamW {
        hyper: Hyper { lr, beta1, beta2, eps, weight_decay, maximize },
        lr: args.optional_input("lr", lr_tensor)?,
        grad_scale: args.optional_input("grad_scale", grad_scale)?,
        found_inf: args.optional_input("found_inf", found_inf)?,
        stochastic: seed.map(|seed| seed as u64),
        target,
    };
    let [mut masters, mut scales, mut amaxes] = [masters, scales, amaxes].map(Vec::into_iter);
    let mut new_scales = new_scales.into_iter();
    let (mut exp_avgs, mut exp_avg_sqs) = (exp_avgs.into_iter(), exp_avg_sqs.into_iter());
    let mut ranges = exp_avg_ranges.into_iter().zip(exp_avg_sq_ranges);
    let mut tensors = Vec::with_capacity(count);
    for (i, param) in params.into_iter().enumerate() {
        let (Some(exp_avg), Some(exp_avg_sq)) = (exp_avgs.next(), exp_avg_sqs.next()) else { break };
        tensors.push(AdamWTensor {
            grad: grads[i],
            exp_avg,
            exp_avg_sq,
            ranges: ranges.next().map(<[ViewMut; 2]>::from),
            param,
            master: masters.next(),
            step: steps[i],
            scale: scales.next(),
            new_scale: new_scales.next(),
            amax: amaxes.next(),
            offset: parse::count("offsets", offsets[i])? as u64,
            stream: parse::number("streams", streams[i])?,
        });
    }
    args.run(|stream| ops::adamw(shared, tensors, stream))
}

/// Fills `x` with random numbers that depend on the indices of its elements.
#[pyfunction]
#[pyo3(signature = (x, seed, offset=0, low=0.0, high=1.0, stream=0, step=None))]
fn random_uniform<'py>(
    py: Python<'py>,
    x: Tensor<'_, 'py>,
    seed: i64,
    offset: i64,
    low: f64,
    high: f64,
    stream: i64,
    step: Optional<'_, 'py>,
) -> PyResult<()> {
    let offset = parse::count("offset", offset)? as u64;
    let stream = parse::number("stream", stream)?;
    let args = Arguments::new(py);
    let x = args.output("x", x)?;
    let step = args.optional_input("step", step)?;
    let numbers = Numbers { seed: seed as u64, offset, stream, step };
    args.run(|stream| ops::random_uniform(x, numbers, (parse::narrowed(low), parse::narrowed(high)), stream))
}
