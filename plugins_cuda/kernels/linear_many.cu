// y[T, n] = x[T, k] . weight[n, k]^T (+ bias) for many tokens: bound by the tensor cores, or by the weight.
//
// A CTA computes tiles of ROWS weight rows x TOKENS tokens. The weight is wgmma's A operand and the tokens
// are its columns, so one kernel serves 16 to 256 tokens a tile, and quantized weights go from shared memory
// through registers (m64's fragments are wgmma's) into the tensor cores without a bf16 copy.
//   warpgroups 0, 1: 64 * kBlocks rows each, f32 accumulators in registers
//   after them: a warp copies weight tiles (contiguous in m64) into a ring, another boxes of x into its own
// Two rings, so that weights are prefetched while the previous kernel still runs, x after it.
//   MULTICAST = m: m CTAs of a cluster share the tokens, each fetches a part of x for all
//   SHARED_K = 1: the tiles' units of k, one tile after another, are dealt out in equal runs, so that all
//                 multiprocessors work to the end whatever the number of tiles. CTAs that meet in a tile leave
//                 their sums in scratch memory, and each adds up a part of the tile when its run is done
//   PER_SM = 2: small tiles, with registers and shared memory for two CTAs on a multiprocessor: the next
//               kernel's weights are on their way before this kernel ends
// Structure: the warp-specialised persistent kernels of CUTLASS 3 (NVIDIA, "Efficient GEMM in CUDA"); shared k:
// Osama et al., "Stream-K: Work-centric Parallel Decomposition for Dense Matrix-Matrix Multiplication", 2023.
//
// Defines: SCHEME (weight_tile.cuh), ROWS (128, 256), TOKENS (16, 32, 64, 128, 256), MULTICAST (1, 2),
// SHARED_K (0, 1), PER_SM (1, 2), OUT_F32 (0, 1; 1 only without SHARED_K).
#include "abi.cuh"
#include "mbarrier.cuh"
#include "tma.cuh"
#include "weight_tile.cuh"
#include "wgmma.cuh"

namespace castiron {
namespace {

constexpr int kStep = 64;                       // k of a box of x
constexpr int kUnitSteps = kUnit / kStep;       // boxes of x per weight tile
constexpr bool kDense = SCHEME == SCHEME_BF16;  // A from shared memory
constexpr int kRowTiles = ROWS / 64;            // m64 tiles
constexpr int kBlocks = kRowTiles / 2;          // of a warpgroup
constexpr int kConsumers = 256;                 // threads
constexpr int kConsumerWarps = kConsumers / 32;
constexpr int kAllConsumers = 3;  // named barrier; 1 and 2 are a warpgroup's
constexpr int kThreads = PER_SM == 1 ? 384 : 320;   // whole warpgroups where they trade registers
constexpr int kGroupTiles = 2048 / TOKENS;          // token tiles that stay in L2 while the weight streams by
constexpr int kBoxBytes = TOKENS * kStep * 2;       // x of a step
constexpr int kCopyBytes = kRowTiles * kTileBytes;  // weight of a unit
constexpr int kSlotBytes = (kCopyBytes + 1023) / 1024 * 1024;
constexpr int kSharedBytes = PER_SM == 1 ? 232448 : 115712;  // what a CTA may have
constexpr int kItemBytes = OUT_F32 ? 4 : 2;
// bytes of a token; f32 is padded against bank conflicts, bf16 swizzled
constexpr int kStagedPitch = OUT_F32 ? 68 * 4 : 128;

constexpr int least(int a, int b) { return a < b ? a : b; }
// transposed at a time by a warpgroup
constexpr int kStagedTokens = least(TOKENS, (OUT_F32 ? 32 : 64) / PER_SM);
constexpr int kStagedBytes = kStagedTokens * kStagedPitch;
constexpr int kRingBytes = kSharedBytes - 1024 - 512 - 2 * kStagedBytes;  // less alignment and barriers
constexpr int kXStages =  // whole units
    least(8, least((kRingBytes - 2 * kSlotBytes) / kBoxBytes, kRingBytes / (kBoxBytes + kSlotBytes / kUnitSteps))) /
    kUnitSteps * kUnitSteps;
constexpr int kWeightStages = least(8, (kRingBytes - kXStages * kBoxBytes) / kSlotBytes);
// Sums of a run's first or last tile in scratch memory: pieces of 64 rows x 8 tokens, 4 floats a thread
constexpr int kPieces = kRowTiles * TOKENS / 8;
constexpr int kPieceFloats = 128 * 4;

static_assert(ROWS % 128 == 0 && kBlocks * TOKENS <= 256, "accumulators are at most 128 registers");
static_assert(TOKENS / MULTICAST % 8 == 0, "parts of a box");
static_assert(kXStages >= 2 && kWeightStages >= 2, "shared memory");
static_assert(2 * 8 * (kXStages + kWeightStages) <= 512, "barriers");

struct Shared {  // addresses
    uint32_t x, weight, staged, x_full, x_empty, weight_full, weight_empty;

    __device__ explicit Shared(uint32_t base) {
        x = base;
        weight = x + kXStages * kBoxBytes;
        staged = weight + kWeightStages * kSlotBytes;
        x_full = staged + 2 * kStagedBytes;
        x_empty = x_full + 8 * kXStages;
        weight_full = x_empty + 8 * kXStages;
        weight_empty = weight_full + 8 * kWeightStages;
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

struct Run {  // of units of k of one tile
    int tile, first_unit, num_units;  // 0: there are no more
};

struct Work {
    int live, token_tiles, row_tiles, num_tiles;  // row_tiles: of a cluster
    int units_of_k;
    int cluster, num_clusters;  // that have work; clusters beyond have none
    int row_rank;               // this CTA's tile of the cluster's rows
    int end;                    // of this cluster's units, counted over all tiles

    __device__ explicit Work(const LinearTmaParams &p) {
        live = p.header[p.count];
        token_tiles = (live + TOKENS - 1) / TOKENS;
        row_tiles = (p.n + ROWS * MULTICAST - 1) / (ROWS * MULTICAST);
        num_tiles = token_tiles * row_tiles;
        cluster = blockIdx.x / MULTICAST;
        row_rank = blockIdx.x % MULTICAST;
        units_of_k = (p.k + kUnit - 1) / kUnit;
        num_clusters = min(int(gridDim.x) / MULTICAST, num_tiles * units_of_k);
        end = cluster < num_clusters ? first_unit_of(cluster + 1) : 0;
    }
    // SHARED_K: of a cluster, counted over all tiles.
    __device__ __forceinline__ int first_unit_of(int cluster) const {
        return int(int64_t(num_tiles) * units_of_k * cluster / num_clusters);
    }
    // The cluster that has a unit.
    __device__ __forceinline__ int cluster_of(int unit) const {
        return int(((int64_t(unit) + 1) * num_clusters - 1) / (int64_t(num_tiles) * units_of_k));
    }
    __device__ __forceinline__ Run run_from(int unit) const {
        const int tile = unit / units_of_k, first = unit - tile * units_of_k;
        return {tile, first, min(units_of_k - first, end - unit)};
    }
    __device__ __forceinline__ Run first_run() const {
        if (cluster >= num_clusters) return {0, 0, 0};
        if constexpr (SHARED_K) return run_from(first_unit_of(cluster));
        return {cluster, 0, cluster < num_tiles ? units_of_k : 0};
    }
    __device__ __forceinline__ Run next(const Run &run) const {
        if constexpr (SHARED_K) {
            const int unit = run.tile * units_of_k + run.first_unit + run.num_units;
            return unit < end ? run_from(unit) : Run{0, 0, 0};
        }
        const int tile = run.tile + num_clusters;
        return {tile, 0, tile < num_tiles ? units_of_k : 0};
    }
    // Groups of kGroupTiles token tiles; in a group tokens vary fastest, so that the CTAs that run at one
    // time read few weight rows and all of the group's tokens.
    __device__ __forceinline__ Tile tile(int index) const {
        const int group = index / (kGroupTiles * row_tiles);
        const int within = index - group * kGroupTiles * row_tiles;
        const int width = min(kGroupTiles, token_tiles - group * kGroupTiles);
        const int row = within / width;
        const int token = group * kGroupTiles + within - row * width;
        return {token * TOKENS, (row * MULTICAST + row_rank) * ROWS};
    }
};

__device__ void copy_weights(const LinearTmaParams &p, const Work &work, const Shared &shared) {
    const uint8_t *weight = static_cast<const uint8_t *>(p.weight);
    const int last_row_tile = (p.n + 63) / 64 - 1;
    Ring<kWeightStages> ring;
    int issued = 0;
    for (Run run = work.first_run(); run.num_units > 0; run = work.next(run)) {
        const int row_tile = work.tile(run.tile).row / 64;
        for (int unit = 0; unit < run.num_units; ++unit) {
            mbarrier_wait(shared.weight_empty + 8 * ring.slot, ring.phase ^ 1);
            const uint32_t full = shared.weight_full + 8 * ring.slot;
            mbarrier_arrive_expect(full, kCopyBytes);
#pragma unroll
            for (int i = 0; i < kRowTiles; ++i) {  // tiles beyond n repeat the last one: never stored
                const int64_t from =
                    int64_t(min(row_tile + i, last_row_tile)) * work.units_of_k + run.first_unit + unit;
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
    for (Run run = work.first_run(); run.num_units > 0; run = work.next(run)) {
        const int token = work.tile(run.tile).token;
        for (int step = 0; step < run.num_units * kUnitSteps; ++step) {  // columns beyond k arrive as zeros
            const uint32_t full = shared.x_full + 8 * ring.slot;
            const int column = (run.first_unit * kUnitSteps + step) * kStep;
            uint32_t to = shared.x + ring.slot * kBoxBytes;
            // MULTICAST: empty in all CTAs of the cluster; the barrier counts the bytes of all their copies
            mbarrier_wait(shared.x_empty + 8 * ring.slot, ring.phase ^ 1);
            mbarrier_arrive_expect(full, kBoxBytes);
            if constexpr (MULTICAST > 1) {
                to += work.row_rank * kRows * kStep * 2;
                copy_box_multicast(to, &p.x, column, token + work.row_rank * kRows, full, (1 << MULTICAST) - 1);
            } else {
                copy_box(to, &p.x, column, token, full);
            }
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
    __device__ __forceinline__ void multiply_dense(Accumulators &d, int num_units) {
        for (int step = 0; step < num_units * kUnitSteps; ++step) {
            mbarrier_wait(shared.weight_full + 8 * weight.slot, weight.phase);
            mbarrier_wait(shared.x_full + 8 * x.slot, x.phase);
            const uint64_t a = swizzled_descriptor(weight_tiles());
            const uint64_t b = swizzled_descriptor(shared.x + x.slot * kBoxBytes);
            wgmma_fence();
#pragma unroll
            for (int s = 0; s < 4; ++s) {  // 16 k are 32 bytes: 2 in a descriptor
#pragma unroll
                for (int block = 0; block < kBlocks; ++block)
                    Wgmma<TOKENS>::shared(d[block], a + block * (kTileBytes / 16) + 2 * s, b + 2 * s,
                                          step > 0 || s > 0);
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

    // The same with dequantized fragments in registers. The wgmmas of a fragment are a group, of which three
    // run while the next fragment is dequantized: into the registers of the fourth, which has finished. So the
    // x of a step is free when the next step's last fragment is ready.
    __device__ __forceinline__ void multiply_quantized(Accumulators &d, int num_units) {
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
            for (int i = 0; i < TOKENS / 2; ++i) d[block][i] = 0.0f;
        }
        uint32_t a[4][kBlocks][4];
        int slot_before = 0;  // of the x of the step before
        for (int unit = 0; unit < num_units; ++unit) {
            mbarrier_wait(shared.weight_full + 8 * weight.slot, weight.phase);
            const uint8_t *tile = tiles + weight.slot * kSlotBytes;
#pragma unroll
            for (int part = 0; part < kUnitSteps; ++part) {
                Part loaded[kBlocks];
#pragma unroll
                for (int block = 0; block < kBlocks; ++block)
                    loaded[block] = load_part(tile + block * kTileBytes, warp, part, lane);
                if (part == kUnitSteps - 1) {
                    __syncwarp();
                    release_weight(weight.slot);
                    weight.advance();
                }
                const uint64_t b = x_boxes + (x.slot + part) * (kBoxBytes / 16);
                const uint32_t x_full = shared.x_full + 8 * (x.slot + part);
#pragma unroll
                for (int s = 0; s < 4; ++s) {
                    wgmma_wait<3>();
                    if (s == 3 && (part > 0 || unit > 0)) release_x(slot_before);
#pragma unroll
                    for (int block = 0; block < kBlocks; ++block)
                        dequantize_fragment(loaded[block], s, a[s][block]);
                    if (s == 0) mbarrier_wait(x_full, x.phase);
                    wgmma_fence();
#pragma unroll
                    for (int block = 0; block < kBlocks; ++block)
                        Wgmma<TOKENS>::registers(d[block], a[s][block], b + 2 * s, 1);
                    wgmma_commit();
                }
                slot_before = x.slot + part;
            }
            x.advance(kUnitSteps);
        }
        wgmma_wait<0>();
        release_x(slot_before);
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
    // Where the sums of this cluster's first tile, or of its last if another one, lie in scratch memory.
    __device__ __forceinline__ float4 *partial(int cluster, bool is_last) const {
        const int64_t index = (int64_t(cluster) * MULTICAST + work.row_rank) * 2 + is_last;
        return reinterpret_cast<float4 *>(p.partials + index * kPieces * kPieceFloats);
    }
    __device__ __forceinline__ int32_t *counter(int tile) const {
        return p.counters + tile * MULTICAST + work.row_rank;
    }
    // Leaves the sums of a part of a tile for those who share it.
    __device__ __forceinline__ void leave(const Run &run, const Accumulators &d) const {
        const bool is_last = run.tile * work.units_of_k > work.first_unit_of(work.cluster);
        const int groups = token_groups(work.tile(run.tile));
        float4 *to = partial(work.cluster, is_last) + threadIdx.x % 128;
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
            for (int j = 0; j < TOKENS / 8; ++j) {
                if (j >= groups) break;
                const float *v = d[block] + 4 * j;
                __stcg(to + ((warpgroup * kBlocks + block) * (TOKENS / 8) + j) * 128,
                       make_float4(v[0], v[1], v[2], v[3]));
            }
        }
        named_barrier(kAllConsumers, kConsumers);
        if (threadIdx.x == 0) {
            __threadfence();
            atomicAdd(counter(run.tile), 1);
        }
    }
    // y = the sum over the parts of a tile in their order + bias, for this CTA's share of the pieces.
    __device__ __forceinline__ void add_up(int index) const {
        const Tile tile = work.tile(index);
        const int first = work.cluster_of(index * work.units_of_k);
        const int count = work.cluster_of((index + 1) * work.units_of_k - 1) - first + 1;  // of parts
        const bool first_is_last = index * work.units_of_k > work.first_unit_of(first);
        if (threadIdx.x == 0) {
            int arrived = 0;
            do {
                asm volatile("ld.acquire.gpu.global.s32 %0, [%1];"
                             : "=r"(arrived)
                             : "l"(__cvta_generic_to_global(counter(index)))
                             : "memory");
            } while (arrived < count);
        }
        named_barrier(kAllConsumers, kConsumers);
        // the second arrival of all: it is zero again for the next launch
        if (threadIdx.x == 0 && atomicAdd(counter(index), 1) == 2 * count - 1) *counter(index) = 0;
        const int groups = token_groups(tile), pieces = kRowTiles * groups;
        for (int i = work.cluster - first + count * warpgroup; i < pieces; i += 2 * count) {
            const int row_tile = i / groups, j = i - row_tile * groups;
            const int at = (row_tile * (TOKENS / 8) + j) * 128 + threadIdx.x % 128;
            float4 sum = __ldcg(partial(first, first_is_last) + at);
#pragma unroll 4
            for (int part = 1; part < count; ++part) {
                const float4 more = __ldcg(partial(first + part, false) + at);
                sum.x += more.x;
                sum.y += more.y;
                sum.z += more.z;
                sum.w += more.w;
            }
            const int row = tile.row + row_tile * 64 + 16 * warp + lane / 4;
            const int token = tile.token + 8 * j + lane % 4 * 2;
            const float2 bias = bias_of(row);
            store_one(token, row, sum.x + bias.x);
            store_one(token + 1, row, sum.y + bias.x);
            store_one(token, row + 8, sum.z + bias.y);
            store_one(token + 1, row + 8, sum.w + bias.y);
        }
    }
    __device__ __forceinline__ void store_one(int token, int row, float value) const {
        if (token < work.live && row < p.n)
            static_cast<bf16 *>(p.y)[token * p.y_stride + row] = __float2bfloat16_rn(value);
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
    } else {
        if constexpr (PER_SM == 1) grow_registers<232>();
        Consumer consumer(p, work, shared);
        wait_for_inputs();
        int first_shared = -1, last_shared = -1;  // tiles of its first and last run, if others have parts of them
        for (Run run = work.first_run(); run.num_units > 0; run = work.next(run)) {
            Consumer::Accumulators d;
            if constexpr (kDense) {
                consumer.multiply_dense(d, run.num_units);
            } else {
                consumer.multiply_quantized(d, run.num_units);
            }
            if (SHARED_K && run.num_units < work.units_of_k) {
                consumer.leave(run, d);
                (first_shared < 0 ? first_shared : last_shared) = run.tile;
            } else {
                consumer.write(work.tile(run.tile), d);
            }
        }
        if constexpr (SHARED_K) {
            if (first_shared >= 0) consumer.add_up(first_shared);
            if (last_shared >= 0) consumer.add_up(last_shared);
        }
    }
    // No CTA ends while another may still arrive at its barriers.
    if constexpr (MULTICAST > 1) cluster_barrier_relaxed();
}

}  // namespace castiron
