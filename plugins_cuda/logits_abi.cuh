// Parameter structs of the kernels of the full sampling variant, by the rules of abi.cuh. They lie apart from
// it since a kernel's stored times hold as long as the headers it includes: abi.cuh is included by all.
#pragma once
#include "abi.cuh"

namespace castiron {

struct MaskLogitsParams {
    const float *logits;            // [logits, vocab]
    const int32_t *mask_rows;       // row of grammar_masks; -1 = none
    const uint32_t *grammar_masks;  // [logits, (vocab + 31) / 32], bit set = allowed
    float *y;
    const int32_t *header;
    int64_t logits_stride, y_stride;
    int32_t count, vocab;
};
struct AdjustLogitsParams {
    const float *logits;
    const int32_t *sample_rows;    // row of token_counts; -1 = none
    const uint32_t *token_counts;  // [rows, vocab]: bit 31 = in the prompt, the others = times in the output
    const float *repetition_penalty, *presence_penalty, *frequency_penalty;
    const int32_t *bias_starts;  // [logits + 1]
    const int32_t *bias_token_ids;
    const float *bias_values;
    const int32_t *allowed_rows;  // row of allowed_masks; -1 = all are allowed
    const uint32_t *allowed_masks;
    float *y;
    const int32_t *header;
    int64_t logits_stride, y_stride;
    int32_t count, vocab;
};
struct SampleFullParams {
    const float *logits;    // of the log probabilities
    const float *adjusted;  // that the token is drawn from
    const int32_t *sample_rows, *num_logprobs;
    const float *temperature;
    const int32_t *top_k;
    const float *top_p, *min_p;
    const uint64_t *seed;
    const int32_t *output_position;
    int32_t *last_token, *sampled_token_ids;
    float *sampled_logprobs;
    int32_t *sampled_ranks, *top_token_ids;
    float *top_logprobs;
    const int32_t *header;
    int64_t logits_stride, adjusted_stride;
    int32_t count, vocab;
};
struct CountTokensParams {
    uint32_t *token_counts;
    const int32_t *sampled_token_ids, *sample_rows;
    const float *repetition_penalty, *presence_penalty, *frequency_penalty;
    const int32_t *header;
    int32_t count, vocab;
};

template <typename Params>
__device__ __forceinline__ bool has_penalty(const Params &p, int64_t row) {
    return p.repetition_penalty[row] != 1.0f || p.presence_penalty[row] != 0.0f ||
           p.frequency_penalty[row] != 0.0f;
}

}  // namespace castiron
