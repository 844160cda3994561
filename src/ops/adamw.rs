//! The `AdamW` step over a list of tensors.

use super::tensorwise::check_rule;
use super::validate::{Call, Kind, check_number, contiguous, same_batch, shape};
use crate::error::{Arg, Error};
use crate::format::moments::BLOCK;
use crate::layout::{BlockFormat, DType, Device};
use crate::spec::{AdamW, AdamWCall, AdamWTensor, BlockScale, Stream, Target};
use crate::{cpu, cuda};

/// Performs one step of `AdamW` (`format::adamw`) for each tensor. It updates the moments, and
/// writes the parameter as the [`Target`] specifies. Stored moments are rounded to nearest; the parameter is
/// computed from the unrounded moments.
///
/// Tensors may have different dtypes. Masters, maxima and ranges of codes must be present for all tensors or
/// for none.
pub fn adamw(shared: AdamW, tensors: Vec<AdamWTensor>, stream: Stream) -> Result<(), Error> {
    let mut call = Call::default();
    for (arg, view) in [("lr", shared.lr), ("grad_scale", shared.grad_scale), ("found_inf", shared.found_inf)]
    {
        if let Some(view) = view {
            call.one_input(arg, &view)?;
        }
    }
    check_numbers(&shared)?;
    for (i, tensor) in tensors.iter().enumerate() {
        check_tensor(&mut call, &shared.target, i, tensor)?;
        let first = &tensors[0];
        for (list, has, expected) in [
            ("masters", tensor.master.is_some(), first.master.is_some()),
            ("amaxes", tensor.amax.is_some(), first.amax.is_some()),
            ("exp_avg_ranges", tensor.ranges.is_some(), first.ranges.is_some()),
        ] {
            check_present(
                list,
                i,
                has,
                expected,
                "as for the first tensor (present for all tensors or for none)",
            )?;
        }
    }
    let device = call.finish()?;
    let matrices = |tensor| (0..AdamWTensor::batch(tensor)).map(|i| tensor.at(i));
    let tensors = tensors.iter().flat_map(matrices).collect();
    let call = AdamWCall { shared, tensors };
    match device {
        Device::Cpu => {
            cpu::adamw(call);
            Ok(())
        }
        Device::Cuda(_) => cuda::adamw(call, stream),
    }
}

fn check_numbers(shared: &AdamW) -> Result<(), Error> {
    let hyper = shared.hyper;
    let unit = 0.0..1.0;
    for (arg, value, works, expected) in [
        ("lr", hyper.lr, hyper.lr >= 0.0 && hyper.lr.is_finite(), "finite and at least 0"),
        ("beta1", hyper.beta1, unit.contains(&hyper.beta1), "at least 0 and below 1"),
        ("beta2", hyper.beta2, unit.contains(&hyper.beta2), "at least 0 and below 1"),
        ("eps", hyper.eps, hyper.eps >= 0.0 && hyper.eps.is_finite(), "finite and at least 0"),
        (
            "weight_decay",
            hyper.weight_decay,
            hyper.weight_decay >= 0.0 && hyper.weight_decay.is_finite(),
            "finite and at least 0",
        ),
    ] {
        check_number(arg, value, works, expected)?;
    }
    if let Target::Blocks(block, scale) = shared.target {
        if let BlockScale::F32(rule) = scale {
            check_rule(rule)?;
        }
        let dtype = scale.dtype();
        if BlockFormat::find(block, dtype).is_none_or(|format| !format.in_adamw) {
            let blocks = BlockFormat::list_blocks(|format| format.in_adamw && format.scale_dtype == dtype);
            return Err(block.unsupported(format!("{blocks} with {dtype} scales")));
        }
    }
    Ok(())
}

fn check_tensor<'a>(
    call: &mut Call<'a>,
    target: &Target,
    i: usize,
    tensor: &'a AdamWTensor,
) -> Result<(), Error> {
    let param = Arg::Item("params", i);
    call.output(param, &tensor.param, if *target == Target::Plain { Kind::Wide } else { Kind::Fp8 })?;
    contiguous(param, tensor.param.is_contiguous())?;

    let grad = Arg::Item("grads", i);
    like_param(tensor, i, grad, tensor.grad.batch(), tensor.grad.shape(), tensor.grad.is_contiguous())?;
    call.input(grad, &tensor.grad, Kind::Wide)?;

    let moment = Kind::Is(match (&tensor.ranges, tensor.exp_avg.dtype()) {
        (Some(_), _) => DType::U8,
        (None, DType::Bf16) => DType::Bf16,
        (None, _) => DType::F32,
    });
    for (list, view, kind) in [
        ("exp_avgs", Some(&tensor.exp_avg), moment),
        ("exp_avg_sqs", Some(&tensor.exp_avg_sq), moment),
        ("masters", tensor.master.as_ref(), Kind::F32),
    ] {
        let Some(view) = view else { continue };
        let arg = Arg::Item(list, i);
        call.output(arg, view, kind)?;
        like_param(tensor, i, arg, view.batch(), view.shape(), view.is_contiguous())?;
    }
    call.one_input(Arg::Item("steps", i), &tensor.step)?;
    check_ranges(call, i, tensor)?;

    check_presence(target, i, tensor)?;
    check_scales(call, target, i, tensor)
}

/// Returns an error unless an argument is contiguous and has the parameter's shape.
fn like_param(
    tensor: &AdamWTensor,
    i: usize,
    arg: Arg,
    batch: usize,
    got: (usize, usize),
    is_contiguous: bool,
) -> Result<(), Error> {
    same_batch(arg, batch, tensor.batch(), Arg::Item("params", i))?;
    shape(arg, got, tensor.param.shape(), &format!("the shape of params[{i}]"))?;
    contiguous(arg, is_contiguous)
}

/// Returns an error unless the scales and the amax are present that the target requires, and no others.
fn check_presence(target: &Target, i: usize, tensor: &AdamWTensor) -> Result<(), Error> {
    let is_codes = *target != Target::Plain;
    check_present(
        "scales",
        i,
        tensor.scale.is_some(),
        is_codes,
        "present if and only if the parameter is FP8 codes",
    )?;
    check_present(
        "new_scales",
        i,
        tensor.new_scale.is_some(),
        *target == Target::Tensor,
        "present if and only if the target is one given scale",
    )?;
    match target {
        Target::Measure => check_present("amaxes", i, tensor.amax.is_some(), true, "present, to measure"),
        Target::Blocks(..) => {
            check_present("amaxes", i, tensor.amax.is_some(), false, "absent with block scales")
        }
        Target::Plain | Target::Tensor => Ok(()),
    }
}

/// Adds the ranges of a tensor's moments to the call.
fn check_ranges<'a>(call: &mut Call<'a>, i: usize, tensor: &'a AdamWTensor) -> Result<(), Error> {
    let Some(ranges) = &tensor.ranges else { return Ok(()) };
    let (rows, cols) = tensor.param.shape();
    let param = Arg::Item("params", i);
    if !cols.is_multiple_of(BLOCK) {
        let expected = format!("a multiple of {BLOCK} columns, because its moments are codes");
        return Err(Error::Value {
            arg: param,
            got: format!("of {cols} columns"),
            expected: expected.into(),
        });
    }
    for (list, range) in ["exp_avg_ranges", "exp_avg_sq_ranges"].into_iter().zip(ranges) {
        let arg = Arg::Item(list, i);
        call.output(arg, range, Kind::F32)?;
        same_batch(arg, range.batch(), tensor.batch(), param)?;
        shape(arg, range.shape(), (rows, 2 * (cols / BLOCK)), "two elements for each block of 128")?;
        contiguous(arg, range.is_contiguous())?;
    }
    Ok(())
}

/// Adds the scales and the amax of a tensor to the call.
fn check_scales<'a>(
    call: &mut Call<'a>,
    target: &Target,
    i: usize,
    tensor: &'a AdamWTensor,
) -> Result<(), Error> {
    let check_batch = |arg, got| same_batch(arg, got, tensor.batch(), Arg::Item("params", i));

    if let Some(scale) = &tensor.scale {
        let arg = Arg::Item("scales", i);
        check_batch(arg, scale.batch())?;
        if let Target::Blocks(block, kind) = target {
            let (rows, cols) = tensor.param.shape();
            call.output(arg, scale, Kind::Is(kind.dtype()))?;
            shape(arg, scale.shape(), block.grid(rows, cols), "one element for each block")?;
            contiguous(arg, scale.is_contiguous())?;
        } else {
            call.one_output(arg, scale)?;
        }
    }
    if let Some(scale) = &tensor.new_scale {
        let arg = Arg::Item("new_scales", i);
        check_batch(arg, scale.batch())?;
        call.one_input(arg, scale)?;
    }
    if let Some(amax) = &tensor.amax {
        let arg = Arg::Item("amaxes", i);
        check_batch(arg, amax.batch())?;
        call.one_output(arg, amax)?;
    }
    Ok(())
}

fn check_present(
    list: &'static str,
    i: usize,
    has: bool,
    expected: bool,
    words: &'static str,
) -> Result<(), Error> {
    if has == expected {
        return Ok(());
    }
    let got = if has { "given" } else { "absent" };
    Err(Error::Value { arg: Arg::Item(list, i), got: got.into(), expected: words.into() })
}
