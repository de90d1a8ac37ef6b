// Quantizes rows that are computed element by element. A cluster of CTAS CTAs of 512 threads does a row at a
// time (CTAS=1: one CTA, as before sm_90). A row of up to CTAS * 512 * CHUNKS * 8 elements, a multiple of 8,
// stays in registers between the search for its largest magnitude and its quantization; other dims, and rows
// that aren't aligned, are computed twice. CHUNKS=0: only that.
#pragma once
#include "fp8_row.cuh"
#include "row_cluster.cuh"

#ifndef CHUNKS
#define CHUNKS 1
#endif

namespace castiron {

constexpr int kChunks = CHUNKS, kHeld = kChunks > 0 ? kChunks : 1, kRowThreads = kCtas * kThreads;

// What eight bf16 are until they are needed: the loads of all chunks of a row come before any arithmetic.
__device__ __forceinline__ uint4 load_words(const bf16 *from) {
    return *reinterpret_cast<const uint4 *>(from);
}
__device__ __forceinline__ Eight eight_of(const uint4 &words) {
    return load_eight(reinterpret_cast<const bf16 *>(&words));
}

// Quantizes the live rows of a grid of clusters. Params: y [rows, dim] codes, scale [rows], dim, input_scale
// (0 = dynamic), and rows counted by header[count]. load(row, column) loads what eight columns are computed
// from, eight(loaded) computes their f32 values, one(row, column) that of a single column. `aligned`: the
// inputs' rows are.
template <typename Params, typename Load, typename EightColumns, typename OneColumn>
__device__ __forceinline__ void quantize_rows(const Params &p, bool aligned, Load load, EightColumns eight,
                                              OneColumn one) {
    __shared__ RowCluster::Slots slots;
    RowCluster cluster(slots);
    // neighbouring warps' columns belong to different CTAs, so that all have the same share of a short row
    const int lane = threadIdx.x % 32;
    const int thread = (threadIdx.x / 32 * kCtas + static_cast<int>(cluster.rank())) * 32 + lane;
    const int num_rows = p.header[p.count];
    const bool wide_rows = aligned && codes_aligned(p.y, p.y_stride);
    const bool held = kChunks > 0 && wide_rows && p.dim % kEight == 0;
    const int wide = held || (kChunks == 0 && wide_rows) ? p.dim / kEight : 0;
    let_next_start();
    wait_for_inputs();
    cluster.start();
    for (int64_t row = blockIdx.x / kCtas; row < num_rows; row += gridDim.x / kCtas) {
        uint8_t *y = p.y + row * p.y_stride;
        Eight x[kHeld];
        uint32_t largest = 0;
        if (held) {
            decltype(load(row, 0)) loaded[kHeld];
#pragma unroll
            for (int c = 0; c < kHeld; ++c) {
                const int i = thread + c * kRowThreads;
                if (i < wide) loaded[c] = load(row, i * kEight);
            }
#pragma unroll
            for (int c = 0; c < kHeld; ++c) {
                if (thread + c * kRowThreads >= wide) continue;
                x[c] = eight(loaded[c]);
                largest = max(largest, largest_magnitude(x[c]));
            }
        } else if (p.input_scale == 0.0f) {
            for (int i = thread; kChunks == 0 && i < wide; i += kRowThreads)
                largest = max(largest, largest_magnitude(eight(load(row, i * kEight))));
            for (int column = wide * kEight + thread; column < p.dim; column += kRowThreads)
                largest = max(largest, magnitude(one(row, column)));
        }
        float scale = p.input_scale;
        if (scale == 0.0f) {
            const uint64_t *words = cluster.exchange(__reduce_max_sync(~0u, largest));
            largest = 0;
#pragma unroll
            for (int i = 0; i < kParts; i += 32)  // a word twice changes nothing
                largest = max(largest, static_cast<uint32_t>(words[(lane + i) % kParts]));
            scale = scale_of(__reduce_max_sync(~0u, largest));
        }
        if (thread == 0) p.scale[row] = scale;
        const ByScale by(scale);
        if (held) {
#pragma unroll
            for (int c = 0; c < kHeld; ++c) {
                const int i = thread + c * kRowThreads;
                if (i < wide) quantize_eight(y + i * kEight, x[c], by);
            }
        } else {
            for (int i = thread; kChunks == 0 && i < wide; i += kRowThreads)
                quantize_eight(y + i * kEight, eight(load(row, i * kEight)), by);
            for (int column = wide * kEight + thread; column < p.dim; column += kRowThreads)
                quantize_one(y + column, one(row, column), by);
        }
    }
}

}  // namespace castiron
