// What a sampled row leaves: the token, and log probabilities under the softmax of the unscaled logits where
// they are asked for.
#pragma once
#include "row_cluster.cuh"

namespace castiron {

constexpr int kMaxLogprobs = 20;  // MAX_LOGPROBS of runtime/step_abi.py

// Top tokens as keys that rank them: the logit's bits, ordered, then the token's complement, so that the
// lowest of equals comes first. No key of a logit is 0.
struct TopTokens {
    uint64_t of_warp[kWarps * kMaxLogprobs];
    uint64_t of_cta[kCtas * kMaxLogprobs];  // by rank; only rank 0's are filled
    uint64_t sorted[kMaxLogprobs];          // of the row

    // By all threads of a CTA, before the cluster starts.
    __device__ __forceinline__ void clear() {
        for (int i = threadIdx.x; i < kCtas * kMaxLogprobs; i += kThreads) of_cta[i] = 0;
        if (threadIdx.x < kMaxLogprobs) sorted[threadIdx.x] = 0;
    }
};

__device__ __forceinline__ uint64_t top_key(float logit, uint32_t token) {
    if (logit != logit) return 0;
    const uint32_t bits = __float_as_uint(logit + 0.0f);  // never -0
    const uint32_t ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return static_cast<uint64_t>(ordered) << 32 | ~token;
}
__device__ __forceinline__ uint32_t token_of(uint64_t key) { return ~static_cast<uint32_t>(key); }
__device__ __forceinline__ float logit_of(uint64_t key) {
    const uint32_t ordered = static_cast<uint32_t>(key >> 32);
    return __uint_as_float(ordered & 0x80000000u ? ordered & 0x7FFFFFFFu : ~ordered);
}

// Largest key below `bound` of this thread's tokens, 0 if there is none.
template <typename Logits>
__device__ __forceinline__ uint64_t next_key(const RowPart &part, Logits logits, uint64_t bound) {
    uint64_t best = 0;
    for (int quad = threadIdx.x; quad < part.num_quads; quad += kThreads) {
        const float4 four = logits(quad);
        const float x[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const uint64_t key = top_key(x[j], part.token(quad) + j);
            if (key < bound && key > best) best = key;
        }
    }
    return best;
}

// Leaves the `count` top tokens in top.sorted of rank 0 (0 where the row has fewer): each warp takes its own
// top out one by one, then the lists are merged by counting, for each key, how many are larger.
template <typename Logits>
__device__ __forceinline__ void find_top_tokens(RowCluster &cluster, TopTokens &top, const RowPart &part,
                                                Logits logits, int count) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint64_t key = next_key(part, logits, ~0ull);
    for (int i = 0; i < count; ++i) {
        uint64_t largest = key;
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) {
            const uint64_t other = __shfl_xor_sync(~0u, largest, offset);
            largest = other > largest ? other : largest;
        }
        if (lane == 0) top.of_warp[warp * kMaxLogprobs + i] = largest;
        if (key == largest && key != 0) key = next_key(part, logits, key);
        __syncwarp();
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kWarps * count; i += kThreads) {
        const uint64_t mine = top.of_warp[i / count * kMaxLogprobs + i % count];
        int larger = 0;
        for (int w = 0; w < kWarps; ++w) {
            for (int j = 0; j < count; ++j) larger += top.of_warp[w * kMaxLogprobs + j] > mine;
        }
        if (mine != 0 && larger < count) {
            RowCluster::store_remote(&top.of_cta[cluster.rank() * kMaxLogprobs + larger], 0, mine);
        }
    }
    __syncwarp();
    cluster.barrier();
    if (cluster.rank() != 0) return;
    if (threadIdx.x < kCtas * kMaxLogprobs) {
        const uint64_t mine = top.of_cta[threadIdx.x];
        int larger = 0;
        for (int i = 0; i < kCtas * kMaxLogprobs; ++i) larger += top.of_cta[i] > mine;
        if (mine != 0 && larger < count) top.sorted[larger] = mine;
    }
    __syncthreads();
}

// log of the sum of e^(logit - largest) over the logits that aren't NaN; 0 if all are minus infinity.
template <typename Logits>
__device__ __forceinline__ double log_sum(RowCluster &cluster, const RowPart &part, Logits logits,
                                          float largest) {
    double sum = 0.0;
    for (int quad = threadIdx.x; quad < part.num_quads; quad += kThreads) {
        const float4 four = logits(quad);
        const float x[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            // the largest may be infinite
            if (x[j] == x[j]) sum += x[j] == largest ? 1.0 : static_cast<double>(expf(x[j] - largest));
        }
    }
    const double total = cluster.sum(sum);
    return largest > minus_infinity() ? log(total) : 0.0;
}

__device__ __forceinline__ float logprob(float logit, float largest, double log_total) {
    if (!(largest > minus_infinity()) || logit != logit) return minus_infinity();
    const double below = logit == largest ? 0.0 : static_cast<double>(logit) - static_cast<double>(largest);
    return static_cast<float>(below - log_total);
}

// The row's outputs, by the CTA of rank 0; log_total and top.sorted count where num_logprobs asks for them.
template <typename Params>
__device__ __forceinline__ void write_row(const Params &p, int64_t row, const TopTokens &top, float largest,
                                          double log_total, uint32_t token) {
    const int num_logprobs = p.num_logprobs[row];
    if (threadIdx.x == 0) {
        p.sampled_token_ids[row] = static_cast<int32_t>(token);
        const int sample_row = p.sample_rows[row];
        if (sample_row >= 0) p.last_token[sample_row] = static_cast<int32_t>(token);
        p.sampled_logprobs[row] =
            num_logprobs < 0 ? 0.0f : logprob(p.logits[row * p.logits_stride + token], largest, log_total);
    }
    if (threadIdx.x < kMaxLogprobs) {
        const uint64_t key = num_logprobs > 0 ? top.sorted[threadIdx.x] : 0;
        const int64_t to = row * kMaxLogprobs + threadIdx.x;
        p.top_token_ids[to] = key != 0 ? static_cast<int32_t>(token_of(key)) : 0;
        p.top_logprobs[to] = key != 0 ? logprob(logit_of(key), largest, log_total) : 0.0f;
    }
}

}  // namespace castiron
