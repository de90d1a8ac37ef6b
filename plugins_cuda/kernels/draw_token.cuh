// A random token of a row: the largest scaled logit + Gumbel noise, which draws from the softmax (Gumbel,
// 1954), of those that min_p, top_k and top_p keep. A cluster of CTAs holds the row in shared memory, so that
// it is read once; a CTA alone (CTAS=1) hasn't the room and reads it again, from L2.
#pragma once
#include "philox.cuh"
#include "prefix_cut.cuh"

namespace castiron {

constexpr bool kHoldsRow = kCtas > 1;

struct Draw {  // how a row's token is drawn
    float temperature;
    int top_k;
    float top_p, min_p;
    uint64_t seed;
    uint32_t output_position;

    template <typename Params>
    __device__ Draw(const Params &p, int64_t row)
        : temperature(p.temperature[row]),
          top_k(p.top_k[row]),
          top_p(p.top_p[row]),
          min_p(p.min_p[row]),
          seed(p.seed[row]),
          output_position(static_cast<uint32_t>(p.output_position[row])) {}
};

// The dynamic shared memory: a histogram, then the CTA's part of the row; a thread sees only its own quads.
struct DrawMemory {
    double *histogram;  // [kBins][kThreads]
    float4 *held;

    __device__ explicit DrawMemory(unsigned char *memory)
        : histogram(reinterpret_cast<double *>(memory)),
          held(reinterpret_cast<float4 *>(histogram + kBins * kThreads)) {}
};

// `best` is the row's largest logit, whose token it is if nothing is random. Where the row is held its logits
// become their ranks.
__device__ __forceinline__ uint32_t draw_token(RowCluster &cluster, const RowPart &part,
                                               const DrawMemory &memory, const Best &best, const Draw &draw) {
    if (!(draw.temperature > 0.0f && best.value > minus_infinity() && draw.top_k != 1)) return best.token;
    const RowScale scale = {best.value, draw.temperature};
    uint4 *held_ranks = reinterpret_cast<uint4 *>(memory.held);
    auto rank_quad = [&](const float4 &x) {
        return make_uint4(scale.rank(x.x), scale.rank(x.y), scale.rank(x.z), scale.rank(x.w));
    };
    if constexpr (kHoldsRow) {
        for (int quad = threadIdx.x; quad < part.num_quads; quad += kThreads) {
            held_ranks[quad] = rank_quad(memory.held[quad]);
        }
    }
    auto ranks = [&](int quad) { return kHoldsRow ? held_ranks[quad] : rank_quad(part.load(quad)); };
    const PrefixCut cut =
        CutFinder(cluster, part, ranks, memory.histogram).find(draw.top_k, draw.top_p, draw.min_p);
    Best drawn = {minus_infinity(), kNoToken};
    for (int quad = threadIdx.x; quad < part.num_quads; quad += kThreads) {
        const uint32_t first = part.token(quad);
        const uint4 four = ranks(quad);
        const uint32_t rank[4] = {four.x, four.y, four.z, four.w};
        if (min(min(rank[0], rank[1]), min(rank[2], rank[3])) > cut.rank) continue;
        const float4 noise = gumbel_noise(draw.seed, draw.output_position, first / 4);
        const float noises[4] = {noise.x, noise.y, noise.z, noise.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float score = noises[j] - __uint_as_float(rank[j]);
            if (cut.keeps(rank[j], first + j) && score > drawn.value) drawn = {score, first + j};
        }
    }
    return cluster.best(drawn).token;
}

}  // namespace castiron
