//! The argument structs of the kernels. The structs with the same names are in `kernels/elements.cuh` and in
//! each module's source.

use crate::cuda::driver::args;
use crate::layout::{View, ViewMut};
use crate::spec::ScaleRule;

#[derive(Clone, Copy)]
#[repr(C)]
pub(in crate::cuda) struct Rule {
    epsilon: f32,
    margin: f32,
    power_of_2: u32,
}

impl From<ScaleRule> for Rule {
    fn from(rule: ScaleRule) -> Self {
        Self {
            epsilon: rule.amax_epsilon,
            margin: f32::from_bits(((rule.margin + 127) as u32) << 23),
            power_of_2: u32::from(rule.power_of_2),
        }
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(in crate::cuda) struct Delayed {
    pub(in crate::cuda) amax: *mut u8,
    pub(in crate::cuda) scale_used: *mut u8,
    pub(in crate::cuda) grid_max: *mut u8,
}

impl Delayed {
    pub(in crate::cuda) const NONE: Self =
        Self { amax: std::ptr::null_mut(), scale_used: std::ptr::null_mut(), grid_max: std::ptr::null_mut() };
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Current {
    pub(super) scale: *mut u8,
    pub(super) barrier: *mut u8,
    pub(super) rule: Rule,
    pub(super) pieces: u32,
    pub(super) common: u32,
}

impl Current {
    /// Number of workspace slots (`struct GridMax`) that one barrier (`struct GridBarrier`) takes.
    pub(super) const SLOTS: usize = 3;
    /// Defined in `kernels/current.cuh`.
    const MOST_OWN: u64 = 2048;

    /// Creates the arguments of a launch of `blocks` blocks over `pieces` pieces. A block can keep two
    /// pieces.
    pub(super) fn new(rule: ScaleRule, scale: *mut u8, barrier: *mut u8, pieces: u64, blocks: u64) -> Self {
        let common = pieces.saturating_sub((2 * blocks).min(Self::MOST_OWN));
        // 2^32 pieces are 2^46 elements, more than any device holds.
        let [pieces, common] = [pieces, common].map(|count| count as u32);
        Self { scale, barrier, rule: rule.into(), pieces, common }
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct AmaxArgs {
    pub(super) x: *const u8,
    pub(super) n: u64,
    pub(super) out: *mut u8,
    pub(super) grid_max: *mut u8,
    pub(super) rule: Rule,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct StridedAmaxArgs {
    pub(super) x: *const u8,
    pub(super) rows: i64,
    pub(super) cols: i64,
    pub(super) x_rs: i64,
    pub(super) x_cs: i64,
    pub(super) out: *mut u8,
    pub(super) grid_max: *mut u8,
    pub(super) rule: Rule,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct ScaleArgs {
    pub(super) amax: *const u8,
    pub(super) scale: *mut u8,
    pub(super) n: i64,
    pub(super) cols: i64,
    pub(super) amax_rs: i64,
    pub(super) amax_cs: i64,
    pub(super) scale_rs: i64,
    pub(super) scale_cs: i64,
    pub(super) rule: Rule,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct CastArgs {
    pub(super) x: *const u8,
    pub(super) codes: *mut u8,
    pub(super) n: u64,
    pub(super) scale: *const u8,
    pub(super) delayed: Delayed,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct CurrentCastArgs {
    pub(super) cast: CastArgs,
    pub(super) current: Current,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct CastTransposeArgs {
    pub(super) x: *const u8,
    pub(super) rowwise: *mut u8,
    pub(super) columnwise: *mut u8,
    pub(super) rows: i64,
    pub(super) cols: i64,
    pub(super) x_rs: i64,
    pub(super) rowwise_rs: i64,
    pub(super) tiles_across: i64,
    pub(super) scale: *const u8,
    pub(super) delayed: Delayed,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct CurrentCastTransposeArgs {
    pub(super) cast: CastTransposeArgs,
    pub(super) current: Current,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(in crate::cuda) struct StridedArgs {
    pub(in crate::cuda) x: *const u8,
    pub(in crate::cuda) rowwise: *mut u8,
    pub(in crate::cuda) columnwise: *mut u8,
    pub(in crate::cuda) rows: i64,
    pub(in crate::cuda) cols: i64,
    pub(in crate::cuda) x_rs: i64,
    pub(in crate::cuda) x_cs: i64,
    pub(in crate::cuda) rowwise_rs: i64,
    pub(in crate::cuda) rowwise_cs: i64,
    pub(in crate::cuda) columnwise_rs: i64,
    pub(in crate::cuda) columnwise_cs: i64,
    pub(in crate::cuda) tiles_across: i64,
    pub(in crate::cuda) scale: *const u8,
    pub(in crate::cuda) delayed: Delayed,
}

impl StridedArgs {
    /// Returns the arguments of a cast. `tiles_across` depends on the kernel, and is 0.
    pub(in crate::cuda) fn new(
        x: &View,
        rowwise: Option<&ViewMut>,
        columnwise: Option<&ViewMut>,
        scale: *const u8,
        delayed: Delayed,
    ) -> Self {
        Self {
            x: x.ptr(),
            rowwise: rowwise.map_or(std::ptr::null_mut(), ViewMut::ptr),
            columnwise: columnwise.map_or(std::ptr::null_mut(), ViewMut::ptr),
            rows: x.rows() as i64,
            cols: x.cols() as i64,
            x_rs: x.row_stride() as i64,
            x_cs: x.col_stride() as i64,
            rowwise_rs: rowwise.map_or(0, |rowwise| rowwise.row_stride() as i64),
            rowwise_cs: rowwise.map_or(0, |rowwise| rowwise.col_stride() as i64),
            columnwise_rs: columnwise.map_or(0, |columnwise| columnwise.row_stride() as i64),
            columnwise_cs: columnwise.map_or(0, |columnwise| columnwise.col_stride() as i64),
            tiles_across: 0,
            scale,
            delayed,
        }
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Entry {
    pub(super) x: *const u8,
    pub(super) codes: *mut u8,
    pub(super) n: u64,
    pub(super) first_block: u32,
    pub(super) index: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct MultiArgs<const N: usize> {
    pub(super) scales: *const u8,
    pub(super) amaxes: *mut u8,
    pub(super) scales_used: *mut u8,
    pub(super) maxima: *mut u8,
    pub(super) count: u32,
    pub(super) blocks: u32,
    pub(super) entries: [Entry; N],
}

args!(AmaxArgs, StridedAmaxArgs, ScaleArgs, CastArgs, CastTransposeArgs, CurrentCastArgs, CurrentCastTransposeArgs, StridedArgs, MultiArgs<const N: usize>);
