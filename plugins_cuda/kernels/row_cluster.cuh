// A row of logits shared by a cluster of CTAs: who has which part, and how the parts' results are combined.
// -DCTAS=8 (of a cluster), or 1: no cluster, which GPUs before sm_90 don't have.
#pragma once
#include "abi.cuh"

#ifndef CTAS
#define CTAS 8
#endif

namespace castiron {

constexpr int kCtas = CTAS, kThreads = 512, kWarps = kThreads / 32;
constexpr int kParts = kCtas * kWarps;  // warps of a cluster

constexpr uint32_t kNoToken = 0xFFFFFFFFu;

// A candidate of an arg max; the lowest token wins among equals.
struct Best {
    float value;
    uint32_t token;
};

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xFF800000u); }

__device__ __forceinline__ Best better(const Best &a, const Best &b) {
    return b.value > a.value || (b.value == a.value && b.token < a.token) ? b : a;
}

// Combines a word of every warp of the cluster. All threads of all its CTAs call it, or none. It has two sets
// of slots, used in turn: a warp may fill the next set while another still reads this one.
class RowCluster {
  public:
    struct Slots {
        uint64_t words[2][kParts];
    };

    // Tells the others that this CTA runs, which they await before their first exchange.
    __device__ explicit RowCluster(Slots &slots) : slots_(slots) {
        if constexpr (kCtas > 1) asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank_));
        arrive();
    }

    __device__ __forceinline__ uint32_t rank() const { return rank_; }

    // After the constructor's arrival: all CTAs run, and see what each wrote before it arrived.
    __device__ __forceinline__ void start() { wait(); }

    __device__ __forceinline__ void barrier() {
        arrive();
        wait();
    }

    // Words of all warps of the cluster by rank * kWarps + warp, in shared memory; `mine` is the same in all
    // lanes. Also a barrier of the cluster.
    __device__ __forceinline__ const uint64_t *exchange(uint64_t mine) {
        uint64_t *words = slots_.words[turn_];
        turn_ ^= 1;
        const uint32_t lane = threadIdx.x % 32;
        if (lane < kCtas) store_remote(&words[rank_ * kWarps + threadIdx.x / 32], lane, mine);
        __syncwarp();
        barrier();
        return words;
    }

    // The best of all threads.
    __device__ __forceinline__ Best best(Best mine) {
        mine = best_of_warp(mine);
        const uint64_t word = static_cast<uint64_t>(__float_as_uint(mine.value)) << 32 | mine.token;
        const uint64_t *words = exchange(word);
        const int lane = threadIdx.x % 32;
        Best result = unpack(words[lane % kParts]);  // the best of a word twice is the same
#pragma unroll
        for (int i = 32; i < kParts; i += 32) result = better(result, unpack(words[lane + i]));
        return best_of_warp(result);
    }

    // The sum over all threads, in an order that depends on nothing.
    __device__ __forceinline__ double sum(double mine) {
        const uint64_t *words = exchange(static_cast<uint64_t>(__double_as_longlong(sum_of_warp(mine))));
        const int lane = threadIdx.x % 32;
        double total = 0.0;
#pragma unroll
        for (int i = 0; i < kParts; i += 32) total += lane + i < kParts ? as_double(words[lane + i]) : 0.0;
        return sum_of_warp(total);
    }

    static __device__ __forceinline__ double sum_of_warp(double value) {
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
        return value;
    }

    static __device__ __forceinline__ double as_double(uint64_t word) {
        return __longlong_as_double(static_cast<long long>(word));
    }

    // Writes to the same place of another CTA's shared memory.
    static __device__ __forceinline__ void store_remote(uint64_t *place, uint32_t rank, uint64_t value) {
        if constexpr (kCtas == 1) {
            *place = value;
            return;
        }
#if CTAS > 1
        const uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(place));
        asm volatile(
            "{\n"
            ".reg .b32 remote;\n"
            "mapa.shared::cluster.u32 remote, %0, %1;\n"
            "st.shared::cluster.u64 [remote], %2;\n"
            "}" ::"r"(address),
            "r"(rank), "l"(value)
            : "memory");
#endif
    }

  private:
    static __device__ __forceinline__ Best best_of_warp(Best mine) {
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) {
            const Best other = {__shfl_xor_sync(~0u, mine.value, offset),
                                __shfl_xor_sync(~0u, mine.token, offset)};
            mine = better(mine, other);
        }
        return mine;
    }

    static __device__ __forceinline__ Best unpack(uint64_t word) {
        return {__uint_as_float(static_cast<uint32_t>(word >> 32)), static_cast<uint32_t>(word)};
    }

    static __device__ __forceinline__ void arrive() {
        if constexpr (kCtas > 1) asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    }
    static __device__ __forceinline__ void wait() {
        if constexpr (kCtas > 1) {
            asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
        } else {
            __syncthreads();
        }
    }

    Slots &slots_;
    uint32_t rank_ = 0;
    int turn_ = 0;
};

// A CTA's part of a row of logits: `num_quads` groups of four tokens from token 4 * first_quad on. Thread t
// does quads t, t + kThreads, ...: its tokens ascend.
struct RowPart {
    const float *logits;  // of the row
    int vocab;
    int first_quad, num_quads;
    bool aligned;

    __device__ RowPart(const float *row, int vocab, uint32_t rank) : logits(row), vocab(vocab) {
        const int quads = (vocab + 3) / 4, share = (quads + kCtas - 1) / kCtas;
        first_quad = static_cast<int>(rank) * share;
        num_quads = max(0, min(share, quads - first_quad));
        aligned = reinterpret_cast<uint64_t>(row) % 16 == 0;
    }

    __device__ __forceinline__ uint32_t token(int quad) const { return 4u * (first_quad + quad); }

    // Logits of a quad; NaN, which no kernel chooses, beyond the vocabulary and the part.
    __device__ __forceinline__ float4 load(int quad) const {
        const float none = __uint_as_float(0x7FFFFFFFu);
        if (quad >= num_quads) return make_float4(none, none, none, none);
        const int first = 4 * (first_quad + quad), left = vocab - first;
        if (aligned && left >= 4) return *reinterpret_cast<const float4 *>(logits + first);
        return make_float4(logits[first], left > 1 ? logits[first + 1] : none,
                           left > 2 ? logits[first + 2] : none, left > 3 ? logits[first + 3] : none);
    }
};

// The thread's largest logit that isn't NaN, kNoToken if it has none; keep(quad, logits) sees each quad.
// Tokens descend, so that the first of equals is taken last and minus infinity needs no care.
template <typename Keep>
__device__ __forceinline__ Best largest_logit(const RowPart &part, Keep keep) {
    constexpr int kBatch = 8;  // quads in flight
    Best best = {minus_infinity(), kNoToken};
    const int turns = (part.num_quads + kThreads - 1) / kThreads;
    for (int turn = (turns - 1) / kBatch * kBatch; turn >= 0; turn -= kBatch) {
        float4 quads[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) quads[i] = part.load(threadIdx.x + (turn + i) * kThreads);
#pragma unroll
        for (int i = kBatch - 1; i >= 0; --i) {
            const int quad = threadIdx.x + (turn + i) * kThreads;
            const uint32_t token = part.token(quad);
            keep(quad, quads[i]);
            const float x[4] = {quads[i].x, quads[i].y, quads[i].z, quads[i].w};
#pragma unroll
            for (int j = 3; j >= 0; --j) {
                if (x[j] >= best.value) best = {x[j], token + j};
            }
        }
    }
    return best;
}

}  // namespace castiron
