// Attention of few query tokens over long paged keys and values: split-KV ("flash-decoding", Dao et al. 2023)
// with the online softmax of FlashAttention-2 (arXiv:2307.08691). Bound by reading the cache.
//
// A unit is (sequence, kv head, tile of 16 rows), row = query token * group + head of the group. All units'
// tiles of kWarps * 16 kv tokens make one line, which is cut into equal ranges, one per CTA ("stream-K",
// arXiv:2301.03598), so one long sequence and 64 short ones spread alike. A range starts and ends anywhere; a
// unit that is cut leaves partial results, and the CTA that comes last to it adds them up in the order of the
// line. Each warp has 16 tokens of every tile, its own ring of cp.async stages and its own softmax; the ring
// runs on over the units of a range, so merging the warps at a unit's end doesn't drain it.
#pragma once
#include "abi.cuh"
#include "attention_ptx.cuh"

namespace castiron {

constexpr int kHeadDim = HEAD_DIM;  // 16, 32, 64, 128 or 256
constexpr int kRows = 16;           // of a unit
constexpr int kWarpTokens = 16;     // kv tokens of a warp's stage: never more than one block
constexpr int kMaxSeqs = 1024;
constexpr int kMaxCtas = 512;
constexpr int kLeastTokens = 256;  // of a range, if a sequence is as long: smaller pieces cost more to add up
constexpr int kPartialFloats =
    kRows * kHeadDim + 2 * kRows;                // of one range's share of a unit: o, then (m, l)
constexpr int kMergeStride = kHeadDim + 8;       // floats; 8 more spread rows over the banks
constexpr bool kSharedQueries = kHeadDim > 128;  // too many registers otherwise
constexpr float kLog2e = 1.4426950408889634f;

// Byte offset of 16-byte chunk `chunk` of row `row` in a [rows, kHeadDim] tile: the chunks of a column lie in
// different banks for any 8 rows in a line, so ldmatrix reads without conflicts.
__device__ __forceinline__ int tile_offset(int row, int chunk) {
    constexpr int kChunks = kHeadDim / 8;
    constexpr int kRowsOfLine = kChunks >= 8 ? 1 : 8 / kChunks;  // rows in 128 bytes
    constexpr int kMask = kChunks >= 8 ? 7 : kChunks - 1;
    return (row * kChunks + (chunk ^ ((row / kRowsOfLine) & kMask))) * 16;
}

// The mma A fragment of step `step` of two query rows (only live ones are read), this lane's columns.
__device__ __forceinline__ void load_query(uint32_t *a, const bf16 *const (&from)[2], const bool (&live)[2],
                                           int step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const bf16 *at = from[half] + 16 * step;
        a[half] = live[half] ? *reinterpret_cast<const uint32_t *>(at) : 0;
        a[2 + half] = live[half] ? *reinterpret_cast<const uint32_t *>(at + 8) : 0;
    }
}

// Flattened tiles of all units, and the equal ranges they are cut into.
struct DecodeLine {
    const int *first;  // shared memory [num_seqs + 1]: first tile of each sequence
    const int32_t *seq_lens;
    int num_seqs, total, range, slack;  // tiles

    __device__ int find(int tile) const {  // the sequence with this tile
        int low = 0, high = num_seqs;
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if (first[middle] <= tile) {
                low = middle;
            } else {
                high = middle;
            }
        }
        return low;
    }
    // First tile of range `index`. A cut near a unit's edge moves to the edge: nothing to add up there.
    __device__ int boundary(int index, int tile_tokens) const {
        if (static_cast<int64_t>(index) * range >= total) return total;
        const int tile = index * range, seq = find(tile);
        const int tiles = (seq_lens[seq] + tile_tokens - 1) / tile_tokens;
        const int after = (tile - first[seq]) % tiles;
        if (after <= slack) return tile - after;
        return tiles - after <= slack ? tile + tiles - after : tile;
    }
};

// A place on the line.
struct DecodeCursor {
    int seq, unit, tile;                              // unit of the sequence, tile of the unit
    int length, tiles, query_start, rows, row_tiles;  // of the sequence; rows = query tokens * group

    __device__ void enter(const PagedAttentionParams &p, int group, int tile_tokens) {
        length = p.seq_lens[seq];
        tiles = (length + tile_tokens - 1) / tile_tokens;
        query_start = p.query_starts[seq];
        rows = (p.query_starts[seq + 1] - query_start) * group;
        row_tiles = (rows + kRows - 1) / kRows;
    }
    __device__ void seek(const PagedAttentionParams &p, const DecodeLine &line, int place, int group,
                         int tile_tokens) {
        seq = line.find(place);
        enter(p, group, tile_tokens);
        const int rest = place - line.first[seq];
        unit = rest / tiles;
        tile = rest % tiles;
    }
    __device__ void advance(const PagedAttentionParams &p, const DecodeLine &line, int group,
                            int tile_tokens) {
        if (++tile < tiles) return;
        tile = 0;
        if (++unit < row_tiles * p.kv_heads) return;
        unit = 0;
        do {
            ++seq;
        } while (seq < line.num_seqs && line.first[seq] == line.first[seq + 1]);
        if (seq < line.num_seqs) enter(p, group, tile_tokens);
    }
};

// Whole attention of the sequences with at most `most_rows` rows by CTA `cta` of `num_ctas`, all kWarps warps
// of it. `shared`: kWarps * (kStages * 2 * kWarpTokens * kHeadDim * 2 + kRows * kMergeStride * 4) bytes.
template <int kWarps, int kStages>
__device__ __forceinline__ void attend_decode(const PagedAttentionParams &p, uint8_t *shared, int cta,
                                              int num_ctas, int most_rows) {
    constexpr int kTileTokens = kWarps * kWarpTokens;
    constexpr int kThreads = kWarps * 32;
    constexpr int kSide = kWarpTokens * kHeadDim * 2;  // bytes of a warp's keys, or values, of one stage
    constexpr int kSteps = kHeadDim / 16;
    __shared__ int first[kMaxSeqs + 1];
    __shared__ int longest;
    __shared__ float2 warp_ml[kWarps][kRows];
    __shared__ int slots[kMaxCtas];
    __shared__ uint4 shared_q[kSharedQueries ? kSteps : 1][32];  // by lane
    __shared__ bool is_last;
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
    const int group = p.num_heads / p.kv_heads;

    // The line, from the step block: before the inputs are there.
    const int num_seqs = p.header[kNumSeqs];
    if (warp == 0) {
        int sum = 0, most = 0;
        for (int base = 0; base < num_seqs; base += 32) {
            const int seq = base + lane;
            int tiles = 0, units = 0;
            if (seq < num_seqs) {
                const int rows = (p.query_starts[seq + 1] - p.query_starts[seq]) * group;
                tiles = (p.seq_lens[seq] + kTileTokens - 1) / kTileTokens;
                units = rows <= most_rows ? (rows + kRows - 1) / kRows * p.kv_heads : 0;
            }
            most = max(most, units > 0 ? tiles : 0);
            int scan = tiles * units;
            for (int step = 1; step < 32; step *= 2) {
                const int other = __shfl_up_sync(0xffffffffu, scan, step);
                if (lane >= step) scan += other;
            }
            if (seq < num_seqs) first[seq + 1] = sum + scan;
            sum += __shfl_sync(0xffffffffu, scan, 31);
        }
        for (int step = 16; step > 0; step /= 2) most = max(most, __shfl_xor_sync(0xffffffffu, most, step));
        if (lane == 0) {
            first[0] = 0;
            longest = most;
        }
    }
    __syncthreads();
    DecodeLine line{first, p.seq_lens, num_seqs, first[num_seqs], 0, 0};
    line.range = max((line.total + num_ctas - 1) / num_ctas, min(kLeastTokens / kTileTokens, longest));
    line.slack = (line.range + 4) / 8;
    const int begin = line.total == 0 ? 0 : line.boundary(cta, kTileTokens);
    const int end = line.total == 0 ? 0 : line.boundary(cta + 1, kTileTokens);
    if (begin >= end) {
        wait_for_inputs();
        let_next_start();
        return;
    }
    DecodeCursor ahead;  // of the loads
    ahead.seek(p, line, begin, group, kTileTokens);
    DecodeCursor here = ahead;

    // Ring of stages: keys [kWarpTokens, kHeadDim], values alike.
    const uint32_t ring = shared_address(shared) + warp * (kStages * 2 * kSide);
    float *merge =
        reinterpret_cast<float *>(shared + kWarps * kStages * 2 * kSide);  // [kWarps, kRows, kMergeStride]
    const int block_shift = __ffs(p.block_size) - 1;
    const int64_t head_size = static_cast<int64_t>(p.block_size) * kHeadDim;  // elements
    // Block of this warp's tokens of the tile `ahead` is at: looked up a stage before its use.
    auto look_up = [&]() {
        const int token = ahead.tile * kTileTokens + warp * kWarpTokens;
        return token < ahead.length
                   ? p.block_tables[static_cast<int64_t>(ahead.seq) * p.table_width + (token >> block_shift)]
                   : 0;
    };
    int next_block = look_up(), loaded = begin, write_slot = 0, read_slot = 0;
    auto load = [&]() {
        if (loaded < end) {
            const int token = ahead.tile * kTileTokens + warp * kWarpTokens, live = ahead.length - token;
            const int kv_head = ahead.unit / ahead.row_tiles;
            const bf16 *keys = p.cache +
                               (static_cast<int64_t>(next_block) * 2 * p.kv_heads + kv_head) * head_size +
                               (token & (p.block_size - 1)) * kHeadDim;
            const bf16 *values = keys + p.kv_heads * head_size;
            const uint32_t stage = ring + write_slot * (2 * kSide);
#pragma unroll(kHeadDim > 128 ? 4 : 16)
            for (int i = 0; i < kSide / 512; ++i) {
                const int index = i * 32 + lane, row = index / (kHeadDim / 8), chunk = index % (kHeadDim / 8);
                const uint32_t to = stage + tile_offset(row, chunk);
                cp_async_16(to, keys + row * kHeadDim + chunk * 8, row < live);
                cp_async_16(to + kSide, values + row * kHeadDim + chunk * 8, row < live);
            }
            write_slot = write_slot + 1 == kStages ? 0 : write_slot + 1;
            if (++loaded < end) {
                ahead.advance(p, line, group, kTileTokens);
                next_block = look_up();
            }
        }
        cp_async_commit();
    };

    // Tokens of earlier steps are in the cache since before this step, so the ring starts to fill with them
    // before the wait (abi.cuh); this step's own tokens, and what is behind them in the ring, come after it.
    auto is_old = [&]() {
        const int token = ahead.tile * kTileTokens + warp * kWarpTokens,
                  past = ahead.length - ahead.rows / group;
        return token >= ahead.length || min(token + kWarpTokens, ahead.length) <= past;
    };
    int stage = 0;
    for (; stage < kStages - 1 && is_old(); ++stage) load();
    wait_for_inputs();
    for (; stage < kStages - 1; ++stage) load();
    let_next_start();

    const float scale = p.scale * kLog2e;
    for (int place = begin; place < end;) {
        const int unit_start = place - here.tile, unit_end = unit_start + here.tiles;
        const int stop = min(end, unit_end);
        const int kv_head = here.unit / here.row_tiles, first_row = here.unit % here.row_tiles * kRows;
        const int rows = min(kRows, here.rows - first_row);
        // Rows g and g + 8 of the unit: their queries and positions.
        uint32_t q[kSharedQueries ? 1 : kSteps][4];
        int position[2];
        const bf16 *from[2];
        bool live[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = g + 8 * half, flat = first_row + row, token = flat / group;
            live[half] = row < rows;
            from[half] = p.q + (here.query_start + token) * p.q_stride +
                         static_cast<int64_t>(kv_head * group + flat % group) * kHeadDim + 2 * t;
            position[half] = live[half] ? here.length - here.rows / group + token : here.length - 1;
        }
        if constexpr (kSharedQueries) {
#pragma unroll
            for (int step = warp; step < kSteps; step += kWarps) {
                uint32_t fragment[4];
                load_query(fragment, from, live, step);
                shared_q[step][lane] = make_uint4(fragment[0], fragment[1], fragment[2], fragment[3]);
            }
            __syncthreads();
        } else {
#pragma unroll
            for (int step = 0; step < kSteps; ++step) load_query(q[step], from, live, step);
        }
        float o[kHeadDim / 8][4] = {};
        float m[2] = {-INFINITY, -INFINITY}, l[2] = {0, 0};  // l: this lane's share of the row
        for (; place < stop; ++place) {
            cp_async_wait<kStages - 2>();
            __syncwarp();
            load();  // into the slot that was read last
            const uint32_t keys = ring + read_slot * (2 * kSide), values = keys + kSide;
            read_slot = read_slot + 1 == kStages ? 0 : read_slot + 1;
            const int token = here.tile * kTileTokens + warp * kWarpTokens;
            ++here.tile;
            if (token >= here.length) continue;
            float parts[2][2][4] = {};  // [step parity][token / 8]: two short chains of mma
#pragma unroll
            for (int step = 0; step < kSteps; ++step) {
                uint32_t b[4], *a = q[kSharedQueries ? 0 : step];
                if constexpr (kSharedQueries) {
                    const uint4 fragment = shared_q[step][lane];
                    a[0] = fragment.x, a[1] = fragment.y, a[2] = fragment.z, a[3] = fragment.w;
                }
                ldmatrix_x4(b,
                            keys + tile_offset((lane & 7) + (lane >> 4) * 8, 2 * step + ((lane >> 3) & 1)));
                mma_bf16(parts[step & 1][0], a, b[0], b[1]);
                mma_bf16(parts[step & 1][1], a, b[2], b[3]);
            }
            float s[2][4];
            float largest[2] = {m[0], m[1]};
#pragma unroll
            for (int n = 0; n < 2; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const bool seen = token + 8 * n + 2 * t + (i & 1) <= position[i / 2];
                    s[n][i] = seen ? (parts[0][n][i] + parts[1][n][i]) * scale : -INFINITY;
                    largest[i / 2] = fmaxf(largest[i / 2], s[n][i]);
                }
            }
            float base[2], alpha[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                largest[half] = quad_max(largest[half]);
                base[half] = largest[half] == -INFINITY ? 0.0f : largest[half];  // nothing seen yet
                alpha[half] = exp2_approx(m[half] - base[half]);
                m[half] = largest[half];
                l[half] *= alpha[half];
            }
#pragma unroll
            for (int n = 0; n < 2; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    s[n][i] = exp2_approx(s[n][i] - base[i / 2]);
                    l[i / 2] += s[n][i];
                }
            }
            const uint32_t weights[4] = {pack_bf16(s[0][0], s[0][1]), pack_bf16(s[0][2], s[0][3]),
                                         pack_bf16(s[1][0], s[1][1]), pack_bf16(s[1][2], s[1][3])};
#pragma unroll
            for (int n = 0; n < kHeadDim / 8; n += 2) {
                uint32_t b[4];
                ldmatrix_x4_trans(b,
                                  values + tile_offset((lane & 7) + ((lane >> 3) & 1) * 8, n + (lane >> 4)));
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    o[n][i] *= alpha[i / 2];
                    o[n + 1][i] *= alpha[i / 2];
                }
                mma_bf16(o[n], weights, b[0], b[1]);
                mma_bf16(o[n + 1], weights, b[2], b[3]);
            }
        }

        // Merge the warps.
        float *own = merge + warp * kRows * kMergeStride;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = g + 8 * half;
            const float sum = quad_sum(l[half]);
            if (row >= rows) continue;
            if (t == 0) warp_ml[warp][row] = make_float2(m[half], sum);
#pragma unroll
            for (int n = 0; n < kHeadDim / 8; ++n) {
                *reinterpret_cast<float2 *>(own + row * kMergeStride + 8 * n + 2 * t) =
                    make_float2(o[n][2 * half], o[n][2 * half + 1]);
            }
        }
        __syncthreads();
        const bool whole = unit_start >= begin && unit_end <= end;
        float *partial =
            p.partials + (2 * cta + (begin < unit_start ? 1 : 0)) * static_cast<int64_t>(kPartialFloats);
        auto output = [&](int row, int column) {
            const int flat = first_row + row;
            return p.y + (here.query_start + flat / group) * p.y_stride +
                   static_cast<int64_t>(kv_head * group + flat % group) * kHeadDim + column;
        };
        for (int index = thread; index < rows * (kHeadDim / 4); index += kThreads) {
            const int row = index / (kHeadDim / 4), column = index % (kHeadDim / 4) * 4;
            float largest = -INFINITY, sum = 0;
#pragma unroll
            for (int w = 0; w < kWarps; ++w) largest = fmaxf(largest, warp_ml[w][row].x);
            const float base = largest == -INFINITY ? 0.0f : largest;
            float4 value = make_float4(0, 0, 0, 0);
#pragma unroll
            for (int w = 0; w < kWarps; ++w) {
                const float2 ml = warp_ml[w][row];
                const float factor = exp2_approx(ml.x - base);
                const float4 x =
                    *reinterpret_cast<const float4 *>(merge + (w * kRows + row) * kMergeStride + column);
                sum += factor * ml.y;
                value.x += factor * x.x, value.y += factor * x.y, value.z += factor * x.z,
                    value.w += factor * x.w;
            }
            if (whole) {
                const float inverse = 1.0f / sum;
                *reinterpret_cast<uint2 *>(output(row, column)) =
                    make_uint2(pack_bf16(value.x * inverse, value.y * inverse),
                               pack_bf16(value.z * inverse, value.w * inverse));
            } else {
                *reinterpret_cast<float4 *>(partial + row * kHeadDim + column) = value;
                if (column == 0) {
                    *reinterpret_cast<float2 *>(partial + kRows * kHeadDim + 2 * row) =
                        make_float2(largest, sum);
                }
            }
        }

        if (!whole) {  // add up the ranges' shares, if this one is the last to arrive
            __threadfence();
            __syncthreads();
            if (thread == 0) {
                // No two units that are cut end in one range before cuts are moved: its number names the
                // unit. The counter holds the tiles done.
                int32_t *counter = p.counters + (unit_end - 1) / line.range;
                const int mine = stop - max(unit_start, begin);
                is_last = atomicAdd(counter, mine) + mine == unit_end - unit_start;
                if (is_last) *counter = 0;
            }
            __syncthreads();
            if (is_last) {
                __threadfence();
                const int from = unit_start / line.range, count = (unit_end - 1) / line.range - from + 1;
                for (int i = thread; i < count; i += kThreads) {
                    const int low = line.boundary(from + i, kTileTokens);
                    const int high = line.boundary(from + i + 1, kTileTokens);
                    const bool shares = max(low, unit_start) < min(high, unit_end);
                    slots[i] = shares ? 2 * (from + i) + (low < unit_start ? 1 : 0) : -1;
                }
                __syncthreads();
                for (int index = thread; index < rows * (kHeadDim / 4); index += kThreads) {
                    const int row = index / (kHeadDim / 4), column = index % (kHeadDim / 4) * 4;
                    float largest = -INFINITY, sum = 0;
                    float4 value = make_float4(0, 0, 0, 0);
#pragma unroll 4
                    for (int i = 0; i < count; ++i) {
                        if (slots[i] < 0) continue;
                        const float *share = p.partials + slots[i] * static_cast<int64_t>(kPartialFloats);
                        const float2 ml =
                            __ldcg(reinterpret_cast<const float2 *>(share + kRows * kHeadDim + 2 * row));
                        const float4 x =
                            __ldcg(reinterpret_cast<const float4 *>(share + row * kHeadDim + column));
                        const float larger = fmaxf(largest, ml.x);
                        const float base = larger == -INFINITY ? 0.0f : larger;
                        const float old = exp2_approx(largest - base), factor = exp2_approx(ml.x - base);
                        largest = larger;
                        sum = sum * old + factor * ml.y;
                        value.x = value.x * old + factor * x.x, value.y = value.y * old + factor * x.y;
                        value.z = value.z * old + factor * x.z, value.w = value.w * old + factor * x.w;
                    }
                    const float inverse = 1.0f / sum;
                    *reinterpret_cast<uint2 *>(output(row, column)) =
                        make_uint2(pack_bf16(value.x * inverse, value.y * inverse),
                                   pack_bf16(value.z * inverse, value.w * inverse));
                }
            }
        }
        __syncthreads();  // merge, warp_ml and slots are free again
        if (place < end) {
            // here.tile ran to the unit's end: on to the next unit
            here.tile = here.tiles - 1;
            here.advance(p, line, group, kTileTokens);
        }
    }
    cp_async_wait<0>();
}

}  // namespace castiron
