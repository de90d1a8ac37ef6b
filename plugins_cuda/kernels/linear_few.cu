// y[T, n] = x[T, k] . W[n, k]^T (+ bias) for few tokens: as fast as the packed weight streams from memory.
//
// A cluster of gridDim.x CTAs owns kRows rows of W and splits k. A CTA walks its part of k in stages of
// kColumns columns. As m64 stores a row of tiles contiguously, a stage's weights are one bulk copy per 64
// rows; kStages of them form a ring in shared memory, and all but one are requested before the kernel waits
// for its inputs. x follows by cp.async. Warps split the stage into panels of 16 rows and parts of 64
// columns; the products are mma.m16n8k16 with W as A and x^T as B. At the end the partial sums of warps and
// CTAs meet in shared memory (distributed, within the cluster) and are added in a fixed order.
//
// -DSCHEME=SCHEME_... -DTOKENS=8|16|32|64 (capacity) -DOUT_F32=0|1 (type of y) -DSHARED_BYTES=... (of a
// launch)
#include "abi.cuh"
#include "kernels/few_tokens.cuh"
#include "kernels/weight_tile.cuh"

namespace castiron {

constexpr int kTokens = TOKENS;
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr bool kIsBf16 = kScheme == SCHEME_BF16;
// Few tokens: integer codes go through the mma and f32 scales are applied to the sums of each group, which
// costs kTokens operations a group. Many tokens: weights are dequantized first.
constexpr bool kScaleSums = !kIsBf16 && kTokens <= (kGroup == 16 ? 8 : 16);

// More rows for more tokens: every CTA reads all of x's columns, kTokens / kRows as much as bf16 weights.
constexpr int kRowGroups = kTokens <= 16 ? 1 : 2;  // of 64 rows
constexpr int kRows = 64 * kRowGroups;
constexpr int kWarpPanels = kIsBf16 ? 1 : 2;               // panels of 16 rows a warp works on
constexpr int kRowWarps = 4 * kRowGroups / kWarpPanels;    // warps along rows,
constexpr int kColumnWarps = kWarps / kRowWarps;           // and along columns
constexpr int kStageTiles = kIsKQuant ? 1 : kColumnWarps;  // tiles along k
constexpr int kColumns = kStageTiles * kUnit;
constexpr int kWarpParts = kColumns / 64 / kColumnWarps;  // runs of 64 columns a warp works on
static_assert(kWarpParts * kColumnWarps * 64 == kColumns);

constexpr int kWeightBytes = kRowGroups * kStageTiles * kTileBytes;
constexpr int kXPitch = kColumns * 2 + 16;  // bytes; 8 tokens' 16-byte chunks fall into different banks
constexpr int kStageBytes = kWeightBytes + kTokens * kXPitch;
// Two CTAs fit a multiprocessor (of 228 KiB), so that the next kernel's first loads overlap this one's end.
constexpr int kFitting = 115000 / kStageBytes;
constexpr int kStages = kFitting > 8 ? 8 : kFitting < 3 ? 3 : kFitting;
constexpr int kCtasPerSm = kFitting < 3 ? 1 : 2;
constexpr int kPartialPitch = kRows + 4;                 // floats; a fragment's stores hit 32 banks
constexpr int kPartialFloats = kTokens * kPartialPitch;  // of one warp column
static_assert(kColumnWarps * kPartialFloats * 4 <= kStages * kStageBytes);
static_assert(kStages * kStageBytes == SHARED_BYTES, "the launch gives as much");
static_assert(kWeightBytes % 16 == 0 && kStageBytes % 16 == 0);

constexpr int kTokenTiles = kTokens / 8;
using Accumulators = float[kWarpPanels][kTokenTiles][4];

struct Work {
    int64_t row_tiles;  // index of the first tile of this CTA's first row group
    int first, last;    // stages
    int tiles;          // of a row of W
    int row_groups;     // of this CTA that exist
    int live;           // tokens
};

__device__ __forceinline__ void copy_weights(const LinearParams &p, const Work &work, int stage, uint8_t *to,
                                             uint32_t barrier) {
    const int tile = stage * kStageTiles;
    const uint32_t bytes = min(kStageTiles, work.tiles - tile) * kTileBytes;
    expect_bytes(barrier, work.row_groups * bytes);
    for (int group = 0; group < work.row_groups; ++group) {
        const int64_t index = work.row_tiles + int64_t(group) * work.tiles + tile;
        const uint8_t *from = static_cast<const uint8_t *>(p.weight) + index * kTileBytes;
        bulk_copy(shared_address(to + group * kStageTiles * kTileBytes), from, bytes, barrier);
    }
}

// x[live, columns of the stage] -> shared memory; other tokens and columns beyond k become zeros, unread.
__device__ __forceinline__ void copy_x(const LinearParams &p, const Work &work, int stage, uint8_t *to,
                                       bool is_aligned) {
    constexpr int kChunks = kColumns / 8;
#pragma unroll
    for (int i = 0; i < (kTokens * kChunks + kThreads - 1) / kThreads; ++i) {
        const int index = i * kThreads + int(threadIdx.x);
        const int token = index / kChunks, chunk = index % kChunks;
        if (token >= kTokens) break;
        const int column = stage * kColumns + chunk * 8;
        const bool is_live = token < work.live && column < p.k;
        const bf16 *from = p.x + (is_live ? token * p.x_stride + column : 0);
        uint8_t *chunk_to = to + token * kXPitch + chunk * 16;
        if (is_aligned) {
            copy_16_async(shared_address(chunk_to), from, is_live);
        } else {
            uint16_t values[8] = {};
            for (int j = 0; is_live && j < 8; ++j) values[j] = reinterpret_cast<const uint16_t *>(from)[j];
            *reinterpret_cast<uint4 *>(chunk_to) =
                make_uint4(values[0] | values[1] << 16, values[2] | values[3] << 16,
                           values[4] | values[5] << 16, values[6] | values[7] << 16);
        }
    }
}

// B fragments of 16 columns and two tiles of 8 tokens (b[0..1], b[2..3]); of 8 tokens: of 32 columns.
__device__ __forceinline__ void load_x(uint32_t x, int token, int column, int lane, uint32_t b[4]) {
    const int matrix = lane / 8;
    if constexpr (kTokenTiles == 1) {
        load_matrices(x + lane % 8 * kXPitch + (column + matrix * 8) * 2, b);
    } else {
        load_matrices(x + (token + matrix / 2 * 8 + lane % 8) * kXPitch + (column + matrix % 2 * 8) * 2, b);
    }
}

// B fragments of all tokens and two steps.
__device__ __forceinline__ void load_x_pair(uint32_t x, int column, int lane, uint32_t b[2][kTokenTiles][2]) {
    uint32_t loaded[4];
    if constexpr (kTokenTiles == 1) {
        load_x(x, 0, column, lane, loaded);
#pragma unroll
        for (int i = 0; i < 4; ++i) b[i / 2][0][i % 2] = loaded[i];
    } else {
#pragma unroll
        for (int step = 0; step < 2; ++step) {
#pragma unroll
            for (int pair = 0; pair < kTokenTiles / 2; ++pair) {
                load_x(x, pair * 16, column + step * 16, lane, loaded);
#pragma unroll
                for (int i = 0; i < 4; ++i) b[step][2 * pair + i / 2][i % 2] = loaded[i];
            }
        }
    }
}

// 64 columns with weights as bf16: accumulators += W . x^T.
__device__ __forceinline__ void multiply(const uint8_t *tile, int panel, int part, uint32_t x, int column,
                                         int lane, int live, Accumulators &sums) {
    uint32_t a[kWarpPanels][4][4];
    if constexpr (kIsBf16) {
        const int row = panel * 16 + lane % 16;
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            const int chunk = (2 * step + lane / 16) ^ (row & 7);
            load_matrices(shared_address(tile) + row * 128 + chunk * 16, a[0][step]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < kWarpPanels; ++i) load_fragments(tile, panel + i, part, lane, a[i]);
    }
    uint32_t b[4];
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        if constexpr (kTokenTiles == 1) {
            if (step % 2 == 0) load_x(x, 0, column + step * 16, lane, b);
#pragma unroll
            for (int i = 0; i < kWarpPanels; ++i) mma(sums[i][0], a[i][step], b + step % 2 * 2, sums[i][0]);
        } else {
#pragma unroll
            for (int pair = 0; pair < kTokenTiles / 2; ++pair) {
                if (pair * 16 >= live) break;
                load_x(x, pair * 16, column + step * 16, lane, b);
#pragma unroll
                for (int i = 0; i < kWarpPanels; ++i) {
                    mma(sums[i][2 * pair], a[i][step], b, sums[i][2 * pair]);
                    mma(sums[i][2 * pair + 1], a[i][step], b + 2, sums[i][2 * pair + 1]);
                }
            }
        }
    }
}

// (scale, minimum) of a panel's rows g and g + 8 and the groups of 64 columns, from shared memory. Blocks of
// 32 keep them as f16 until they're used, for fewer registers.
struct PanelScales {
    uint32_t halves[4];                             // [scale 0, 1 of row g], the same of g + 8, both minimums
    float2 values[kIsKQuant ? 64 / kGroup : 1][2];  // K-quants: [group][row]
};

__device__ __forceinline__ PanelScales load_panel_scales(const uint8_t *tile, int panel, int part, int lane) {
    PanelScales scales;
    if constexpr (kIsKQuant) {
        load_scales(tile, panel, part, lane, scales.values);
    } else {
        // 8x8 matrices, transposed: lane 4g + t gets column g of their rows 2t, 2t + 1. Even rows are group
        // 0's scales of 8 weight rows, odd ones group 1's, so every t gets both groups; matrices 2, 3 hold
        // minimums.
        const int row = panel * 16 + lane / 8 % 2 * 8, group = lane % 2;
        load_matrices_transposed(shared_address(tile) + lane / 16 * 256 + (group * 64 + row) * 2,
                                 scales.halves);
    }
    return scales;
}

__device__ __forceinline__ float2 scale_of(const PanelScales &scales, int group, int row) {
    if constexpr (kIsKQuant) return scales.values[group][row];
    const float2 scale = half_pair(scales.halves[row]), minimum = half_pair(scales.halves[2 + row]);
    return {group == 0 ? scale.x : scale.y, group == 0 ? minimum.x : minimum.y};
}

// 64 columns with weights as integer codes. In a group of columns w = scale * (q - kZeroPoint) + minimum, and
// the mma sees kCodeBias + q, exact in bf16. It starts from -(kCodeBias + kZeroPoint) * sum x, which another
// mma with a constant A gives, so that
//   sum w x = scale * (start + sum (kCodeBias + q) x) + minimum * sum x.
__device__ __forceinline__ void multiply_codes(const uint8_t *tile, int panel, int part, uint32_t x,
                                               int column, int lane, Accumulators &sums) {
    constexpr int kGroups = 64 / kGroup, kSteps = kGroup / 16;
    constexpr float kPerStart = kHasMinimum ? -1.0f / 128 : 0.0f;
    constexpr uint32_t kMinusBias = (0xC300u | kZeroPoint) * 0x10001u;  // bf16 of -(128 + kZeroPoint), twice
    CodeWords words[kWarpPanels];
    PanelScales scales[kWarpPanels];
#pragma unroll
    for (int i = 0; i < kWarpPanels; ++i) {
        words[i] = load_code_words(tile, panel + i, part, lane);
        scales[i] = load_panel_scales(tile, panel + i, part, lane);
    }
    uint32_t b[2][kTokenTiles][2];  // of two steps
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
        const int first = group * kSteps;
        if (first % 2 == 0) load_x_pair(x, column + first * 16, lane, b);
        float start[kTokenTiles][4] = {};
        if constexpr (kCodeBias != 0) {
            const uint32_t minus[4] = {kMinusBias, kMinusBias, kMinusBias, kMinusBias};
#pragma unroll
            for (int t = 0; t < kTokenTiles; ++t) {
#pragma unroll
                for (int step = first; step < first + kSteps; ++step)
                    mma(start[t], minus, b[step % 2][t], start[t]);
            }
        }
#pragma unroll
        for (int i = 0; i < kWarpPanels; ++i) {
            float group_sums[kTokenTiles][4];
#pragma unroll
            for (int t = 0; t < kTokenTiles; ++t) {
#pragma unroll
                for (int j = 0; j < 4; ++j) group_sums[t][j] = start[t][j % 2];  // the same for all rows
            }
#pragma unroll
            for (int step = first; step < first + kSteps; ++step) {
                uint32_t a[4];
                unpack_codes(words[i], step, a);
#pragma unroll
                for (int t = 0; t < kTokenTiles; ++t) mma(group_sums[t], a, b[step % 2][t], group_sums[t]);
            }
            const float2 scale[2] = {scale_of(scales[i], group, 0), scale_of(scales[i], group, 1)};
            // times start: minimum times sum x
            const float minimum[2] = {scale[0].y * kPerStart, scale[1].y * kPerStart};
#pragma unroll
            for (int t = 0; t < kTokenTiles; ++t) {
#pragma unroll
                for (int j = 0; j < 4; ++j) {  // j / 2: row g or g + 8; j % 2: token
                    sums[i][t][j] = fmaf(scale[j / 2].x, group_sums[t][j], sums[i][t][j]);
                    if constexpr (kHasMinimum)
                        sums[i][t][j] = fmaf(minimum[j / 2], start[t][j % 2], sums[i][t][j]);
                }
            }
        }
    }
}

// Add up the partial sums of the cluster's CTAs and their warps; every CTA writes kRows / split rows of y.
__device__ __forceinline__ void reduce_and_write(const LinearParams &p, const float *partials, int live) {
    const int split = gridDim.x, rank = blockIdx.x;
    const int cta_rows = kRows / split, quads = cta_rows / 4;
    for (int item = threadIdx.x; item < live * quads; item += kThreads) {
        const int token = item / quads, row = rank * cta_rows + item % quads * 4;
        const int64_t n = int64_t(blockIdx.y) * kRows + row;
        if (n >= p.n) continue;
        const uint32_t local = shared_address(partials + token * kPartialPitch + row);
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
        for (int cta = 0; cta < split; ++cta) {
            const uint32_t remote = address_in_cluster(local, cta);
#pragma unroll
            for (int column = 0; column < kColumnWarps; ++column) {
                const float4 part = load_from_cluster(remote + column * kPartialFloats * 4);
                sum.x += part.x;
                sum.y += part.y;
                sum.z += part.z;
                sum.w += part.w;
            }
        }
        float values[4] = {sum.x, sum.y, sum.z, sum.w};
        const int count = p.n - n < 4 ? int(p.n - n) : 4;
        if (p.bias != nullptr) {
            for (int i = 0; i < 4; ++i) values[i] += i < count ? p.bias[n + i] : 0.0f;
        }
        const int64_t at = token * p.y_stride + n;
        if constexpr (OUT_F32) {
            write_4(static_cast<float *>(p.y) + at, values, count);
        } else {
            write_4(static_cast<bf16 *>(p.y) + at, values, count);
        }
    }
}

}  // namespace castiron

extern "C" __global__ void __launch_bounds__(castiron::kThreads, castiron::kCtasPerSm)
    linear_few(const __grid_constant__ castiron::LinearParams p) {
    using namespace castiron;
    extern __shared__ __align__(128) uint8_t ring[];
    __shared__ uint64_t full[kStages];  // weights of a slot have arrived
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    Work work;
    work.live = min(p.header[p.count], kTokens);
    if (work.live <= 0) {  // the same in all CTAs of the cluster
        wait_for_inputs();
        return;
    }
    work.tiles = (p.k + kUnit - 1) / kUnit;
    const int num_stages = (work.tiles + kStageTiles - 1) / kStageTiles;
    work.first = int(blockIdx.x) * num_stages / int(gridDim.x);
    work.last = int(blockIdx.x + 1) * num_stages / int(gridDim.x);
    const int row_group = blockIdx.y * kRowGroups;
    work.row_groups = min(kRowGroups, (p.n + 63) / 64 - row_group);
    work.row_tiles = int64_t(row_group) * work.tiles;

    if (threadIdx.x == 0) {
        for (int i = 0; i < kStages; ++i) init_barrier(shared_address(full + i), 1);
        fence_barrier_init();
        for (int i = 0; i < kStages - 1 && work.first + i < work.last; ++i) {
            copy_weights(p, work, work.first + i, ring + i * kStageBytes, shared_address(full + i));
        }
    }
    __syncthreads();
    let_next_start();
    wait_for_inputs();

    const bool is_aligned = ((reinterpret_cast<uint64_t>(p.x) | uint64_t(p.x_stride) * 2) & 15) == 0;
#pragma unroll 1
    for (int i = 0; i < kStages - 1; ++i) {
        if (work.first + i < work.last) {
            copy_x(p, work, work.first + i, ring + i * kStageBytes + kWeightBytes, is_aligned);
        }
        commit_async();
    }

    const int row_warp = warp % kRowWarps, column_warp = warp / kRowWarps;
    const int group = row_warp * kWarpPanels / 4, panel = row_warp * kWarpPanels % 4;
    Accumulators sums = {};
    int slot = 0, phase = 0;
#pragma unroll 1
    for (int stage = work.first; stage < work.last; ++stage) {
        wait_async<kStages - 2>();
        wait_barrier(shared_address(full + slot), phase);
        __syncthreads();  // x is there, and the slot before this one is free
        const int ahead = stage + kStages - 1;
        if (ahead < work.last) {
            const int free_slot = slot == 0 ? kStages - 1 : slot - 1;
            uint8_t *to = ring + free_slot * kStageBytes;
            if (threadIdx.x == 0) copy_weights(p, work, ahead, to, shared_address(full + free_slot));
            copy_x(p, work, ahead, to + kWeightBytes, is_aligned);
        }
        commit_async();
        const uint8_t *weights = ring + slot * kStageBytes;
        const uint32_t x = shared_address(weights + kWeightBytes);
#pragma unroll
        for (int i = 0; i < kWarpParts; ++i) {
            const int run = i * kColumnWarps + column_warp;  // of 64 columns
            const int tile = run / kParts;
            if (stage * kStageTiles + tile < work.tiles) {
                const uint8_t *from = weights + (group * kStageTiles + tile) * kTileBytes;
                if constexpr (kScaleSums) {
                    multiply_codes(from, panel, run % kParts, x, run * 64, lane, sums);
                } else {
                    multiply(from, panel, run % kParts, x, run * 64, lane, work.live, sums);
                }
            }
        }
        if (++slot == kStages) {
            slot = 0;
            phase ^= 1;
        }
    }

    wait_async<0>();
    __syncthreads();  // the ring is free
    float *partials = reinterpret_cast<float *>(ring);
    float *own = partials + column_warp * kPartialFloats + (group * 4 + panel) * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < kWarpPanels; ++i) {
#pragma unroll
        for (int t = 0; t < kTokenTiles; ++t) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                own[(t * 8 + lane % 4 * 2 + j % 2) * kPartialPitch + i * 16 + j / 2 * 8] = sums[i][t][j];
            }
        }
    }
    sync_cluster();
    reduce_and_write(p, partials, work.live);
    sync_cluster();  // until all have read, this CTA's shared memory must live
}
