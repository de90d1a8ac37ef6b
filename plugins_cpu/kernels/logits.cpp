// What changes logits before a token is drawn, and the counts of tokens that penalties need. A thread does a
// row.
#include <algorithm>
#include <limits>

#include "float_vector.h"
#include "registry.h"

namespace castiron {
namespace {

constexpr float kBanned = -std::numeric_limits<float>::infinity();
constexpr uint32_t kInPrompt = 1u << 31;  // of a token count

// Bans the tokens whose bit isn't set.
void apply_mask(float *row, const uint32_t *mask, int32_t vocab) {
    for (int32_t first = 0; first < vocab; first += 32) {
        const uint32_t word = mask[first / 32];
        if (word == ~0u) continue;
        const int32_t last = std::min(first + 32, vocab);
        for (int32_t token = first; token < last; ++token) {
            if (!(word >> (token - first) & 1)) row[token] = kBanned;
        }
    }
}

const uint32_t *mask_row(const uint32_t *masks, int32_t row, int32_t vocab) {
    return masks + static_cast<int64_t>(row) * ((vocab + 31) / 32);
}

template <typename Params>
bool has_penalty(const Params &p, int64_t i) {
    return p.repetition_penalty[i] != 1.0f || p.presence_penalty[i] != 0.0f || p.frequency_penalty[i] != 0.0f;
}

void mask_logits(const MaskLogitsParams &p, const Context &context) {
    const Range mine = share(live_count(p.count, context), context);
    for (int64_t i = mine.begin; i < mine.end; ++i) {
        float *y = p.y + i * p.y_stride;
        std::copy_n(p.logits + i * p.logits_stride, p.vocab, y);
        if (p.mask_rows[i] >= 0) apply_mask(y, mask_row(p.grammar_masks, p.mask_rows[i], p.vocab), p.vocab);
    }
}

void adjust_logits(const AdjustLogitsParams &p, const Context &context) {
    const Range mine = share(live_count(p.count, context), context);
    for (int64_t i = mine.begin; i < mine.end; ++i) {
        float *y = p.y + i * p.y_stride;
        std::copy_n(p.logits + i * p.logits_stride, p.vocab, y);
        if (p.allowed_rows[i] >= 0)
            apply_mask(y, mask_row(p.allowed_masks, p.allowed_rows[i], p.vocab), p.vocab);
        for (int32_t at = p.bias_starts[i]; at < p.bias_starts[i + 1]; ++at) {
            y[p.bias_token_ids[at]] += p.bias_values[at];
        }
        if (p.sample_rows[i] < 0 || !has_penalty(p, i)) continue;
        const uint32_t *counts = p.token_counts + static_cast<int64_t>(p.sample_rows[i]) * p.vocab;
        const float repetition = p.repetition_penalty[i];
        for (int32_t token = 0; token < p.vocab; ++token) {
            if (counts[token] == 0) continue;
            const uint32_t times = counts[token] & ~kInPrompt;
            float x = y[token] > 0.0f ? y[token] / repetition : y[token] * repetition;
            x -= p.frequency_penalty[i] * static_cast<float>(times);
            y[token] = x - (times ? p.presence_penalty[i] : 0.0f);
        }
    }
}

void count_tokens(const CountTokensParams &p, const Context &context) {
    const Range mine = share(live_count(p.count, context), context);
    for (int64_t i = mine.begin; i < mine.end; ++i) {
        if (p.sample_rows[i] < 0 || !has_penalty(p, i)) continue;
        p.token_counts[static_cast<int64_t>(p.sample_rows[i]) * p.vocab + p.sampled_token_ids[i]] += 1;
    }
}

CASTIRON_KERNEL("mask_logits", MaskLogitsParams, mask_logits);
CASTIRON_KERNEL("adjust_logits", AdjustLogitsParams, adjust_logits);
CASTIRON_KERNEL("count_tokens", CountTokensParams, count_tokens);

}  // namespace
}  // namespace castiron
