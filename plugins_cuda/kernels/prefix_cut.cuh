// min-p, top-k and top-p as a cut through the tokens ordered by scaled logit, largest first, and by id among
// equals. Scaled logits, (logit - largest) / temperature, are <= 0: their bits without the sign are ranks, 0
// first, that order them.
//
// A cut is found without sorting, four bits of the rank at a time from the top (a radix select): each thread
// sums the weights (1, or e^scaled) of its tokens by the next four bits, in a column of its own of a
// histogram in shared memory; the cluster adds the columns up in a fixed order and goes on in the bin where
// the wanted total is reached. No atomics: the same row gives the same bits. Sums are doubles.
#pragma once
#include "row_cluster.cuh"

namespace castiron {

constexpr int kBins = 16, kBinBits = 4;
static_assert(kBins == kWarps, "a warp adds up a bin");
constexpr uint32_t kInfinityRank = 0x7F800000u;
constexpr uint32_t kNoRank = 0xFFFFFFFFu;  // of a NaN logit: behind every cut
constexpr uint32_t kLastToken = 0x7FFFFFFFu;

// Kept are tokens of a lower rank, and of those of this rank the ids up to `token`.
struct PrefixCut {
    uint32_t rank = kInfinityRank;
    uint32_t token = kLastToken;

    __device__ __forceinline__ bool keeps(uint32_t r, uint32_t t) const {
        return r < rank || (r == rank && t <= token);
    }
};

// The scaled logits of a row.
struct RowScale {
    float largest, temperature;  // above minus infinity; above 0

    __device__ __forceinline__ uint32_t rank(float logit) const {
        if (logit != logit) return kNoRank;
        // the largest may be infinite
        return logit == largest ? 0u : __float_as_uint(fabsf((logit - largest) / temperature));
    }
};

// Ranks: ranks(quad) are the uint4 ranks of a quad of the CTA's part.
template <typename Ranks>
class CutFinder {
  public:
    // histogram: double [kBins][kThreads] in shared memory
    __device__ CutFinder(RowCluster &cluster, const RowPart &part, Ranks ranks, double *histogram)
        : cluster_(cluster), part_(part), ranks_(ranks), histogram_(histogram) {}

    // Each filter narrows the cut down further.
    __device__ __forceinline__ PrefixCut find(int top_k, float top_p, float min_p) {
        PrefixCut cut;
        if (min_p > 0.0f) {
            const float least = static_cast<float>(log(static_cast<double>(min_p)));
            cut.rank = __float_as_uint(fmaxf(0.0f, -least));
        }
        if (top_k > 0 && top_k < part_.vocab) {
            cut = narrowed(cut, static_cast<double>(top_k), false, [](uint32_t) { return 1.0; });
        }
        if (top_p < 1.0f) {
            cut = narrowed(cut, static_cast<double>(top_p), true, [](uint32_t rank) { return mass(rank); });
        }
        return cut;
    }

  private:
    struct Found {
        uint32_t key;
        double target;  // what was looked for,
        double before;  // the weight of all lower keys
        double here;    // and of this one
    };

    // e^scaled. Below e^-40 it is left out: a whole vocabulary of such tokens has less than 2^-39 of the
    // mass, and any top_p below 1 leaves out more than 2^-25 of it.
    static __device__ __forceinline__ double mass(uint32_t rank) {
        const float distance = __uint_as_float(rank);
        return distance <= 40.0f ? exp(-static_cast<double>(distance)) : 0.0;
    }

    // The fewest first tokens of those `cut` keeps, at least one, whose weight reaches `target`, or `target`
    // times the weight of all (share); all of them if rounding keeps it from being reached.
    template <typename Weight>
    __device__ __forceinline__ PrefixCut narrowed(PrefixCut cut, double target, bool share, Weight weight) {
        const Found last = search(
            28, target, share, [&](uint32_t rank, uint32_t token) { return cut.keeps(rank, token); },
            [](uint32_t rank, uint32_t) { return rank; }, weight);
        // tokens of one rank weigh the same: how many are there, and how many are wanted?
        const double each = weight(last.key), equals = rint(last.here / each);
        double kept = fmin(equals, fmax(1.0, ceil((last.target - last.before) / each)));
        while (kept > 1.0 && last.before + (kept - 1.0) * each >= last.target) kept -= 1.0;
        while (kept < equals && last.before + kept * each < last.target) kept += 1.0;
        if (kept == equals) return {last.key, last.key == cut.rank ? cut.token : kLastToken};
        const Found token = search(
            16, kept, false,
            [&](uint32_t rank, uint32_t token) { return rank == last.key && cut.keeps(rank, token); },
            [](uint32_t, uint32_t token) { return token; }, [](uint32_t) { return 1.0; });
        return {last.key, token.key};
    }

    // The key, of the tokens that `chosen` admits, at which the weight of keys up to it reaches the target.
    // Keys have shift + 4 bits, ranks the sign bit, which is 0, besides.
    template <typename Chosen, typename Key, typename Weight>
    __device__ __forceinline__ Found search(int shift, double target, bool share, Chosen chosen, Key key,
                                            Weight weight) {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, bin = lane % kBins;
        double *column = histogram_ + threadIdx.x;
        uint32_t least = 0;  // of the keys still possible, least .. least + 16 * 2^shift - 1
        double before = 0.0, here = 0.0;
        for (; shift >= 0; shift -= kBinBits) {
#pragma unroll
            for (int b = 0; b < kBins; ++b) column[b * kThreads] = 0.0;
            for (int quad = threadIdx.x; quad < part_.num_quads; quad += kThreads) {
                const uint4 four = ranks_(quad);
                const uint32_t rank[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const uint32_t token = part_.token(quad) + j;
                    const uint32_t digit = (key(rank[j], token) - least) >> shift;
                    if (digit < kBins && chosen(rank[j], token)) {
                        column[digit * kThreads] += weight(rank[j]);
                    }
                }
            }
            __syncthreads();
            double sum = 0.0;
#pragma unroll
            for (int i = 0; i < kThreads; i += 32) sum += histogram_[warp * kThreads + i + lane];
            const uint64_t *words =
                cluster_.exchange(static_cast<uint64_t>(__double_as_longlong(RowCluster::sum_of_warp(sum))));
            double total = 0.0;  // of bin lane % kBins; both halves of a warp do the same
#pragma unroll
            for (int cta = 0; cta < kCtas; ++cta) total += RowCluster::as_double(words[cta * kWarps + bin]);
            double up_to = total;
#pragma unroll
            for (int offset = 1; offset < kBins; offset *= 2) {
                const double lower = __shfl_up_sync(~0u, up_to, offset, kBins);
                if (bin >= offset) up_to += lower;
            }
            if (share) target *= __shfl_sync(~0u, up_to, kBins - 1);
            share = false;
            // rounding never stops in an empty bin
            const uint32_t filled = __ballot_sync(~0u, total > 0.0) & 0xFFFFu;
            const uint32_t reached = __ballot_sync(~0u, total > 0.0 && before + up_to >= target) & 0xFFFFu;
            const int stop = reached ? __ffs(reached) - 1 : 31 - __clz(filled);
            here = __shfl_sync(~0u, total, stop);
            const double lower = __shfl_sync(~0u, up_to, max(stop - 1, 0));
            if (stop > 0) before += lower;
            least += static_cast<uint32_t>(stop) << shift;
        }
        return {least, target, before, here};
    }

    RowCluster &cluster_;
    const RowPart &part_;
    Ranks ranks_;
    double *histogram_;
};

}  // namespace castiron
