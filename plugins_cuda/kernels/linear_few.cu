// y[T, n] = x[T, k] . W[n, k]^T (+ bias) for few tokens: as fast as the packed weight streams from memory.
//
// A cluster of gridDim.x CTAs owns 64 rows of W and splits k. The warps of a CTA take the tiles of its part
// in turn (warp w tiles w, w + kWarps, ...) and never wait for each other until the end: each has its own
// ring of kSlots slots in shared memory, holding a tile (one bulk copy) and the x of its columns (cp.async),
// and refills a slot as soon as it has used it. The whole ring of weights is requested before the kernel
// waits for its inputs. The products are mma.m16n8k16 with W as A and x^T as B. At the end the warps' sums
// meet in shared memory, and a CTA sends the sums of rows that another owns to it; all in a fixed order.
//
// -DSCHEME=SCHEME_... -DTOKENS=8|16 (capacity) -DOUT_F32=0|1 (type of y) -DWARPS=... -DSLOTS=...
// -DSHARED_BYTES=... (of a launch) -DPER_SM=... (CTAs that run on a multiprocessor)
#include "abi.cuh"
#include "kernels/few_tokens.cuh"
#include "kernels/weight_tile.cuh"

namespace castiron {

constexpr int kTokens = TOKENS;
constexpr int kTokenTiles = kTokens / 8;
constexpr int kWarps = WARPS;
constexpr int kThreads = 32 * kWarps;
constexpr int kSlots = SLOTS;
constexpr bool kDense = kScheme == SCHEME_BF16 || kIsFp8;
constexpr int kXBytes = kIsFp8 ? 1 : 2;  // of an element of x
constexpr int kPanels = 4;               // of 16 rows

constexpr int kXPitch =
    kUnit * kXBytes;  // bytes of a token; 16-byte chunk c of its row lies at c ^ (token & 7)
constexpr int kSlotBytes = kTileBytes + kTokens * kXPitch;
constexpr int kRingBytes = kSlots * kSlotBytes;  // of a warp
// [CTA that sends][token][own quads of rows] for every split up to 8: at most 18 quads, of 3 CTAs
constexpr int kReceivedBytes = kTokens * 18 * 16;
constexpr int kPartialPitch = kTileRows + 4;  // floats; a fragment's stores hit 32 banks
static_assert(kTokens * kPartialPitch * 4 <= kRingBytes, "a warp's sums take its ring's place");
static_assert(kWarps * kRingBytes + kReceivedBytes == SHARED_BYTES, "the launch gives as much");
static_assert(kTileBytes % 16 == 0 && kTokens % 8 == 0);

using Accumulators = float[kPanels][kTokenTiles][4];

constexpr int kPassBytes = 32 * 16;  // of x that a warp copies at once
static_assert(kTokens * kXPitch % kPassBytes == 0);

// Passes of a warp over x of a tile that reach the live tokens.
__device__ __forceinline__ int live_passes(int live) {
    return (live * kXPitch + kPassBytes - 1) / kPassBytes;
}

// Zeros for the tokens that no pass of copy_x reaches.
__device__ __forceinline__ void clear_dead_tokens(int live, uint8_t *x) {
    for (int i = live_passes(live); i < kTokens * kXPitch / kPassBytes; ++i)
        *reinterpret_cast<uint4 *>(x + i * kPassBytes + threadIdx.x % 32 * 16) = make_uint4(0, 0, 0, 0);
}

// x[live tokens, columns of the tile] -> shared memory; tokens beyond `live` in the last pass and columns
// beyond k become zeros, unread.
__device__ __forceinline__ void copy_x(const LinearParams &p, int live, int tile, uint8_t *to,
                                       bool is_aligned) {
    constexpr int kChunks = kXPitch / 16, kElements = 16 / kXBytes;  // of a chunk
    const int passes = live_passes(live);
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kTokens * kXPitch / kPassBytes; ++i) {
        if (i >= passes) break;
        const int index = i * 32 + lane, token = index / kChunks, chunk = index % kChunks;
        const int column = tile * kUnit + chunk * kElements;
        const bool is_live = token < live && column < p.k;
        const uint8_t *from =
            static_cast<const uint8_t *>(p.x) + (is_live ? (token * p.x_stride + column) * kXBytes : 0);
        uint8_t *chunk_to = to + token * kXPitch + (chunk ^ (token & 7)) * 16;
        if (is_aligned) {
            copy_16_async(shared_address(chunk_to), from, is_live);
        } else {
            for (int j = 0; j < 16; ++j) chunk_to[j] = is_live ? from[j] : 0;
        }
    }
}

// B fragments of steps 2 * pair and 2 * pair + 1 of 64 columns; x is the address of their first chunks.
__device__ __forceinline__ void load_x_pair(uint32_t x, int pair, int lane, uint32_t b[2][kTokenTiles][2]) {
    const int matrix = lane / 8, row = lane % 8;
    uint32_t loaded[4];
    if constexpr (kTokenTiles == 1) {
        load_matrices(x + row * kXPitch + ((4 * pair + matrix) ^ row) * 16, loaded);
#pragma unroll
        for (int i = 0; i < 4; ++i) b[i / 2][0][i % 2] = loaded[i];
    } else {
#pragma unroll
        for (int step = 0; step < 2; ++step) {
            const int chunk = 4 * pair + 2 * step + matrix % 2;
#pragma unroll
            for (int t = 0; t < kTokenTiles; t += 2) {
                load_matrices(x + (t * 8 + matrix / 2 * 8 + row) * kXPitch + (chunk ^ row) * 16, loaded);
#pragma unroll
                for (int i = 0; i < 4; ++i) b[step][t + i / 2][i % 2] = loaded[i];
            }
        }
    }
}

// A tile of bf16, or of e4m3 with twice the columns in the same places: sums += W . x^T.
__device__ __forceinline__ void multiply_dense(const uint8_t *tile, uint32_t x, int lane,
                                               Accumulators &sums) {
    const uint32_t rows = shared_address(tile) + lane % 16 * 128;
    uint32_t b[2][kTokenTiles][2];
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        if (step % 2 == 0) load_x_pair(x, step / 2, lane, b);
        const int chunk = (2 * step + lane / 16) ^ (lane & 7);
#pragma unroll
        for (int panel = 0; panel < kPanels; ++panel) {
            uint32_t a[4];
            load_matrices(rows + panel * 2048 + chunk * 16, a);
#pragma unroll
            for (int t = 0; t < kTokenTiles; ++t) {
                if constexpr (kIsFp8) {
                    mma_e4m3(sums[panel][t], a, b[step % 2][t]);
                } else {
                    mma(sums[panel][t], a, b[step % 2][t], sums[panel][t]);
                }
            }
        }
    }
}

constexpr bool kUnpacksScales = kIsKQuant || kIsInt4;

// (scale, minimum) of a panel's rows g and g + 8 and the groups of 64 columns, from shared memory. Blocks of
// 32 keep them as f16 until they're used, for fewer registers.
struct PanelScales {
    uint32_t halves[4];  // [scale 0, 1 of row g], the same of g + 8, both minimums
    float2 values[kUnpacksScales ? kPartGroups : 1][2];  // K-quants, int4: [group][row]
};

__device__ __forceinline__ PanelScales load_panel_scales(const uint8_t *tile, int panel, int part, int lane) {
    PanelScales scales;
    if constexpr (kUnpacksScales) {
        load_scales(tile, panel, part, lane, scales.values);
    } else {
        // 8x8 matrices, transposed: lane 4g + t gets column g of their rows 2t, 2t + 1. Even rows are group
        // 0's scales of 8 weight rows, odd ones group 1's, so every t gets both groups; matrices 2, 3 hold
        // minimums (without minimums: whatever follows, unused).
        const int row = panel * 16 + lane / 8 % 2 * 8, group = lane % 2;
        load_matrices_transposed(shared_address(tile) + lane / 16 * 256 + (group * 64 + row) * 2,
                                 scales.halves);
    }
    return scales;
}

__device__ __forceinline__ float2 scale_of(const PanelScales &scales, int group, int row) {
    if constexpr (kUnpacksScales) return scales.values[group][row];
    const float2 scale = half_pair(scales.halves[row]), minimum = half_pair(scales.halves[2 + row]);
    return {group == 0 ? scale.x : scale.y, group == 0 ? minimum.x : minimum.y};
}

// A tile of integer codes. In a group of columns w = scale * q + minimum, and the mma sees kCodeBias + q,
// exact in bf16; another mma, with ones as A, gives sum x:
//   sum w x = scale * (sum (kCodeBias + q) x) + (minimum - kCodeBias * scale) * sum x.
__device__ __forceinline__ void multiply_codes(const uint8_t *tile, uint32_t x, int lane,
                                               Accumulators &sums) {
    constexpr int kSteps = kPartGroup / 16, kLoaded = kSteps > 2 ? kSteps : 2;
    constexpr bool kHasOffset = kHasMinimum || kCodeBias + kZeroPoint != 0;
    constexpr uint32_t kOnes = 0x3F803F80u;  // bf16
    Accumulators code_sums;                  // of a group
    float x_sums[kTokenTiles][4];            // the same in all rows
#pragma unroll(kParts <= 2 ? kParts : 1)
    for (int part = 0; part < kParts; ++part) {
        CodeWords words[kPanels];
#pragma unroll
        for (int i = 0; i < kPanels; ++i) words[i] = load_code_words(tile, i, part, lane);
        uint32_t b[kLoaded][kTokenTiles][2];
#pragma unroll
        for (int group = 0; group < kPartGroups; ++group) {
            // a group of 128 columns begins in one part and ends in the next
            const bool begins = (part * 64 + group * kPartGroup) % kGroup == 0;
            const bool ends = (part * 64 + (group + 1) * kPartGroup) % kGroup == 0;
            const int first = group * kSteps;
            if (first % 2 == 0) {
#pragma unroll
                for (int pair = 0; pair < kLoaded / 2; ++pair)
                    load_x_pair(x + part * 128, first / 2 + pair, lane, b + 2 * pair);
            }
            if constexpr (kHasOffset) {
                const uint32_t ones[4] = {kOnes, kOnes, kOnes, kOnes};
#pragma unroll
                for (int t = 0; t < kTokenTiles; ++t) {
#pragma unroll
                    for (int j = 0; j < 4; ++j) x_sums[t][j] = begins ? 0.0f : x_sums[t][j];
#pragma unroll
                    for (int step = 0; step < kSteps; ++step)
                        mma(x_sums[t], ones, b[(first + step) % kLoaded][t], x_sums[t]);
                }
            }
#pragma unroll
            for (int i = 0; i < kPanels; ++i) {
#pragma unroll
                for (int t = 0; t < kTokenTiles; ++t) {
#pragma unroll
                    for (int j = 0; j < 4; ++j) code_sums[i][t][j] = begins ? 0.0f : code_sums[i][t][j];
                }
#pragma unroll
                for (int step = 0; step < kSteps; ++step) {
                    uint32_t a[4];
                    unpack_codes(words[i], first + step, a);
#pragma unroll
                    for (int t = 0; t < kTokenTiles; ++t)
                        mma(code_sums[i][t], a, b[(first + step) % kLoaded][t], code_sums[i][t]);
                }
                if (!ends) continue;
                const PanelScales scales = load_panel_scales(tile, i, part, lane);
#pragma unroll
                for (int row = 0; row < 2; ++row) {  // g, g + 8
                    const float2 scale = scale_of(scales, group, row);
                    const float offset = kHasMinimum ? fmaf(scale.x, -kCodeBias, scale.y)
                                                     : scale.x * -(kCodeBias + kZeroPoint);
#pragma unroll
                    for (int t = 0; t < kTokenTiles; ++t) {
#pragma unroll
                        for (int j = 0; j < 2; ++j) {  // token
                            float &sum = sums[i][t][2 * row + j];
                            sum = fmaf(scale.x, code_sums[i][t][2 * row + j], sum);
                            if constexpr (kHasOffset) sum = fmaf(offset, x_sums[t][j], sum);
                        }
                    }
                }
            }
        }
    }
}

// y[token, n..n + 3] = sum + bias; of codes: sum * their scales + bias.
__device__ __forceinline__ void write_sum(const LinearParams &p, int token, int64_t n, float4 sum) {
    if (n >= p.n) return;
    float values[4] = {sum.x, sum.y, sum.z, sum.w};
    const int count = p.n - n < 4 ? int(p.n - n) : 4;
    if constexpr (kIsFp8) {
        const float *rows = row_scales(p.weight, p.n, p.k) + n;
        const float x_scale = p.x_scale[token];
#pragma unroll
        for (int i = 0; i < 4; ++i) values[i] *= rows[i] * x_scale;  // of whole tiles: n is a multiple of 4
    }
    if (p.bias != nullptr) {
#pragma unroll
        for (int i = 0; i < 4; ++i) values[i] += i < count ? p.bias[n + i] : 0.0f;
    }
    const int64_t at = token * p.y_stride + n;
    if constexpr (OUT_F32) {
        write_4(static_cast<float *>(p.y) + at, values, count);
    } else {
        write_4(static_cast<bf16 *>(p.y) + at, values, count);
    }
}

// Quads of 4 rows that a CTA owns of the 16 of a tile: quad q belongs to CTA q % split.
__device__ __forceinline__ int own_quads() {
    return (16 - int(blockIdx.x) + int(gridDim.x) - 1) / int(gridDim.x);
}

// y = the sum of the cluster's CTAs and their warps, whose partial sums lie where their rings were, as
// [token][kPartialPitch].
__device__ __forceinline__ void reduce_and_write(const LinearParams &p, const uint8_t *rings,
                                                 uint8_t *received, uint32_t barrier, int live) {
    const int split = gridDim.x, rank = blockIdx.x, pitch = (16 + split - 1) / split;  // quads
    const int64_t first_row = int64_t(blockIdx.y) * kTileRows;
    for (int item = threadIdx.x; item < live * 16; item += kThreads) {
        const int token = item / 16, quad = item % 16;
        const uint8_t *from = rings + (token * kPartialPitch + quad * 4) * 4;
        float4 sum = *reinterpret_cast<const float4 *>(from);
#pragma unroll
        for (int warp = 1; warp < kWarps; ++warp) {
            const float4 part = *reinterpret_cast<const float4 *>(from + warp * kRingBytes);
            sum.x += part.x;
            sum.y += part.y;
            sum.z += part.z;
            sum.w += part.w;
        }
        if (split == 1) {
            write_sum(p, token, first_row + quad * 4, sum);
        } else {
            const int owner = quad % split;
            const uint8_t *to = received + ((rank * kTokens + token) * pitch + quad / split) * 16;
            store_async(cluster_address(shared_address(to), owner), sum, cluster_address(barrier, owner));
        }
    }
    if (split == 1) return;
    mbarrier_wait(barrier, 0);
    const int own = own_quads();
    for (int item = threadIdx.x; item < live * own; item += kThreads) {
        const int token = item / own, quad = item % own;
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        for (int cta = 0; cta < split; ++cta) {
            const float4 part =
                *reinterpret_cast<const float4 *>(received + ((cta * kTokens + token) * pitch + quad) * 16);
            sum.x += part.x;
            sum.y += part.y;
            sum.z += part.z;
            sum.w += part.w;
        }
        write_sum(p, token, first_row + (quad * split + rank) * 4, sum);
    }
}

}  // namespace castiron

extern "C" __global__ void __launch_bounds__(castiron::kThreads, PER_SM)
    linear_few(const __grid_constant__ castiron::LinearParams p) {
    using namespace castiron;
    extern __shared__ __align__(128) uint8_t rings[];
    __shared__ uint64_t full[kWarps][kSlots];  // the weights of a slot have arrived
    __shared__ uint64_t received;              // the sums of the cluster's CTAs have
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    const int live = min(p.header[p.count], kTokens);
    if (live <= 0) {  // the same in all CTAs of the cluster
        wait_for_inputs();
        return;
    }
    const int tiles = (p.k + kUnit - 1) / kUnit;  // of a row of tiles
    const int first = int(blockIdx.x) * tiles / int(gridDim.x) + warp;
    const int last = int(blockIdx.x + 1) * tiles / int(gridDim.x);
    const uint8_t *weights =
        static_cast<const uint8_t *>(p.weight) + int64_t(blockIdx.y) * tiles * kTileBytes;
    uint8_t *ring = rings + warp * kRingBytes;
    const uint32_t barriers = shared_address(full[warp]);

    if (lane == 0) {
        for (int i = 0; i < kSlots; ++i) mbarrier_init(barriers + 8 * i, 1);
        if (warp == 0) mbarrier_init(shared_address(&received), 1);
        mbarrier_init_fence();
        for (int i = 0; i < kSlots && first + i * kWarps < last; ++i) {
            mbarrier_arrive_expect(barriers + 8 * i, kTileBytes);
            copy_bulk(shared_address(ring + i * kSlotBytes),
                      weights + int64_t(first + i * kWarps) * kTileBytes, kTileBytes, barriers + 8 * i);
        }
        if (warp == 0 && gridDim.x > 1)
            mbarrier_arrive_expect(shared_address(&received), live * own_quads() * int(gridDim.x) * 16);
    }
    for (int i = 0; i < kSlots; ++i) clear_dead_tokens(live, ring + i * kSlotBytes + kTileBytes);
    __syncwarp();
    if (gridDim.x > 1) cluster_arrive_relaxed();
    let_next_start();
    wait_for_inputs();

    const bool is_aligned = ((reinterpret_cast<uint64_t>(p.x) | uint64_t(p.x_stride) * kXBytes) & 15) == 0;
#pragma unroll 1
    for (int i = 0; i < kSlots; ++i) {
        if (first + i * kWarps < last) {
            copy_x(p, live, first + i * kWarps, ring + i * kSlotBytes + kTileBytes, is_aligned);
        }
        commit_async();
    }

    Accumulators sums = {};
    int slot = 0, phase = 0;
#pragma unroll 1
    for (int tile = first; tile < last; tile += kWarps) {
        uint8_t *tile_at = ring + slot * kSlotBytes, *x = tile_at + kTileBytes;
        const uint32_t barrier = barriers + 8 * slot;
        wait_async<kSlots - 1>();
        mbarrier_wait(barrier, phase);
        __syncwarp();  // all lanes' x is there
        if constexpr (kDense) {
            multiply_dense(tile_at, shared_address(x), lane, sums);
        } else {
            multiply_codes(tile_at, shared_address(x), lane, sums);
        }
        __syncwarp();  // all lanes have read the slot
        const int ahead = tile + kSlots * kWarps;
        if (ahead < last) {
            if (lane == 0) {
                mbarrier_arrive_expect(barrier, kTileBytes);
                copy_bulk(shared_address(tile_at), weights + int64_t(ahead) * kTileBytes, kTileBytes,
                          barrier);
            }
            copy_x(p, live, ahead, x, is_aligned);
        }
        commit_async();
        if (++slot == kSlots) {
            slot = 0;
            phase ^= 1;
        }
    }

    wait_async<0>();
    __syncwarp();
    float *own = reinterpret_cast<float *>(ring) + lane / 4;
#pragma unroll
    for (int i = 0; i < kPanels; ++i) {
#pragma unroll
        for (int t = 0; t < kTokenTiles; ++t) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                own[(t * 8 + lane % 4 * 2 + j % 2) * kPartialPitch + i * 16 + j / 2 * 8] = sums[i][t][j];
            }
        }
    }
    __syncthreads();
    if (gridDim.x > 1) cluster_wait();  // all its CTAs run
    reduce_and_write(p, rings, rings + kWarps * kRingBytes, shared_address(&received), live);
}
