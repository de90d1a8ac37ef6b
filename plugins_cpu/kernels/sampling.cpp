// From logits to token ids. One thread does a whole row, in a fixed order.
#include <algorithm>
#include <cmath>
#include <limits>

#include "noise.h"
#include "prefix_cut.h"
#include "registry.h"

namespace castiron {
namespace {

constexpr int kMaxLogprobs = 20;  // MAX_LOGPROBS of runtime/step_abi.py
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Largest logit that isn't NaN; -infinity if there is none.
float largest_logit(const float *logits, int32_t vocab) {
    Vec most[4] = {splat(-kInfinity), splat(-kInfinity), splat(-kInfinity), splat(-kInfinity)};
    int32_t i = 0;
    for (; i + 4 * kVecLanes <= vocab; i += 4 * kVecLanes) {
        for (int j = 0; j < 4; ++j) most[j] = max(load(logits + i + j * kVecLanes), most[j]);
    }
    float largest = max_lanes(max(max(most[0], most[1]), max(most[2], most[3])));
    for (; i < vocab; ++i) largest = logits[i] > largest ? logits[i] : largest;
    return largest;
}

// Lowest id with this logit; 0 if there is none (all logits are NaN).
int32_t first_with(const float *logits, int32_t vocab, float value) {
    int32_t i = 0;
    for (; i + kVecLanes <= vocab; i += kVecLanes) {
        if (lane_bits(equal(load(logits + i), splat(value)))) break;
    }
    for (; i < vocab; ++i) {
        if (logits[i] == value) return i;
    }
    return 0;
}

// log of the sum of e^(logit - largest), NaN logits left out.
double log_sum(const ScaledLogits &row) {
    double total = 0.0;
    constexpr int32_t kBlock = 64 * kVecLanes;
    for (int32_t begin = 0; begin < row.vocab; begin += kBlock) {
        const int32_t end = std::min(row.vocab, begin + kBlock);
        Vec sum = splat(0.0f);
        for (int32_t token = begin; token < end; token += kVecLanes) sum += exp(row.at(token));
        total += static_cast<double>(sum_lanes(sum));
    }
    return std::log(total);
}

// The n most likely tokens of a row, the lowest id first among equals.
struct TopTokens {
    int32_t ids[kMaxLogprobs];
    float logits[kMaxLogprobs];
    int count = 0;

    TopTokens(const float *row, int32_t vocab, int n) {
        if (n <= 0) return;
        int32_t token = 0;
        for (; token + kVecLanes <= vocab; token += kVecLanes) {
            if (count == n && !lane_bits(greater(load(row + token), splat(logits[n - 1])))) continue;
            for (int i = 0; i < kVecLanes; ++i) insert(token + i, row[token + i], n);
        }
        for (; token < vocab; ++token) insert(token, row[token], n);
    }

    void insert(int32_t token, float logit, int n) {
        if (logit != logit || (count == n && !(logit > logits[n - 1]))) return;
        if (count < n) ++count;
        int at = count - 1;
        for (; at > 0 && logits[at - 1] < logit; --at) {
            logits[at] = logits[at - 1];
            ids[at] = ids[at - 1];
        }
        logits[at] = logit;
        ids[at] = token;
    }
};

// Leaves a row's outputs: the token, for the host and for the next step, and its log probabilities if asked
// for, under the softmax of the unscaled logits.
template <typename Params>
void write_row(const Params &p, int64_t index, const ScaledLogits &row, int32_t token) {
    p.sampled_token_ids[index] = token;
    if (p.sample_rows[index] >= 0) p.last_token[p.sample_rows[index]] = token;

    int32_t *top_ids = p.top_token_ids + index * kMaxLogprobs;
    float *top_logprobs = p.top_logprobs + index * kMaxLogprobs;
    std::fill_n(top_ids, kMaxLogprobs, 0);
    std::fill_n(top_logprobs, kMaxLogprobs, 0.0f);
    p.sampled_logprobs[index] = 0.0f;
    if (p.num_logprobs[index] < 0) return;

    const ScaledLogits unscaled{row.logits, row.vocab, row.largest, 1.0f};
    const bool possible = row.largest > -kInfinity;  // else no token is, and none has a probability
    const double log_total = possible ? log_sum(unscaled) : 0.0;
    auto logprob = [&](float logit) {
        if (!possible || logit != logit) return -kInfinity;
        const double below = logit == row.largest ? 0.0 : static_cast<double>(logit) - row.largest;
        return static_cast<float>(below - log_total);
    };
    p.sampled_logprobs[index] = logprob(row.logits[token]);
    const TopTokens top(row.logits, row.vocab, std::min(p.num_logprobs[index], kMaxLogprobs));
    for (int i = 0; i < top.count; ++i) {
        top_ids[i] = top.ids[i];
        top_logprobs[i] = logprob(top.logits[i]);
    }
}

// Tokens that min_p (relative to the most likely one), top_k and then top_p (of what these leave) keep.
PrefixCut find_cut(const ScaledLogits &row, int32_t top_k, float top_p, float min_p, char *scratch) {
    static_assert(sizeof(CutFinder::Histogram) <= kScratchBytes, "sampling scratch");
    CutFinder finder(row, *reinterpret_cast<CutFinder::Histogram *>(scratch));
    PrefixCut cut;
    if (min_p > 0.0f) cut.value = std::min(std::log(min_p), 0.0f);
    double mass = -1.0;  // of what the cut keeps, once it is known
    if (top_k > 0 && top_k < row.vocab) {
        double first_mass;
        const PrefixCut by_count = finder.first_tokens(top_k, &first_mass);
        if (by_count.keeps_less_than(cut)) {
            cut = by_count;
            mass = first_mass;
        }
    }
    if (top_p < 1.0f) {
        if (mass < 0.0) mass = finder.mass_from(cut.value);
        const PrefixCut by_mass = finder.first_mass(static_cast<double>(top_p) * mass);
        if (by_mass.keeps_less_than(cut)) cut = by_mass;
    }
    return cut;
}

// The kept token with the largest scaled logit + noise.
int32_t sample_token(const ScaledLogits &row, const PrefixCut &cut, uint64_t seed, int32_t output_position) {
    float best = -kInfinity;
    int32_t best_token = 0;
    for (int32_t first = 0; first < row.vocab; first += kNoiseTokens) {
        float scaled[kNoiseTokens], noise[kNoiseTokens];
        uint32_t candidates = 0;
        for (int i = 0; i < kNoiseTokens; i += kVecLanes) {
            const Vec value = row.at(first + i);
            store(scaled + i, value);
            candidates |= ~lane_bits(greater(splat(cut.value), value)) & ((1u << kVecLanes) - 1);
        }
        if (!candidates) continue;
        fill_noise(seed, static_cast<uint32_t>(output_position), static_cast<uint32_t>(first), noise);
        for (int i = 0; i < kNoiseTokens; i += kVecLanes) {
            const Vec score = load(scaled + i) + load(noise + i);
            if (!lane_bits(greater(score, splat(best)))) continue;
            for (int j = i; j < i + kVecLanes; ++j) {
                const int32_t token = first + j;
                const bool kept =
                    scaled[j] > cut.value || (scaled[j] == cut.value && token <= cut.last_token);
                if (kept && scaled[j] + noise[j] > best) {
                    best = scaled[j] + noise[j];
                    best_token = token;
                }
            }
        }
    }
    return best_token;
}

void sample_greedy(const SampleGreedyParams &p, const Context &context) {
    const Range mine = share(live_count(p.count, context), context);
    for (int64_t i = mine.begin; i < mine.end; ++i) {
        const float *logits = p.logits + i * p.logits_stride;
        const float largest = largest_logit(logits, p.vocab);
        write_row(p, i, {logits, p.vocab, largest, 1.0f}, first_with(logits, p.vocab, largest));
    }
}

// The token that the parameters of row `index` draw from its logits.
template <typename Params>
int32_t draw_token(const Params &p, int64_t index, const ScaledLogits &row, char *scratch) {
    if (!(p.temperature[index] > 0.0f && row.largest > -kInfinity)) {
        return first_with(row.logits, p.vocab, row.largest);
    }
    const PrefixCut cut = find_cut(row, p.top_k[index], p.top_p[index], p.min_p[index], scratch);
    return sample_token(row, cut, p.seed[index], p.output_position[index]);
}

void sample_random(const SampleRandomParams &p, const Context &context) {
    const Range mine = share(live_count(p.count, context), context);
    for (int64_t i = mine.begin; i < mine.end; ++i) {
        const float *logits = p.logits + i * p.logits_stride;
        const ScaledLogits row{logits, p.vocab, largest_logit(logits, p.vocab), p.temperature[i]};
        write_row(p, i, row, draw_token(p, i, row, context.scratch));
    }
}

// 1 + the tokens that are more likely than this one; one without a logit is as likely as one of -infinity.
int32_t rank_of(const ScaledLogits &row, int32_t token) {
    const float own = row.logits[token];
    const Vec least = splat(own == own ? own : -kInfinity);
    int32_t rank = 1, i = 0;
    for (; i + kVecLanes <= row.vocab; i += kVecLanes) {
        rank += __builtin_popcount(lane_bits(greater(load(row.logits + i), least)));
    }
    for (; i < row.vocab; ++i) rank += row.logits[i] > (own == own ? own : -kInfinity);
    return rank;
}

void sample_full(const SampleFullParams &p, const Context &context) {
    const Range mine = share(live_count(p.count, context), context);
    for (int64_t i = mine.begin; i < mine.end; ++i) {
        const float *adjusted = p.adjusted + i * p.adjusted_stride;
        const ScaledLogits drawn_from{adjusted, p.vocab, largest_logit(adjusted, p.vocab), p.temperature[i]};
        const int32_t token = draw_token(p, i, drawn_from, context.scratch);
        const float *logits = p.logits + i * p.logits_stride;
        const ScaledLogits row{logits, p.vocab, largest_logit(logits, p.vocab), 1.0f};
        write_row(p, i, row, token);
        p.sampled_ranks[i] = p.num_logprobs[i] >= 0 ? rank_of(row, token) : 0;
    }
}

CASTIRON_KERNEL("sample_greedy", SampleGreedyParams, sample_greedy);
CASTIRON_KERNEL("sample_random", SampleRandomParams, sample_random);
CASTIRON_KERNEL("sample_full", SampleFullParams, sample_full);

}  // namespace
}  // namespace castiron
