// The packed 128x4 layout of E8M0 scales.
//
// The scales (line r, block c) of a plane are padded to (128a, 4b) and stored in row-major
// tiles of 128x4. A tile is 32 rows of 16 bytes, and its scale (r, c) is at (r % 32, r / 32 *
// 4 + c). Padding bytes are 0.
#include "blocks.cuh"

struct PackArgs {
  const u8 *scales;      // (row blocks, blocks)
  u8 *packed;            // 512 bytes per tile
  i64 scales_rs, scales_cs;
  i64 lines, blocks;     // rows of the plane, scales per row
  i64 block_rows;        // rows that share a scale
  i64 tiles_across;
  i64 words;             // 32-bit words in `packed`
};

/// One thread per word of four scales.
extern "C" __global__ void mx_pack(const __grid_constant__ PackArgs a) {
  i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= a.words) return;
  i64 tile = i / 128;
  int in_tile = i % 128;
  i64 line = tile / a.tiles_across * 128 + in_tile % 4 * 32 + in_tile / 4;
  i64 block = tile % a.tiles_across * 4;
  u32 word = 0;
  if (line < a.lines) {
    const u8 *from = a.scales + line / a.block_rows * a.scales_rs;
    for (int k = 0; k < 4 && block + k < a.blocks; k++)
      word |= (u32)from[(block + k) * a.scales_cs] << (8 * k);
  }
  ((u32 *)a.packed)[i] = word;
}
