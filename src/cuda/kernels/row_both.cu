// One fp32 scale per row for the rowwise output and per column for the columnwise output. The
// maxima are computed before.
#include "scaled.cuh"

#define KERNEL(NAME, T, F)                                                              \
  extern "C" __global__ void TILE_BOUNDS(T)                                             \
      row_both_##NAME(const __grid_constant__ TileArgs a) { \
    scaled_tile<T, F, WHOLE_LINES>(a);                                                       \
  }
FOR_TYPES(KERNEL)
