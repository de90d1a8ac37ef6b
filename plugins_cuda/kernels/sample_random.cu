// A random token of each row: the largest scaled logit + Gumbel noise, which draws from the softmax (Gumbel,
// 1954), of those that top_k, top_p and min_p keep. A cluster of CTAs does a row and holds it in shared
// memory, so that it is read once; a CTA alone (CTAS=1) hasn't the room and reads it again, from L2.
#include "logprobs.cuh"
#include "philox.cuh"
#include "prefix_cut.cuh"

namespace castiron {

constexpr bool kHoldsRow = kCtas > 1;

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    sample_random(const __grid_constant__ SampleRandomParams p) {
    __shared__ RowCluster::Slots slots;
    __shared__ TopTokens top;
    extern __shared__ __align__(16) unsigned char dynamic_shared[];
    double *histogram = reinterpret_cast<double *>(dynamic_shared);  // [kBins][kThreads]
    // the CTA's part of the logits, from some point on their ranks; a thread sees only its own quads
    float4 *held = reinterpret_cast<float4 *>(histogram + kBins * kThreads);
    const int64_t row = blockIdx.y;
    let_next_start();
    if (row >= p.header[p.count]) {
        wait_for_inputs();
        return;
    }
    const int num_logprobs = p.num_logprobs[row], top_k = p.top_k[row];
    const float temperature = p.temperature[row], top_p = p.top_p[row], min_p = p.min_p[row];
    const uint64_t seed = p.seed[row];
    const uint32_t output_position = static_cast<uint32_t>(p.output_position[row]);
    top.clear();
    RowCluster cluster(slots);
    const RowPart part(p.logits + row * p.logits_stride, p.vocab, cluster.rank());
    wait_for_inputs();

    Best best = largest_logit(part, [&](int quad, const float4 &logits) {
        if (kHoldsRow && quad < part.num_quads) held[quad] = logits;
    });
    cluster.start();
    best = cluster.best(best);
    if (best.token == kNoToken) best.token = 0;  // all logits are NaN

    double log_total = 0.0;
    if (num_logprobs >= 0) {
        auto logits = [&](int quad) { return kHoldsRow ? held[quad] : part.load(quad); };
        log_total = log_sum(cluster, part, logits, best.value);
        if (num_logprobs > 0) {
            find_top_tokens(cluster, top, part, logits, min(num_logprobs, kMaxLogprobs));
        }
    }

    uint32_t token = best.token;
    if (temperature > 0.0f && best.value > minus_infinity() && top_k != 1) {
        const RowScale scale = {best.value, temperature};
        uint4 *held_ranks = reinterpret_cast<uint4 *>(held);
        auto rank_quad = [&](const float4 &x) {
            return make_uint4(scale.rank(x.x), scale.rank(x.y), scale.rank(x.z), scale.rank(x.w));
        };
        if constexpr (kHoldsRow) {
            for (int quad = threadIdx.x; quad < part.num_quads; quad += kThreads) {
                held_ranks[quad] = rank_quad(held[quad]);
            }
        }
        auto ranks = [&](int quad) { return kHoldsRow ? held_ranks[quad] : rank_quad(part.load(quad)); };
        const PrefixCut cut = CutFinder(cluster, part, ranks, histogram).find(top_k, top_p, min_p);
        Best drawn = {minus_infinity(), kNoToken};
        for (int quad = threadIdx.x; quad < part.num_quads; quad += kThreads) {
            const uint32_t first = part.token(quad);
            const uint4 four = ranks(quad);
            const uint32_t rank[4] = {four.x, four.y, four.z, four.w};
            if (min(min(rank[0], rank[1]), min(rank[2], rank[3])) > cut.rank) continue;
            const float4 noise = gumbel_noise(seed, output_position, first / 4);
            const float noises[4] = {noise.x, noise.y, noise.z, noise.w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float score = noises[j] - __uint_as_float(rank[j]);
                if (cut.keeps(rank[j], first + j) && score > drawn.value) drawn = {score, first + j};
            }
        }
        drawn = cluster.best(drawn);
        token = drawn.token;
    }
    if (cluster.rank() == 0) write_row(p, row, top, best.value, log_total, token);
}

}  // namespace castiron
