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

// Divides by a row's scale with fewer instructions than a division takes: a quotient, then its remainder's
// (Markstein, "Computation of elementary functions on the IBM RISC System/6000 processor", 1990). Rounded
// like x / scale where that decides on a code, between 2^-11 and 1024; beyond, of the same code.
class ByScale {
  public:
    __device__ __forceinline__ explicit ByScale(float scale) {
        constexpr float kSmall = 0x1p-60f, kLarge = 0x1p60f;  // between which no remainder is rounded
        factor_ = scale < kSmall ? kLarge : scale > kLarge ? kSmall : 1.0f;
        scale_ = scale * factor_;
        reciprocal_ = __frcp_rn(scale_);
        limit_ = reciprocal_ == 0.0f ? 0.0f : 1024.0f;  // infinity leaves no remainders
    }

    __device__ __forceinline__ float quotient(float x) const {
        x = __fmul_rn(x, factor_);
        const float rough = __fmul_rn(x, reciprocal_);
        const float minus_remainder = __fmaf_rn(rough, scale_, -x);  // this sign keeps a zero's
        return fabsf(rough) < limit_ ? __fmaf_rn(-minus_remainder, reciprocal_, rough) : rough;
    }

  private:
    float factor_, scale_, reciprocal_, limit_;
};

// Codes of two values, the first in the low byte. satfinite clamps to +-448, infinity too, and keeps NaN.
__device__ __forceinline__ uint32_t quantize_two(float first, float second, const ByScale &by) {
    uint16_t codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;"
        : "=h"(codes)
        : "f"(by.quotient(second)), "f"(by.quotient(first)));
    return codes;
}

__device__ __forceinline__ void quantize_one(uint8_t *to, float x, const ByScale &by) {
    *to = static_cast<uint8_t>(quantize_two(x, 0.0f, by));
}

// `to` is aligned to 8 bytes.
__device__ __forceinline__ void quantize_eight(uint8_t *to, const Eight &x, const ByScale &by) {
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) pairs[i] = quantize_two(x.v[2 * i], x.v[2 * i + 1], by);
    *reinterpret_cast<uint2 *>(to) = make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
}

// Whether eight codes can be stored at once in every row.
__device__ __forceinline__ bool codes_aligned(const uint8_t *base, int64_t stride) {
    return ((reinterpret_cast<uint64_t>(base) | static_cast<uint64_t>(stride)) & 7) == 0;
}

}  // namespace castiron
