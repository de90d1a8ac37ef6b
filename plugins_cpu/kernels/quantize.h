// Activations to two int8 digits with a scale per 32 values, for the linear_q8 kernels.
#pragma once
#include <algorithm>
#include <cstdint>

#include "float_vector.h"

namespace castiron {

constexpr int kQuantGroup = 32;  // values sharing a scale; each half of them has its own sum

constexpr float kLargestQ = 127 * 256;  // of 256 * high + low

// Where a group's results go; the tensors are q int8 [rows, 2, dim], scale [rows, dim / 32], sum [rows, dim /
// 16].
struct QuantizedPlace {
    int8_t *high, *low;
    float *scale, *sum;

    QuantizedPlace(int8_t *q, float *scale_, float *sum_, int64_t row, int64_t dim, int64_t column)
        : high(q + row * 2 * dim + column),
          low(high + dim),
          scale(scale_ + (row * dim + column) / kQuantGroup),
          sum(sum_ + (row * dim + column) / (kQuantGroup / 2)) {}
};

// x[32] -> high and low int8 [32], *scale, sum [2]: scale = amax / 32512, 256 * high + low =
// round-half-even(x * (32512 / amax)) with low from -127 to 127 (-128 has no int8 negative: one more there),
// sum = scale times the sum of 16 such integers.
inline void quantize_group(const float *x, const QuantizedPlace &to) {
    Vec largest = splat(0.0f);
    for (int i = 0; i < kQuantGroup; i += kVecLanes) largest = max(largest, abs(load(x + i)));
    const float amax = max_lanes(largest);
    float inverse = amax > 0.0f ? kLargestQ / amax : 0.0f;
    if (inverse > 3.4e38f) inverse = 0.0f;  // amax so small that its inverse overflows
    *to.scale = amax / kLargestQ;
    const int32_t shift_bits = static_cast<int32_t>(float_to_bits(kRoundingShift));
    for (int half = 0; half < 2; ++half) {
        float shifted[16];
        for (int i = 0; i < 16; i += kVecLanes) {
            const Vec value = load(x + 16 * half + i) * splat(inverse);
            store(shifted + i, value + splat(kRoundingShift));
        }
        int32_t total = 0;
        for (int i = 0; i < 16; ++i) {
            const int32_t q = static_cast<int32_t>(float_to_bits(shifted[i])) - shift_bits;
            const int32_t digit = ((q + 128) & 255) - 128;
            const int32_t low_digit = digit < -127 ? -127 : digit;
            const int32_t high_digit = (q - digit) >> 8;
            to.high[16 * half + i] = static_cast<int8_t>(high_digit);
            to.low[16 * half + i] = static_cast<int8_t>(low_digit);
            total += 256 * high_digit + low_digit;
        }
        to.sum[half] = *to.scale * static_cast<float>(total);
    }
}

// Columns begin .. end (multiples of 32) of a row; x points at column `begin`.
inline void quantize_columns(const float *x, int8_t *q, float *scale, float *sum, int64_t row, int64_t dim,
                             int64_t begin, int64_t end) {
    for (int64_t column = begin; column < end; column += kQuantGroup)
        quantize_group(x + column - begin, QuantizedPlace(q, scale, sum, row, dim, column));
}

}  // namespace castiron
