// y = logits, minus infinity where a row's grammar forbids the token.
#include "token_mask.cuh"

namespace castiron {

extern "C" __global__ void __launch_bounds__(kPartThreads)
    mask_logits(const __grid_constant__ MaskLogitsParams p) {
    const int64_t row = blockIdx.y;
    let_next_start();
    wait_for_inputs();
    if (row >= p.header[p.count]) return;
    const int index = p.mask_rows[row];
    const uint32_t *mask = index < 0 ? nullptr : mask_row(p.grammar_masks, index, p.vocab);
    const float *from = p.logits + row * p.logits_stride;
    float *to = p.y + row * p.y_stride;
    const int first = blockIdx.x * kPartTokens + threadIdx.x;
#pragma unroll
    for (int i = 0; i < kPartTokens; i += kPartThreads) {
        const int token = first + i;
        if (token < p.vocab) to[token] = is_allowed(mask, token) ? from[token] : banned();
    }
}

}  // namespace castiron
