// Block scaling with fp32 scales: 1x128 rowwise, 128x1 columnwise.
#include "scaled.cuh"

#define KERNEL(NAME, T, F)                                                              \
  extern "C" __global__ void TILE_BOUNDS(T)                                             \
      block_lines_##NAME(const __grid_constant__ TileArgs a) { \
    scaled_tile<T, F, LINES_128>(a);                                                       \
  }
FOR_TYPES(KERNEL)
