// The arguments of casts of views with any strides.
#pragma once
#include "elements.cuh"

struct StridedArgs {
  const void *x;
  u8 *rowwise;           // or null
  u8 *columnwise;        // or null; (cols, rows)
  i64 rows, cols;
  i64 x_rs, x_cs;
  i64 rowwise_rs, rowwise_cs;
  i64 columnwise_rs, columnwise_cs;
  i64 tiles_across;
  const float *scale;
  Delayed delayed;       // without grid_max, amaxes are not recorded
};
