// Current scaling in one launch: the absolute maximum, a barrier, then the cast.
//
// Blocks claim pieces of the tensor from a counter: whoever waits at the barrier waits for blocks
// that run. So not all blocks need be resident at once, which a collective beside them would
// prevent. The tensor's last pieces are cast by those that read them, which still have them in
// registers and shared memory; the others by whoever is free, the last ones, which may be in the
// L2, first.
#pragma once
#include "elements.cuh"

/// The state of such a launch's barrier, in a workspace: zero before and after it. As large as three
/// `GridMax`es.
struct GridBarrier {
  u32 max_bits;
  u32 done;              // pieces that were read
  u32 read;              // pieces claimed for reading
  u32 cast;              // pieces claimed for casting
  u32 arrived;
  u32 unused;
};

static_assert(sizeof(GridBarrier) == 3 * sizeof(GridMax), "SLOTS in the launch code");

struct Current {
  float *scale;          // is written
  GridBarrier *barrier;
  Rule rule;
  u32 pieces;
  u32 common;            // of them: the first ones, which are cast by whoever is free
};

/// The pieces that are not common are at most so many: one block may come to have them all.
#define MOST_OWN 2048

DEVICE u32 load_acquire(const u32 *at) {
  u32 d;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(d) : "l"(at) : "memory");
  return d;
}

/// Numbers from a counter, each to one block; the next is asked for while the block is at work.
struct Claims {
  u32 *counter;
  u32 next, count;

  DEVICE Claims(u32 *counter) : counter(counter), next(0), count(0) { ask(); }

  DEVICE void ask() {
    if (threadIdx.x == 0) next = atomicAdd(counter, 1u);
  }

  DEVICE u32 take(u32 (&slots)[2]) {
    // Two slots, so that nobody writes what another thread has still to read.
    u32 *slot = slots + (count++ & 1);
    if (threadIdx.x == 0) *slot = next;
    __syncthreads();
    ask();
    return *slot;
  }
};

/// `Piece` is what a block holds in registers: vectors `v` of each thread, with `load(args, index)`,
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

  // The last one finds all claims taken, and every block past the barrier.
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
