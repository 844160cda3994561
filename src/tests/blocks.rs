//! Block formats through the public API: bytes from the specification, layouts, and blocks that shard
//! boundaries split.

use crate::format::e8m0::Rounding;
use crate::ops::{self, Axis, BlockInputs, BlockPlane, BlockScale, BlockSpec};
use crate::{Block, DType, Error, ScaleRule, Stream, View, ViewMut};

const MX: Block = Block { rows: 1, cols: 32 };
const MX_SQUARE: Block = Block { rows: 32, cols: 32 };

fn mx(block: Block, rounding: Rounding) -> BlockSpec {
    BlockSpec { block, scale: BlockScale::E8m0(rounding), row_offset: 0, packed: false, divide: false }
}

/// Returns the row-major codes and scale bytes of one direction.
fn quantize(
    x: &[f32],
    (rows, cols): (usize, usize),
    spec: BlockSpec,
    dtype: DType,
    columnwise: bool,
) -> (Vec<u8>, Vec<u8>) {
    let (r, c) = if columnwise { (cols, rows) } else { (rows, cols) };
    let grid = spec.block.grid(r, c);
    let bytes = if spec.packed { crate::layout::packed::bytes(r, grid.1) } else { grid.0 * grid.1 };
    let (mut codes, mut scales) = (vec![0xAA; r * c], vec![0xAA; bytes]);
    let shape = if spec.packed { (1, bytes) } else { grid };
    let plane = BlockPlane {
        codes: ViewMut::from_bytes(&mut codes, dtype, r, c).unwrap(),
        scales: ViewMut::from_bytes(&mut scales, DType::E8m0, shape.0, shape.1).unwrap(),
    };
    let (rowwise, columnwise) = if columnwise { (None, Some(plane)) } else { (Some(plane), None) };
    let x = View::from_slice(x, rows, cols).unwrap();
    ops::quantize_blocks(x, spec, BlockInputs::default(), rowwise, columnwise, Stream::default()).unwrap();
    (codes, scales)
}

/// Returns a block of 32 values that starts with `head` and is filled with `tail`.
fn block(head: &[f32], tail: f32) -> Vec<f32> {
    head.iter().copied().chain(std::iter::repeat(tail)).take(32).collect()
}

/// (start of a block, remaining values, rounding, scale byte, first codes, code of the remaining values).
type Case<'a> = (&'a [f32], f32, Rounding, u8, &'a [u8], u8);

#[test]
fn mx_bytes_of_special_blocks_match_the_specification() {
    use Rounding::{Ceil, Floor};
    let max = f32::MAX; // (2 - 2^-23) * 2^127. The mantissa is above .75, so Ceil yields 2^(127 - 8 + 1).
    let two = |e: i32| 2.0_f64.powi(e) as f32;
    let cases: [Case; 15] = [
        (&[0.0, -0.0], 0.0, Ceil, 0, &[0x00, 0x80], 0x00),
        (&[two(-149), -two(-149)], 0.0, Ceil, 0, &[0x00, 0x80], 0x00),
        // e = -127 is the smallest exponent: 2^-127 becomes 1, and 2^-126 becomes 2.
        (&[two(-127), -two(-126)], 0.0, Ceil, 0, &[0x38, 0xC0], 0x00),
        (&[1.0, f32::NAN], 2.0, Ceil, 255, &[0x7F, 0x7F], 0x7F),
        (&[-0.0, f32::NEG_INFINITY], 0.0, Floor, 255, &[0x7F, 0x7F], 0x7F),
        // 255.99 rounds to 256. With Floor it is 511.99, which saturates.
        (&[max, -max], 0.0, Ceil, 247, &[0x78, 0xF8], 0x00),
        (&[max, -max], 0.0, Floor, 246, &[0x7E, 0xFE], 0x00),
        // 448 is the largest value for scale 2^0. 449 needs 2^1, and 224.5 rounds to 224.
        (&[448.0], -448.0, Ceil, 127, &[0x7E], 0xFE),
        (&[449.0], 0.0, Ceil, 128, &[0x76], 0x00),
        (&[449.0], 0.0, Floor, 127, &[0x7E], 0x00),
        // 1 <= 448 * 2^-8, so the code is 256.
        (&[1.0], 1.0, Ceil, 119, &[0x78], 0x78),
        (&[1.0], 1.0, Floor, 119, &[0x78], 0x78),
        // One huge value and 31 tiny ones. 448 * 2^20 needs 2^20, so -1 becomes a signed zero.
        (&[448.0 * two(20)], -1.0, Ceil, 147, &[0x7E], 0x80),
        // Subnormal codes are multiples of 2^-9. Half a step rounds to even (down), and one and a half steps
        // round up.
        (
            &[448.0 * two(20), two(11), two(10), 1.5 * two(10), 3.0 * two(10)],
            0.0,
            Ceil,
            147,
            &[0x7E, 0x01, 0x00, 0x01, 0x02],
            0x00,
        ),
        (&[-3.0, 1.5], 0.25, Ceil, 120, &[0xFC, 0x74], 0x60),
    ];
    for (head, tail, rounding, byte, first, rest) in cases {
        let values = block(head, tail);
        let expected: Vec<u8> = block(&[0.0; 0], 0.0)
            .iter()
            .enumerate()
            .map(|(i, _)| first.get(i).copied().unwrap_or(rest))
            .collect();
        for columnwise in [false, true] {
            let shape = if columnwise { (32, 1) } else { (1, 32) };
            let got = quantize(&values, shape, mx(MX, rounding), DType::E4m3, columnwise);
            assert_eq!(got, (expected.clone(), vec![byte]), "{head:?} {tail} {rounding:?} {columnwise}");
        }
    }
    // E5M2: 1 <= 57344 * 2^-15, so the code is 2^15, whose exponent field is 30. NaN is 0x7F here as well.
    assert_eq!(quantize(&[1.0; 32], (1, 32), mx(MX, Ceil), DType::E5m2, false), (vec![0x78; 32], vec![112]));
    let got = quantize(&block(&[f32::NAN], 1.0), (1, 32), mx(MX, Ceil), DType::E5m2, false);
    assert_eq!(got, (vec![0x7F; 32], vec![255]));
}

#[test]
fn nan_affects_only_its_block() {
    let mut x = vec![1.0_f32; 3 * 96];
    x[96 + 40] = f32::NAN;
    let (codes, scales) = quantize(&x, (3, 96), mx(MX, Rounding::Ceil), DType::E4m3, false);
    assert_eq!(scales, [119, 119, 119, 119, 255, 119, 119, 119, 119]);
    assert!(codes.iter().enumerate().all(|(i, &c)| c == if (128..160).contains(&i) { 0x7F } else { 0x78 }));
    let (_, scales) = quantize(&x, (3, 96), mx(MX_SQUARE, Rounding::Ceil), DType::E4m3, false);
    assert_eq!(scales, [119, 255, 119]);
}

#[test]
fn short_last_blocks_have_scales() {
    // 2 x 35: each row has blocks of 32 and 3.
    let x: Vec<f32> = (0..70).map(|i| if i % 35 < 32 { 1.0 } else { 4.0 }).collect();
    let (codes, scales) = quantize(&x, (2, 35), mx(MX, Rounding::Ceil), DType::E4m3, false);
    assert_eq!(scales, [119, 121, 119, 121]);
    assert!(codes.iter().all(|&c| c == 0x78));
    let (codes, scales) = quantize(&x, (2, 35), mx(MX, Rounding::Ceil), DType::E4m3, true);
    assert_eq!(scales.len(), 35);
    assert!(scales[..32].iter().all(|&s| s == 119) && scales[32..].iter().all(|&s| s == 121));
    assert!(codes.iter().all(|&c| c == 0x78));
}

/// The packed layout from its definition: pad the (lines, blocks) matrix to (128a, 4b), and store its 128x4
/// tiles in row-major order. A tile is 32 rows of four groups of four: row r, column c of the tile is at (r %
/// 32, (r / 32) * 4 + c).
fn swizzle(bytes: &[u8], lines: usize, blocks: usize) -> Vec<u8> {
    let mut out = Vec::new();
    for tile_row in 0..lines.div_ceil(128) {
        for tile_col in 0..blocks.div_ceil(4) {
            let mut tile = [[0_u8; 16]; 32];
            for r in 0..128 {
                for c in 0..4 {
                    let (line, block) = (tile_row * 128 + r, tile_col * 4 + c);
                    if line < lines && block < blocks {
                        tile[r % 32][(r / 32) * 4 + c] = bytes[line * blocks + block];
                    }
                }
            }
            out.extend(tile.concat());
        }
    }
    out
}

/// Returns values whose block maxima differ from block to block.
fn varied(rows: usize, cols: usize) -> Vec<f32> {
    (0..rows * cols)
        .map(|i| {
            let (r, c) = (i / cols, i % cols);
            let e = (r * 7 + c / 5 * 3) % 40;
            (1.0 + (i % 13) as f32 / 16.0) * 2.0_f32.powi(e as i32 - 20) * if i % 3 == 0 { -1.0 } else { 1.0 }
        })
        .collect()
}

#[test]
fn packed_scales_match_the_definition_with_partial_tiles() {
    // More than 3 x 3 tiles, the last ones partial: 300 lines, 9 blocks; columnwise 270 lines, 10 blocks.
    let (rows, cols) = (300, 270);
    let x = varied(rows, cols);
    for columnwise in [false, true] {
        let (lines, blocks) = if columnwise { (cols, 10) } else { (rows, 9) };
        let (codes, compact) = quantize(&x, (rows, cols), mx(MX, Rounding::Ceil), DType::E4m3, columnwise);
        let spec = BlockSpec { packed: true, ..mx(MX, Rounding::Ceil) };
        let (packed_codes, packed) = quantize(&x, (rows, cols), spec, DType::E4m3, columnwise);
        assert_eq!(packed_codes, codes);
        assert_eq!(packed, swizzle(&compact, lines, blocks));

        let mut out = vec![0xAA; packed.len()];
        let scales = View::from_bytes(&compact, DType::E8m0, lines, blocks).unwrap();
        let to = ViewMut::from_bytes(&mut out, DType::E8m0, 1, packed.len()).unwrap();
        ops::pack_scales(scales, lines, 1, to, Stream::default()).unwrap();
        assert_eq!(out, packed);

        // 32x32 blocks: a scale is repeated for each row of its block.
        let (_, square) = quantize(&x, (rows, cols), mx(MX_SQUARE, Rounding::Ceil), DType::E4m3, columnwise);
        let repeated: Vec<u8> =
            (0..lines).flat_map(|line| square[line / 32 * blocks..][..blocks].to_vec()).collect();
        let spec = BlockSpec { packed: true, ..mx(MX_SQUARE, Rounding::Ceil) };
        let (_, packed) = quantize(&x, (rows, cols), spec, DType::E4m3, columnwise);
        assert_eq!(packed, swizzle(&repeated, lines, blocks));
    }
}

#[test]
fn square_blocks_are_transposed_bytes_columnwise() {
    let (rows, cols) = (70, 100);
    let x = varied(rows, cols);
    let (codes, scales) = quantize(&x, (rows, cols), mx(MX_SQUARE, Rounding::Floor), DType::E5m2, false);
    let (codes_t, scales_t) = quantize(&x, (rows, cols), mx(MX_SQUARE, Rounding::Floor), DType::E5m2, true);
    let transposed = |m: &[u8], rows: usize, cols: usize| -> Vec<u8> {
        (0..cols).flat_map(|c| (0..rows).map(move |r| (r, c))).map(|(r, c)| m[r * cols + c]).collect()
    };
    assert_eq!(codes_t, transposed(&codes, rows, cols));
    assert_eq!(scales_t, transposed(&scales, 3, 4));
}

#[test]
fn shards_with_reduced_maxima_match_the_whole_tensor() {
    let (rows, cols) = (150, 70);
    let x = varied(rows, cols);
    for (block, scale) in [
        (MX_SQUARE, BlockScale::E8m0(Rounding::Ceil)),
        (Block { rows: 128, cols: 128 }, BlockScale::F32(ScaleRule::default())),
    ] {
        let grid = block.grid(rows, cols);
        let whole = View::from_slice(&x, rows, cols).unwrap();
        let mut amax = vec![0_f32; grid.0 * grid.1];
        let out = ViewMut::from_slice(&mut amax, grid.0, grid.1).unwrap();
        ops::block_amax(whole, block, 0, out, Stream::default()).unwrap();
        let size = if matches!(scale, BlockScale::F32(_)) { 4 } else { 1 };
        let run = |x: View, row_offset, given: &[f32], grid: (usize, usize)| {
            let mut codes = vec![0; x.numel()];
            let mut bytes = vec![0_u8; grid.0 * grid.1];
            let mut floats = vec![0_f32; grid.0 * grid.1];
            let scales = match size {
                1 => ViewMut::from_bytes(&mut bytes, DType::E8m0, grid.0, grid.1),
                _ => ViewMut::from_slice(&mut floats, grid.0, grid.1),
            }
            .unwrap();
            let codes_view = ViewMut::from_bytes(&mut codes, DType::E4m3, x.rows(), x.cols()).unwrap();
            let spec = BlockSpec { block, scale, row_offset, packed: false, divide: false };
            let given = BlockInputs {
                amax: (!given.is_empty()).then(|| View::from_slice(given, grid.0, grid.1).unwrap()),
                ..Default::default()
            };
            ops::quantize_blocks(
                x,
                spec,
                given,
                Some(BlockPlane { codes: codes_view, scales }),
                None,
                Stream::default(),
            )
            .unwrap();
            (codes, bytes, floats)
        };
        let expected = run(whole, 0, &[], grid);
        let mut codes = Vec::new();
        for (start, end) in [(0, 50), (50, 100), (100, 100), (100, 150)] {
            let part = View::from_slice(&x[start * cols..end * cols], end - start, cols).unwrap();
            let touched = block.grid_from(start, end - start, cols);
            let first = start / block.rows;
            let known = &amax[first * grid.1..(first + touched.0) * grid.1];
            // The maxima of the shard alone are at most the maxima of the whole tensor.
            let mut own = vec![0_f32; touched.0 * touched.1];
            let out = ViewMut::from_slice(&mut own, touched.0, touched.1).unwrap();
            ops::block_amax(part, block, start, out, Stream::default()).unwrap();
            assert!(own.iter().zip(known).all(|(a, b)| a <= b));
            let got = run(part, start, known, touched);
            codes.extend(got.0);
            assert_eq!(got.1[..], expected.1[first * grid.1..][..got.1.len()]);
            assert_eq!(got.2[..], expected.2[first * grid.1..][..got.2.len()]);
        }
        assert_eq!(codes, expected.0);
    }
}

fn rebase(
    codes: &[u8],
    scales: &[u8],
    (rows, cols): (usize, usize),
    block: Block,
    axis: Axis,
) -> (Vec<u8>, Vec<f32>) {
    let (r, c) = if axis == Axis::Rows { (rows, cols) } else { (cols, rows) };
    let (mut out, mut scale_out) = (vec![0xAA; codes.len()], vec![-1.0; r]);
    let grid = block.grid(rows, cols);
    ops::rebase(
        View::from_bytes(codes, DType::E4m3, rows, cols).unwrap(),
        View::from_bytes(scales, DType::E8m0, grid.0, grid.1).unwrap(),
        block,
        axis,
        ViewMut::from_bytes(&mut out, DType::E4m3, r, c).unwrap(),
        ViewMut::from_slice(&mut scale_out, r, 1).unwrap(),
        Stream::default(),
    )
    .unwrap();
    (out, scale_out)
}

#[test]
fn rebase_keeps_the_largest_blocks_and_rounds_subnormals() {
    // One row with blocks 2^0, 2^-3, 2^-20, NaN, byte 0. 1.75 (0x3E) * 2^-3 = 0.21875 (0x26) exactly. 1.75 *
    // 2^-20 becomes zero. 2^-6 (0x08) * 2^-3 = 2^-9 (0x01). 2^-9 * 2^-3 becomes zero.
    let scales = [127, 124, 107, 255, 0];
    let mut codes = [0x3E_u8; 160];
    (codes[33], codes[34], codes[35]) = (0x08, 0x81, 0x7F);
    let (out, scale) = rebase(&codes, &scales, (1, 160), MX, Axis::Rows);
    assert_eq!(scale, [1.0]);
    assert_eq!(out[..36], [[0x3E; 32].as_slice(), &[0x26, 0x01, 0x80, 0x7F]].concat());
    assert_eq!(out[64..96], [0x00; 32]);
    assert_eq!(out[96..128], [0x7F; 32]);
    assert_eq!(out[128..], [0x00; 32]);
}

#[test]
fn rebase_scales_of_zero_nan_and_tiny_rows() {
    let zeros = [0x00_u8, 0x80].repeat(16);
    assert_eq!(rebase(&zeros, &[140], (1, 32), MX, Axis::Rows), (zeros.clone(), vec![1.0]));
    assert_eq!(rebase(&[0x7F; 32], &[255], (1, 32), MX, Axis::Rows), (vec![0x7F; 32], vec![1.0]));
    // 2^-127 is below the smallest scale, 2^-126, so 0x38 (1) becomes 0x30 (0.5).
    let tiny = rebase(&[0x38; 32], &[0], (1, 32), MX, Axis::Rows);
    assert_eq!(tiny, (vec![0x30; 32], vec![2.0_f32.powi(-126)]));
    // The largest scale byte, 2^127.
    assert_eq!(
        rebase(&[0x78; 32], &[254], (1, 32), MX, Axis::Rows),
        (vec![0x78; 32], vec![2.0_f32.powi(127)])
    );
    // In a 32x32 block, a row of zeros has scale 1.
    let mut codes = vec![0x38_u8; 64 * 32];
    codes[32..64].fill(0x00);
    let (_, scale) = rebase(&codes, &[130, 120], (64, 32), MX_SQUARE, Axis::Rows);
    assert_eq!((scale[0], scale[1], scale[2], scale[63]), (8.0, 1.0, 8.0, 2.0_f32.powi(-7)));
}

#[test]
fn rebase_along_columns_equals_rebase_of_the_transpose_along_rows() {
    let (rows, cols) = (70, 100);
    let x = varied(rows, cols);
    let (codes, scales) = quantize(&x, (rows, cols), mx(MX_SQUARE, Rounding::Ceil), DType::E4m3, false);
    let (codes_t, scales_t) = quantize(&x, (rows, cols), mx(MX_SQUARE, Rounding::Ceil), DType::E4m3, true);
    assert_eq!(
        rebase(&codes, &scales, (rows, cols), MX_SQUARE, Axis::Columns),
        rebase(&codes_t, &scales_t, (cols, rows), MX_SQUARE, Axis::Rows)
    );
}

#[test]
fn per_row_scales_with_and_without_column_scale() {
    // Rows with maxima 448 and 3. The column scale doubles the first column.
    let x = [448.0_f32, -1.0, 3.0, 0.5];
    let column_scale = [2.0_f32, 1.0];
    let run = |column_scale: Option<&[f32]>, power_of_2| {
        let (mut codes, mut scales) = ([0_u8; 4], [0_f32; 2]);
        let (mut codes_t, mut scales_t) = ([0_u8; 4], [0_f32; 2]);
        let rule = ScaleRule { power_of_2, ..Default::default() };
        ops::quantize_blocks(
            View::from_slice(&x, 2, 2).unwrap(),
            BlockSpec {
                block: Block::ROW,
                scale: BlockScale::F32(rule),
                row_offset: 0,
                packed: false,
                divide: false,
            },
            BlockInputs {
                column_scale: column_scale.map(|f| View::from_slice(f, 1, 2).unwrap()),
                ..Default::default()
            },
            Some(BlockPlane {
                codes: ViewMut::from_bytes(&mut codes, DType::E4m3, 2, 2).unwrap(),
                scales: ViewMut::from_slice(&mut scales, 2, 1).unwrap(),
            }),
            Some(BlockPlane {
                codes: ViewMut::from_bytes(&mut codes_t, DType::E4m3, 2, 2).unwrap(),
                scales: ViewMut::from_slice(&mut scales_t, 2, 1).unwrap(),
            }),
            Stream::default(),
        )
        .unwrap();
        (codes, scales, codes_t, scales_t)
    };
    let (codes, scales, codes_t, scales_t) = run(None, true);
    assert_eq!(scales, [1.0, 2.0_f32.powi(-7)]); // 3 / 448 rounds up to 2^-7
    assert_eq!(codes, [0x7E, 0xB8, 0x7C, 0x68]); // 3 * 128 = 384, 0.5 * 128 = 64
    assert_eq!(scales_t, [1.0, 2.0_f32.powi(-8)]); // column maxima 448 and 1
    assert_eq!(codes_t, [0x7E, 0x44, 0xF8, 0x70]); // 448, 3; -256, 128
    let (codes, scales, codes_t2, scales_t2) = run(Some(&column_scale), true);
    assert_eq!(scales, [2.0, 2.0_f32.powi(-6)]); // 896, 6
    assert_eq!(codes, [0x7E, 0xB0, 0x7C, 0x60]); // 448, -0.5; 384, 32
    assert_eq!((codes_t2, scales_t2), (codes_t, scales_t));
    assert_eq!(run(None, false).1, [1.0, 3.0 / 448.0]);
}

#[test]
fn invalid_calls_name_the_argument() {
    let x = [1.0_f32; 64];
    let call = |spec: BlockSpec, scales: (usize, usize)| {
        let (mut codes, mut bytes) = ([0_u8; 64], vec![0_u8; scales.0 * scales.1]);
        let plane = BlockPlane {
            codes: ViewMut::from_bytes(&mut codes, DType::E4m3, 2, 32).unwrap(),
            scales: ViewMut::from_bytes(&mut bytes, DType::E8m0, scales.0, scales.1).unwrap(),
        };
        let x = View::from_slice(&x, 2, 32).unwrap();
        ops::quantize_blocks(x, spec, BlockInputs::default(), Some(plane), None, Stream::default())
            .unwrap_err()
    };
    let spec = mx(MX, Rounding::Ceil);
    assert!(matches!(call(spec, (1, 2)), Error::Shape { arg, .. } if arg == "rowwise_scale"));
    let bad = BlockSpec { block: Block { rows: 2, cols: 32 }, ..spec };
    assert!(matches!(call(bad, (1, 1)), Error::Value { arg, .. } if arg == "block"));
    let bad = BlockSpec { packed: true, row_offset: 5, block: MX_SQUARE, ..spec };
    assert!(matches!(call(bad, (1, 512)), Error::Value { arg, .. } if arg == "row_offset"));
    let bad = BlockSpec { packed: true, ..spec };
    assert!(matches!(call(bad, (1, 511)), Error::Shape { arg, .. } if arg == "rowwise_scale"));
    let bad = BlockSpec { scale: BlockScale::F32(ScaleRule::default()), block: Block::ROW, ..spec };
    assert!(matches!(call(bad, (2, 1)), Error::DType { arg, .. } if arg == "rowwise_scale"));
}
