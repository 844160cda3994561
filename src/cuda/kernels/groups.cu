// Groups of rows: their bounds, and quantization with a scale per row and per column of each
// group. format/groups.rs and format/activation.rs have the definitions.
//
// A quantization has three launches. The first finds the maxima of rows and of columns, in the
// memory of the scales. The second turns maxima into scales. The third casts.
#include "activation.cuh"
#include "vectors.cuh"

struct GroupBoundsArgs {
  const int *offs;       // (count)
  int *ends;             // (count)
  int *padded_ends;      // (count)
  int *invalid;          // one element in memory of the host, never cleared here
  i64 count;
  i64 rows;
};

#define SCAN 1024
#define ALIGNMENT 16

/// Returns the maximum or the sum of the values of this thread and all threads before it.
/// Values are not negative. All values are in `shared` afterwards.
template <bool SUM> DEVICE int scan(int value, int (&shared)[SCAN]) {
  int i = threadIdx.x;
  __syncthreads();
  shared[i] = value;
  __syncthreads();
  for (int step = 1; step < SCAN; step *= 2) {
    int other = i >= step ? shared[i - step] : 0;
    __syncthreads();
    value = SUM ? value + other : (value > other ? value : other);
    shared[i] = value;
    __syncthreads();
  }
  return value;
}

/// Computes the bounds of groups from the offsets that `offset_of` returns. Runs on one block of
/// SCAN threads. Returns whether an offset of this thread was invalid.
template <class Offsets>
DEVICE int write_bounds(Offsets offset_of, int *ends, int *padded_ends, i64 count, int rows) {
  __shared__ int shared[SCAN];
  int last_end = 0, last_padded = 0, invalid = 0;
  for (i64 first = 0; first < count; first += SCAN) {
    i64 i = first + threadIdx.x;
    int offset = i < count ? offset_of(i) : 0;
    int clamped = offset < 0 ? 0 : offset > rows ? rows : offset;
    int end = scan<false>(clamped, shared);
    end = end > last_end ? end : last_end;
    int start = threadIdx.x ? shared[threadIdx.x - 1] : 0;
    start = start > last_end ? start : last_end;
    int next_end = shared[SCAN - 1] > last_end ? shared[SCAN - 1] : last_end;
    int length = i < count ? end - start : 0;
    int padded = scan<true>((length + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT, shared);
    if (i < count) {
      invalid |= end != offset;
      ends[i] = end;
      padded_ends[i] = last_padded + padded;
    }
    last_end = next_end;
    last_padded += shared[SCAN - 1];
  }
  return invalid;
}

/// Returns a number of rows as an int. Offsets are ints.
DEVICE int int_rows(i64 rows) { return rows > 0x7fffffff ? 0x7fffffff : (int)rows; }

extern "C" __global__ void __launch_bounds__(SCAN)
    group_bounds(const __grid_constant__ GroupBoundsArgs a) {
  auto offset_of = [&](i64 group) { return a.offs[group]; };
  int invalid = write_bounds(offset_of, a.ends, a.padded_ends, a.count, int_rows(a.rows));
  invalid = __syncthreads_or(invalid);
  if (threadIdx.x == 0 && invalid) *a.invalid = 1;
}

struct RouteArgs {
  const i64 *row_experts;  // (rows), in ascending order
  const i64 *row_pairs;    // (rows), token * k + position
  int *ends;               // (count)
  int *padded_ends;        // (count)
  i64 *row_tokens;         // (rows)
  i64 *token_rows;         // (rows)
  i64 count;
  i64 rows;
  i64 k;
};

/// The first block computes the bounds, each thread of the other blocks the routes of one row.
extern "C" __global__ void __launch_bounds__(SCAN)
    route_rows(const __grid_constant__ RouteArgs a) {
  int rows = int_rows(a.rows);
  if (blockIdx.x == 0) {
    auto end_of = [&](i64 expert) {
      int first = 0, last = rows;
      while (first < last) {
        int middle = (int)(((u32)first + (u32)last) / 2);
        if (a.row_experts[middle] <= expert) first = middle + 1;
        else last = middle;
      }
      return first;
    };
    write_bounds(end_of, a.ends, a.padded_ends, a.count, rows);
    return;
  }
  i64 row = (i64)(blockIdx.x - 1) * SCAN + threadIdx.x;
  if (row >= a.rows) return;
  i64 pair = a.row_pairs[row];
  bool valid = pair >= 0 && pair < a.rows;
  a.row_tokens[row] = valid ? pair / a.k : 0;
  if (valid) a.token_rows[pair] = row;
}

struct ZeroTailArgs {
  u8 *out;               // (rows, bytes)
  const int *ends;       // (count)
  i64 count;
  i64 rows;
  i64 bytes;             // of a row
  i64 pitch;             // bytes from a row to the next one
};

/// Zeroes the rows after the last group. Blocks of 256 threads take rows in turn.
DEVICE void zero_rows(const ZeroTailArgs &a, i64 block, i64 blocks) {
  i64 end = a.count ? a.ends[a.count - 1] : 0;
  for (i64 row = (end < 0 ? 0 : end) + block; row < a.rows; row += blocks) {
    u8 *to = a.out + row * a.pitch;
    i64 whole = (u64)to % 16 ? 0 : a.bytes / 16 * 16;
    for (i64 i = threadIdx.x * 16; i < whole; i += 256 * 16) *(uint4 *)(to + i) = uint4{0, 0, 0, 0};
    for (i64 i = whole + threadIdx.x; i < a.bytes; i += 256) to[i] = 0;
  }
}

extern "C" __global__ void __launch_bounds__(256)
    zero_tail(const __grid_constant__ ZeroTailArgs a) {
  zero_rows(a, blockIdx.x, gridDim.x);
}

/// The arguments of the other kernels, mirrored by `GroupArgs` in the launch code.
struct GroupArgs {
  const void *x;            // the values, or the input (rows, 2 * width) of an activation
  const void *dy;           // the gradient (rows, width) of an activation's result, or null
  const i64 *index;         // (rows), or null
  const int *ends;          // (count)
  const int *padded_ends;   // (count)
  void *values;             // output (rows, cols) of an activation
  u8 *row;                  // codes (rows, cols), or null
  float *row_scale;         // (rows), with `row`
  u8 *col;                  // codes (cols, columns), or null
  float *col_scale;         // (count, cols), with `col`
  i64 x_rs, x_cs, dy_rs, dy_cs;
  i64 x_rows;
  i64 rows, cols, columns, count;
  i64 tiles_across;
  Rule rule;
  u32 gelu;                 // the activation: SiLU, or GELU
  u32 flags;
  u32 unused;               // pads the struct to a multiple of 8 bytes
};

enum : u32 {
  X_VECTORS = 1,    // rows of x are contiguous and 16-byte aligned, and so are both halves of them
  DY_VECTORS = 2,   // rows of dy are contiguous and 16-byte aligned
  VALUE_VECTORS = 4,  // rows of `values` and of `row` start at multiples of 16 and 8 bytes
};

/// Returns the first group whose bound is above `at`, or `count`. All lanes of a warp pass the
/// same arguments. Unlike in a binary search, the loads do not depend on each other.
DEVICE i64 group_after(const int *bounds, i64 count, i64 at) {
  int below = 0, most = (int)count - 1;
#pragma unroll 1
  for (int first = threadIdx.x & 31; first - (int)(threadIdx.x & 31) <= most; first += 128) {
    int found[4];
#pragma unroll
    for (int k = 0; k < 4; k++) found[k] = bounds[first + 32 * k < most ? first + 32 * k : most];
#pragma unroll
    for (int k = 0; k < 4; k++)
      below += __popc(__ballot_sync(0xffffffffu, first + 32 * k <= most && found[k] <= at));
  }
  return below;
}

/// Loads 16 bytes of each of N rows of the values, which are STEP rows apart, from column `col` on.
/// Rows from the `valid`-th on are 0. All addresses are known before the first load, so that all
/// loads are in flight at once.
template <class T, int N, int STEP>
DEVICE void load_rows(const GroupArgs &a, i64 row, int valid, i64 col, u32 (&d)[N][4]) {
  constexpr int COLS = 4 * T::PER_REG;
  int from[N];
#pragma unroll
  for (int k = 0; k < N; k++) from[k] = (int)row + k * STEP;
  if (a.index) {
    int most = int_rows(a.x_rows) - 1;
    i64 index[N];
#pragma unroll
    for (int k = 0; k < N; k++) index[k] = k < valid ? a.index[from[k]] : 0;
#pragma unroll
    for (int k = 0; k < N; k++) from[k] = index[k] < 0 ? 0 : index[k] < most ? (int)index[k] : most;
  }
  const char *x = (const char *)a.x + col * a.x_cs * T::BYTES;
  if ((a.flags & X_VECTORS) && col + COLS <= a.cols) {
#pragma unroll
    for (int k = 0; k < N; k++) {
      uint4 v = k < valid ? *(const uint4 *)(x + from[k] * a.x_rs * T::BYTES) : uint4{0, 0, 0, 0};
      d[k][0] = v.x, d[k][1] = v.y, d[k][2] = v.z, d[k][3] = v.w;
    }
    return;
  }
#pragma unroll
  for (int k = 0; k < N; k++) {
    d[k][0] = d[k][1] = d[k][2] = d[k][3] = 0;
    if (k < valid) load_vector<T>(a.x, a.x_rs, a.x_cs, false, from[k], col, a.cols, d[k]);
  }
}

/// Stores the elements of registers to `values`, at column `first + col`.
template <class T>
DEVICE void store_values(const GroupArgs &a, i64 row, i64 first, i64 col, i64 cols,
                         const u32 (&d)[4]) {
  char *at = (char *)a.values + (row * a.cols + first + col) * T::BYTES;
  store_vector<T>(at, a.flags & VALUE_VECTORS, col, cols, d);
}

// --- maxima ----------------------------------------------------------------------------------

#define STRIP_ROWS 128
#define WARPS 8
enum Source { ROWS, GATED, GRADIENT };

/// Raises the maxima of two or one columns to the elements of a register.
template <class T> DEVICE void raise(float *scales, i64 col, i64 cols, u32 found) {
#pragma unroll
  for (int e = 0; e < T::PER_REG; e++) {
    u32 bits = canonical(T::amax_bits(found, e));
    if (col + e < cols && bits) atomicMax((u32 *)scales + col + e, bits);
  }
}

/// Raises the maxima of the columns of a group to the thread's maxima, which are `T::amax`
/// results, and clears these.
template <class T> DEVICE void flush(float *scales, i64 col, i64 cols, u32 (&found)[4]) {
#pragma unroll
  for (int j = 0; j < 4; j++) raise<T>(scales, col + j * T::PER_REG, cols, found[j]);
  found[0] = found[1] = found[2] = found[3] = 0;
}

/// Raises the maxima of the columns of a group to the maxima of all warps of the block, which
/// have the same columns. `first` is the column of the first lane.
template <class T>
DEVICE void flush_block(float *scales, i64 first, i64 cols, const u32 (&found)[4],
                        u32 (&shared)[WARPS][128]) {
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  __syncthreads();
#pragma unroll
  for (int j = 0; j < 4; j++) shared[warp][j * 32 + lane] = found[j];
  __syncthreads();
  if (threadIdx.x >= 128) return;
  u32 all = 0;
#pragma unroll
  for (int i = 0; i < WARPS; i++) all = T::amax(all, shared[i][threadIdx.x]);
  raise<T>(scales, first + (lane * 4 + warp) * T::PER_REG, cols, all);
}

/// The maxima of a strip of rows and of 32 vectors of columns. Warps take rows in turn. The
/// memory of the scales must be 0 before. With an activation, its values are stored as well.
template <class T, Source SOURCE> DEVICE void group_maxima(const GroupArgs &a) {
  constexpr int COLS = 4 * T::PER_REG, BATCH = SOURCE == ROWS ? 4 : 1;
  __shared__ u32 shared[WARPS][128];
  int lane = threadIdx.x & 31;
  // An activation has `width` columns of input for the gate, and as many for `up`.
  const i64 width = SOURCE == GRADIENT ? a.cols / 2 : a.cols;
  i64 strip = blockIdx.x / a.tiles_across;
  i64 first = (blockIdx.x - strip * a.tiles_across) * 32 * COLS, col = first + lane * COLS;
  i64 last = a.count ? a.ends[a.count - 1] : 0;
  last = last < a.rows ? last : a.rows;
  i64 start = strip * STRIP_ROWS;
  i64 end = start + STRIP_ROWS < last ? start + STRIP_ROWS : last;
  if (start >= end) return;
  i64 group = group_after(a.ends, a.count, start), group_end = a.ends[group];
  // If all rows belong to one group, the maxima of the warps are merged before the atomics.
  bool one = group_end >= end;
  u32 found[4] = {0, 0, 0, 0}, found_up[4] = {0, 0, 0, 0};
  bool vectors = a.flags & X_VECTORS;
  for (i64 begin = start + (threadIdx.x >> 5); begin < end; begin += BATCH * WARPS) {
    u32 d[BATCH][4];
    int valid = (int)(end - begin + WARPS - 1) / WARPS;
    if (SOURCE == ROWS) load_rows<T, BATCH, WARPS>(a, begin, col < width ? valid : 0, col, d);
#pragma unroll
    for (int k = 0; k < BATCH; k++) {
      if (k >= valid) break;
      i64 row = begin + k * WARPS;
      if (row >= group_end) {
        if (a.col) {
          flush<T>(a.col_scale + group * a.cols, col, width, found);
          if (SOURCE == GRADIENT)
            flush<T>(a.col_scale + group * a.cols + width, col, width, found_up);
        }
        while (group_end <= row) group_end = a.ends[++group];
      }
      u32 of_row = 0, up_values[4];
      if (SOURCE != ROWS) {
        u32 dy[4], gate[4], up[4];
        // `glu_vector` raises this maximum of a vector. Below are those of its row and its columns.
        u32 unused = 0;
        const char *ups = (const char *)a.x + width * a.x_cs * T::BYTES;
        load_vector<T>(a.x, a.x_rs, a.x_cs, vectors, row, col, width, gate);
        load_vector<T>(ups, a.x_rs, a.x_cs, vectors, row, col, width, up);
        if (SOURCE == GRADIENT)
          load_vector<T>(a.dy, a.dy_rs, a.dy_cs, a.flags & DY_VECTORS, row, col, width, dy);
        glu_vector<T, SOURCE == GRADIENT>(a.gelu, gate, up, dy, d[k], up_values, unused, unused);
        store_values<T>(a, row, 0, col, width, d[k]);
        if (SOURCE == GRADIENT) store_values<T>(a, row, width, col, width, up_values);
      }
      if (col < width) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
          found[j] = T::amax(found[j], d[k][j]);
          of_row = T::amax(of_row, d[k][j]);
          if (SOURCE == GRADIENT) {
            found_up[j] = T::amax(found_up[j], up_values[j]);
            of_row = T::amax(of_row, up_values[j]);
          }
        }
      }
      if (!a.row) continue;
      of_row = __reduce_max_sync(0xffffffffu, magnitude<T>(of_row));
      if (lane == 0 && of_row) atomicMax((u32 *)a.row_scale + row, canonical(of_row));
    }
  }
  if (!a.col) return;
  float *scales = a.col_scale + group * a.cols;
  if (one) {
    flush_block<T>(scales, first, width, found, shared);
    if (SOURCE == GRADIENT) flush_block<T>(scales + width, first, width, found_up, shared);
  } else {
    flush<T>(scales, col, width, found);
    if (SOURCE == GRADIENT) flush<T>(scales + width, col, width, found_up);
  }
}

#define MAXIMA_KERNELS(NAME, T)                                                                  \
  extern "C" __global__ void __launch_bounds__(256) group_amax_##NAME(                            \
      const __grid_constant__ GroupArgs a) {                                                      \
    group_maxima<T, ROWS>(a);                                                                     \
  }                                                                                               \
  extern "C" __global__ void __launch_bounds__(256) group_gated_##NAME(                           \
      const __grid_constant__ GroupArgs a) {                                                      \
    group_maxima<T, GATED>(a);                                                                    \
  }                                                                                               \
  extern "C" __global__ void __launch_bounds__(256) group_gradient_##NAME(                        \
      const __grid_constant__ GroupArgs a) {                                                      \
    group_maxima<T, GRADIENT>(a);                                                                 \
  }

FOR_INPUTS(MAXIMA_KERNELS)

// --- scales ----------------------------------------------------------------------------------

/// Replaces maxima by scales. The other blocks zero the codes of rows that belong to no group.
template <class F> DEVICE void group_scales(const GroupArgs &a) {
  i64 of_rows = a.row ? a.rows : 0, of_cols = a.col ? a.count * a.cols : 0;
  i64 blocks = (of_rows + of_cols + 255) / 256;
  if (blockIdx.x >= blocks) {
    ZeroTailArgs rows = {a.row, a.ends, a.count, a.rows, a.cols, a.cols};
    zero_rows(rows, blockIdx.x - blocks, gridDim.x - blocks);
    return;
  }
  i64 i = (i64)blockIdx.x * 256 + threadIdx.x;
  if (i >= of_rows + of_cols) return;
  float *at = i < of_rows ? a.row_scale + i : a.col_scale + (i - of_rows);
  *at = scale_of<F>(__float_as_uint(*at), a.rule);
}

extern "C" __global__ void __launch_bounds__(256)
    group_scales_e4m3(const __grid_constant__ GroupArgs a) {
  group_scales<E4m3>(a);
}
extern "C" __global__ void __launch_bounds__(256)
    group_scales_e5m2(const __grid_constant__ GroupArgs a) {
  group_scales<E5m2>(a);
}

// --- cast ------------------------------------------------------------------------------------

/// Casts a tile of 128 columns of the columnwise plane and 128 columns of the values. A thread
/// holds 16 rows of 16 bytes. They belong to one group, because groups start at multiples of
/// 16. A warp is 8 lanes across and 4 down. Tiles are taken from the last to the first, because
/// the rows that were read last may still be in L2.
///
/// All scales are loaded before the first store: the compiler does not move loads over stores,
/// and each would wait for memory by itself.
template <class T, class F> DEVICE void group_cast(const GroupArgs &a) {
  constexpr int COLS = 4 * T::PER_REG, WARPS_ACROSS = 128 / (8 * COLS), P = T::PER_REG;
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  i64 index = gridDim.x - 1 - blockIdx.x;
  i64 tile = index / a.tiles_across, across = index - tile * a.tiles_across;
  i64 place = tile * 128 + warp / WARPS_ACROSS * 64 + (lane >> 3) * 16;
  i64 col = across * 128 + warp % WARPS_ACROSS * 8 * COLS + (lane & 7) * COLS;
  bool inside = place < a.columns && col < a.cols;
  i64 group = group_after(a.padded_ends, a.count, place - (lane >> 3) * 16);
  while (group < a.count && a.padded_ends[group] <= place) group++;
  i64 row = 0;
  int valid = 0;
  if (group < a.count) {
    i64 padded_start = group ? a.padded_ends[group - 1] : 0;
    row = (group ? a.ends[group - 1] : 0) + place - padded_start;
    i64 left = (a.ends[group] < a.rows ? a.ends[group] : a.rows) - row;
    valid = left < 0 ? 0 : left > 16 ? 16 : (int)left;
  }
  u32 d[16][4];
  load_rows<T, 16, 1>(a, row, inside ? valid : 0, col, d);
  // Eight lanes have the same rows. Each has the factors of two of them.
  float row_factors[2], col_factors[COLS];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    int r = i * 8 + (lane & 7);
    row_factors[i] = a.row && r < valid ? a.row_scale[row + r] : 1.0f;
  }
#pragma unroll
  for (int j = 0; j < COLS; j++) {
    bool used = a.col && valid && col + j < a.cols;
    col_factors[j] = used ? a.col_scale[group * a.cols + col + j] : 1.0f;
  }
#pragma unroll
  for (int i = 0; i < 2; i++) row_factors[i] = reciprocal(row_factors[i]);
#pragma unroll
  for (int j = 0; j < COLS; j++) col_factors[j] = reciprocal(col_factors[j]);
  if (a.row) {
#pragma unroll
    for (int r = 0; r < 16; r++) {
      float f = __shfl_sync(0xffffffffu, row_factors[r / 8], (lane & 24) + r % 8);
      if (r >= valid || !inside) continue;
      u32 word[2] = {0, 0};
#pragma unroll
      for (int j = 0; j < COLS; j += 2) {
        u32 two = F::pair(__fmul_rn(T::get(d[r][j / P], 0), f),
                          __fmul_rn(T::get(d[r][(j + 1) / P], P - 1), f));
        word[j / 4] |= two << (j % 4 * 8);
      }
      u8 *to = a.row + (row + r) * a.cols + col;
      if ((a.flags & VALUE_VECTORS) && col + COLS <= a.cols) {
        if (COLS == 8) *(uint2 *)to = make_uint2(word[0], word[1]);
        else *(u32 *)to = word[0];
      } else {
        u64 all = (u64)word[1] << 32 | word[0];
#pragma unroll 1
        for (int j = 0; j < COLS && col + j < a.cols; j++, all >>= 8) to[j] = (u8)all;
      }
    }
  }
  if (!a.col || !inside) return;
  // Padding is 0 even if the scale is NaN.
  u32 mask[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    int rows = valid - 4 * i;
    mask[i] = rows >= 4 ? ~0u : rows <= 0 ? 0u : (1u << (8 * rows)) - 1;
  }
#pragma unroll
  for (int j = 0; j < COLS; j++) {
    if (col + j >= a.cols) continue;
    float f = col_factors[j];
    u32 word[4] = {0, 0, 0, 0};
#pragma unroll
    for (int r = 0; r < 16; r += 2) {
      u32 two = F::pair(__fmul_rn(T::get_again(d[r][j / P], j % P), f),
                        __fmul_rn(T::get_again(d[r + 1][j / P], j % P), f));
      word[r / 4] |= two << (r % 4 * 8);
    }
    *(uint4 *)(a.col + (col + j) * a.columns + place) =
        make_uint4(word[0] & mask[0], word[1] & mask[1], word[2] & mask[2], word[3] & mask[3]);
  }
}

#define CAST_KERNEL(NAME, T, F)                                                                  \
  extern "C" __global__ void __launch_bounds__(256 / T::PER_REG, 2 * T::PER_REG) group_cast_##NAME(   \
      const __grid_constant__ GroupArgs a) {                                                      \
    group_cast<T, F>(a);                                                                          \
  }

FOR_TYPES(CAST_KERNEL)
