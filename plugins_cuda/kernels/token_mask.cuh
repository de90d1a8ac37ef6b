// Rows of logits a CTA does a part of, and masks over their tokens.
#pragma once
#include "logits_abi.cuh"

namespace castiron {

constexpr int kPartThreads = 256, kPartTokens = 2048;  // of a CTA: blockIdx.x is the part, blockIdx.y the row

// Row `row` of masks over `vocab` tokens.
__device__ __forceinline__ const uint32_t *mask_row(const uint32_t *masks, int row, int vocab) {
    return masks + static_cast<int64_t>(row) * ((vocab + 31) / 32);
}

__device__ __forceinline__ bool is_allowed(const uint32_t *mask, int token) {
    return mask == nullptr || (mask[token / 32] >> token % 32 & 1) != 0;
}

__device__ __forceinline__ float banned() { return __uint_as_float(0xFF800000u); }

}  // namespace castiron
