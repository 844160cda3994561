// Current scaling in one launch: the absolute maximum, a barrier, then the cast.
//
// Blocks claim pieces of the tensor from a counter. A block that waits at the barrier thus
// only waits for blocks that are running, so the blocks need not all be resident at the same
// time, which a concurrent collective would prevent. The last pieces of the tensor are cast by
// the blocks that read them and still have them in registers or shared memory. The other
// pieces are cast by any free block, starting with the last ones, which may still be in L2.
#pragma once
#include "elements.cuh"

/// The state of the barrier, in a workspace. It is zero before and after a launch, and has the
/// size of three `GridMax`.
struct GridBarrier {
  u32 max_bits;
  u32 done;              // number of pieces that were read
  u32 read;              // number of pieces claimed for reading
  u32 cast;              // number of pieces claimed for casting
  u32 arrived;
  u32 unused;
};

static_assert(sizeof(GridBarrier) == 3 * sizeof(GridMax), "SLOTS in the launch code");

struct Current {
  float *scale;          // output
  GridBarrier *barrier;
  Rule rule;
  u32 pieces;
  u32 common;            // number of leading pieces that any block may cast
};

/// The largest number of pieces that are not common, because one block may get all of them.
#define MOST_OWN 2048

DEVICE u32 load_acquire(const u32 *at) {
  u32 d;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(d) : "l"(at) : "memory");
  return d;
}

/// Claims numbers from a counter. Each number is claimed by one block only. The next number is
/// fetched while the block works.
struct Claims {
  u32 *counter;
  u32 next, count;

  DEVICE Claims(u32 *counter) : counter(counter), next(0), count(0) { fetch(); }

  DEVICE void fetch() {
    if (threadIdx.x == 0) next = atomicAdd(counter, 1u);
  }

  DEVICE u32 take(u32 (&slots)[2]) {
    // Two slots, so that thread 0 does not overwrite a slot that another thread still has to
    // read.
    u32 *slot = slots + (count++ & 1);
    if (threadIdx.x == 0) *slot = next;
    __syncthreads();
    fetch();
    return *slot;
  }
};

/// `Piece` holds a piece in registers: vectors `v` of each thread, with `load(args, index)`,
/// `amax(args, index)` and `store<F>(args, index, q)`.
template <class F, class Piece, class Args>
DEVICE void quantize_current(const Args &a, const Current &c) {
  constexpr int VECTORS = sizeof(Piece::v) / 16;
  __shared__ uint4 kept[VECTORS][Piece::THREADS];
  __shared__ u16 own[MOST_OWN];
  __shared__ u32 slots[2];
  __shared__ float factor;
  GridBarrier *at = c.barrier;
  Piece p;
  u32 m = 0, count = 0, owned = 0;
  Claims reads(&at->read);
  for (u32 piece; (piece = reads.take(slots)) < c.pieces; count++) {
    if (piece >= c.common) {
      if (owned > 0) {
#pragma unroll
        for (int i = 0; i < VECTORS; i++) kept[i][threadIdx.x] = p.v[i];
      }
      if (threadIdx.x == 0) own[owned] = (u16)(piece - c.common);
      owned++;
    }
    p.load(a, piece);
    m = max_u32(m, p.amax(a, piece));
  }

  m = block_max(m);
  if (threadIdx.x == 0) {
    atomicMax(&at->max_bits, canonical(m));
    __threadfence();
    atomicAdd(&at->done, count);
    while (load_acquire(&at->done) != c.pieces) __nanosleep(20);
    factor = reciprocal(scale_of<F>(load_acquire(&at->max_bits), c.rule));
  }
  __syncthreads();

  float q = factor;
  Claims casts(&at->cast);
  bool in_registers = owned > 0, in_memory = owned > 1, more = c.common > 0;
  for (;;) {
    u32 piece;
    if (in_registers) {
      in_registers = false;
      piece = c.common + own[--owned];
    } else {
      bool restored = false;
      if (more) {
        u32 claimed = casts.take(slots);
        more = claimed < c.common;
        piece = c.common - 1 - claimed;
      }
      if (!more) {
        if (owned == 0) break;
        piece = c.common + own[--owned];
        restored = in_memory;
        in_memory = false;
      }
      if (restored) {
#pragma unroll
        for (int i = 0; i < VECTORS; i++) p.v[i] = kept[i][threadIdx.x];
      } else {
        p.load(a, piece);
      }
    }
    p.template store<F>(a, piece, q);
  }

  // The last block to arrive knows that all pieces are claimed and that every block has passed
  // the barrier.
  if (threadIdx.x == 0) {
    __threadfence();
    if (atomicInc(&at->arrived, gridDim.x - 1) == gridDim.x - 1) {
      __threadfence();
      *c.scale = scale_of<F>(atomicExch(&at->max_bits, 0u), c.rule);
      at->read = 0;
      at->done = 0;
      at->cast = 0;
    }
  }
}
