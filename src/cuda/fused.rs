//! What the kernels that cast values they compute have in common (`kernels/fused.cuh`).

use super::driver::Grid;
use super::tensorwise::{
    Delayed, StridedArgs, across_strided, patch_rows, strided_grid, tiles_are_supported,
};
use super::views::ordinal;
use super::workspace;
use crate::error::Error;
use crate::layout::View;
use crate::spec::{ScaleRule, Stream, TensorPlanes};

/// The launch of a cast of values that are computed from `x`, in its shape.
pub(super) struct FusedCast {
    pub(super) args: StridedArgs,
    pub(super) grid: Grid,
    /// Whether tiles are cast in registers. Otherwise the views have any layout.
    pub(super) in_tiles: bool,
}

impl FusedCast {
    /// Prepares a cast. `others_are_aligned` says whether the other inputs allow tiles.
    pub(super) fn new(
        x: &View,
        planes: &TensorPlanes,
        others_are_aligned: bool,
        stream: Stream,
    ) -> Result<Self, Error> {
        let (mut scale, mut delayed) = (planes.scale.ptr().cast_const(), Delayed::NONE);
        if let Some((given, amax)) = &planes.delayed {
            let grid_max = workspace::slots(ordinal(x.device()), stream, 1)?;
            scale = given.ptr();
            delayed = Delayed { amax: amax.ptr(), scale_used: planes.scale.ptr(), grid_max };
        }
        let (rowwise, columnwise) = (planes.rowwise.as_ref(), planes.columnwise.as_ref());
        let args = StridedArgs::new(x, rowwise, columnwise, scale, delayed);
        let in_tiles = others_are_aligned && tiles_are_supported(x, rowwise, columnwise);
        if !in_tiles {
            let args = StridedArgs { tiles_across: across_strided(x), ..args };
            return Ok(Self { args, grid: strided_grid(x, &delayed), in_tiles });
        }
        let tiles_across = x.cols().div_ceil(128);
        let blocks = (x.rows().div_ceil(8 * patch_rows(x)) * tiles_across) as u64;
        let args = StridedArgs { tiles_across: tiles_across as i64, ..args };
        Ok(Self { args, grid: Grid { blocks, threads: 128 }, in_tiles })
    }
}

/// Where a launch before the cast writes a scale, and how it computes it. `None` with delayed scaling.
pub(super) fn current_scale(planes: &TensorPlanes) -> Option<(*mut u8, ScaleRule)> {
    if planes.delayed.is_some() { None } else { Some((planes.scale.ptr(), planes.rule)) }
}
