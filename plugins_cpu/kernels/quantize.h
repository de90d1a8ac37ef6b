// Activations to int8 with a scale per 32 values, for the linear_q8 kernels.
#pragma once
#include <algorithm>
#include <cstdint>

#include "float_vector.h"

namespace castiron {

constexpr int kQuantGroup = 32;  // values sharing a scale; each half of them has its own sum

// x[32] -> q int8 [32], *scale, sum [2]: scale = amax / 127, q = round-half-even(x * (127 / amax)), sum =
// scale times the sum of 16 q.
inline void quantize_group(const float *x, int8_t *q, float *scale, float *sum) {
    Vec largest = splat(0.0f);
    for (int i = 0; i < kQuantGroup; i += kVecLanes) largest = max(largest, abs(load(x + i)));
    const float amax = max_lanes(largest);
    float inverse = amax > 0.0f ? 127.0f / amax : 0.0f;
    if (inverse > 3.4e38f) inverse = 0.0f;  // amax so small that its inverse overflows
    *scale = amax / 127.0f;
    for (int half = 0; half < 2; ++half) {
        int32_t total = 0;
        float shifted[16];
        for (int i = 0; i < 16; i += kVecLanes) {
            const Vec value = load(x + 16 * half + i) * splat(inverse);
            store(shifted + i, value + splat(kRoundingShift));
        }
        for (int i = 0; i < 16; ++i) {
            const int32_t code = static_cast<int8_t>(float_to_bits(shifted[i]));
            q[16 * half + i] = static_cast<int8_t>(code);
            total += code;
        }
        sum[half] = *scale * static_cast<float>(total);
    }
}

// A row of `dim` (a multiple of 32) values.
inline void quantize_row(const float *x, int64_t dim, int8_t *q, float *scale, float *sum) {
    for (int64_t i = 0; i < dim; i += kQuantGroup) {
        quantize_group(x + i, q + i, scale + i / kQuantGroup, sum + 2 * (i / kQuantGroup));
    }
}

}  // namespace castiron
