// Rows quantized to float8 (e4m3: largest 448, no infinity, NaN 0x7F), value = scale * code. A row's scale is
// its largest magnitude / 448 (dynamic), or given for all rows (static). Divisions are true ones and codes
// are rounded to nearest even, so that a plain reference gives the same bits.
#pragma once
#include "row_access.cuh"

namespace castiron {

// A magnitude as its bits: they order as the magnitudes do and NaN is above infinity, so that a maximum of
// them, unlike fmaxf, keeps a NaN.
__device__ __forceinline__ uint32_t magnitude(float x) { return __float_as_uint(x) & 0x7FFFFFFFu; }

__device__ __forceinline__ uint32_t largest_magnitude(const Eight &x) {
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kEight; ++i) largest = max(largest, magnitude(x.v[i]));
    return largest;
}

// The scale of a row whose largest magnitude this is; NaN stays.
__device__ __forceinline__ float scale_of(uint32_t largest) {
    constexpr float kLargest = 448.0f, kSmallestScale = 1e-12f;
    const float scale = __fdiv_rn(__uint_as_float(largest), kLargest);
    return scale < kSmallestScale ? kSmallestScale : scale;
}

// Codes of two values, the first in the low byte. satfinite clamps to +-448, infinity too, and keeps NaN.
__device__ __forceinline__ uint32_t quantize_two(float first, float second, float scale) {
    uint16_t codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
        : "=h"(codes)
        : "f"(__fdiv_rn(second, scale)), "f"(__fdiv_rn(first, scale)));
    return codes;
}

__device__ __forceinline__ void quantize_one(uint8_t *to, float x, float scale) {
    *to = static_cast<uint8_t>(quantize_two(x, 0.0f, scale));
}

// `to` is aligned to 8 bytes.
__device__ __forceinline__ void quantize_eight(uint8_t *to, const Eight &x, float scale) {
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = quantize_two(x.v[2 * i], x.v[2 * i + 1], scale);
    *reinterpret_cast<uint2 *>(to) = make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
}

// Whether eight codes can be stored at once in every row.
__device__ __forceinline__ bool codes_aligned(const uint8_t *base, int64_t stride) {
    return ((reinterpret_cast<uint64_t>(base) | static_cast<uint64_t>(stride)) & 7) == 0;
}

}  // namespace castiron
