// paged_attention for steps with prompts, chunks of prompts and decode rows together. CTAs with blockIdx.y ==
// 0 share the sequences with at most kSplitRows rows (query tokens * group) as decode steps do. Every other
// CTA computes one tile of kTileRows rows of one kv head's group of one sequence: FlashAttention-2
// (arXiv:2307.08691), a warp having 16 rows and all kv tokens. WGMMA=1: the products are warpgroup multiplies
// (as in FlashAttention-3, arXiv:2407.08608). The scale must be positive.
//
// Defines: HEAD_DIM, WARPS, TILE_TOKENS (kv tokens of a stage), PREFILL_STAGES, WGMMA (0, 1), SPLIT_ROWS,
// STAGES (of sequences that are split). SPLIT_ROWS=0: no sequence is, all are tiles from blockIdx.y == 0 on,
// which takes far less shared memory.
#include "attention_decode.cuh"
#if WGMMA
#include "attention_wgmma.cuh"
#endif

namespace castiron {
namespace {

// of a sequence that is split as in decode steps: few rows may see many tokens
constexpr int kSplitRows = SPLIT_ROWS;
constexpr int kWarps = WARPS;
constexpr int kThreads = kWarps * 32;
constexpr int kTileRows = kWarps * 16;
constexpr int kTileTokens = TILE_TOKENS;           // kv tokens of a stage
constexpr int kStages = PREFILL_STAGES;            // of keys and values
constexpr int kAhead = kStages - (WGMMA ? 2 : 1);  // tiles loaded ahead; wgmma may still read the tile before
constexpr int kChunks = kHeadDim / 8;              // of 16 bytes, of a token
constexpr int kSide = kTileTokens * kHeadDim * 2;  // bytes of keys, or values, of a stage
constexpr int kPanel = kTileTokens * 128;          // bytes of 64 columns
constexpr int kSteps = kHeadDim / 16;
static_assert(kAhead >= (WGMMA ? 2 : 1), "a stage to load while others are in use");

// Byte offset of a 16-byte chunk in a [kTileTokens, kHeadDim] tile: panels of 64 columns as
// attention_wgmma.cuh describes, narrower heads as one swizzled tile.
__device__ __forceinline__ int kv_offset(int row, int chunk) {
    if constexpr (kHeadDim < 64) return tile_offset(row, chunk);
    return chunk / 8 * kPanel + row * 128 + ((chunk ^ row) & 7) * 16;
}

// s[16 rows, kTileTokens] of a warp = q . keys^T; with WGMMA it runs on after this.
#if WGMMA
__device__ __forceinline__ void multiply_keys(float (&s)[kTileTokens / 2], const uint32_t (&q)[kSteps][4],
                                              uint32_t keys) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        const uint32_t at = keys + step / 4 * kPanel + step % 4 * 32;
        Wgmma<kTileTokens>::registers(s, q[step], swizzled_descriptor(at), step > 0);
    }
    wgmma_commit();
}
#else
template <typename Query>
__device__ __forceinline__ void multiply_keys(float (&s)[kTileTokens / 2], Query query, uint32_t keys) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kTileTokens / 2; ++i) s[i] = 0;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        uint32_t a[4], b[4];
        query(step, a);
#pragma unroll
        for (int n = 0; n < kTileTokens / 8; n += 2) {
            ldmatrix_x4(b,
                        keys + kv_offset(8 * n + (lane & 7) + (lane >> 4) * 8, 2 * step + ((lane >> 3) & 1)));
            mma_bf16(s + 4 * n, a, b[0], b[1]);
            mma_bf16(s + 4 * n + 4, a, b[2], b[3]);
        }
    }
}
#endif

// o[16 rows, kHeadDim] of a warp += weights[16 rows, kTileTokens] . values; with WGMMA it runs on after this.
__device__ __forceinline__ void multiply_values(float (&o)[kHeadDim / 2],
                                                const uint32_t (&weights)[kTileTokens / 16][4],
                                                uint32_t values) {
#if WGMMA
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kTileTokens / 16; ++step) {
        wgmma_transposed(o, weights[step], transposed_descriptor(values + step * 16 * 128, kPanel));
    }
    wgmma_commit();
#else
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 0; step < kTileTokens / 16; ++step) {
#pragma unroll
        for (int n = 0; n < kHeadDim / 8; n += 2) {
            uint32_t b[4];
            ldmatrix_x4_trans(b, values + kv_offset(16 * step + (lane & 15), n + (lane >> 4)));
            mma_bf16(o + 4 * n, weights[step], b[0], b[1]);
            mma_bf16(o + 4 * n + 4, weights[step], b[2], b[3]);
        }
    }
#endif
}

#if WGMMA
template <int kPending>
struct Pending {  // how many groups of multiplies may be unfinished
    static constexpr int kCount = kPending;
};
#endif

// Item `item` of all (sequence, tile of rows, kv head): later rows first, as they have more to do.
__device__ __forceinline__ void attend_tile(const PagedAttentionParams &p, uint8_t *shared, int64_t item) {
    __shared__ int first[kMaxSeqs + 1];  // first item of each sequence
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
    const int group = p.num_heads / p.kv_heads, num_seqs = p.header[kNumSeqs];
    if (warp == 0) {
        int sum = 0;
        for (int base = 0; base < num_seqs; base += 32) {
            const int seq = base + lane;
            int scan = 0;
            if (seq < num_seqs) {
                const int rows = (p.query_starts[seq + 1] - p.query_starts[seq]) * group;
                scan = rows <= kSplitRows ? 0 : (rows + kTileRows - 1) / kTileRows * p.kv_heads;
            }
            for (int step = 1; step < 32; step *= 2) {
                const int other = __shfl_up_sync(0xffffffffu, scan, step);
                if (lane >= step) scan += other;
            }
            if (seq < num_seqs) first[seq + 1] = sum + scan;
            sum += __shfl_sync(0xffffffffu, scan, 31);
        }
        if (lane == 0) first[0] = 0;
    }
    __syncthreads();
    if (item >= first[num_seqs]) {
        wait_for_inputs();
        let_next_start();
        return;
    }
    const DecodeLine items{first, p.seq_lens, num_seqs, 0, 0, 0};
    const int seq = items.find(static_cast<int>(item)), rest = static_cast<int>(item) - first[seq];
    const int query_start = p.query_starts[seq], query_len = p.query_starts[seq + 1] - query_start;
    const int length = p.seq_lens[seq], num_rows = query_len * group, kv_head = rest % p.kv_heads;
    const int first_row = ((num_rows + kTileRows - 1) / kTileRows - 1 - rest / p.kv_heads) * kTileRows;
    const int past = length - query_len;  // position of the first query token
    const int kv_end = past + (min(first_row + kTileRows, num_rows) - 1) / group + 1;
    const int num_tiles = (kv_end + kTileTokens - 1) / kTileTokens;

    // Loading: thread i has chunk i % kChunks of every kPassRows-th token; 16 tokens in a line share a block.
    constexpr int kPassRows = kThreads / kChunks, kPasses = (kTileTokens + kPassRows - 1) / kPassRows;
    constexpr int kLookUps = kPassRows >= 16 ? kPasses : kTileTokens / 16;
    const uint32_t ring = shared_address(shared);
    const int32_t *table = p.block_tables + static_cast<int64_t>(seq) * p.table_width;
    const int block_shift = __ffs(p.block_size) - 1, thread_row = thread / kChunks, chunk = thread % kChunks;
    const int64_t head_size = static_cast<int64_t>(p.block_size) * kHeadDim;
    int blocks[kLookUps];  // of the tile that is loaded next
    auto look_up = [&](int tile) {
#pragma unroll
        for (int i = 0; i < kLookUps; ++i) {
            const int token = tile * kTileTokens + (kPassRows >= 16 ? i * kPassRows + thread_row : i * 16);
            blocks[i] = token < kv_end ? table[token >> block_shift] : 0;
        }
    };
    int loaded = 0, write_slot = 0;
    auto load = [&]() {
        if (loaded < num_tiles) {
            const uint32_t stage = ring + write_slot * (2 * kSide);
#pragma unroll
            for (int i = 0; i < kPasses; ++i) {
                const int row = i * kPassRows + thread_row, token = loaded * kTileTokens + row;
                if (kPassRows > kTileTokens && row >= kTileTokens) break;
                const int block = blocks[kPassRows >= 16 ? i : i * kPassRows / 16];
                const bf16 *keys = p.cache +
                                   (static_cast<int64_t>(block) * 2 * p.kv_heads + kv_head) * head_size +
                                   (token & (p.block_size - 1)) * kHeadDim + chunk * 8;
                const uint32_t to = stage + kv_offset(row, chunk);
                cp_async_16(to, keys, token < kv_end);
                cp_async_16(to + kSide, keys + p.kv_heads * head_size, token < kv_end);
            }
            write_slot = write_slot + 1 == kStages ? 0 : write_slot + 1;
            look_up(++loaded);
        }
        cp_async_commit();
    };
    look_up(0);

    wait_for_inputs();
#pragma unroll
    for (int stage = 0; stage < kAhead; ++stage) load();
    let_next_start();

    // Rows g and g + 8 of the warp: their queries, positions and outputs.
    int position[2];
    const bf16 *from[2];
    bool live[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = first_row + 16 * warp + g + 8 * half, token = row / group;
        live[half] = row < num_rows;
        position[half] = live[half] ? past + token : kv_end - 1;
        from[half] = p.q + (query_start + token) * p.q_stride +
                     static_cast<int64_t>(kv_head * group + row % group) * kHeadDim + 2 * t;
    }
    const int least_position = past + (first_row + 16 * warp) / group;  // of the warp's rows
#if WGMMA
    uint32_t query[kSteps][4];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) load_query(query[step], from, live, step);
#else
    uint32_t q[kSharedQueries ? 1 : kSteps][4];
    uint4 *own_q = reinterpret_cast<uint4 *>(shared + kStages * 2 * kSide) + warp * kSteps * 32 + lane;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        uint32_t *a = q[kSharedQueries ? 0 : step];
        load_query(a, from, live, step);
        if (kSharedQueries) own_q[step * 32] = make_uint4(a[0], a[1], a[2], a[3]);
    }
    auto query = [&](int step, uint32_t *a) {
        if constexpr (kSharedQueries) {
            const uint4 fragment = own_q[step * 32];
            a[0] = fragment.x, a[1] = fragment.y, a[2] = fragment.z, a[3] = fragment.w;
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) a[i] = q[step][i];
        }
    };
#endif

    const float scale = p.scale * kLog2e;
    float o[kHeadDim / 2] = {};                          // o[4 * n + i]: 8 columns of the rows
    float m[2] = {-INFINITY, -INFINITY}, l[2] = {0, 0};  // m unscaled; l: this lane's share of the row
    float alpha[2];
    // s of tile `tile` becomes exp2(scale * (s - m)); alpha is what earlier results shrink by.
    auto softmax = [&](float (&s)[kTileTokens / 2], int tile) {
        const int token = tile * kTileTokens;
        if (token + kTileTokens - 1 > least_position) {
#pragma unroll
            for (int i = 0; i < kTileTokens / 2; ++i) {
                if (token + i / 4 * 8 + 2 * t + (i & 1) > position[(i / 2) & 1]) s[i] = -INFINITY;
            }
        }
        // Token 0 is in the first tile and every row sees it, so m is finite from there on.
        float base[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float largest = m[half];
#pragma unroll
            for (int n = 0; n < kTileTokens / 8; ++n) {
                largest = fmaxf(largest, fmaxf(s[4 * n + 2 * half], s[4 * n + 2 * half + 1]));
            }
            largest = quad_max(largest);
            base[half] = largest == -INFINITY ? 0.0f : largest * scale;
            alpha[half] = exp2_approx(m[half] * scale - base[half]);
            m[half] = largest;
            l[half] *= alpha[half];
        }
#pragma unroll
        for (int i = 0; i < kTileTokens / 2; ++i) {
            s[i] = exp2_approx(s[i] * scale - base[(i / 2) & 1]);
            l[(i / 2) & 1] += s[i];
        }
    };
    uint32_t weights[kTileTokens / 16][4] = {};
    // o = alpha * o + s . values
    auto accumulate = [&](const float (&s)[kTileTokens / 2], uint32_t values) {
#pragma unroll
        for (int i = 0; i < kTileTokens / 4; ++i) weights[i / 4][i % 4] = pack_bf16(s[2 * i], s[2 * i + 1]);
#pragma unroll
        for (int i = 0; i < kHeadDim / 2; ++i) o[i] *= alpha[(i / 2) & 1];
        multiply_values(o, weights, values);
    };
    int read_slot = 0;
    auto next_stage = [&]() {  // address of the keys of the next tile
        const uint32_t keys = ring + read_slot * (2 * kSide);
        read_slot = read_slot + 1 == kStages ? 0 : read_slot + 1;
        return keys;
    };
#if WGMMA
    // The scores of the next tile are multiplied while this tile's softmax is computed, and the values of
    // this tile while the next one's is (FlashAttention-3, section 3.2). Three tiles are in use then.
    auto arrive = []() {
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // what cp.async wrote, for wgmma
        __syncthreads();
    };
    auto finish = [&](float (&s)[kTileTokens / 2], int tile, auto pending, uint32_t values) {
        softmax(s, tile);
        pin(s);
        wgmma_wait<decltype(pending)::kCount>();  // the values of the tile before
        pin(o);
        pin(weights);
        accumulate(s, values);
    };
    float scores[2][kTileTokens / 2];
    cp_async_wait<kAhead - 1>();
    arrive();
    uint32_t keys = next_stage();
    multiply_keys(scores[0], query, keys);
    wgmma_wait<0>();
    pin(scores[0]);
    auto step = [&](float (&s)[kTileTokens / 2], float (&next)[kTileTokens / 2], int tile) {
        cp_async_wait<kAhead - 2>();  // the next tile
        arrive();
        load();  // into the slot of the tile before the last, which nobody reads any more
        const uint32_t next_keys = next_stage();
        multiply_keys(next, query, next_keys);
        finish(s, tile, Pending<1>{}, keys + kSide);
        wgmma_wait<1>();  // the next tile's scores
        pin(next);
        keys = next_keys;
    };
    int tile = 0;
    for (; tile + 2 < num_tiles; tile += 2) {
        step(scores[0], scores[1], tile);
        step(scores[1], scores[0], tile + 1);
    }
    if (tile + 1 < num_tiles) {
        step(scores[0], scores[1], tile);
        finish(scores[1], tile + 1, Pending<0>{}, keys + kSide);
    } else {
        finish(scores[0], tile, Pending<0>{}, keys + kSide);
    }
    wgmma_wait<0>();
    pin(o);
    pin(weights);
#else
    for (int tile = 0; tile < num_tiles; ++tile) {
        cp_async_wait<kAhead - 1>();
        __syncthreads();
        load();  // into a slot that nobody reads any more
        const uint32_t keys = next_stage();
        float s[kTileTokens / 2];
        multiply_keys(s, query, keys);
        softmax(s, tile);
        accumulate(s, keys + kSide);
    }
#endif
    cp_async_wait<0>();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float inverse = 1.0f / quad_sum(l[half]);
        if (!live[half]) continue;
        const int row = first_row + 16 * warp + g + 8 * half;
        bf16 *to = p.y + (query_start + row / group) * p.y_stride +
                   static_cast<int64_t>(kv_head * group + row % group) * kHeadDim + 2 * t;
#pragma unroll
        for (int n = 0; n < kHeadDim / 8; ++n) {
            *reinterpret_cast<uint32_t *>(to + 8 * n) =
                pack_bf16(o[4 * n + 2 * half] * inverse, o[4 * n + 2 * half + 1] * inverse);
        }
    }
}

}  // namespace
}  // namespace castiron

extern "C" __global__ void __launch_bounds__(castiron::kThreads, 1)
    paged_attention_mixed(const __grid_constant__ castiron::PagedAttentionParams p) {
    extern __shared__ uint4 shared_memory[];
    uint8_t *shared = reinterpret_cast<uint8_t *>(shared_memory);
    shared += -castiron::shared_address(shared) & 1023;                  // swizzle atoms are aligned
    constexpr unsigned kSplitLayers = castiron::kSplitRows > 0 ? 1 : 0;  // of CTAs, before those of tiles
#if SPLIT_ROWS > 0
    if (blockIdx.y < kSplitLayers) {
        castiron::attend_decode<castiron::kWarps, STAGES>(p, shared, blockIdx.x, gridDim.x,
                                                          castiron::kSplitRows);
        return;
    }
#endif
    castiron::attend_tile(p, shared,
                          static_cast<int64_t>(blockIdx.y - kSplitLayers) * gridDim.x + blockIdx.x);
}
