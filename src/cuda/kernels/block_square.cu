// Block scaling with fp32 scales: 128x128, one scale for both directions.
#include "scaled.cuh"

#define KERNEL(NAME, T, F)                                                              \
  extern "C" __global__ void TILE_BOUNDS(T)                                             \
      block_square_##NAME(const __grid_constant__ TileArgs a) { \
    scaled_tile<T, F, SQUARE_128>(a);                                                       \
  }
FOR_TYPES(KERNEL)
