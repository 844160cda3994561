//! Argument checks of operations. A [`Call`] collects the arguments of a call. It checks each argument as it
//! is added, and the relations between arguments at the end.

use std::borrow::Cow;

use super::overlap::{Region, overlap, overlaps_itself, regions};
use crate::error::{Arg, Error};
use crate::format::Fp8Format;
use crate::layout::{DType, Device, View, ViewMut};

/// The element types that an argument may have.
#[derive(Clone, Copy)]
pub(super) enum Kind {
    /// fp32, bf16 or fp16.
    Wide,
    /// fp32.
    F32,
    /// FP8 codes.
    Fp8,
    /// Exactly this type.
    Is(DType),
    /// The types of block scales: fp32 or E8M0.
    Scale,
    /// fp32, or exactly this type.
    F32Or(DType),
}

impl Kind {
    fn takes(self, dtype: DType) -> bool {
        match self {
            Self::Wide => dtype.is_wide(),
            Self::F32 => dtype == DType::F32,
            Self::Fp8 => dtype.fp8().is_some(),
            Self::Is(expected) => dtype == expected,
            Self::Scale => matches!(dtype, DType::F32 | DType::E8m0),
            Self::F32Or(other) => dtype == DType::F32 || dtype == other,
        }
    }

    fn words(self) -> Cow<'static, str> {
        match self {
            Self::Wide => "float32, bfloat16 or float16".into(),
            Self::F32 | Self::F32Or(DType::F32) => "float32".into(),
            Self::F32Or(other) => format!("float32 or {other}").into(),
            Self::Fp8 => "float8_e4m3fn or float8_e5m2".into(),
            Self::Is(dtype) => dtype.to_string().into(),
            Self::Scale => "float32 or float8_e8m0fnu".into(),
        }
    }
}

struct Used<'a> {
    arg: Arg,
    extent: (usize, usize),
    written: bool,
    region: Region<'a>,
}

/// The arguments of one call that were checked so far.
#[derive(Default)]
pub(super) struct Call<'a> {
    device: Option<(Arg, Device)>,
    /// The number of matrices of every argument. Items of lists are exempt: each may have its own number.
    batch: Option<(Arg, usize)>,
    used: Vec<Used<'a>>,
}

impl<'a> Call<'a> {
    /// Adds an argument that is read.
    pub(super) fn input(&mut self, arg: impl Into<Arg>, view: &View<'a>, kind: Kind) -> Result<(), Error> {
        let arg = arg.into();
        self.batch(arg, view.batch())?;
        self.check(arg, view.dtype(), view.device(), kind)?;
        let mut regions = regions(view.first(), view.batch(), view.batch_stride());
        regions.try_for_each(|region| self.memory(arg, region, false))
    }

    /// Adds an argument that is written, or read and written.
    pub(super) fn output(&mut self, arg: impl Into<Arg>, view: &'a ViewMut, kind: Kind) -> Result<(), Error> {
        let arg = arg.into();
        self.batch(arg, view.batch())?;
        let first = view.first();
        if view.batch() > 0 && overlaps_itself(&first) {
            return Err(Error::SelfOverlap {
                arg,
                shape: view.shape(),
                strides: (view.row_stride(), view.col_stride()),
            });
        }
        self.check(arg, view.dtype(), view.device(), kind)?;
        regions(first, view.batch(), view.batch_stride())
            .try_for_each(|region| self.memory(arg, region, true))
    }

    /// Adds an argument that is read and has one fp32 element per matrix.
    pub(super) fn one_input(&mut self, arg: impl Into<Arg>, view: &View<'a>) -> Result<(), Error> {
        let arg = arg.into();
        self.input(arg, view, Kind::F32)?;
        one(arg, view.shape())
    }

    /// Adds an argument that is written and has one fp32 element per matrix.
    pub(super) fn one_output(&mut self, arg: impl Into<Arg>, view: &'a ViewMut) -> Result<(), Error> {
        let arg = arg.into();
        self.output(arg, view, Kind::F32)?;
        one(arg, view.shape())
    }

    /// Adds the code outputs of a quantization of an `x` of this shape. Returns their format.
    pub(super) fn planes(
        &mut self,
        (rows, cols): (usize, usize),
        rowwise: Option<&'a ViewMut>,
        columnwise: Option<&'a ViewMut>,
    ) -> Result<Fp8Format, Error> {
        let first = rowwise.or(columnwise).ok_or_else(no_plane)?;
        let format = first.dtype();
        for (arg, plane, expected, is) in [
            ("rowwise", rowwise, (rows, cols), "the shape of x"),
            ("columnwise", columnwise, (cols, rows), "the transposed shape of x"),
        ] {
            let Some(plane) = plane else { continue };
            self.output(arg, plane, Kind::Fp8)?;
            if plane.dtype() != format {
                return Err(Error::DType {
                    arg: arg.into(),
                    got: plane.dtype(),
                    expected: format!("{format}, as rowwise is").into(),
                });
            }
            shape(arg, plane.shape(), expected, is)?;
        }
        Ok(format.fp8().expect("checked to be an FP8 type"))
    }

    /// Checks that no output shares memory with another argument. Returns the device of the call.
    pub(super) fn finish(mut self) -> Result<Device, Error> {
        // Visit the arguments by start address. Each can only overlap earlier ones whose end is still ahead.
        // These are few, even in a call with a thousand tensors.
        self.used.sort_by_key(|used| used.extent.0);
        let mut open: Vec<&Used> = Vec::new();
        for used in &self.used {
            open.retain(|earlier| used.extent.0 < earlier.extent.1);
            let clash = open
                .iter()
                .find(|earlier| (earlier.written || used.written) && overlap(&earlier.region, &used.region));
            if let Some(earlier) = clash {
                let (out, with) = if used.written { (used, *earlier) } else { (*earlier, used) };
                return Err(Error::Overlap { arg: out.arg, with: with.arg });
            }
            open.push(used);
        }
        Ok(self.device.map_or(Device::Cpu, |(_, device)| device))
    }

    /// Checks that an argument has as many matrices as the other arguments.
    fn batch(&mut self, arg: Arg, got: usize) -> Result<(), Error> {
        if matches!(arg, Arg::Item(..)) {
            return Ok(());
        }
        let (with, expected) = *self.batch.get_or_insert((arg, got));
        same_batch(arg, got, expected, with)
    }

    fn check(&mut self, arg: Arg, dtype: DType, device: Device, kind: Kind) -> Result<(), Error> {
        if !kind.takes(dtype) {
            return Err(Error::DType { arg, got: dtype, expected: kind.words() });
        }
        let (with, expected) = *self.device.get_or_insert((arg, device));
        if device == expected {
            return Ok(());
        }
        Err(Error::Device { arg, got: device, expected, with })
    }

    fn memory(&mut self, arg: Arg, region: Region<'a>, written: bool) -> Result<(), Error> {
        let Some(extent) = region.extent() else { return Ok(()) };
        let (ptr, size) = (region.matrix.ptr, region.matrix.dtype.size());
        if ptr.is_null() {
            return Err(Error::NullPointer { arg, elements: region.numel() });
        }
        if !(ptr as usize).is_multiple_of(size) {
            return Err(Error::Misaligned { arg, size });
        }
        self.used.push(Used { arg, extent, written, region });
        Ok(())
    }
}

/// Returns an error unless a number works.
pub(super) fn check_number(
    arg: &'static str,
    value: impl ToString,
    works: bool,
    expected: &'static str,
) -> Result<(), Error> {
    if works {
        return Ok(());
    }
    Err(Error::Value { arg: arg.into(), got: value.to_string(), expected: expected.into() })
}

/// Returns the error of a quantization without outputs.
pub(super) fn no_plane() -> Error {
    Error::Value {
        arg: "rowwise".into(),
        got: "absent, and so is columnwise".into(),
        expected: "given, unless columnwise is".into(),
    }
}

/// Returns an error unless `got` is the expected shape. `is` describes the expected shape in the message.
pub(super) fn shape(
    arg: impl Into<Arg>,
    got: (usize, usize),
    expected: (usize, usize),
    is: &str,
) -> Result<(), Error> {
    if got == expected {
        return Ok(());
    }
    let expected = format!("({}, {}), {is}", expected.0, expected.1);
    Err(Error::Shape { arg: arg.into(), got, expected })
}

/// Returns an error if the argument is a batch.
pub(super) fn one_matrix(arg: &'static str, batch: usize) -> Result<(), Error> {
    if batch == 1 {
        return Ok(());
    }
    let got = format!("a batch of {batch} matrices");
    Err(Error::Value { arg: arg.into(), got, expected: "one matrix".into() })
}

/// Returns an error unless the argument is contiguous.
pub(super) fn contiguous(arg: impl Into<Arg>, is_contiguous: bool) -> Result<(), Error> {
    if is_contiguous {
        return Ok(());
    }
    Err(Error::Value { arg: arg.into(), got: "strided".into(), expected: "contiguous".into() })
}

/// Returns an error unless the argument has as many matrices as `with`.
pub(super) fn same_batch(arg: Arg, got: usize, expected: usize, with: Arg) -> Result<(), Error> {
    if got == expected {
        return Ok(());
    }
    Err(Error::Value {
        arg,
        got: format!("a batch of {got} matrices"),
        expected: format!("a batch of {expected}, as {with} is").into(),
    })
}

/// Returns an error unless the argument has one element.
fn one(arg: Arg, got: (usize, usize)) -> Result<(), Error> {
    shape(arg, got, (1, 1), "one element")
}

/// Returns an error unless the argument is a row with one element per matrix of the list `with`.
pub(super) fn one_each(
    arg: &'static str,
    got: (usize, usize),
    count: usize,
    with: &'static str,
) -> Result<(), Error> {
    if got.0 != 1 {
        return shape(arg, got, (1, count), "a vector with one element for each tensor");
    }
    length(arg, got.1, count, with)
}

/// Returns an error unless a list is as long as the list `with`.
pub(super) fn length(
    arg: &'static str,
    got: usize,
    expected: usize,
    with: &'static str,
) -> Result<(), Error> {
    if got == expected {
        return Ok(());
    }
    Err(Error::Length { arg: arg.into(), got, expected, with })
}
