//! Norms and gated activations with quantization match their definitions byte for byte, on every instruction
//! set and for every layout, and write nothing else.

use super::common::{self, Layout, Owned, on_each_level};
use crate::format::activation::Activation;
use crate::format::norm::RowStats;
use crate::format::wide::Wide;
use crate::ops::{Glu, Norm, TensorPlanes};
use crate::{DType, ScaleRule, Stream, View, ViewMut, ops};
use half::{bf16, f16};
use proptest::prelude::*;

fn narrow(out: &mut Owned, row: usize, col: usize, value: f32) {
    match out.dtype {
        DType::F32 => out.set(row, col, <f32 as Wide>::from_f32(value)),
        DType::F16 => out.set(row, col, <f16 as Wide>::from_f32(value)),
        _ => out.set(row, col, <bf16 as Wide>::from_f32(value)),
    }
}

/// The outputs of one quantization.
#[derive(Debug, Clone)]
struct Planes {
    rowwise: Option<Owned>,
    columnwise: Option<Owned>,
    scale: Owned,
    /// The given scale and the amax of delayed scaling.
    delayed: Option<(Owned, Owned)>,
}

const RULE: ScaleRule = ScaleRule { power_of_2: false, amax_epsilon: 1e-3, margin: 0 };

impl Planes {
    fn argument(&mut self) -> TensorPlanes<'_> {
        TensorPlanes {
            rule: RULE,
            delayed: self.delayed.as_mut().map(|(scale, amax)| (scale.view(), amax.view_mut())),
            scale: self.scale.view_mut(),
            rowwise: self.rowwise.as_mut().map(Owned::view_mut),
            columnwise: self.columnwise.as_mut().map(Owned::view_mut),
        }
    }

    /// Quantizes values that were computed by a definition.
    fn expect(&mut self, values: &Owned) {
        let format = self.rowwise.as_ref().or(self.columnwise.as_ref()).unwrap().dtype.fp8().unwrap();
        let amax = common::amax(values);
        let scale = if let Some((scale, slot)) = &mut self.delayed {
            let given: f32 = scale.get(0, 0);
            if amax.is_finite() {
                slot.set(0, 0, slot.get::<f32>(0, 0).max(amax));
            }
            self.scale.set(0, 0, if amax.is_finite() { given } else { f32::from_bits(0x7FC0_0000) });
            given
        } else {
            let scale = RULE.scale(amax, format);
            self.scale.set(0, 0, scale);
            scale
        };
        if let Some(out) = &mut self.rowwise {
            common::cast(values, scale, out);
        }
        if let Some(out) = &mut self.columnwise {
            common::cast_transposed(values, scale, out);
        }
    }

    fn bytes(&self) -> Vec<Vec<u64>> {
        let outputs = [self.rowwise.as_ref(), self.columnwise.as_ref(), Some(&self.scale)];
        let amax = self.delayed.as_ref().map(|(_, amax)| amax);
        outputs.into_iter().chain([amax]).flatten().map(|out| out.bytes.clone()).collect()
    }
}

fn scalar(value: f32) -> Owned {
    let mut owned = Owned::dense(DType::F32, (1, 1));
    owned.set(0, 0, value);
    owned
}

fn planes(shape: (usize, usize)) -> impl Strategy<Value = Planes> {
    let outputs = (common::fp8_dtype(), common::output_layout(), common::output_layout(), 0_u8..3);
    (outputs, any::<bool>()).prop_map(move |((codes, rows, cols, wanted), delayed)| Planes {
        rowwise: (wanted != 1).then(|| Owned::new(codes, shape, rows, 1)),
        columnwise: (wanted != 0).then(|| Owned::new(codes, (shape.1, shape.0), cols, 3)),
        scale: scalar(-1.0),
        delayed: delayed.then(|| (scalar(0.037), scalar(2.0))),
    })
}

/// Returns the values of a norm by its definition, and writes its statistics.
fn norm_values(
    x: &Owned,
    [weight, bias]: [Option<&Owned>; 2],
    centered: bool,
    mean: &mut Owned,
    rstd: &mut Owned,
) -> Owned {
    let mut values = Owned::dense(x.dtype, x.shape);
    for row in 0..x.shape.0 {
        let xs: Vec<f32> = (0..x.shape.1).map(|col| x.value(row, col)).collect();
        let stats = RowStats::of(&xs, centered, 1e-5);
        mean.set(row, 0, stats.mean);
        rstd.set(row, 0, stats.rstd);
        for (col, x) in xs.into_iter().enumerate() {
            let mut value = if centered { x - stats.mean } else { x } * stats.rstd;
            if let Some(weight) = weight {
                value *= weight.value(0, col);
            }
            if let Some(bias) = bias {
                value += bias.value(0, col);
            }
            narrow(&mut values, row, col, value);
        }
    }
    values
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn norms_match_their_definition(
        (x, planes) in (common::wide_dtype(), common::shape(), common::input_layout(), any::<u64>())
            .prop_flat_map(|(dtype, shape, layout, seed)| {
                (Just(Owned::new(dtype, shape, layout, 0).random(seed)), planes(shape))
            }),
        centered in any::<bool>(),
        parameters in 0_usize..3,
    ) {
        let vector = |seed| Owned::dense(x.dtype, (1, x.shape.1)).random(seed);
        let (weight, bias) = (vector(1), vector(2));
        let weight = (parameters > 0).then_some(&weight);
        let bias = (parameters > 1).then_some(&bias);
        let statistics = Owned::dense(DType::F32, (x.shape.0, 1));
        let (mut mean, mut rstd) = (statistics.clone(), statistics.clone());
        let mut expected = planes.clone();
        expected.expect(&norm_values(&x, [weight, bias], centered, &mut mean, &mut rstd));

        on_each_level(|| {
            let mut got = planes.clone();
            let (mut got_mean, mut got_rstd) = (statistics.clone(), statistics.clone());
            let norm = Norm {
                x: x.view(),
                weight: weight.map(Owned::view),
                bias: bias.map(Owned::view),
                centered,
                eps: 1e-5,
                mean: centered.then(|| got_mean.view_mut()),
                rstd: got_rstd.view_mut(),
            };
            ops::quantize_norm(norm, got.argument(), Stream::default()).unwrap();
            assert_eq!(got.bytes(), expected.bytes());
            assert_eq!(got_rstd.bytes, rstd.bytes);
            if centered {
                assert_eq!(got_mean.bytes, mean.bytes);
            }
        });
    }

    #[test]
    fn gated_activations_match_their_definition(
        (gate, up, dy, first, second) in
            (common::wide_dtype(), common::shape(), common::input_layout(), common::input_layout(), any::<u64>())
            .prop_flat_map(|(dtype, shape, layout, other, seed)| (
                Just(Owned::new(dtype, shape, layout, 0).random(seed)),
                Just(Owned::new(dtype, shape, other, 1).random(seed ^ 1)),
                Just(Owned::new(dtype, shape, Layout::Dense, 0).random(seed ^ 2)),
                planes(shape),
                planes(shape),
            )),
        gelu in any::<bool>(),
    ) {
        let activation = if gelu { Activation::GeluTanh } else { Activation::Silu };
        let mut products = Owned::dense(gate.dtype, gate.shape);
        let (mut to_gate, mut to_up) = (products.clone(), products.clone());
        for (row, col) in gate.cells() {
            let (g, u) = (gate.value(row, col), up.value(row, col));
            narrow(&mut products, row, col, activation.gated(g, u));
            let (d_gate, d_up) = activation.gradients(g, u, dy.value(row, col));
            narrow(&mut to_gate, row, col, d_gate);
            narrow(&mut to_up, row, col, d_up);
        }
        let mut expected = first.clone();
        expected.expect(&products);
        let mut expected_gate = first.clone();
        expected_gate.expect(&to_gate);
        // Both gradients have one format, and either both or none have delayed scaling.
        let mut second = second;
        let codes = first.rowwise.as_ref().or(first.columnwise.as_ref()).unwrap().dtype;
        for plane in [&mut second.rowwise, &mut second.columnwise].into_iter().flatten() {
            plane.dtype = codes;
        }
        second.delayed = first.delayed.as_ref().map(|_| (scalar(0.5), scalar(0.0)));
        let mut expected_up = second.clone();
        expected_up.expect(&to_up);

        on_each_level(|| {
            let glu = Glu { gate: gate.view(), up: up.view(), activation };
            let mut got = first.clone();
            let (mut values, mut up_values) = (products.clone(), products.clone());
            ops::quantize_glu(glu, values.view_mut(), got.argument(), Stream::default()).unwrap();
            assert_eq!(got.bytes(), expected.bytes());

            let (mut got_gate, mut got_up) = (first.clone(), second.clone());
            let (gate_planes, up_planes) = (got_gate.argument(), got_up.argument());
            let both = [values.view_mut(), up_values.view_mut()];
            ops::quantize_glu_backward(glu, dy.view(), both, gate_planes, up_planes, Stream::default()).unwrap();
            assert_eq!(got_gate.bytes(), expected_gate.bytes());
            assert_eq!(got_up.bytes(), expected_up.bytes());
            assert_eq!((values.bytes, up_values.bytes), (to_gate.bytes.clone(), to_up.bytes.clone()));
        });
    }
}

#[test]
fn bad_arguments_are_named_and_nothing_is_written() {
    let x = [1.0_f32; 6];
    let short = [1.0_f32; 2];
    let half = [bf16::ONE; 3];
    let (mut rstd, mut scale, mut codes) = ([-1.0_f32; 2], [-1.0_f32], [7_u8; 6]);
    let mut error = |weight: Option<View>, bias: Option<View>, eps: f32| {
        let norm = Norm {
            x: View::from_slice(&x, 2, 3).unwrap(),
            weight,
            bias,
            centered: false,
            eps,
            mean: None,
            rstd: ViewMut::from_slice(&mut rstd, 2, 1).unwrap(),
        };
        let planes = TensorPlanes {
            rule: ScaleRule::default(),
            delayed: None,
            scale: ViewMut::from_slice(&mut scale, 1, 1).unwrap(),
            rowwise: Some(ViewMut::from_bytes(&mut codes, DType::E4m3, 2, 3).unwrap()),
            columnwise: None,
        };
        ops::quantize_norm(norm, planes, Stream::default()).unwrap_err().to_string()
    };
    let weight = View::from_slice(&x[..3], 1, 3).unwrap();
    assert!(error(Some(View::from_slice(&short, 1, 2).unwrap()), None, 0.0).starts_with("weight has shape"));
    assert!(error(Some(View::from_slice(&half, 1, 3).unwrap()), None, 0.0).starts_with("weight has dtype"));
    assert!(error(None, Some(weight), 0.0).starts_with("bias is given without weight"));
    assert!(error(Some(weight), None, f32::NAN).starts_with("eps is NaN"));
    assert_eq!((rstd, scale, codes), ([-1.0; 2], [-1.0], [7; 6]));
}
