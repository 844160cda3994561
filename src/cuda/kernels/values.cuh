// Conversion of codes to values, and of values to elements of every type.
#pragma once
#include "elements.cuh"

/// Decodes the two codes in the low 16 bits.
struct FromE4m3 {
  static DEVICE u32 halves(u32 codes) {
    u32 d;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(d) : "h"((u16)codes));
    return d;
  }
};
struct FromE5m2 {
  static DEVICE u32 halves(u32 codes) {
    u32 d;
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(d) : "h"((u16)codes));
    return d;
  }
};

struct OutF32 {
  static constexpr int BYTES = 4;
  static DEVICE u32 bits(float v) { return v != v ? NAN_BITS : __float_as_uint(v); }
};
struct OutBf16 {
  static constexpr int BYTES = 2;
  static DEVICE u32 bits(float v) {
    u16 d;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(d) : "f"(v));
    return v != v ? 0x7fc0u : d;
  }
  /// Converts two numbers that are not NaN.
  static DEVICE u32 pair(float lo, float hi) {
    u32 d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
    return d;
  }
};
struct OutF16 {
  static constexpr int BYTES = 2;
  static DEVICE u32 bits(float v) {
    u16 d;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(d) : "f"(v));
    return v != v ? 0x7e00u : d;
  }
  /// Converts two numbers that are not NaN.
  static DEVICE u32 pair(float lo, float hi) {
    u32 d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
    return d;
  }
};
