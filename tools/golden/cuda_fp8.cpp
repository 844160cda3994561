// Writes the codes that NVIDIA's cuda_fp8.h gives on the host for the inputs described in
// tests/golden/README.md to standard output.

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "cuda_fp8.h"

static float from_bits(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

// xorshift32
static uint32_t next(uint32_t &state) {
    state ^= state << 13;
    state ^= state >> 17;
    state ^= state << 5;
    return state;
}

int main() {
    const __nv_fp8_interpretation_t formats[] = {__NV_E4M3, __NV_E5M2};
    std::vector<uint8_t> out;
    for (auto format : formats)
        for (uint32_t bits = 0; bits < 0x10000; ++bits)
            out.push_back(__nv_cvt_float_to_fp8(from_bits(bits << 16), __NV_SATFINITE, format));
    for (auto format : formats)
        for (uint32_t bits = 0; bits < 0x10000; ++bits) {
            __half_raw half;
            half.x = static_cast<unsigned short>(bits);
            out.push_back(__nv_cvt_halfraw_to_fp8(half, __NV_SATFINITE, format));
        }
    for (auto format : formats) {
        uint32_t state = 1;
        for (uint32_t i = 0; i < 0x10000; ++i) {
            uint32_t exponent = 105 + next(state) % 40, mantissa = next(state) >> 8, keep = next(state) % 24;
            uint32_t sign = state & 0x80000000u;
            mantissa = mantissa >> (1 + keep) << keep;  // 23 bits, often with a tie's run of zeros
            out.push_back(__nv_cvt_float_to_fp8(from_bits(sign | exponent << 23 | mantissa), __NV_SATFINITE, format));
        }
    }
    return std::fwrite(out.data(), 1, out.size(), stdout) == out.size() ? 0 : 1;
}
