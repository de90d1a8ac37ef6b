// y = logits as a token is drawn from them: allowed ids alone, biases, then penalties.
#include "token_mask.cuh"

namespace castiron {

constexpr uint32_t kInPrompt = 1u << 31;  // of a token count

extern "C" __global__ void __launch_bounds__(kPartThreads)
    adjust_logits(const __grid_constant__ AdjustLogitsParams p) {
    __shared__ float biases[kPartTokens];  // of the part's tokens, 0 = none
    const int64_t row = blockIdx.y;
    let_next_start();
    if (row >= p.header[p.count]) {
        wait_for_inputs();
        return;
    }
    const int first = blockIdx.x * kPartTokens;
    for (int i = threadIdx.x; i < kPartTokens; i += kPartThreads) biases[i] = 0.0f;
    __syncthreads();
    for (int at = p.bias_starts[row] + threadIdx.x; at < p.bias_starts[row + 1]; at += kPartThreads) {
        const int place = p.bias_token_ids[at] - first;
        if (place >= 0 && place < kPartTokens) biases[place] = p.bias_values[at];
    }
    const int allowed = p.allowed_rows[row];
    const uint32_t *mask = allowed < 0 ? nullptr : mask_row(p.allowed_masks, allowed, p.vocab);
    const bool penalized = p.sample_rows[row] >= 0 && has_penalty(p, row);
    const uint32_t *counts = p.token_counts + static_cast<int64_t>(max(p.sample_rows[row], 0)) * p.vocab;
    const float repetition = p.repetition_penalty[row], presence = p.presence_penalty[row];
    const float frequency = p.frequency_penalty[row];
    __syncthreads();
    wait_for_inputs();
    const float *from = p.logits + row * p.logits_stride;
    float *to = p.y + row * p.y_stride;
#pragma unroll
    for (int i = 0; i < kPartTokens; i += kPartThreads) {
        const int place = i + threadIdx.x, token = first + place;
        if (token >= p.vocab) continue;
        float x = is_allowed(mask, token) ? from[token] : banned();
        if (biases[place] != 0.0f) x += biases[place];
        const uint32_t count = penalized ? counts[token] : 0u;
        if (count != 0) {
            const uint32_t times = count & ~kInPrompt;
            x = x > 0.0f ? __fdiv_rn(x, repetition) : __fmul_rn(x, repetition);
            x = __fsub_rn(x, __fmul_rn(frequency, static_cast<float>(times)));
            if (times != 0) x = __fsub_rn(x, presence);
        }
        to[token] = x;
    }
}

}  // namespace castiron
