// y[T, n] = x[T, k] . weight[n, k]^T (+ bias) for many tokens: bound by the tensor cores, or by the weight.
//
// A CTA computes tiles of ROWS weight rows x TOKENS tokens. The weight is wgmma's A operand and the tokens
// are its columns, so one kernel serves 16 to 256 tokens a tile, and quantized weights go from shared memory
// through registers (m64's fragments are wgmma's) into the tensor cores without a bf16 copy.
//   warpgroups 0, 1: 64 * kBlocks rows each, f32 accumulators in registers
//   after them: a warp copies weight tiles (contiguous in m64) into a ring, another boxes of x into its own
// Two rings, so that weights are prefetched while the previous kernel still runs, x after it.
//   MULTICAST = m: m CTAs of a cluster share the tokens, each fetches a part of x for all
//   SPLIT_K = s: s CTAs of a cluster share a tile, each has a part of k. Every CTA sends its sums of 16 rows
//                to the CTA that owns them, into its shared memory
//   PER_SM = 2: small tiles, with registers and shared memory for two CTAs on a multiprocessor: the next
//               kernel's weights are on their way before this kernel ends
// Structure: the warp-specialised persistent kernels of CUTLASS 3 (NVIDIA, "Efficient GEMM in CUDA").
//
// Defines: SCHEME (weight_tile.cuh), ROWS (128, 256), TOKENS (16, 32, 64, 128, 256), MULTICAST (1, 2, 4),
// SPLIT_K (1 to 8, only where MULTICAST is 1), PER_SM (1, 2), OUT_F32 (0, 1).
#include "abi.cuh"
#include "mbarrier.cuh"
#include "tma.cuh"
#include "weight_tile.cuh"
#include "wgmma.cuh"

namespace castiron {
namespace {

constexpr int kXBytes = kIsFp8 ? 1 : 2;                   // of an element of x
constexpr int kStep = 128 / kXBytes;                      // k of a box of x
constexpr int kUnitSteps = kUnit / kStep;                 // boxes of x per weight tile
constexpr bool kDense = SCHEME == SCHEME_BF16 || kIsFp8;  // A from shared memory
constexpr int kRowTiles = ROWS / 64;                      // m64 tiles
constexpr int kBlocks = kRowTiles / 2;                    // of a warpgroup
constexpr int kConsumers = 256;                           // threads
constexpr int kConsumerWarps = kConsumers / 32;
constexpr int kThreads = PER_SM == 1 ? 384 : 320;   // whole warpgroups where they trade registers
constexpr int kGroupTiles = 2048 / TOKENS;          // token tiles that stay in L2 while the weight streams by
constexpr int kBoxBytes = TOKENS * 128;             // x of a step
constexpr int kCopyBytes = kRowTiles * kTileBytes;  // weight of a unit
constexpr int kSlotBytes = (kCopyBytes + 1023) / 1024 * 1024;
constexpr int kSharedBytes = PER_SM == 1 ? 232448 : 115712;  // what a CTA may have
constexpr int kItemBytes = OUT_F32 ? 4 : 2;
// bytes of a token; f32 is padded against bank conflicts, bf16 swizzled
constexpr int kStagedPitch = OUT_F32 ? 68 * 4 : 128;

constexpr int least(int a, int b) { return a < b ? a : b; }
// transposed at a time by a warpgroup
constexpr int kStagedTokens = least(TOKENS, (OUT_F32 ? 32 : 64) / PER_SM);
constexpr int kStagedBytes = SPLIT_K > 1 ? 0 : kStagedTokens * kStagedPitch;
constexpr int kRingBytes = kSharedBytes - 1024 - 512 - 2 * kStagedBytes;  // less alignment and barriers
constexpr int kXStages =                                                  // whole units
    least(8, least((kRingBytes - 2 * kSlotBytes) / kBoxBytes,
                   kRingBytes / (kBoxBytes + kSlotBytes / kUnitSteps))) /
    kUnitSteps * kUnitSteps;
constexpr int kWeightStages = least(8, (kRingBytes - kXStages * kBoxBytes) / kSlotBytes);
// Sums that a CTA receives: [CTA that sends][panel of 16 rows][row][kSumPitch], panel p from all CTAs goes to
// CTA p % SPLIT_K. Floats of a row; 4 rows of 8 bytes a lane fall into different banks.
constexpr int kSumPitch = TOKENS + 8;
constexpr int kPanels = ROWS / 16;
constexpr int kOwnPanels = (kPanels + SPLIT_K - 1) / SPLIT_K;

static_assert(ROWS % 128 == 0 && kBlocks * TOKENS <= 256, "accumulators are at most 128 registers");
static_assert(MULTICAST == 1 || SPLIT_K == 1, "a cluster shares tokens or a tile");
static_assert(kXStages >= 2 && kWeightStages >= 2, "shared memory");
static_assert(SPLIT_K == 1 || SPLIT_K * kOwnPanels * 16 * kSumPitch * 4 <= kRingBytes,
              "received sums take the rings' place");
static_assert(2 * 8 * (kXStages + kWeightStages) + 8 <= 512, "barriers");

struct Shared {  // addresses
    uint32_t x, weight, staged, x_full, x_empty, weight_full, weight_empty, received;

    __device__ explicit Shared(uint32_t base) {
        x = base;
        weight = x + kXStages * kBoxBytes;
        staged = weight + kWeightStages * kSlotBytes;
        x_full = staged + 2 * kStagedBytes;
        x_empty = x_full + 8 * kXStages;
        weight_full = x_empty + 8 * kXStages;
        weight_empty = weight_full + 8 * kWeightStages;
        received = weight_empty + 8 * kWeightStages;
    }
};

template <int kStages>
struct Ring {  // position of a reader or writer
    int slot = 0;
    uint32_t phase = 0;

    __device__ __forceinline__ void advance(int steps = 1) {
        slot += steps;
        if (slot == kStages) {
            slot = 0;
            phase ^= 1;
        }
    }
};

struct Tile {
    int token, row;  // first of the CTA's tile; row may be beyond n in the last cluster
};

struct Work {
    int live, token_tiles, row_tiles, num_tiles;  // row_tiles: of a cluster
    int first_unit, num_units;                    // this CTA's part of k
    int num_steps;
    int units_of_k;
    int cluster, num_clusters, rank;

    __device__ explicit Work(const LinearTmaParams &p) {
        constexpr int kCluster = MULTICAST * SPLIT_K;
        live = p.header[p.count];
        token_tiles = (live + TOKENS - 1) / TOKENS;
        row_tiles = (p.n + ROWS * MULTICAST - 1) / (ROWS * MULTICAST);
        num_tiles = token_tiles * row_tiles;
        cluster = blockIdx.x / kCluster;
        num_clusters = gridDim.x / kCluster;
        rank = blockIdx.x % kCluster;
        units_of_k = (p.k + kUnit - 1) / kUnit;
        const int part = SPLIT_K > 1 ? rank : 0;
        first_unit = units_of_k * part / SPLIT_K;
        const int end_unit = units_of_k * (part + 1) / SPLIT_K;
        num_units = end_unit - first_unit;
        num_steps = min((p.k + kStep - 1) / kStep, end_unit * kUnitSteps) - first_unit * kUnitSteps;
    }
    // Groups of kGroupTiles token tiles; in a group tokens vary fastest, so that the CTAs that run at one
    // time read few weight rows and all of the group's tokens.
    __device__ __forceinline__ Tile tile(int index) const {
        const int group = index / (kGroupTiles * row_tiles);
        const int within = index - group * kGroupTiles * row_tiles;
        const int width = min(kGroupTiles, token_tiles - group * kGroupTiles);
        const int row = within / width;
        const int token = group * kGroupTiles + within - row * width;
        return {token * TOKENS, (row * MULTICAST + (MULTICAST > 1 ? rank : 0)) * ROWS};
    }
};

__device__ void copy_weights(const LinearTmaParams &p, const Work &work, const Shared &shared) {
    const uint8_t *weight = static_cast<const uint8_t *>(p.weight);
    const int last_row_tile = (p.n + 63) / 64 - 1;
    Ring<kWeightStages> ring;
    int issued = 0;
    for (int index = work.cluster; index < work.num_tiles; index += work.num_clusters) {
        const int row_tile = work.tile(index).row / 64;
        for (int unit = 0; unit < work.num_units; ++unit) {
            mbarrier_wait(shared.weight_empty + 8 * ring.slot, ring.phase ^ 1);
            const uint32_t full = shared.weight_full + 8 * ring.slot;
            mbarrier_arrive_expect(full, kCopyBytes);
#pragma unroll
            for (int i = 0; i < kRowTiles; ++i) {  // tiles beyond n repeat the last one: never stored
                const int64_t from =
                    int64_t(min(row_tile + i, last_row_tile)) * work.units_of_k + work.first_unit + unit;
                copy_bulk(shared.weight + ring.slot * kSlotBytes + i * kTileBytes, weight + from * kTileBytes,
                          kTileBytes, full);
            }
            ring.advance();
            if (++issued == kWeightStages) let_next_start();
        }
    }
    if (issued < kWeightStages) let_next_start();
}

__device__ void copy_x(const LinearTmaParams &p, const Work &work, const Shared &shared) {
    constexpr int kRows = TOKENS / MULTICAST;
    Ring<kXStages> ring;
    for (int index = work.cluster; index < work.num_tiles; index += work.num_clusters) {
        const int token = work.tile(index).token;
        for (int step = 0; step < work.num_steps; ++step) {
            const uint32_t full = shared.x_full + 8 * ring.slot;
            const int column = (work.first_unit * kUnitSteps + step) * kStep;
            uint32_t to = shared.x + ring.slot * kBoxBytes;
            if constexpr (MULTICAST > 1) {
                // empty in all CTAs of the cluster; the barrier counts the bytes of all their copies
                mbarrier_wait(shared.x_empty + 8 * ring.slot, ring.phase ^ 1);
                mbarrier_arrive_expect(full, kBoxBytes);
                to += work.rank * kRows * 128;
                copy_box_multicast(to, &p.x, column, token + work.rank * kRows, full, (1 << MULTICAST) - 1);
            } else {
                mbarrier_wait(shared.x_empty + 8 * ring.slot, ring.phase ^ 1);
                mbarrier_arrive_expect(full, kBoxBytes);
                copy_box(to, &p.x, column, token, full);
            }
            ring.advance();
        }
    }
    if constexpr (MULTICAST > 1) {
        // This CTA must not end before the others' last arrivals at its barriers: their consumers have then
        // read all that it sent them.
        for (int i = 0; i < kXStages; ++i) {
            mbarrier_wait(shared.x_empty + 8 * ring.slot, ring.phase ^ 1);
            ring.advance();
        }
    }
}

struct Consumer {
    using Accumulators = float[kBlocks][TOKENS / 2];

    const LinearTmaParams &p;
    const Work &work;
    const Shared &shared;
    const int warpgroup = threadIdx.x / 128;  // 0, 1
    const int warp = threadIdx.x / 32 % 4;    // in the warpgroup
    const int lane = threadIdx.x % 32;
    Ring<kXStages> x;
    Ring<kWeightStages> weight;
    const uint8_t *tiles;  // of the warpgroup, in slot 0
    uint64_t x_boxes;      // descriptor of slot 0

    __device__ Consumer(const LinearTmaParams &p, const Work &work, const Shared &shared)
        : p(p), work(work), shared(shared) {
        tiles = static_cast<const uint8_t *>(__cvta_shared_to_generic(weight_tiles()));
        x_boxes = swizzled_descriptor(shared.x);
    }

    __device__ __forceinline__ void release_x(int slot) const {
        const uint32_t barrier = shared.x_empty + 8 * slot;
        if constexpr (MULTICAST > 1) {
            if (lane < MULTICAST) mbarrier_arrive_at(barrier, lane);
        } else {
            if (lane == 0) mbarrier_arrive(barrier);
        }
    }
    __device__ __forceinline__ void release_weight(int slot) const {
        if (lane == 0) mbarrier_arrive(shared.weight_empty + 8 * slot);
    }

    __device__ __forceinline__ uint32_t weight_tiles() const {  // of this warpgroup
        return shared.weight + weight.slot * kSlotBytes + warpgroup * kBlocks * kTileBytes;
    }

    // d = the CTA's part of weight . x^T, both from shared memory. A step's wgmmas run while the next one's
    // are issued; then the step before has finished and its memory is freed.
    __device__ __forceinline__ void multiply_dense(Accumulators &d) {
        for (int step = 0; step < work.num_steps; ++step) {
            mbarrier_wait(shared.weight_full + 8 * weight.slot, weight.phase);
            mbarrier_wait(shared.x_full + 8 * x.slot, x.phase);
            const uint64_t a = swizzled_descriptor(weight_tiles());
            const uint64_t b = swizzled_descriptor(shared.x + x.slot * kBoxBytes);
            wgmma_fence();
#pragma unroll
            for (int s = 0; s < 4; ++s) {  // 32 bytes: 2 in a descriptor
#pragma unroll
                for (int block = 0; block < kBlocks; ++block) {
                    const uint64_t tile = a + block * (kTileBytes / 16) + 2 * s;
                    if constexpr (kIsFp8) {
                        Wgmma<TOKENS>::shared_e4m3(d[block], tile, b + 2 * s, step > 0 || s > 0);
                    } else {
                        Wgmma<TOKENS>::shared(d[block], tile, b + 2 * s, step > 0 || s > 0);
                    }
                }
            }
            wgmma_commit();
            wgmma_wait<1>();
            if (step > 0) release_step_before();
            x.advance();
            weight.advance();
        }
        wgmma_wait<0>();
        release_step_before();
    }
    __device__ __forceinline__ void release_step_before() const {
        release_x(x.slot == 0 ? kXStages - 1 : x.slot - 1);
        release_weight(weight.slot == 0 ? kWeightStages - 1 : weight.slot - 1);
    }

    // The same with dequantized fragments in registers. The wgmmas of two fragments are a group, which runs
    // while the next two are dequantized. So the x of a step is free when half of the next step is under way.
    __device__ __forceinline__ void multiply_quantized(Accumulators &d) {
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
            for (int i = 0; i < TOKENS / 2; ++i) d[block][i] = 0.0f;
        }
        uint32_t a[4][kBlocks][4];
        Part loaded[kBlocks];
        int slot_before = 0;  // of the x of the step before
        for (int unit = 0; unit < work.num_units;
             ++unit) {  // of whole steps: blocks of columns don't end in one
            mbarrier_wait(shared.weight_full + 8 * weight.slot, weight.phase);
#pragma unroll
            for (int part = 0; part < kUnitSteps; ++part) {
                load(part, loaded);
                if (part == kUnitSteps - 1) {
                    __syncwarp();
                    release_weight(weight.slot);
                    weight.advance();
                }
                const uint64_t b = x_boxes + (x.slot + part) * (kBoxBytes / 16);
                const uint32_t x_full = shared.x_full + 8 * (x.slot + part);
#pragma unroll
                for (int s = 0; s < 4; s += 2) {
                    wgmma_wait<1>();
                    if (s == 2 && (part > 0 || unit > 0)) release_x(slot_before);
#pragma unroll
                    for (int i = s; i < s + 2; ++i) {
#pragma unroll
                        for (int block = 0; block < kBlocks; ++block)
                            dequantize_fragment(loaded[block], i, a[i][block]);
                    }
                    if (s == 0) mbarrier_wait(x_full, x.phase);
                    wgmma_fence();
#pragma unroll
                    for (int i = s; i < s + 2; ++i) {
#pragma unroll
                        for (int block = 0; block < kBlocks; ++block)
                            Wgmma<TOKENS>::registers(d[block], a[i][block], b + 2 * i, 1);
                    }
                    wgmma_commit();
                }
                slot_before = x.slot + part;
            }
            x.advance(kUnitSteps);
        }
        wgmma_wait<0>();
        release_x(slot_before);
        if constexpr (kFragmentScale != 1.0f) {
#pragma unroll
            for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
                for (int i = 0; i < TOKENS / 2; ++i) d[block][i] *= 1.0f / kFragmentScale;
            }
        }
    }
    // The codes of a part of the unit, and their scales where they are others than the part before's.
    __device__ __forceinline__ void load(int part, Part (&loaded)[kBlocks]) const {
        const uint8_t *tile = tiles + weight.slot * kSlotBytes;
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
            const uint8_t *of_block = tile + block * kTileBytes;
            loaded[block].words = load_code_words(of_block, warp, part, lane);
            if (part * 64 % kGroup == 0) load_scales_of_part(of_block, warp, part, lane, loaded[block]);
        }
    }

    // Sums of codes become values. Rows beyond n and tokens beyond the live ones are never stored.
    __device__ __forceinline__ void scale(const Tile &tile, Accumulators &d) const {
        const float *rows = row_scales(p.weight, p.n, p.k);
        const int first_token = tile.token + lane % 4 * 2;
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
            const int row = tile.row + (warpgroup * kBlocks + block) * 64 + 16 * warp + lane / 4;
            const float low = row < p.n ? rows[row] : 0.0f, high = row + 8 < p.n ? rows[row + 8] : 0.0f;
#pragma unroll
            for (int j = 0; j < TOKENS / 8; ++j) {
                const int token = first_token + 8 * j;
                const float a = token < work.live ? p.x_scale[token] : 0.0f;
                const float b = token + 1 < work.live ? p.x_scale[token + 1] : 0.0f;
                float *v = d[block] + 4 * j;
                v[0] *= low * a;
                v[1] *= low * b;
                v[2] *= high * a;
                v[3] *= high * b;
            }
        }
    }
    // Bias of the two rows that a lane holds of a block.
    __device__ __forceinline__ float2 bias_of(int row) const {
        float2 bias = {0.f, 0.f};
        if (p.bias != nullptr) {
            if (row < p.n) bias.x = p.bias[row];
            if (row + 8 < p.n) bias.y = p.bias[row + 8];
        }
        return bias;
    }
    // 16 bytes of y from `row` on; single elements where they would pass n or aren't aligned.
    __device__ __forceinline__ void store(int token, int row, uint4 value, bool aligned) const {
        constexpr int kItems = 16 / kItemBytes;
        uint8_t *to = static_cast<uint8_t *>(p.y) + (token * p.y_stride + row) * kItemBytes;
        if (aligned && row + kItems <= p.n) {
            *reinterpret_cast<uint4 *>(to) = value;
            return;
        }
        const uint32_t words[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
            if (row + i >= p.n) return;
            if constexpr (OUT_F32) {
                reinterpret_cast<uint32_t *>(to)[i] = words[i];
            } else {
                reinterpret_cast<uint16_t *>(to)[i] = uint16_t(words[i / 2] >> 16 * (i % 2));
            }
        }
    }
    __device__ __forceinline__ bool is_aligned() const {
        return ((reinterpret_cast<uint64_t>(p.y) | uint64_t(p.y_stride) * kItemBytes) & 15) == 0;
    }

    // y = d + bias, transposed to rows of tokens through the warpgroup's staging memory.
    __device__ __forceinline__ void write(const Tile &tile, const Accumulators &d) const {
        const bool aligned = is_aligned();
        const int thread = threadIdx.x % 128;
        const uint32_t staged = shared.staged + warpgroup * kStagedBytes;
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
            const int first_row = tile.row + (warpgroup * kBlocks + block) * 64;
            if (first_row >= p.n) break;
            const float2 bias = bias_of(first_row + 16 * warp + lane / 4);
#pragma unroll
            for (int chunk = 0; chunk < TOKENS / kStagedTokens; ++chunk) {
                const int first_token = tile.token + chunk * kStagedTokens;
                if (first_token >= work.live) break;
                const float *values = d[block] + chunk * kStagedTokens / 2;
                named_barrier(1 + warpgroup, 128);  // the chunk before has been read
                stage(staged, values, bias);
                named_barrier(1 + warpgroup, 128);
                constexpr int kRowChunks = 64 * kItemBytes / 16;  // 16-byte pieces of a token
#pragma unroll
                for (int i = thread; i < kStagedTokens * kRowChunks; i += 128) {
                    const int token = i / kRowChunks, piece = i % kRowChunks;
                    if (first_token + token >= work.live) break;
                    const int place = OUT_F32 ? piece : piece ^ (token & 7);
                    uint4 v;
                    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                                 : "r"(staged + token * kStagedPitch + place * 16)
                                 : "memory");
                    store(first_token + token, first_row + piece * (16 / kItemBytes), v, aligned);
                }
            }
        }
    }
    // kStagedTokens tokens of the warp's 16 rows into [token][64 rows].
    __device__ __forceinline__ void stage(uint32_t staged, const float *values, float2 bias) const {
#pragma unroll
        for (int j = 0; j < kStagedTokens / 8; j += OUT_F32 ? 1 : 2) {
            const float *v = values + 4 * j;
            if constexpr (OUT_F32) {
                const uint32_t to =
                    staged + (8 * j + lane % 4 * 2) * kStagedPitch + (16 * warp + lane / 4) * 4;
                store_float(to, v[0] + bias.x);
                store_float(to + kStagedPitch, v[1] + bias.x);
                store_float(to + 32, v[2] + bias.y);
                store_float(to + kStagedPitch + 32, v[3] + bias.y);
            } else {
                // 8x8 matrices: tokens 8j.. of rows 0.. and 8.., tokens 8j + 8.. of rows 0.. and 8..; a lane
                // gives the address of token lane % 8 of matrix lane / 8
                const int token = 8 * j + lane / 16 * 8 + lane % 8;
                const int piece = 2 * warp + lane / 8 % 2;
                const uint32_t to = staged + token * kStagedPitch + ((piece ^ (token & 7)) * 16);
                asm volatile(
                    "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                    "r"(pair(v[0] + bias.x, v[1] + bias.x)), "r"(pair(v[2] + bias.y, v[3] + bias.y)),
                    "r"(pair(v[4] + bias.x, v[5] + bias.x)), "r"(pair(v[6] + bias.y, v[7] + bias.y))
                    : "memory");
            }
        }
    }
    static __device__ __forceinline__ void store_float(uint32_t to, float value) {
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(value) : "memory");
    }
    static __device__ __forceinline__ uint32_t pair(float low, float high) {
        uint32_t packed;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
        return packed;
    }

    // Groups of 8 tokens of the tile that are live.
    __device__ __forceinline__ int token_groups(const Tile &tile) const {
        return min(TOKENS, work.live - tile.token + 7) / 8;
    }
    __device__ __forceinline__ int own_panels() const {
        return (kPanels - work.rank + SPLIT_K - 1) / SPLIT_K;
    }
    // Every panel of the partial sum to its owner, where the rings were: all CTAs have read theirs.
    __device__ __forceinline__ void send(const Tile &tile, const Accumulators &d) const {
        const int groups = token_groups(tile);
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
            const int panel = (warpgroup * kBlocks + block) * 4 + warp, owner = panel % SPLIT_K;
            const int row = (work.rank * kOwnPanels + panel / SPLIT_K) * 16 + lane / 4;
            const uint32_t to = cluster_address(shared.x + (row * kSumPitch + lane % 4 * 2) * 4, owner);
            const uint32_t barrier = cluster_address(shared.received, owner);
#pragma unroll
            for (int j = 0; j < TOKENS / 8; ++j) {
                if (j >= groups) break;
                store_async(to + j * 32, d[block][4 * j], d[block][4 * j + 1], barrier);
                store_async(to + 8 * kSumPitch * 4 + j * 32, d[block][4 * j + 2], d[block][4 * j + 3],
                            barrier);
            }
        }
    }
    // y = sum over the cluster, in the order of the ranks, + bias, for this CTA's panels.
    __device__ __forceinline__ void write_sums(const Tile &tile) const {
        const bool aligned = is_aligned();
        mbarrier_wait(shared.received, 0);
        for (int i = threadIdx.x; i < own_panels() * 2 * TOKENS; i += kConsumers) {  // 8 rows of a token
            const int token = i % TOKENS, half = i / TOKENS;
            const int row = tile.row + (half / 2 * SPLIT_K + work.rank) * 16 + half % 2 * 8;
            if (tile.token + token >= work.live || row >= p.n) continue;
            float sum[8] = {};
#pragma unroll
            for (int rank = 0; rank < SPLIT_K; ++rank) {
                const int from = (rank * kOwnPanels + half / 2) * 16 + half % 2 * 8;
#pragma unroll
                for (int e = 0; e < 8; ++e) {
                    const uint32_t address = shared.x + ((from + e) * kSumPitch + token) * 4;
                    sum[e] += load_float(address);
                }
            }
            if (p.bias != nullptr) {
#pragma unroll
                for (int e = 0; e < 8; ++e) {
                    if (row + e < p.n) sum[e] += p.bias[row + e];
                }
            }
            if constexpr (OUT_F32) {
                store(tile.token + token, row,
                      {__float_as_uint(sum[0]), __float_as_uint(sum[1]), __float_as_uint(sum[2]),
                       __float_as_uint(sum[3])},
                      aligned);
                store(tile.token + token, row + 4,
                      {__float_as_uint(sum[4]), __float_as_uint(sum[5]), __float_as_uint(sum[6]),
                       __float_as_uint(sum[7])},
                      aligned);
            } else {
                store(
                    tile.token + token, row,
                    {pair(sum[0], sum[1]), pair(sum[2], sum[3]), pair(sum[4], sum[5]), pair(sum[6], sum[7])},
                    aligned);
            }
        }
    }
    static __device__ __forceinline__ float load_float(uint32_t from) {
        float value;
        asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(from) : "memory");
        return value;
    }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, PER_SM)
    linear_many(const __grid_constant__ LinearTmaParams p) {
    extern __shared__ uint8_t memory[];
    const Shared shared((shared_address(memory) + 1023) / 1024 * 1024);
    const Work work(p);
    if (threadIdx.x == kConsumers) {
        prefetch_map(&p.x);
        for (int i = 0; i < kXStages; ++i) {
            mbarrier_init(shared.x_full + 8 * i, 1);
            mbarrier_init(shared.x_empty + 8 * i, kConsumerWarps * MULTICAST);
        }
        for (int i = 0; i < kWeightStages; ++i) {
            mbarrier_init(shared.weight_full + 8 * i, 1);
            mbarrier_init(shared.weight_empty + 8 * i, kConsumerWarps);
        }
        mbarrier_init(shared.received, 1);
        mbarrier_init_fence();
    }
    __syncwarp();
    if constexpr (MULTICAST > 1) {
        cluster_barrier_relaxed();  // the other CTA's barriers too are ready
    } else {
        __syncthreads();
    }

    if (threadIdx.x >= kConsumers) {
        if constexpr (PER_SM == 1) shrink_registers<40>();
        // before wait_for_inputs: no kernel writes weights
        if (threadIdx.x == kConsumers) copy_weights(p, work, shared);
        wait_for_inputs();
        if (threadIdx.x == kConsumers + 32) copy_x(p, work, shared);
        __syncwarp();
        if constexpr (SPLIT_K > 1) cluster_barrier_relaxed();
    } else {
        if constexpr (PER_SM == 1) grow_registers<232>();
        Consumer consumer(p, work, shared);
        wait_for_inputs();
        for (int index = work.cluster; index < work.num_tiles; index += work.num_clusters) {
            Consumer::Accumulators d;
            if constexpr (kDense) {
                consumer.multiply_dense(d);
                if constexpr (kIsFp8) consumer.scale(work.tile(index), d);
            } else {
                consumer.multiply_quantized(d);
            }
            if constexpr (SPLIT_K > 1) {  // one tile per cluster
                const Tile tile = work.tile(index);
                if (threadIdx.x == 0) {
                    mbarrier_arrive_expect(shared.received, SPLIT_K * consumer.own_panels() *
                                                                consumer.token_groups(tile) * 16 * 8 * 4);
                }
                __syncwarp();
                cluster_barrier_relaxed();  // all CTAs run, and their rings are free
                consumer.send(tile, d);
                consumer.write_sums(tile);
            } else {
                consumer.write(work.tile(index), d);
            }
        }
        if constexpr (SPLIT_K > 1) {
            // the barrier that the producers count on
            if (work.cluster >= work.num_tiles) cluster_barrier_relaxed();
        }
    }
}

}  // namespace castiron
