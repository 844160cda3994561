// Absolute maxima of blocks, or of all rows and columns from one read.
//
// Maxima are fp32 bits that are combined with atomic integer maxima, so the outputs must be
// set to zero first (`fill_lines`, `fill_grid`). NaN is greater than Inf, and every NaN is
// stored as 0x7fc00000.
#include "tile.cuh"

/// Two strided fp32 vectors, either of which may be null.
struct LinesArgs {
  float *first, *second;
  i64 first_stride, second_stride, first_count, second_count;
  float value;
  u32 unused;            // pads the struct to a multiple of 8 bytes
};

/// Sets both vectors to `value`.
extern "C" __global__ void fill_lines(const __grid_constant__ LinesArgs a) {
  i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (a.first && i < a.first_count) a.first[i * a.first_stride] = a.value;
  if (a.second && i < a.second_count) a.second[i * a.second_stride] = a.value;
}

struct LineAmaxArgs {
  const void *x;
  float *row, *col;      // maxima of each row (of x * column_scale) and column; either may be null
  const float *column_scale;  // per column, or null
  i64 x_rs, x_cs, row_stride, col_stride, column_scale_cs;
  i64 rows, cols, tiles_across;
  u32 flags;             // X_VECTORS
  u32 mark;              // 0, or MAXIMUM if a quantizer converts the maxima to scales
};

template <class T> struct LinePlace {
  int lane, warp;
  i64 row, col;
  bool rows_inside, cols_inside;
};

/// A block of 256 threads processes 128 rows. A warp processes 16 of them, and each lane 16
/// bytes of each row.
template <class T> DEVICE void line_amax(const LineAmaxArgs &a) {
  constexpr int COLS = 4 * T::PER_REG;
  constexpr int UNITS = 16 / T::PER_REG;
  __shared__ __align__(16) uint4 part[8][32];
  LinePlace<T> p;
  p.lane = threadIdx.x & 31, p.warp = threadIdx.x >> 5;
  i64 tile_row = blockIdx.x / a.tiles_across;
  i64 tile_col = blockIdx.x - tile_row * a.tiles_across;
  p.row = tile_row * 128 + p.warp * 16;
  p.col = tile_col * 32 * COLS + p.lane * COLS;
  p.rows_inside = p.row + 16 <= a.rows;
  p.cols_inside = p.col + COLS <= a.cols;
  u32 d[16][4];
  load_tile<T>(a, p, d);

  if (a.row && a.column_scale) {
    float column_scale[COLS];
#pragma unroll
    for (int j = 0; j < COLS; j++)
      column_scale[j] = p.col + j < a.cols ? a.column_scale[(p.col + j) * a.column_scale_cs] : 0.0f;
    u32 unit[16];
#pragma unroll
    for (int r = 0; r < 16; r++) {
      u32 m = 0;
#pragma unroll
      for (int j = 0; j < COLS; j++) {
        float v = T::get(d[r][j / T::PER_REG], j % T::PER_REG) * column_scale[j];
        m = max(m, __float_as_uint(v) & 0x7fffffffu);
      }
      unit[r] = m;
    }
    int first = fold_lanes<InF32, 16>(unit, p.lane);
    u32 bits = InF32::amax(unit[0], shuffle_xor(unit[0], 16)) & 0x7fffffffu;
    if (p.lane < 16 && p.row + first < a.rows)
      atomicMax((u32 *)(a.row + (p.row + first) * a.row_stride), canonical(bits) | a.mark);
  } else if (a.row) {
    u32 unit[UNITS];
    row_maxima<T>(d, unit);
    int first = fold_lanes<T, UNITS>(unit, p.lane);
#pragma unroll
    for (int mask = UNITS; mask < 32; mask *= 2)
      unit[0] = T::amax(unit[0], shuffle_xor(unit[0], mask));
#pragma unroll
    for (int h = 0; h < T::PER_REG; h++) {
      i64 r = p.row + first * T::PER_REG + h;
      if (p.lane < UNITS && r < a.rows)
        atomicMax((u32 *)(a.row + r * a.row_stride),
                  canonical(T::amax_bits(unit[0], h)) | a.mark);
    }
  }
  if (a.col) {
    u32 unit[4];
    col_maxima<T>(d, unit);
    part[p.warp][p.lane] = make_uint4(unit[0], unit[1], unit[2], unit[3]);
    __syncthreads();
    if (threadIdx.x < 128) {
      const u32 *words = (const u32 *)part + threadIdx.x;
      u32 m = words[0];
#pragma unroll
      for (int w = 1; w < 8; w++) m = T::amax(m, words[w * 128]);
#pragma unroll
      for (int h = 0; h < T::PER_REG; h++) {
        i64 c = tile_col * 32 * COLS + threadIdx.x * T::PER_REG + h;
        if (c < a.cols)
          atomicMax((u32 *)(a.col + c * a.col_stride), canonical(T::amax_bits(m, h)) | a.mark);
      }
    }
  }
}

#define LINE_AMAX(NAME, T)                                                                       \
  extern "C" __global__ void __launch_bounds__(256) line_amax_##NAME(                             \
      const __grid_constant__ LineAmaxArgs a) {                                                   \
    line_amax<T>(a);                                                                              \
  }
FOR_INPUTS(LINE_AMAX)

struct BlockAmaxArgs {
  const void *x;
  float *out;                    // (row blocks, column blocks)
  i64 x_rs, x_cs, out_rs, out_cs;
  i64 rows, cols;
  i64 block_rows, block_cols;    // 1, or a multiple of 32
  i64 rows_before;               // rows of the first block that lie before this view
  i64 tiles_across;
  u32 flags;                     // X_VECTORS
  u32 unused;                    // pads the struct to a multiple of 8 bytes
};

/// Sets the grid of `rows` x `cols` blocks to zero.
extern "C" __global__ void fill_grid(const __grid_constant__ BlockAmaxArgs a) {
  i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  i64 r = i / a.cols, c = i - r * a.cols;
  if (r < a.rows) a.out[r * a.out_rs + c * a.out_cs] = 0.0f;
}

/// Computes maxima of blocks of any supported shape. A warp processes 32 columns of 32
/// (virtual) rows.
template <class T> DEVICE void block_amax(const BlockAmaxArgs &a) {
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  i64 tile_row = blockIdx.x / a.tiles_across;
  i64 c = (blockIdx.x - tile_row * a.tiles_across) * 256 + warp * 32 + lane;
  i64 v = tile_row * 32;                              // virtual row
  bool inside = c < a.cols;
  i64 block_col = c / a.block_cols;
  auto put = [&](i64 block_row, u32 bits) {
    if (a.block_cols > 1) bits = __reduce_max_sync(0xffffffffu, bits);
    if (inside && (a.block_cols == 1 || lane == 0))
      atomicMax((u32 *)(a.out + block_row * a.out_rs + block_col * a.out_cs), canonical(bits));
  };
  u32 bits = 0;
#pragma unroll 8
  for (int i = 0; i < 32; i++) {
    i64 r = v + i - a.rows_before;
    u32 m = 0;
    if (inside && r >= 0 && r < a.rows) {
      u32 reg = T::load(a.x, r * a.x_rs + c * a.x_cs);
      m = __float_as_uint(T::get(reg, 0)) & 0x7fffffffu;
    }
    if (a.block_rows == 1) {
      if (r >= 0 && r < a.rows) put(r, m);
    } else {
      bits = max(bits, m);
    }
  }
  // Every tile has at least one row of the tensor, unless the tensor has no rows.
  if (a.block_rows > 1) put(v / a.block_rows, bits);
}

/// Computes maxima of blocks with at least 32 rows. A thread has 16 rows of 16 bytes, as in
/// the tile kernels.
template <class T> DEVICE void tall_amax(const BlockAmaxArgs &a) {
  typedef TileShape<T> S;
  TilePlace<T> p(a);
  u32 d[16][4];
  load_tile<T>(a, p, d);
  u32 unit[4];
  col_maxima<T>(d, unit);
  i64 row_block = (p.tile_row * 128 + p.row_in_tile) / a.block_rows;
  float *out = a.out + row_block * a.out_rs;
  // The last tile may have rows of blocks below the tensor, which are not in the grid.
  bool behind = p.tile_row * 128 + p.row_in_tile / 32 * 32 - a.rows_before >= a.rows;
  if (a.block_cols == 1) {
    // Both lanes of 32 rows have all columns. Each writes half of them.
    fold_halves<T>(unit, 4, p.lane, 8);
    int first = p.lane & 8 ? 2 : 0;
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int h = 0; h < T::PER_REG; h++) {
        i64 c = p.col + (first + i) * T::PER_REG + h;
        if (c < a.cols && !behind)
          atomicMax((u32 *)(out + c * a.out_cs), canonical(T::amax_bits(unit[i], h)));
      }
    return;
  }
  u32 m = square_maximum<T>(unit);
  constexpr int LANES = 32 / S::COLS;                 // lanes that share 32 columns
  if (p.lane % LANES == 0 && !(p.lane & 8) && p.col < a.cols && !behind)
    atomicMax((u32 *)(out + p.col / a.block_cols * a.out_cs), canonical(magnitude<T>(m)));
}

#define BLOCK_AMAX(NAME, T)                                                                      \
  extern "C" __global__ void __launch_bounds__(256) block_amax_##NAME(                            \
      const __grid_constant__ BlockAmaxArgs a) {                                                  \
    block_amax<T>(a);                                                                             \
  }
FOR_INPUTS(BLOCK_AMAX)

#define TALL_AMAX(NAME, T)                                                                       \
  extern "C" __global__ void __launch_bounds__(TileShape<T>::THREADS) tall_amax_##NAME(           \
      const __grid_constant__ BlockAmaxArgs a) {                                                  \
    tall_amax<T>(a);                                                                              \
  }
FOR_INPUTS(TALL_AMAX)
