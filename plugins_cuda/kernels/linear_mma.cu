// y[T, n] = x[T, k] . weight[n, k]^T (+ bias) for any number of tokens, on sm_80 and newer.
//
// A CTA computes TOKENS x ROWS of y with mma.m16n8k16: the tokens are A, and the weight is B, since the pairs
// that a lane holds of an m64 fragment (16 weight rows x 16 columns) are two B operands of 8 rows each. Steps
// of 64 columns go through STAGES stages of cp.async; a weight tile comes with the first step it serves.
// Structure: the multi-stage pipeline of CUTLASS 2 (NVIDIA, "Efficient GEMM in CUDA").
//
// Defines: SCHEME (weight_tile.cuh), ROWS, TOKENS, ROW_WARPS, TOKEN_WARPS (warps side by side over them),
// STAGES (2 or more), OUT_F32 (0, 1).
#include "abi.cuh"
#include "kernels/attention_ptx.cuh"
#include "kernels/weight_tile.cuh"

namespace castiron {
namespace {

constexpr int kStep = 64;                  // columns
constexpr int kUnitSteps = kUnit / kStep;  // of a weight tile
constexpr int kWarps = ROW_WARPS * TOKEN_WARPS, kThreads = 32 * kWarps;
constexpr int kRowTiles = ROWS / kTileRows;                  // m64 tiles
constexpr int kPanels = ROWS / 16 / ROW_WARPS;               // of 16 weight rows, of a warp
constexpr int kTokenTiles = TOKENS / 16 / TOKEN_WARPS;       // of 16 tokens, of a warp
constexpr int kXBytes = TOKENS * kStep * 2;                  // of a step
constexpr int kWeightBytes = kRowTiles * kTileBytes;         // of a unit
constexpr int kWeightSlots = (STAGES - 2) / kUnitSteps + 2;  // units that STAGES steps in a line may touch
constexpr int kGroupTiles = 2048 / TOKENS;                   // token tiles in L2 while the weight streams by

static_assert(ROWS % kTileRows == 0 && kPanels * 16 * ROW_WARPS == ROWS);
static_assert(kTokenTiles * 16 * TOKEN_WARPS == TOKENS && STAGES >= 2);
static_assert(kTileBytes % 16 == 0);

struct Work {
    int live, first_token, first_row, units, steps;
    bool has_any;

    // The tile of this CTA. Groups of kGroupTiles token tiles; in a group tokens vary fastest, so that the
    // CTAs that run at one time read few weight rows and all of the group's tokens.
    __device__ explicit Work(const LinearParams &p) {
        live = p.header[p.count];
        const int token_tiles = (live + TOKENS - 1) / TOKENS, row_tiles = (p.n + ROWS - 1) / ROWS;
        const int index = blockIdx.x;
        has_any = index < token_tiles * row_tiles;
        const int group = index / (kGroupTiles * row_tiles);
        const int within = index - group * kGroupTiles * row_tiles;
        const int width = max(1, min(kGroupTiles, token_tiles - group * kGroupTiles));
        const int row = within / width;
        first_token = (group * kGroupTiles + within - row * width) * TOKENS;
        first_row = row * ROWS;
        units = (p.k + kUnit - 1) / kUnit;
        steps = (p.k + kStep - 1) / kStep;
    }
};

// The unit's tiles of the CTA's rows. Tiles beyond n repeat the last one: their sums are never stored.
__device__ __forceinline__ void copy_weights(const LinearParams &p, const Work &work, int unit, uint32_t to) {
    constexpr int kTileChunks = kTileBytes / 16;
    const int row_tile = work.first_row / kTileRows, last = (p.n + kTileRows - 1) / kTileRows - 1;
    const uint8_t *weight = static_cast<const uint8_t *>(p.weight);
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
        const int64_t tile = int64_t(min(row_tile + i, last)) * work.units + unit;
        for (int chunk = threadIdx.x; chunk < kTileChunks; chunk += kThreads) {
            cp_async_16(to + i * kTileBytes + chunk * 16, weight + tile * kTileBytes + chunk * 16, true);
        }
    }
}

// x[tokens, columns of the step]; a token is 128 bytes, its chunk c at c ^ (token & 7). Tokens beyond the
// live ones and columns beyond k become zeros, unread.
__device__ __forceinline__ void copy_x(const LinearParams &p, const Work &work, int step, uint8_t *to,
                                       bool is_aligned) {
#pragma unroll
    for (int i = 0; i < (TOKENS * 8 + kThreads - 1) / kThreads; ++i) {
        const int index = i * kThreads + threadIdx.x, row = index / 8, chunk = index % 8;
        if (TOKENS * 8 % kThreads != 0 && row >= TOKENS) break;
        const int token = work.first_token + row, column = step * kStep + chunk * 8;
        const bool is_live = token < work.live && column < p.k;
        const bf16 *from = static_cast<const bf16 *>(p.x) + (is_live ? token * p.x_stride + column : 0);
        uint8_t *at = to + row * 128 + (chunk ^ (row & 7)) * 16;
        if (is_aligned) {
            cp_async_16(shared_address(at), from, is_live);
        } else {
            uint16_t values[8] = {};
            for (int j = 0; is_live && j < 8; ++j) values[j] = reinterpret_cast<const uint16_t *>(from)[j];
            *reinterpret_cast<uint4 *>(at) =
                make_uint4(values[0] | values[1] << 16, values[2] | values[3] << 16,
                           values[4] | values[5] << 16, values[6] | values[7] << 16);
        }
    }
}

// Two neighbours of a token's row of y, of which `count` (1 or 2) exist.
__device__ __forceinline__ void store(const LinearParams &p, int64_t token, int row, float a, float b,
                                      bool is_aligned) {
    const bool both = row + 1 < p.n;
    if constexpr (OUT_F32) {
        float *to = static_cast<float *>(p.y) + token * p.y_stride + row;
        if (both && is_aligned) {
            *reinterpret_cast<float2 *>(to) = make_float2(a, b);
        } else {
            to[0] = a;
            if (both) to[1] = b;
        }
    } else {
        bf16 *to = static_cast<bf16 *>(p.y) + token * p.y_stride + row;
        if (both && is_aligned) {
            *reinterpret_cast<uint32_t *>(to) = pack_bf16(a, b);
        } else {
            to[0] = __float2bfloat16_rn(a);
            if (both) to[1] = __float2bfloat16_rn(b);
        }
    }
}

}  // namespace
}  // namespace castiron

extern "C" __global__ void __launch_bounds__(castiron::kThreads)
    linear_mma(const __grid_constant__ castiron::LinearParams p) {
    using namespace castiron;
    extern __shared__ __align__(128) uint8_t shared[];
    uint8_t *const x_ring = shared, *const weight_ring = shared + STAGES * kXBytes;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int first_panel = warp % ROW_WARPS * kPanels, first_tile = warp / ROW_WARPS * kTokenTiles;
    const Work work(p);
    let_next_start();
    if (!work.has_any) {
        wait_for_inputs();
        return;
    }

    auto load_weights = [&](int step) {  // into the group that is committed next
        if (step < work.steps && step % kUnitSteps == 0) {
            const int unit = step / kUnitSteps;
            copy_weights(p, work, unit, shared_address(weight_ring + unit % kWeightSlots * kWeightBytes));
        }
    };
    const bool x_aligned = ((reinterpret_cast<uint64_t>(p.x) | uint64_t(p.x_stride) * 2) & 15) == 0;
    auto load_x = [&](int step) {
        if (step < work.steps) copy_x(p, work, step, x_ring + step % STAGES * kXBytes, x_aligned);
        cp_async_commit();
    };
#pragma unroll
    for (int step = 0; step < STAGES - 1; ++step) load_weights(step);
    wait_for_inputs();
#pragma unroll
    for (int step = 0; step < STAGES - 1; ++step) load_x(step);

    // sums[token tile][panel][rows 0..7 or 8..15 of it]: tokens g, g + 8 x rows 2t, 2t + 1
    float sums[kTokenTiles][kPanels][2][4] = {};
    for (int step = 0; step < work.steps; ++step) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();  // this step's copies of all threads are there, the step before is done with
        load_weights(step + STAGES - 1);
        load_x(step + STAGES - 1);
        const uint8_t *tiles = weight_ring + step / kUnitSteps % kWeightSlots * kWeightBytes;
        const uint32_t x = shared_address(x_ring + step % STAGES * kXBytes);
        uint32_t weights[kPanels][4][4];
#pragma unroll
        for (int i = 0; i < kPanels; ++i) {
            const int panel = first_panel + i;
            load_fragments(tiles + panel / 4 * kTileBytes, panel % 4, step % kUnitSteps, lane, weights[i]);
        }
#pragma unroll
        for (int s = 0; s < 4; ++s) {
#pragma unroll
            for (int tile = 0; tile < kTokenTiles; ++tile) {
                // 8 x 8 matrices: tokens 0..7, 8..15 of 8 columns, then of the next 8
                const int row = (first_tile + tile) * 16 + lane % 16, chunk = 2 * s + lane / 16;
                uint32_t a[4];
                ldmatrix_x4(a, x + row * 128 + (chunk ^ (row & 7)) * 16);
#pragma unroll
                for (int i = 0; i < kPanels; ++i) {
                    mma_bf16(sums[tile][i][0], a, weights[i][s][0], weights[i][s][2]);
                    mma_bf16(sums[tile][i][1], a, weights[i][s][1], weights[i][s][3]);
                }
            }
        }
    }
    cp_async_wait<0>();

    constexpr int kPairBytes = OUT_F32 ? 8 : 4;
    constexpr float kSumScale = 1.0f / kFragmentScale;
    const bool y_aligned = (reinterpret_cast<uint64_t>(p.y) & (kPairBytes - 1)) == 0 && p.y_stride % 2 == 0;
#pragma unroll
    for (int i = 0; i < kPanels; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = work.first_row + (first_panel + i) * 16 + half * 8 + 2 * t;
            if (row >= p.n) continue;
            float2 bias = {0.0f, 0.0f};
            if (p.bias != nullptr) {
                bias.x = p.bias[row];
                if (row + 1 < p.n) bias.y = p.bias[row + 1];
            }
#pragma unroll
            for (int tile = 0; tile < kTokenTiles; ++tile) {
#pragma unroll
                for (int of = 0; of < 2; ++of) {  // g, g + 8
                    const int token = work.first_token + (first_tile + tile) * 16 + g + 8 * of;
                    const float *sum = &sums[tile][i][half][2 * of];
                    if (token >= work.live) continue;
                    store(p, token, row, fmaf(sum[0], kSumScale, bias.x), fmaf(sum[1], kSumScale, bias.y),
                          y_aligned);
                }
            }
        }
    }
}
