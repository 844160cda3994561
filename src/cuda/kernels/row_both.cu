// One fp32 scale a row for the rowwise output and a column for the columnwise one, maxima known.
#include "scaled.cuh"

#define KERNEL(NAME, T, F)                                                              \
  extern "C" __global__ void TILE_BOUNDS(T)                                             \
      row_both_##NAME(const __grid_constant__ TileArgs a) { \
    scaled_tile<T, F, WHOLE_LINES>(a);                                                       \
  }
FOR_TYPES(KERNEL)
