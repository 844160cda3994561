//! Rows of the block formats, with E4M3 outputs.

use fp8rs::ops::{self, Axis, BlockInputs, BlockPlane, BlockScale, BlockSpec, Rounding};
use fp8rs::{Block, BlockFormat, DType, FORMATS, ScaleRule, packed};

use crate::machine::{Case, Plan};
use crate::row::{Id, Operands, Row};

const E4M3: DType = DType::E4m3;
const E8M0: DType = DType::E8m0;
const F32: DType = DType::F32;

const MX: Block = Block { rows: 1, cols: 32 };
const MX_SQUARE: Block = Block { rows: 32, cols: 32 };
const SQUARE: Block = Block { rows: 128, cols: 128 };

/// The largest magnitude of random inputs, used as given maximum.
const AMAX: f32 = 2.0;
/// The column scale.
const COLUMN_SCALE: f32 = 1.5;

/// A block format and the options of a row.
#[derive(Clone, Copy)]
struct Variant {
    format: &'static BlockFormat,
    packed: bool,
    /// Whether maxima are given.
    given: bool,
    /// Whether there is a column scale.
    column_scale: bool,
}

impl Variant {
    /// Returns the rows of a format: without options, and with each option that the format has.
    fn of(format: &'static BlockFormat) -> Vec<Self> {
        let plain = Self { format, packed: false, given: false, column_scale: false };
        if format.block == MX {
            return vec![plain, Self { packed: true, ..plain }];
        }
        if format.block == Block::ROW {
            return vec![plain, Self { given: true, ..plain }, Self { column_scale: true, ..plain }];
        }
        vec![plain]
    }

    fn name(self) -> String {
        let mut name = match self.format {
            format if format.block == Block::ROW => "per_row".to_owned(),
            format if format.scale_dtype == E8M0 => format!("mx_{}", format.name),
            format => format.name.to_owned(),
        };
        for (option, suffix) in
            [(self.packed, "_packed"), (self.given, "_given"), (self.column_scale, "_column_scale")]
        {
            if option {
                name.push_str(suffix);
            }
        }
        name
    }

    fn spec(self) -> BlockSpec {
        let scale = match self.format.scale_dtype {
            E8M0 => BlockScale::E8m0(Rounding::Ceil),
            _ => BlockScale::F32(ScaleRule::default()),
        };
        BlockSpec { block: self.format.block, scale, row_offset: 0, packed: self.packed, divide: false }
    }
}

#[derive(Clone, Copy)]
enum Directions {
    Rowwise,
    Columnwise,
    Both,
}
use Directions::{Both, Columnwise, Rowwise};

/// Returns all rows, grouped by operation.
pub(crate) fn rows(plan: &Plan) -> Vec<Row> {
    let mut rows = Vec::new();
    for format in &FORMATS {
        let is_mx = format.block == MX;
        let directions: &[Directions] = if is_mx { &[Rowwise, Columnwise, Both] } else { &[Rowwise, Both] };
        for &case in if is_mx { &plan.mx } else { &plan.blocks } {
            for variant in Variant::of(format) {
                rows.extend(directions.iter().map(|&directions| quantize(case, variant, directions)));
            }
        }
    }
    for &case in &plan.blocks {
        let kinds = [("32x32", MX_SQUARE), ("128x128", SQUARE), ("per_row", Block::ROW)];
        rows.extend(kinds.map(|(name, block)| block_amax(case, name, block)));
    }
    for &case in &plan.blocks {
        rows.push(rebase(case, "mx_32x32_rows", MX_SQUARE, Axis::Rows));
        rows.push(rebase(case, "mx_32x32_columns", MX_SQUARE, Axis::Columns));
        rows.push(rebase(case, "mx_1x32_rows", MX, Axis::Rows));
    }
    rows.extend(plan.blocks.iter().map(|&case| dequantize(case)));
    rows.extend(plan.mx.iter().map(|&case| pack(case)));
    rows
}

fn name(what: &str, dtype: DType, shape: (usize, usize)) -> String {
    format!("{what}/{dtype}/{}x{}", shape.0, shape.1)
}

/// Operands of one direction: codes, scales, and given maxima.
#[derive(Clone, Copy)]
struct Plane {
    codes: Id,
    scales: Id,
    amax: Option<Id>,
}

impl Plane {
    fn new(o: &mut Operands, variant: Variant, shape: (usize, usize)) -> Self {
        let format = variant.format;
        let grid = format.block.grid(shape.0, shape.1);
        let codes = o.output(E4M3, shape);
        let scales = if variant.packed {
            o.output(format.scale_dtype, (1, packed::bytes(shape.0, grid.1)))
        } else if format.scales_by_columns {
            o.output_by_columns(format.scale_dtype, grid)
        } else {
            o.output(format.scale_dtype, grid)
        };
        Self { codes, scales, amax: variant.given.then(|| o.value(AMAX, grid)) }
    }
}

fn quantize(case: Case, variant: Variant, directions: Directions) -> Row {
    let (rows, cols) = case.shape;
    let spec = variant.spec();
    let mut o = Operands::default();
    let x = o.case(case);
    let rowwise = (!matches!(directions, Columnwise)).then(|| Plane::new(&mut o, variant, (rows, cols)));
    let columnwise = (!matches!(directions, Rowwise)).then(|| Plane::new(&mut o, variant, (cols, rows)));
    let column_scale = variant.column_scale.then(|| o.value(COLUMN_SCALE, (1, cols)));
    let direction = match directions {
        Rowwise => "rowwise",
        Columnwise => "columnwise",
        Both => "both",
    };
    let what = format!("{}_{direction}", variant.name());
    o.row("quantize_blocks", name(&what, case.dtype, case.shape), move |r| {
        let plane = |plane: Plane| BlockPlane { codes: r.out(plane.codes), scales: r.out(plane.scales) };
        let amax = |plane: Option<Plane>| plane.and_then(|plane| plane.amax).map(|amax| r.view(amax));
        let inputs = BlockInputs {
            amax: amax(rowwise),
            amax_columnwise: amax(columnwise),
            column_scale: column_scale.map(|column_scale| r.view(column_scale)),
        };
        ops::quantize_blocks(r.view(x), spec, inputs, rowwise.map(plane), columnwise.map(plane), r.stream())
    })
}

fn block_amax(case: Case, what: &str, block: Block) -> Row {
    let mut o = Operands::default();
    let (x, out) = (o.case(case), o.output(F32, block.grid(case.shape.0, case.shape.1)));
    o.row("block_amax", name(what, case.dtype, case.shape), move |r| {
        ops::block_amax(r.view(x), block, 0, r.out(out), r.stream())
    })
}

fn rebase(Case { shape, .. }: Case, what: &str, block: Block, axis: Axis) -> Row {
    let (rows, cols) = if axis == Axis::Rows { shape } else { (shape.1, shape.0) };
    let mut o = Operands::default();
    let (codes, scales) = (o.input(E4M3, shape), o.input(E8M0, block.grid(shape.0, shape.1)));
    let (out, scale_out) = (o.output(E4M3, (rows, cols)), o.output(F32, (rows, 1)));
    o.row("rebase", name(what, E4M3, shape), move |r| {
        let (codes, scales) = (r.view(codes), r.view(scales));
        ops::rebase(codes, scales, block, axis, r.out(out), r.out(scale_out), r.stream())
    })
}

fn dequantize(case: Case) -> Row {
    let mut o = Operands::default();
    let (codes, scales) = (o.input(E4M3, case.shape), o.input(E8M0, MX.grid(case.shape.0, case.shape.1)));
    let out = o.output(case.dtype, case.shape);
    o.row("dequantize", name("mx_1x32", case.dtype, case.shape), move |r| {
        ops::dequantize(r.view(codes), r.view(scales), MX, r.out(out), r.stream())
    })
}

/// Returns the shapes of the unpacked and the packed scales of a 1x32 plane of the case's shape.
fn scales(case: Case) -> ((usize, usize), (usize, usize)) {
    let compact = MX.grid(case.shape.0, case.shape.1);
    (compact, (1, packed::bytes(compact.0, compact.1)))
}

fn pack(case: Case) -> Row {
    let (compact, packed) = scales(case);
    let mut o = Operands::default();
    let (scales, out) = (o.input(E8M0, compact), o.output(E8M0, packed));
    o.row("pack_scales", name("mx_1x32", E8M0, compact), move |r| {
        ops::pack_scales(r.view(scales), compact.0, 1, r.out(out), r.stream())
    })
}
